"""Training the router: which shard does a noised image come from?"""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hddm.data.open_shard import open_shard
from hddm.data.shard_records import find_shards
from hddm.data.shards import Shard
from hddm.data.whole import JoinedStore
from hddm.errors import HddmError
from hddm.experts import ROUTER_FILE, RouterFacts, save_router
from hddm.models.router import RouterTransformer
from hddm.objectives import TIME_SCALE
from hddm.tensors import append_dims
from hddm.training.data_identity import data_of
from hddm.training.loop import Fitted, Inputs, OnStep, Task
from hddm.training.networks import new_network
from hddm.training.router_accuracy import (
    Evidence,
    accuracy_of,
    is_better_than_chance,
    kept_apart,
)
from hddm.training.router_calibration import HELD_OUT_SHARE, calibrate_router, held_out
from hddm.training.runs import finished, train
from hddm.training.settings import RouterSettings as RouterSettings
from hddm.training.settings import RunOptions
from hddm.training.shard_calibration import placed
from hddm.training.watching import watching
from hddm.wording import counted

log = logging.getLogger(__name__)


def train_router(
    shards_folder: Path,
    out: Path,
    settings: RouterSettings,
    overwrite: bool = False,
    on_step: OnStep | None = None,
    run: RunOptions | None = None,
) -> list[float]:
    """Train a router on all shards of a partition and write its folder.

    Cross-entropy against the shard of x_0, on x_t = (1 - t) x_0 + t eps with t uniform in [0, 1]: the
    common path, whatever the experts' objectives are. Its optimum is the posterior p(k | x_t).

    With ``settings.calibrate`` a part of every shard is kept out of training, and temperatures are fitted to
    it (`hddm.training.router_calibration`).

    In the end its accuracy is measured on held-out images of the partition, else on those kept for the
    temperatures, else on the training images; it is recorded, and no better than chance is a warning.

    Args:
        shards_folder: a partition, as it is or encoded.
        out: the router folder to write.
        settings: see `RouterSettings`.
        overwrite: whether an existing ``out`` is replaced.
        on_step: called after each step with its number and loss.
        run: as of `hddm.training.expert.train_expert`.

    Returns:
        The loss of every step.

    Raises:
        HddmError: for shards that cannot be read or differ in shape or VAE, held-out images that cannot be
            read or are not theirs, a run that differs from the one to be resumed, pictures asked of it, or
            losses that are not finite.
        Stopped: after a signal, with the run saved.
    """
    if run is not None and run.sample_every:
        raise HddmError(f"sample_every: {run.sample_every}: a router makes no images; leave it out")
    folders = find_shards(shards_folder)
    data = data_of(folders)
    if finished(out, ROUTER_FILE, overwrite, run):
        return []
    shards = [open_shard(folder) for folder in folders]
    _check_alike(shards)
    stored = JoinedStore([shard.stored for shard in shards])
    rows = torch.arange(len(stored))
    labels = stored.part_of(rows)
    seen = Evidence(stored, rows, labels, "training images")
    if settings.calibrate:
        fresh = torch.cat([held_out(shard) for shard in shards])
        held = rows[fresh]
        rows = rows[~fresh]
        seen = Evidence(stored, held, labels[held], "images kept from training")
    evidence = kept_apart(shards_folder, shards) or seen
    shape = shards[0].shape
    network = new_network(RouterTransformer, settings.size, shape, settings.seed, num_experts=len(shards))

    def draw(chosen: Tensor, noise: torch.Generator) -> Inputs:
        flip = torch.rand(len(chosen), generator=noise) < 0.5 if settings.random_flip else None
        x_0 = stored.take(rows[chosen], noise, flip)
        t = torch.rand(len(chosen), generator=noise)
        return {
            "x_0": x_0,
            "eps": torch.randn(x_0.shape, generator=noise),
            "t": t,
            "shard": labels[rows[chosen]],
        }

    def loss(module: nn.Module, inputs: Inputs) -> Tensor:
        wide = append_dims(inputs["t"], inputs["x_0"].ndim)
        x_t = (1 - wide) * inputs["x_0"] + wide * inputs["eps"]
        logits = module(x_t, inputs["t"] * TIME_SCALE)
        return F.cross_entropy(logits.float(), inputs["shard"], reduction="none")

    def write(draft: Path, fitted: Fitted, used: RouterSettings) -> None:
        calibration: dict[str, Any] = {}
        temperatures: tuple[float, ...] = (1.0,)
        place = fitted.device

        def logits(x: Tensor, time: Tensor) -> Tensor:
            given: Tensor = network(x.to(place), time.to(place))
            return given.cpu()

        with placed(network, place):
            accuracy = accuracy_of(logits, TIME_SCALE, evidence, settings.seed)
            if settings.calibrate:
                log.info("calibrating on %s …", counted(len(held), "image"))
                images, of = stored.take(held, None, None), labels[held]
                temperatures, figures = calibrate_router(logits, TIME_SCALE, images, of, settings.seed)
                each = of.bincount(minlength=len(shards)).tolist()
                calibration = {"held_out_share": HELD_OUT_SHARE, "held_out_images": each, **figures}
        if len(shards) > 1 and not is_better_than_chance(accuracy):
            log.warning(
                "%s: tells shards apart no better than chance, as far as %d images show; train it "
                "for longer, or with another --learning-rate",
                out,
                accuracy["images"],
            )
        facts = RouterFacts(
            time_scale=TIME_SCALE,
            sample_shape=shape,
            shard_hashes=tuple(shard.hash for shard in shards),
            shard_images=tuple(len(shard) for shard in shards),
            temperatures=temperatures,
            calibration=calibration,
            training=fitted.record(used) | {"accuracy": accuracy},
        )
        save_router(draft, network, facts)

    return train(
        Task(network, len(rows), draw, loss, (len(shards),)),
        settings,
        out,
        ROUTER_FILE,
        write,
        data,
        overwrite,
        on_step,
        run,
        watching(),
    )


def _check_alike(shards: list[Shard]) -> None:
    shapes = {shard.shape for shard in shards}
    if len(shapes) > 1:
        raise HddmError(f"the shards hold images of different shapes: {sorted(shapes)}")
    if any(shard.vae != shards[0].vae for shard in shards):
        raise HddmError("the shards hold latents of different VAEs; encode all with one")
