"""Training the router: which shard does a noised image come from?"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hddm.data.open_shard import open_shard
from hddm.data.shards import Shard, find_shards
from hddm.errors import HddmError
from hddm.experts import ROUTER_FILE, RouterFacts, save_router
from hddm.files import check_absent, new_folder
from hddm.models.router import RouterTransformer
from hddm.objectives import TIME_SCALE
from hddm.tensors import append_dims, generator
from hddm.training.loop import TRAINING_STREAM, LoopSettings, OnStep, fit
from hddm.training.networks import new_network
from hddm.training.router_calibration import HELD_OUT_SHARE, calibrate_router, held_out


class RouterSettings(LoopSettings):
    """How large the router is, how it is optimised, and whether its probabilities are calibrated."""

    size: str = "tiny"
    calibrate: bool = False


def train_router(
    shards_folder: Path,
    out: Path,
    settings: RouterSettings,
    overwrite: bool = False,
    on_step: OnStep | None = None,
) -> list[float]:
    """Train a router on all shards of a partition and write its folder.

    Cross-entropy against the shard of x_0, on x_t = (1 - t) x_0 + t eps with t uniform in [0, 1]: the
    common path, whatever the experts' objectives are. Its optimum is the posterior p(k | x_t).

    With ``settings.calibrate`` a part of every shard is kept out of training, and temperatures are fitted to
    it (`hddm.training.router_calibration`).

    Returns:
        The loss of every step.

    Raises:
        HddmError: for shards that cannot be read or differ in image shape, or a loss that is not finite.
    """
    check_absent(out, ROUTER_FILE, overwrite)
    shards = [open_shard(folder) for folder in find_shards(shards_folder)]
    images, labels = _joined(shards)
    if settings.calibrate:
        fresh = torch.cat([held_out(shard) for shard in shards])
        held, held_labels = images[fresh], labels[fresh]
        images, labels = images[~fresh], labels[~fresh]
    network = new_network(
        RouterTransformer, settings.size, images.shape[1:], settings.seed, num_experts=len(shards)
    )
    draws = generator(settings.seed, len(shards), TRAINING_STREAM)

    def loss() -> Tensor:
        rows = torch.randint(len(images), (settings.batch_size,), generator=draws)
        t = torch.rand(settings.batch_size, generator=draws)
        eps = torch.randn(images[rows].shape, generator=draws)
        wide = append_dims(t, images.ndim)
        x_t = (1 - wide) * images[rows] + wide * eps
        return F.cross_entropy(network(x_t, t * TIME_SCALE), labels[rows])

    fitted = fit(network, loss, settings, on_step)
    calibration: dict[str, Any] = {}
    temperatures: tuple[float, ...] = (1.0,)
    if settings.calibrate:
        temperatures, figures = calibrate_router(network, TIME_SCALE, held, held_labels, settings.seed)
        each = held_labels.bincount(minlength=len(shards)).tolist()
        calibration = {"held_out_share": HELD_OUT_SHARE, "held_out_images": each, **figures}
    channels, height, width = images.shape[1:]
    facts = RouterFacts(
        time_scale=TIME_SCALE,
        sample_shape=(channels, height, width),
        shard_hashes=tuple(shard.hash for shard in shards),
        shard_images=tuple(len(shard) for shard in shards),
        temperatures=temperatures,
        calibration=calibration,
        training=fitted.record(settings),
    )
    with new_folder(out, ROUTER_FILE, overwrite) as draft:
        save_router(draft, network, facts)
    return fitted.losses


def _joined(shards: list[Shard]) -> tuple[Tensor, Tensor]:
    shapes = {tuple(shard.shape) for shard in shards}
    if len(shapes) > 1:
        raise HddmError(f"the shards hold images of different shapes: {sorted(shapes)}")
    images = torch.cat([shard.images for shard in shards])
    labels = torch.cat([torch.full((len(s),), k) for k, s in enumerate(shards)])
    return images, labels
