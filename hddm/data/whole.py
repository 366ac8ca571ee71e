"""All shards of a partition as one: what a student of a whole ensemble is trained on."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hddm.data.shards import Shard
from hddm.data.stored import Stored
from hddm.errors import HddmError


@dataclass(frozen=True)
class JoinedStore:
    """Samples of several stores, one after the other."""

    parts: Sequence[Stored]

    @cached_property
    def ends(self) -> Tensor:
        """(parts,): the row after the last one of each."""
        return torch.tensor([len(part) for part in self.parts]).cumsum(0)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.parts[0].shape

    def __len__(self) -> int:
        return int(self.ends[-1])

    def take(self, rows: Tensor, noise: torch.Generator | None, flip: Tensor | None) -> Tensor:
        taken = torch.empty(len(rows), *self.shape)
        which = self.part_of(rows)
        for k, part in enumerate(self.parts):
            here = which == k
            if here.any():
                own = rows[here] - (self.ends[k] - len(part))
                taken[here] = part.take(own, noise, None if flip is None else flip[here])
        return taken

    def digest(self, row: int) -> bytes:
        k = int(self.part_of(torch.tensor(row)))
        return self.parts[k].digest(row - int(self.ends[k]) + len(self.parts[k]))

    def part_of(self, rows: Tensor) -> Tensor:
        """Index of the part that each of ``rows`` is in."""
        return torch.searchsorted(self.ends, rows, right=True)


def joined(shards: Sequence[Shard], folder: Path) -> Shard:
    """All ``shards`` of the partition in ``folder`` as one shard: index 0 of 1.

    Its hash, and its partition, are the partition's hash, which no shard has. So whoever matches experts by
    their shards takes a model of it neither for an expert of one of them, nor for one that fits beside
    these. Captions and texts are left out.

    Raises:
        HddmError: for shards that differ in shape, classes, VAE or partition.
    """
    first = shards[0]
    qualities: dict[str, Callable[[Shard], Any]] = {
        "shape": lambda one: one.shape,
        "classes": lambda one: one.classes,
        "VAE": lambda one: one.vae,
        "partition": lambda one: one.partition,
    }
    for name, of in qualities.items():
        for other in shards:
            if of(other) != of(first):
                raise HddmError(
                    f"{folder}: its shards do not belong together: {name} of {other.folder.name} is "
                    f"{of(other)}, and {of(first)} of {first.folder.name}"
                )
    labels = [one.labels for one in shards if one.labels is not None]
    digest = hashlib.sha256("\n".join(one.hash for one in shards).encode()).hexdigest()
    return Shard(
        folder=folder,
        index=0,
        num_shards=1,
        hash=first.partition or digest,
        classes=first.classes,
        stored=JoinedStore([one.stored for one in shards]),
        labels=torch.cat(labels) if len(labels) == len(shards) else None,
        partition=first.partition or digest,
        vae=first.vae,
    )
