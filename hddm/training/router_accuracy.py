"""Accuracy of a router: how often it names the shard of a noised image, beside chance (`accuracy_of`)."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hddm.data.shard_records import HELD_OUT
from hddm.data.shards import Samples, Shard, join_samples, open_shard
from hddm.experts.denoising import IMAGES, SURE
from hddm.experts.shard_images import evenly_spaced
from hddm.training.router_temperatures import noised_logits
from hddm.utils.errors import counted

log = logging.getLogger(__name__)

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
    for one, shard in zip(found, shards, strict=True):
        if one.held_out_of != shard.hash:
            return None
    store = join_samples([one.stored for one in found])
    rows = torch.arange(len(store))
    return Evidence(store, rows, store.shard_of(rows), "held-out images")


def accuracy_of(
    network: Callable[[Tensor, Tensor], Tensor], evidence: Evidence, seed: int
) -> dict[str, Any]:
    """Measure how often the most probable shard is the right one, at times spread evenly over [0, 1].

    At most `hddm.training.denoising.IMAGES` images of ``evidence`` are used, spread evenly over all. Besides
    ``accuracy``, the record gets ``chance``, the share of the largest shard, which is the accuracy of always
    naming that; and ``deviation``, (chance (1 - chance)/images)^½, of the accuracy of so many such guesses.
    """
    chosen = evenly_spaced(evidence.rows, IMAGES)
    number = len(chosen)
    log.info("measuring accuracy on %s …", counted(number, "image"))
    images = evidence.store.take(evidence.rows[chosen], None, None)
    labels = evidence.labels[chosen]
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
