"""Train the router, which predicts the shard of a noised image (`train_router`)."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hddm.data.shard_records import find_shards
from hddm.data.shards import Shard, join_samples, open_shard
from hddm.experts.record_folders import save_router
from hddm.experts.records import ROUTER_FILE, RouterRecord, is_at_chance
from hddm.networks.transformers import RouterTransformer
from hddm.training.expert import data_of, new_network
from hddm.training.loader import StepInputs
from hddm.training.loop import Fitted, OnTrainingStep, Task, Training
from hddm.training.needs import needs_of_training
from hddm.training.objectives import conditions_in
from hddm.training.resume import recipe_before, recipe_of_resumed
from hddm.training.router_accuracy import (
    Evidence,
    accuracy_of,
    held_out_evidence,
    with_and_without,
)
from hddm.training.router_conditions import conditions_of
from hddm.training.router_temperatures import calibrate_router
from hddm.training.settings import RouterRecipe, RouterSettings, RunOptions, resolve
from hddm.training.watching import watching
from hddm.utils.errors import HddmError, counted
from hddm.utils.needs import Needs
from hddm.utils.progress import Progress
from hddm.utils.streams import Use
from hddm.utils.tensors import append_dims
from hddm.velocity import TIME_SCALE

log = logging.getLogger(__name__)

HELD_OUT_SHARE = 0.15
"""Share of a shard that is kept to fit temperatures to."""
DROPPED = 0.1
"""Share of the images whose condition a router that sees conditions is trained without."""


def train_router(
    partitions: Path | Sequence[Path],
    out: Path,
    settings: RouterSettings,
    overwrite: bool = False,
    on_step: OnTrainingStep | None = None,
    run: RunOptions | None = None,
) -> list[float]:
    """Train a router on all shards of one or more partitions and write its folder; return all losses.

    The loss is cross-entropy against the shard of x_0, on x_t = (1 - t) x_0 + t eps with t uniform in [0, 1]:
    the common path, whatever the experts' objectives are. Its optimum is the posterior p(k | x_t).

    With ``settings.calibrate`` a part of every shard is kept from training to fit temperatures
    (`calibrate_router`). Accuracy is measured on held-out images of the partition, else on those kept for the
    temperatures, else on the training images, and recorded; no better than chance is a warning.

    With ``settings.condition`` the router sees the class or the caption of an image too, and its optimum is
    p(k | x_t, t, c). A tenth of the images have the null condition (`DROPPED`), so that it is p(k | x_t, t)
    as well. Classes of several partitions are joined by name. What the condition is worth is recorded
    (`with_and_without`).

    Arguments are those of `hddm.training.expert.train_expert`, with partitions, encoded or not; outputs are
    in the order of their shards.

    Raises:
        HddmError: for shards that are unreadable, equal, or differ in shape or VAE, or lack the condition,
            held-out images that are unreadable, a run that differs from the one to be resumed, or losses that
            are not finite.
        Stopped: after a signal, with the run saved.
    """
    before = recipe_before(out, ROUTER_FILE, run, overwrite)
    training = router_training(partitions, out, settings, before)
    return training.run(out, overwrite, on_step, run)


def router_training(
    partitions: Path | Sequence[Path],
    out: Path,
    settings: RouterSettings,
    before: Mapping[str, Any] | None = None,
) -> Training:
    """Return the training of `train_router`; ``before`` is the recipe of a run that it continues."""
    recipe = resolve(RouterRecipe, settings, before=before)
    named = [partitions] if isinstance(partitions, Path) else partitions
    shards: list[Shard] = []
    for partition in named:
        shards += [open_shard(folder) for folder in find_shards(partition)]
    _check_alike(shards)
    stored = join_samples([shard.stored for shard in shards])
    rows = torch.arange(len(stored))
    labels = stored.shard_of(rows)
    fresh = torch.zeros(len(rows), dtype=torch.bool)
    if recipe.calibrate:
        fresh = torch.cat([held_out(shard) for shard in shards])
    held, rows = rows[fresh], rows[~fresh]
    sees = None if recipe.condition is None else conditions_of(shards, recipe.condition)
    classes = () if sees is None else sees.classes
    source, own = ("images kept from training", held) if len(held) else ("training images", rows)
    evidence = held_out_evidence(shards, recipe.condition, classes) or Evidence(
        stored, own, labels[own], source, sees
    )
    shape = shards[0].shape
    arguments: dict[str, Any] = {"num_experts": len(shards)}
    if classes:
        arguments["num_classes"] = len(classes)
    if sees is not None and sees.texts is not None:
        arguments["text_dim"] = sees.null.shape[-1]
    network = new_network(RouterTransformer, recipe.size, shape, recipe.seed, **arguments)
    if sees is not None and sees.texts is not None:
        network.null_text = sees.null

    def draw(chosen: Tensor, noise: torch.Generator, own: slice) -> StepInputs:
        number = len(chosen)
        flip = torch.rand(number, generator=noise) < 0.5 if recipe.random_flip else None
        x_0 = stored.take(rows[chosen], noise, flip, own)
        t = torch.rand(number, generator=noise)[own]
        eps = torch.randn(number, *x_0.shape[1:], generator=noise)[own]
        mine = rows[chosen[own]]
        inputs = {"x_0": x_0, "eps": eps, "t": t, "shard": labels[mine]}
        if sees is not None:
            dropped = (torch.rand(number, generator=noise) < DROPPED)[own]
            inputs |= sees.dropped(sees.take(mine), dropped)
        return inputs

    def loss(module: nn.Module, inputs: StepInputs) -> Tensor:
        wide = append_dims(inputs["t"], inputs["x_0"].ndim)
        x_t = (1 - wide) * inputs["x_0"] + wide * inputs["eps"]
        logits = module(x_t, inputs["t"] * TIME_SCALE, **conditions_in(inputs))
        return F.cross_entropy(logits.float(), inputs["shard"], reduction="none")

    def complete(fitted: Fitted) -> Callable[[Path], None]:
        calibration: dict[str, Any] = {}
        temperatures: tuple[float, ...] = (1.0,)

        def logits(x: Tensor, time: Tensor, **conditions: Tensor) -> Tensor:
            given = {name: one.to(fitted.device) for name, one in conditions.items()}
            found: Tensor = network(x.to(fitted.device), time.to(fitted.device), **given)
            return found.cpu()

        def given(places: Tensor) -> Mapping[str, Tensor]:
            return {} if sees is None else sees.take(held[places])

        with fitted.on_device(), Progress(None, "measure and calibrate"):
            accuracy = accuracy_of(logits, evidence, recipe.seed)
            if sees is not None:
                shares = sees.class_shares(labels, len(shards))
                accuracy |= with_and_without(logits, evidence, recipe.seed, shares)
            if recipe.calibrate:
                log.info("calibrating on %s …", counted(len(held), "image"))
                images, origin = stored.take(held, None, None), labels[held]
                temperatures, figures = calibrate_router(
                    logits, images, origin, recipe.seed, given=given
                )
                each = origin.bincount(minlength=len(shards)).tolist()
                calibration = {"held_out_share": HELD_OUT_SHARE, "held_out_images": each, **figures}
        if is_at_chance(accuracy):
            remedy = "train it for longer, or with another `learning_rate`"
            text = "%s: recognises shards no better than chance on %d images; %s"
            log.warning(text, out, accuracy["images"], remedy)
        record = RouterRecord(
            time_scale=TIME_SCALE,
            sample_shape=shape,
            shard_hashes=tuple(shard.hash for shard in shards),
            shard_images=tuple(len(shard) for shard in shards),
            temperatures=temperatures,
            calibration=calibration,
            condition=recipe.condition,
            classes=classes,
            text_encoder=None if sees is None else sees.text_encoder,
            training=fitted.record(recipe) | {"accuracy": accuracy},
        )
        return functools.partial(save_router, network=network, record=record)

    task = Task(network, len(rows), draw, loss, (Use.ROUTER_ORDER, Use.ROUTER_STEPS, 0))
    return Training(task, recipe, ROUTER_FILE, complete, data_of(shards), watching())


def needs_of_router(
    partitions: Path | Sequence[Path], out: Path, settings: RouterSettings, run: RunOptions
) -> Needs:
    """Measure what `train_router` needs with these arguments, and write nothing."""
    before = recipe_of_resumed(out, run)
    return needs_of_training(router_training(partitions, out, settings, before))


def _check_alike(shards: Sequence[Shard]) -> None:
    first: dict[str, Shard] = {}
    for shard in shards:
        other = first.setdefault(shard.hash, shard)
        if other is not shard:
            raise HddmError(
                f"{shard.folder}: holds the same images as {other.folder}; name each shard once"
            )
        if (shard.shape, shard.vae) != (shards[0].shape, shards[0].vae):
            one = f"{shards[0].folder} ({shards[0].shape}, VAE {shards[0].vae})"
            two = f"{shard.folder} ({shard.shape}, VAE {shard.vae})"
            raise HddmError(
                f"{one} and {two} hold samples of different kinds; encode all of them alike"
            )


def held_out(shard: Shard) -> Tensor:
    """Select images (N,) of a shard to keep from training, by the lowest SHA-256 of their pixels.

    They are `HELD_OUT_SHARE` of the shard, at least two, whatever order, names, seed and other shards. Equal
    images stay together.
    """
    digests = [shard.stored.digest(row) for row in range(len(shard))]
    last = sorted(digests)[max(2, round(HELD_OUT_SHARE * len(digests))) - 1]
    return torch.tensor([digest <= last for digest in digests])
