"""Train the router, which predicts the shard of a noised image; measure its accuracy, fit its temperatures.

Logits are divided by T(t) (`hddm.routers.temperature_at`), fitted to noised images that the router was not
trained on, so that its probabilities are calibrated. The order of the experts, and so top-1, does not change;
strategies that weigh or count by probability do.
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
from hddm.data.shards import Samples, Shard, join_samples, open_shard
from hddm.experts.denoising import IMAGES, SURE
from hddm.experts.records import ROUTER_FILE, RouterRecord, save_router
from hddm.experts.shard_images import evenly_spaced
from hddm.networks.transformers import RouterTransformer
from hddm.routers import temperature_at
from hddm.training.device import placed
from hddm.training.expert import data_of, new_network
from hddm.training.loop import Fitted, OnTrainingStep, StepInputs, Task, run_task
from hddm.training.resume import recipe_before
from hddm.training.settings import RouterRecipe, RouterSettings, RunOptions, resolve
from hddm.training.watching import watching
from hddm.utils.errors import HddmError, counted
from hddm.utils.progress import Progress
from hddm.utils.streams import Use, generator
from hddm.utils.tensors import append_dims
from hddm.velocity import TIME_SCALE

log = logging.getLogger(__name__)


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
    temperatures, else on the training images, and recorded; no better than chance is a warning. Arguments are
    those of `hddm.training.expert.train_expert`, with partitions, encoded or not; outputs are in the order of
    their shards.

    Raises:
        HddmError: for shards that are unreadable, equal, or differ in shape or VAE, held-out images that are
            unreadable, a run that differs from the one to be resumed, or losses that are not finite.
        Stopped: after a signal, with the run saved.
    """
    recipe = resolve(RouterRecipe, settings, before=recipe_before(out, ROUTER_FILE, run, overwrite))
    named = [partitions] if isinstance(partitions, Path) else partitions
    shards = [open_shard(folder) for partition in named for folder in find_shards(partition)]
    _check_alike(shards)
    stored = join_samples([shard.stored for shard in shards])
    rows = torch.arange(len(stored))
    labels = stored.shard_of(rows)
    fresh = torch.zeros(len(rows), dtype=torch.bool)
    if recipe.calibrate:
        fresh = torch.cat([held_out(shard) for shard in shards])
    held, rows = rows[fresh], rows[~fresh]
    source, own = ("images kept from training", held) if len(held) else ("training images", rows)
    evidence = held_out_evidence(shards) or Evidence(stored, own, labels[own], source)
    shape = shards[0].shape
    network = new_network(RouterTransformer, recipe.size, shape, recipe.seed, num_experts=len(shards))

    def draw(chosen: Tensor, noise: torch.Generator, own: slice) -> StepInputs:
        number = len(chosen)
        flip = torch.rand(number, generator=noise) < 0.5 if recipe.random_flip else None
        x_0 = stored.take(rows[chosen], noise, flip, own)
        t = torch.rand(number, generator=noise)[own]
        eps = torch.randn(number, *x_0.shape[1:], generator=noise)[own]
        return {"x_0": x_0, "eps": eps, "t": t, "shard": labels[rows[chosen[own]]]}

    def loss(module: nn.Module, inputs: StepInputs) -> Tensor:
        wide = append_dims(inputs["t"], inputs["x_0"].ndim)
        x_t = (1 - wide) * inputs["x_0"] + wide * inputs["eps"]
        logits = module(x_t, inputs["t"] * TIME_SCALE)
        return F.cross_entropy(logits.float(), inputs["shard"], reduction="none")

    def write(draft: Path, fitted: Fitted) -> None:
        calibration: dict[str, Any] = {}
        temperatures: tuple[float, ...] = (1.0,)

        def logits(x: Tensor, time: Tensor) -> Tensor:
            found: Tensor = network(x.to(fitted.device), time.to(fitted.device))
            return found.cpu()

        with placed(network, fitted.device), Progress(None, "measure and calibrate"):
            accuracy = accuracy_of(logits, evidence, recipe.seed)
            if recipe.calibrate:
                log.info("calibrating on %s …", counted(len(held), "image"))
                images, origin = stored.take(held, None, None), labels[held]
                temperatures, figures = calibrate_router(logits, images, origin, recipe.seed)
                each = origin.bincount(minlength=len(shards)).tolist()
                calibration = {"held_out_share": HELD_OUT_SHARE, "held_out_images": each, **figures}
        if len(shards) > 1 and not is_better_than_chance(accuracy):
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
            training=fitted.record(recipe) | {"accuracy": accuracy},
        )
        save_router(draft, network, record)

    task = Task(network, len(rows), draw, loss, (Use.ROUTER_ORDER, Use.ROUTER_STEPS, 0))
    data = data_of(shards)
    return run_task(task, recipe, out, ROUTER_FILE, write, data, overwrite, on_step, run, watching())


def _check_alike(shards: Sequence[Shard]) -> None:
    first: dict[str, Shard] = {}
    for shard in shards:
        if (other := first.setdefault(shard.hash, shard)) is not shard:
            raise HddmError(f"{shard.folder}: holds the same images as {other.folder}; name each shard once")
        if (shard.shape, shard.vae) != (shards[0].shape, shards[0].vae):
            one, two = (f"{each.folder} ({each.shape}, VAE {each.vae})" for each in (shards[0], shard))
            raise HddmError(f"{one} and {two} hold samples of different kinds; encode all of them alike")


JUDGED = 4096
"""Fewest noised images to measure the accuracy on; each image serves equally often."""
BATCH = 128


@dataclass(frozen=True)
class Evidence:
    """Images to judge a router by: ``rows`` (n,) of a store, their shards ``labels``, ``source`` in words."""

    store: Samples
    rows: Tensor
    labels: Tensor
    source: str


def held_out_evidence(shards: Sequence[Shard]) -> Evidence | None:
    """Open the held-out images of ``shards``; None where one of them has none."""
    if not all((shard.folder.parent / HELD_OUT).is_dir() for shard in shards):
        return None
    found = [open_shard(shard.folder.parent / HELD_OUT / shard.folder.name) for shard in shards]
    if any(one.held_out_of != shard.hash for one, shard in zip(found, shards, strict=True)):
        return None
    store = join_samples([one.stored for one in found])
    rows = torch.arange(len(store))
    return Evidence(store, rows, store.shard_of(rows), "held-out images")


def accuracy_of(network: Callable[[Tensor, Tensor], Tensor], evidence: Evidence, seed: int) -> dict[str, Any]:
    """Measure how often the most probable shard is the right one, at times spread evenly over [0, 1].

    At most `hddm.experts.denoising.IMAGES` images of ``evidence`` are used, spread evenly over all. Besides
    ``accuracy``, the record gets ``chance``, the share of the largest shard, which is the accuracy of always
    naming that; and ``deviation``, (chance (1 - chance)/images)^½, of the accuracy of so many such guesses.
    """
    chosen = evenly_spaced(evidence.rows, IMAGES)
    number = len(chosen)
    log.info("measuring accuracy on %s …", counted(number, "image"))
    images, labels = evidence.store.take(evidence.rows[chosen], None, None), evidence.labels[chosen]
    noised = noised_logits(network, images, labels, seed, JUDGED, BATCH)
    chance = labels.bincount().max().item() / number
    return {
        "images": number,
        "of": evidence.source,
        "accuracy": (noised.logits.argmax(1) == noised.labels).double().mean().item(),
        "chance": chance,
        "deviation": (chance * (1 - chance) / number) ** 0.5,
    }


def is_better_than_chance(found: dict[str, Any]) -> bool:
    """Return whether the accuracy lies more than `SURE` deviations above chance."""
    return bool(found["accuracy"] > found["chance"] + SURE * found["deviation"])


def accuracy_text(found: dict[str, Any]) -> str:
    """Describe the result of `accuracy_of` in one line for users."""
    return (
        f"names the shard of {found['accuracy']:.1%} of {found['images']} {found['of']} at all noise levels; "
        f"always naming the largest would be right for {found['chance']:.1%}"
    )


HELD_OUT_SHARE = 0.15
NOISED = 16384
"""Fewest noised images to fit temperatures to; each held-out image serves many times."""
KNOTS = 5
"""Temperatures over t (docs/notes/training.md)."""
ECE_BINS = 15


def held_out(shard: Shard) -> Tensor:
    """Select images (N,) of a shard to keep from training, by the lowest SHA-256 of their pixels.

    They are `HELD_OUT_SHARE` of the shard, at least two, whatever order, names, seed and other shards. Equal
    images stay together.
    """
    digests = [shard.stored.digest(row) for row in range(len(shard))]
    last = sorted(digests)[max(2, round(HELD_OUT_SHARE * len(digests))) - 1]
    return torch.tensor([digest <= last for digest in digests])


def calibrate_router(
    network: Callable[[Tensor, Tensor], Tensor],
    images: Tensor,
    labels: Tensor,
    seed: int = 0,
    knots: int = KNOTS,
) -> tuple[tuple[float, ...], dict[str, Any]]:
    """Fit temperatures of a router to fresh images, and measure its calibration without and with them.

    ``network(x_t, t × TIME_SCALE)`` gives logits (batch, K). The router was trained on none of ``images`` (N,
    C, H, W), which are of the shards in ``labels`` (N,). The ``knots`` temperatures are at times spread
    evenly over [0, 1].

    The record that is returned with them holds expected calibration error and cross-entropy, before and
    after. Figures "after" are cross-fitted: each half of the images is judged by temperatures fitted to the
    other. The temperatures returned are fitted to all.
    """
    noised = noised_logits(network, images, labels, seed)
    # Dealt in the order of the labels, so that each half has its share of every shard.
    half = torch.empty_like(labels).index_put_((labels.argsort(stable=True),), torch.arange(len(labels)) % 2)
    part = half[noised.image]
    crossed = torch.empty_like(noised.t)
    for k in (0, 1):
        fresh = part == k
        crossed[fresh] = temperature_at(noised.t[fresh], noised.fit(~fresh, knots))
    after = noised.logits / crossed[:, None]
    record: dict[str, Any] = {"noised_images": len(noised.t), "knots": knots, "seed": seed}
    for when, logits in (("before", noised.logits), ("after", after)):
        record[f"ece_{when}"] = expected_calibration_error(logits.softmax(1), noised.labels)
        record[f"cross_entropy_{when}"] = F.cross_entropy(logits, noised.labels).item()
    return noised.fit(torch.ones_like(part, dtype=torch.bool), knots), record


def fit_temperatures(
    logits: Tensor, t: Tensor, labels: Tensor, knots: int = KNOTS, images: int | None = None
) -> tuple[float, ...]:
    """Fit temperatures at ``knots`` times, spread evenly over [0, 1], by the least cross-entropy.

        minimise  mean -log softmax(logits / T(t))[label] + sum (log T)² / (2 images)

    T is linear between knots. A single one is the temperature scaling of Guo et al. (arXiv:1706.04599,
    section 4.2), convex in 1/T; T over t and the second term are ours. That is a prior, log T ~ N(0, 1),
    against as many observations as there are images: T stays near 1 where few of them are informative, as
    near t = 1, or where the router is never wrong.

    ``logits`` are (n, K), ``t`` (n,) in [0, 1], ``labels`` (n,) in 0 … K - 1, of ``images`` images, by
    default n.
    """
    logits, t = logits.double(), t.double()
    # Weights (n, knots) of the knots at each time: the interpolation is linear in the temperatures.
    basis = torch.stack([temperature_at(t, row) for row in torch.eye(knots).tolist()], dim=1)
    prior = 0.5 / (images or len(labels))
    log_temperatures = torch.zeros(knots, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [log_temperatures], max_iter=200, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        scaled = logits / (basis @ log_temperatures.exp())[:, None]
        value = F.cross_entropy(scaled, labels) + prior * log_temperatures.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    return tuple(log_temperatures.detach().exp().tolist())


def expected_calibration_error(probabilities: Tensor, labels: Tensor) -> float:
    """Return the expected calibration error, in [0, 1]: the mean distance of confidence from accuracy.

        ECE = sum_m |B_m|/n |accuracy(B_m) - confidence(B_m)|

    B_m holds the samples whose largest probability lies in ((m-1)/15, m/15]; accuracy is the share of those
    whose most probable class is the label, confidence their mean largest probability. It is biased upwards
    where bins hold few samples. ``probabilities`` are (n, K), ``labels`` (n,) in 0 … K - 1. Source:
    arXiv:1706.04599, equations 2 to 5; 15 bins as there.
    """
    confidence, predicted = probabilities.double().max(1)
    right = (predicted == labels).double()
    place = (confidence * ECE_BINS).ceil().long().clamp(1, ECE_BINS) - 1
    gaps = torch.zeros(ECE_BINS, dtype=torch.float64).index_add_(0, place, right - confidence)
    return gaps.abs().sum().item() / len(labels)


@dataclass(frozen=True)
class Noised:
    """Logits (n, K) of noised images at t (n,), their labels (n,), and the index of each one's image (n,)."""

    logits: Tensor
    t: Tensor
    labels: Tensor
    image: Tensor

    def fit(self, rows: Tensor, knots: int) -> tuple[float, ...]:
        images = len(self.image[rows].unique())
        return fit_temperatures(self.logits[rows], self.t[rows], self.labels[rows], knots, images)


@torch.no_grad()
def noised_logits(
    network: Callable[[Tensor, Tensor], Tensor],
    images: Tensor,
    labels: Tensor,
    seed: int,
    at_least: int = NOISED,
    batch_size: int = 512,
) -> Noised:
    """Return logits of noised images, each image equally often, at times spread evenly over [0, 1]."""
    draws = generator(seed, Use.ROUTER_CALIBRATION)
    image = torch.arange(len(images)).repeat(-(-at_least // len(images)))
    places = torch.randperm(len(image), generator=draws).double()
    t = (places + torch.rand(len(image), generator=draws, dtype=torch.float64)) / len(image)
    logits = []
    for rows, times in zip(image.split(batch_size), t.split(batch_size), strict=True):
        x_0, wide = images[rows], append_dims(times, images.ndim).to(images)
        eps = torch.randn(x_0.shape, generator=draws, dtype=x_0.dtype)
        logits.append(network((1 - wide) * x_0 + wide * eps, (times * TIME_SCALE).to(images)).double())
    return Noised(torch.cat(logits), t, labels[image], image)
