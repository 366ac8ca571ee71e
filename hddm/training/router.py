"""Train the router: from which shard does a noised image come?

Its accuracy is measured in the end against chance, on images that it was not trained on where there are some.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hddm.data.shard_records import HELD_OUT, find_shards
from hddm.data.shards import Shard, open_shard
from hddm.data.stores import JoinedStore, Stored
from hddm.experts.records import ROUTER_FILE, RouterRecord, save_router
from hddm.networks.transformers import RouterTransformer
from hddm.training.denoising import IMAGES, SURE
from hddm.training.expert import new_network, placed
from hddm.training.loop import Fitted, Inputs, OnStep, Task, train
from hddm.training.objectives import TIME_SCALE
from hddm.training.resume import data_of, is_complete
from hddm.training.router_calibration import HELD_OUT_SHARE, calibrate_router, held_out, noised_logits
from hddm.training.settings import RouterSettings, RunOptions
from hddm.training.watching import watching
from hddm.utils.errors import HddmError, counted
from hddm.utils.tensors import append_dims

NOISED = 4096
"""Noised images that are looked at, at least; each image serves as often as any other."""
BATCH = 128

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evidence:
    """Images that a router is judged by: ``rows`` (n,) of a store, and ``labels`` (n,), their shards.

    ``source`` says in words where they come from.
    """

    store: Stored
    rows: Tensor
    labels: Tensor
    source: str


def kept_apart(partition: Path, shards: Sequence[Shard]) -> Evidence | None:
    """The held-out images of a partition; None where it has none.

    Raises:
        HddmError: for held-out images that cannot be read, or are not those of ``shards``.
    """
    if not (partition / HELD_OUT).is_dir():
        return None
    found = [open_shard(partition / HELD_OUT / shard.folder.name) for shard in shards]
    for one, shard in zip(found, shards, strict=True):
        if one.held_out_of != shard.hash or one.shape != shard.shape:
            raise HddmError(
                f"{one.folder}: its images were not kept from {shard.folder}; take the partition anew, or "
                f"move {partition / HELD_OUT} away"
            )
    store = JoinedStore([one.stored for one in found])
    rows = torch.arange(len(store))
    return Evidence(store, rows, store.part_of(rows), "held-out images")


def accuracy_of(
    network: Callable[[Tensor, Tensor], Tensor], time_scale: float, evidence: Evidence, seed: int
) -> dict[str, Any]:
    """Measure how often the most probable shard is the right one, at times spread evenly over [0, 1].

    Of ``evidence`` `hddm.training.denoising.IMAGES` at most are looked at, spread evenly over all. Other
    arguments are those of `hddm.training.router_calibration.calibrate_router`.

    Returns:
        Plain values for the record: ``accuracy``; ``chance``, the share of the largest shard, which is the
        accuracy of always naming that; and ``deviation`` of the accuracy of so many guesses of that kind,
        (chance (1 - chance)/images)^½. A router counts as better from `SURE` deviations on.
    """
    number = min(len(evidence.rows), IMAGES)
    log.info("measuring accuracy on %s …", counted(number, "image"))
    chosen = torch.linspace(0, len(evidence.rows) - 1, number).round().long()
    images, labels = evidence.store.take(evidence.rows[chosen], None, None), evidence.labels[chosen]
    noised = noised_logits(network, time_scale, images, labels, seed, NOISED, BATCH)
    chance = labels.bincount().max().item() / number
    return {
        "images": number,
        "of": evidence.source,
        "accuracy": (noised.logits.argmax(1) == noised.labels).double().mean().item(),
        "chance": chance,
        "deviation": (chance * (1 - chance) / number) ** 0.5,
    }


def is_better_than_chance(found: dict[str, Any]) -> bool:
    """Return true where the accuracy is beyond that of a router that knows nothing."""
    return bool(found["accuracy"] > found["chance"] + SURE * found["deviation"])


def accuracy_text(found: dict[str, Any]) -> str:
    """Return a line for users on what `accuracy_of` found."""
    return (
        f"names the shard of {found['accuracy']:.1%} of {found['images']} {found['of']} at all noise levels; "
        f"always naming the largest would be right for {found['chance']:.1%}"
    )


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
    if is_complete(out, ROUTER_FILE, run, overwrite, settings, data):
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
        eps = torch.randn(x_0.shape, generator=noise)
        return {"x_0": x_0, "eps": eps, "t": t, "shard": labels[rows[chosen]]}

    def loss(module: nn.Module, inputs: Inputs) -> Tensor:
        wide = append_dims(inputs["t"], inputs["x_0"].ndim)
        x_t = (1 - wide) * inputs["x_0"] + wide * inputs["eps"]
        logits = module(x_t, inputs["t"] * TIME_SCALE)
        return F.cross_entropy(logits.float(), inputs["shard"], reduction="none")

    def write(draft: Path, fitted: Fitted, used: RouterSettings) -> None:
        calibration: dict[str, Any] = {}
        temperatures: tuple[float, ...] = (1.0,)
        device = fitted.device

        def logits(x: Tensor, time: Tensor) -> Tensor:
            given: Tensor = network(x.to(device), time.to(device))
            return given.cpu()

        with placed(network, device):
            accuracy = accuracy_of(logits, TIME_SCALE, evidence, settings.seed)
            if settings.calibrate:
                log.info("calibrating on %s …", counted(len(held), "image"))
                images, origin = stored.take(held, None, None), labels[held]
                temperatures, figures = calibrate_router(logits, TIME_SCALE, images, origin, settings.seed)
                each = origin.bincount(minlength=len(shards)).tolist()
                calibration = {"held_out_share": HELD_OUT_SHARE, "held_out_images": each, **figures}
        if len(shards) > 1 and not is_better_than_chance(accuracy):
            log.warning(
                "%s: tells shards apart no better than chance, as far as %d images show; train it "
                "for longer, or with another --learning-rate",
                out,
                accuracy["images"],
            )
        record = RouterRecord(
            time_scale=TIME_SCALE,
            sample_shape=shape,
            shard_hashes=tuple(shard.hash for shard in shards),
            shard_images=tuple(len(shard) for shard in shards),
            temperatures=temperatures,
            calibration=calibration,
            training=fitted.record(used) | {"accuracy": accuracy},
        )
        save_router(draft, network, record)

    task = Task(network, len(rows), draw, loss, (len(shards),))
    return train(task, settings, out, ROUTER_FILE, write, data, overwrite, on_step, run, watching())


def _check_alike(shards: list[Shard]) -> None:
    shapes = {shard.shape for shard in shards}
    if len(shapes) > 1:
        raise HddmError(f"the shards hold images of different shapes: {sorted(shapes)}")
    if any(shard.vae != shards[0].vae for shard in shards):
        raise HddmError("the shards hold latents of different VAEs; encode all with one")
