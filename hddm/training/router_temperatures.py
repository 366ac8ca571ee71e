"""Temperatures of a router, which calibrate its probabilities (`calibrate_router`).

Logits are divided by T(t) (`hddm.routers.temperature_at`), fitted to noised images that the router was not
trained on. The order of the experts, and so top-1, does not change; strategies that weigh or count by
probability do.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hddm.routers import temperature_at
from hddm.utils.streams import Use, generator
from hddm.utils.tensors import append_dims
from hddm.velocity import TIME_SCALE

NOISED = 16384
"""Fewest noised images to fit temperatures to; each held-out image serves many times."""
KNOTS = 5
"""Temperatures over t (docs/notes/training.md)."""
ECE_BINS = 15


Given = Callable[[Tensor], Mapping[str, Tensor]]
"""Conditions (n, …) of images by their indices (n,), as keywords of a router's network."""


def no_condition(rows: Tensor) -> Mapping[str, Tensor]:
    """The conditions of a router that sees none."""
    return {}


def calibrate_router(
    network: Callable[..., Tensor],
    images: Tensor,
    labels: Tensor,
    seed: int = 0,
    knots: int = KNOTS,
    given: Given = no_condition,
) -> tuple[tuple[float, ...], dict[str, Any]]:
    """Fit temperatures of a router to fresh images, and measure its calibration without and with them.

    ``network(x_t, t × TIME_SCALE)`` gives logits (batch, K), and takes the conditions ``given``. The router
    was trained on none of ``images`` (N, C, H, W), which are of the shards in ``labels`` (N,). The ``knots``
    temperatures are at times spread evenly over [0, 1].

    The record that is returned with them holds expected calibration error and cross-entropy, before and
    after. Figures "after" are cross-fitted: each half of the images is judged by temperatures fitted to the
    other. The temperatures returned are fitted to all.
    """
    noised = noised_logits(network, images, labels, seed, given=given)
    # Dealt in the order of the labels, so that each half has its share of every shard.
    half = torch.empty_like(labels).index_put_(
        (labels.argsort(stable=True),), torch.arange(len(labels)) % 2
    )
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
    network: Callable[..., Tensor],
    images: Tensor,
    labels: Tensor,
    seed: int,
    at_least: int = NOISED,
    batch_size: int = 512,
    given: Given = no_condition,
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
        x_t, timestep = (1 - wide) * x_0 + wide * eps, (times * TIME_SCALE).to(images)
        logits.append(network(x_t, timestep, **given(rows)).double())
    return Noised(torch.cat(logits), t, labels[image], image)
