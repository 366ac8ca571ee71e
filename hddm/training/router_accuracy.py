"""Accuracy of a router: how often it names the shard of a noised image, beside chance (`accuracy_of`).

Of a router that sees a condition, `with_and_without` says what that is worth.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hddm.data.shard_records import HELD_OUT
from hddm.data.shards import Samples, Shard, join_samples, open_shard
from hddm.experts.denoising import IMAGES
from hddm.experts.shard_images import evenly_spaced
from hddm.training.router_conditions import ShardConditions, conditions_of
from hddm.training.router_temperatures import Noised, noised_logits
from hddm.training.settings import RouterConditionName
from hddm.utils.errors import counted
from hddm.utils.streams import Use, generator
from hddm.velocity import TIME_SCALE

log = logging.getLogger(__name__)

JUDGED = 4096
"""Fewest noised images to measure the accuracy on; each image serves equally often."""
BATCH = 128
BINS = 10
"""Even bins of t in [0, 1] that accuracy and cross-entropy are given for."""


@dataclass(frozen=True)
class Evidence:
    """Images to judge a router by: ``rows`` (n,) of a store, their shards ``labels``, ``source`` in words.

    ``conditions`` are those of all images of the store, for a router that sees any.
    """

    store: Samples
    rows: Tensor
    labels: Tensor
    source: str
    conditions: ShardConditions | None = None

    def spread(self) -> "Evidence":
        """At most `hddm.experts.denoising.IMAGES` of these images, spread evenly over all."""
        chosen = evenly_spaced(self.rows, IMAGES)
        return Evidence(
            self.store, self.rows[chosen], self.labels[chosen], self.source, self.conditions
        )

    def given(self, places: Tensor) -> Mapping[str, Tensor]:
        """Conditions of the images at these ``places`` (n,) of ``rows``; none for a router without any."""
        return {} if self.conditions is None else self.conditions.take(self.rows[places])

    def null(self, places: Tensor) -> Mapping[str, Tensor]:
        """The null condition of as many images."""
        return {} if self.conditions is None else self.conditions.nulls(len(places))


def held_out_evidence(
    shards: Sequence[Shard],
    condition: RouterConditionName | None = None,
    classes: tuple[str, ...] = (),
) -> Evidence | None:
    """Open the held-out images of ``shards``; None where one of them has none.

    With a ``condition``, classes are numbered as ``classes`` are.
    """
    if not all((shard.folder.parent / HELD_OUT).is_dir() for shard in shards):
        return None
    found = [open_shard(shard.folder.parent / HELD_OUT / shard.folder.name) for shard in shards]
    for one, shard in zip(found, shards, strict=True):
        if one.held_out_of != shard.hash:
            return None
    store = join_samples([one.stored for one in found])
    rows = torch.arange(len(store))
    conditions = None if condition is None else conditions_of(found, condition, classes)
    return Evidence(store, rows, store.shard_of(rows), "held-out images", conditions)


def accuracy_of(network: Callable[..., Tensor], evidence: Evidence, seed: int) -> dict[str, Any]:
    """Measure how often the most probable shard is the right one, at times spread evenly over [0, 1].

    At most `hddm.training.denoising.IMAGES` images of ``evidence`` are used, spread evenly over all. Besides
    ``accuracy``, the record gets ``chance``, the share of the largest shard, which is the accuracy of always
    naming that; and ``deviation``, (chance (1 - chance)/images)^½, of the accuracy of so many such guesses.
    """
    evidence = evidence.spread()
    labels, number = evidence.labels, len(evidence.labels)
    log.info("measuring accuracy on %s …", counted(number, "image"))
    images = evidence.store.take(evidence.rows, None, None)
    noised = noised_logits(network, images, labels, seed, JUDGED, BATCH, evidence.given)
    chance = labels.bincount().max().item() / number
    return {
        "images": number,
        "of": evidence.source,
        "accuracy": (noised.logits.argmax(1) == noised.labels).double().mean().item(),
        "chance": chance,
        "deviation": (chance * (1 - chance) / number) ** 0.5,
    }


@torch.no_grad()
def with_and_without(
    network: Callable[..., Tensor],
    evidence: Evidence,
    seed: int,
    class_shares: Tensor | None = None,
) -> dict[str, Any]:
    """Measure what the condition is worth to a router: accuracy and cross-entropy with it and without.

    The record has them in even bins of t (``by_noise``), over all of them (``without_condition``), and of
    noise alone at t = 1 (``at_noise``), where the router knows the condition and nothing else. There
    ``by_counts`` are those of p(k | class), the rows ``class_shares`` (classes + 1, K), where it is known.
    """
    evidence = evidence.spread()
    labels = evidence.labels
    images = evidence.store.take(evidence.rows, None, None)
    both = {}
    for name, given in (("with", evidence.given), ("without", evidence.null)):
        both[name] = noised_logits(network, images, labels, seed, JUDGED, BATCH, given)
    by_noise = []
    for place in range(BINS):
        row: dict[str, Any] = {"t": [place / BINS, (place + 1) / BINS]}
        for name, noised in both.items():
            row[name] = _scores_of(noised, place)
        by_noise.append(row)
    draws = generator(seed, Use.ROUTER_CALIBRATION, 1)
    logits = []
    for places in torch.arange(len(labels)).split(BATCH):
        noise = torch.randn(len(places), *images.shape[1:], generator=draws, dtype=images.dtype)
        timestep = torch.full((len(places),), TIME_SCALE, dtype=images.dtype)
        logits.append(network(noise, timestep, **evidence.given(places)).double())
    at_noise = _scores(torch.cat(logits), labels)
    if class_shares is not None and evidence.conditions is not None:
        classes = evidence.given(torch.arange(len(labels)))[evidence.conditions.name]
        at_noise["by_counts"] = _scores(class_shares[classes].clamp_min(1e-6).log(), labels)
    return {
        "without_condition": _scores_of(both["without"]),
        "at_noise": at_noise,
        "by_noise": by_noise,
    }


def _scores_of(noised: Noised, place: int | None = None) -> dict[str, Any]:
    """Accuracy and cross-entropy in a bin of t, by default in all."""
    if place is None:
        return _scores(noised.logits, noised.labels)
    here = (noised.t * BINS).long().clamp(max=BINS - 1) == place
    return _scores(noised.logits[here], noised.labels[here])


def _scores(logits: Tensor, labels: Tensor) -> dict[str, Any]:
    """Accuracy and cross-entropy in nats of ``logits`` (n, K) for ``labels`` (n,)."""
    return {
        "accuracy": (logits.argmax(1) == labels).double().mean().item(),
        "cross_entropy": F.cross_entropy(logits, labels).item(),
    }


def condition_text(found: dict[str, Any]) -> str:
    """Describe the result of `with_and_without` in one line for users."""
    without, alone = found["without_condition"], found["at_noise"]
    text = (
        f"without its condition {without['accuracy']:.1%}; of noise alone, by the condition, "
        f"{alone['accuracy']:.1%}"
    )
    if "by_counts" in alone:
        text += f", and p(k | class) by counts {alone['by_counts']['accuracy']:.1%}"
    return text


def accuracy_text(found: dict[str, Any]) -> str:
    """Describe the result of `accuracy_of` in one line for users."""
    return (
        f"names the shard of {found['accuracy']:.1%} of {found['images']} {found['of']} at all noise levels; "
        f"always naming the largest would be right for {found['chance']:.1%}"
    )
