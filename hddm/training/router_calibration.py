"""Temperatures of a router, fitted so that its probabilities are as often right as they say.

Logits are divided by T(t) (`hddm.ensemble.temperature_at`), fitted to noised images that the router was not
trained on. The order of the experts does not change, only how sure the router is of it; so top-1 never
changes, and every strategy that weighs or counts by probability does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hddm.data.shards import Shard
from hddm.ensemble import temperature_at
from hddm.utils.errors import HddmError
from hddm.utils.tensors import append_dims, generator

HELD_OUT_SHARE = 0.15
NOISED = 16384
"""Noised images that temperatures are fitted to, at least; each held-out image serves many times."""
KNOTS = 5
"""Temperatures over t (docs/notes/training.md)."""
ECE_BINS = 15
TIME_BINS = 5
# Beside the streams of training (2), classes (3) and samples (0, 1).
CALIBRATION_STREAM = 5


def held_out(shard: Shard) -> Tensor:
    """Select images (N,) of a shard to keep from training: those of the lowest SHA-256 of their pixels.

    `HELD_OUT_SHARE` of the shard, at least two; equal images stay together. Neither order, names, seed nor
    other shards have a say, so that a router trained anew holds out the same images.

    Raises:
        HddmError: where nothing is left to train on, since the images are equal.
    """
    digests = [shard.stored.digest(row) for row in range(len(shard))]
    last = sorted(digests)[max(2, round(HELD_OUT_SHARE * len(digests))) - 1]
    if last == max(digests):
        raise HddmError(
            f"{shard.folder}: its images are too much alike to keep some from training; drop --calibrate"
        )
    return torch.tensor([digest <= last for digest in digests])


def calibrate_router(
    network: Callable[[Tensor, Tensor], Tensor],
    time_scale: float,
    images: Tensor,
    labels: Tensor,
    seed: int = 0,
    knots: int = KNOTS,
) -> tuple[tuple[float, ...], dict[str, Any]]:
    """Temperatures of a router on fresh images, and how well it is calibrated without and with them.

    Figures "after" are of images that the temperatures were not fitted to: the images are dealt into two
    halves, each judged by what was fitted to the other. The temperatures returned are fitted to all.

    Args:
        network: ``network(x_t, timestep)`` to logits (batch, K).
        time_scale: the network is fed t × ``time_scale``.
        images: (N, C, H, W) that the router was not trained on.
        labels: (N,) their shards.
        seed: of times and noise.
        knots: temperatures, at times spread evenly over [0, 1].

    Returns:
        The temperatures, and plain values for the record: expected calibration error and cross-entropy,
        before and after, over all times and in `TIME_BINS` intervals of t.
    """
    noised = noised_logits(network, time_scale, images, labels, seed)
    # Dealt in the order of the labels, so that each half has its share of every shard.
    half = torch.empty_like(labels).index_put_((labels.argsort(stable=True),), torch.arange(len(labels)) % 2)
    part = half[noised.image]
    crossed = torch.empty_like(noised.t)
    for k in (0, 1):
        seen, fresh = part != k, part == k
        temperatures = noised.fit(seen, knots)
        crossed[fresh] = temperature_at(noised.t[fresh], temperatures)
    after = noised.logits / crossed[:, None]
    time_bin = (noised.t * TIME_BINS).long()
    bins = []
    for k in range(TIME_BINS):
        rows = time_bin == k
        figures = _figures(noised.logits[rows], after[rows], noised.labels[rows])
        bins.append({"from": k / TIME_BINS, "to": (k + 1) / TIME_BINS, **figures})
    record = {
        "noised_images": len(noised.t),
        "knots": knots,
        "seed": seed,
        **_figures(noised.logits, after, noised.labels),
        "time_bins": bins,
    }
    return noised.fit(torch.ones_like(part, dtype=torch.bool), knots), record


def fit_temperatures(
    logits: Tensor, t: Tensor, labels: Tensor, knots: int = KNOTS, images: int | None = None
) -> tuple[float, ...]:
    """Temperatures at ``knots`` times, evenly over [0, 1], of the least cross-entropy.

        minimise  mean -log softmax(logits / T(t))[label] + sum (log T)² / (2 images)

    T is linear between knots. A single one is the temperature scaling of Guo et al., convex in 1/T. The
    second term is a prior, log T ~ N(0, 1), against as many observations as there are images: where few of
    them say anything, as near t = 1, or the router is never wrong, T stays near 1.

    Args:
        logits: (n, K).
        t: (n,) in [0, 1].
        labels: (n,) in 0 … K - 1.
        knots: at least 1.
        images: how many images the rows are of; by default each is of another one.

    Source: arXiv:1706.04599, section 4.2; T over t and the prior are ours.
    """
    logits, t = logits.double(), t.double()
    # Rows of how much each knot counts at each time: the interpolation is linear in the temperatures.
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


def expected_calibration_error(probabilities: Tensor, labels: Tensor, bins: int = ECE_BINS) -> float:
    """Return the mean distance of confidence from accuracy.

        ECE = sum_m |B_m|/n |accuracy(B_m) - confidence(B_m)|

    B_m holds the samples whose largest probability lies in ((m-1)/bins, m/bins]; accuracy is the share of
    those whose most probable class is the label, confidence their mean largest probability. In [0, 1]. It is
    biased upwards where bins hold few samples.

    Args:
        probabilities: (n, K), rows summing to 1.
        labels: (n,) in 0 … K - 1.
        bins: of equal width.

    Source: arXiv:1706.04599, equations 2 to 5; there, too, 15 bins.
    """
    confidence, predicted = probabilities.double().max(1)
    right = (predicted == labels).double()
    place = (confidence * bins).ceil().long().clamp(1, bins) - 1
    gaps = torch.zeros(bins, dtype=torch.float64).index_add_(0, place, right - confidence)
    return gaps.abs().sum().item() / len(labels)


@dataclass(frozen=True)
class Noised:
    """Logits (n, K) of noised images at t (n,), their labels (n,), and which image each is of (n,)."""

    logits: Tensor
    t: Tensor
    labels: Tensor
    image: Tensor

    def fit(self, rows: Tensor, knots: int) -> tuple[float, ...]:
        """Temperatures from ``rows``."""
        images = len(self.image[rows].unique())
        return fit_temperatures(self.logits[rows], self.t[rows], self.labels[rows], knots, images)


@torch.no_grad()
def noised_logits(
    network: Callable[[Tensor, Tensor], Tensor],
    time_scale: float,
    images: Tensor,
    labels: Tensor,
    seed: int,
    at_least: int = NOISED,
    batch_size: int = 512,
) -> Noised:
    """Ask a router about noised images; arguments as of `calibrate_router`.

    Every image comes as often as any other, at times that are spread evenly over [0, 1] together.
    """
    draws = generator(seed, 0, CALIBRATION_STREAM)
    image = torch.arange(len(images)).repeat(-(-at_least // len(images)))
    places = torch.randperm(len(image), generator=draws).double()
    t = (places + torch.rand(len(image), generator=draws, dtype=torch.float64)) / len(image)
    logits = []
    for rows, times in zip(image.split(batch_size), t.split(batch_size), strict=True):
        x_0, wide = images[rows], append_dims(times, images.ndim).to(images)
        eps = torch.randn(x_0.shape, generator=draws, dtype=x_0.dtype)
        logits.append(network((1 - wide) * x_0 + wide * eps, (times * time_scale).to(images)).double())
    return Noised(torch.cat(logits), t, labels[image], image)


def _figures(before: Tensor, after: Tensor, labels: Tensor) -> dict[str, float]:
    """Of logits without and with temperatures."""
    return {
        "ece_before": expected_calibration_error(before.softmax(1), labels),
        "ece_after": expected_calibration_error(after.softmax(1), labels),
        "cross_entropy_before": F.cross_entropy(before, labels).item(),
        "cross_entropy_after": F.cross_entropy(after, labels).item(),
    }
