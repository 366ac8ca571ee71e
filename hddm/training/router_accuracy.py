"""Whether a router has learnt anything: how often it names the shard of a noised image, against chance."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hddm.data.open_shard import open_shard
from hddm.data.shard_records import HELD_OUT
from hddm.data.shards import Shard
from hddm.data.stored import Stored
from hddm.data.whole import JoinedStore
from hddm.errors import HddmError
from hddm.training.judging import IMAGES, SURE
from hddm.training.router_calibration import noised_logits
from hddm.wording import counted

NOISED = 4096
"""Noised images that are looked at, at least; each image serves as often as any other."""
BATCH = 128

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evidence:
    """Images that a router is judged by.

    Args:
        store: where they lie.
        rows: (n,) which they are.
        labels: (n,) their shards.
        source: what they are, in words.
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
    """How often the most probable shard is the right one, at times spread evenly over [0, 1].

    Args:
        network: as of `hddm.training.router_calibration.calibrate_router`.
        time_scale: the network is fed t × ``time_scale``.
        evidence: of which `hddm.training.judging.IMAGES` at most are looked at, spread evenly over all.
        seed: of times and noise.

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
    """Whether what `accuracy_of` found is beyond what a router that knows nothing may have."""
    return bool(found["accuracy"] > found["chance"] + SURE * found["deviation"])


def told(found: dict[str, Any]) -> str:
    """What `accuracy_of` found, in words."""
    return (
        f"names the shard of {found['accuracy']:.1%} of {found['images']} {found['of']} at all noise levels; "
        f"always naming the largest would be right for {found['chance']:.1%}"
    )
