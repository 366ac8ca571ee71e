"""How near samples lie to each shard of the data."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hddm.evaluation.frechet import Distance, Features, Gaussian, measure

_CHUNK = 1024


@dataclass(frozen=True)
class ShardDistance:
    """Fréchet distances to the ``images`` of one shard.

    ``all`` is of all samples: what one expert's samples are judged by. ``own`` is of those ``samples`` whose
    nearest training image in feature space lies in this shard: how well a mixture does there. It is None for
    fewer than 2. Either is marked where a side has no more images than features.
    """

    shard: int
    images: int
    all: Distance
    samples: int
    own: Distance | None


class ShardMeter:
    """Measures samples against shards.

    Args:
        shards: features (n_k, d) of the images of each shard.
        resamples: of the bootstrap.
    """

    def __init__(self, shards: Sequence[Features], resamples: int = 100) -> None:
        self._shards, self._resamples = shards, resamples
        self._moments = [Gaussian.of(shard) for shard in shards]

    def measure(self, features: Features) -> tuple[ShardDistance, ...]:
        """Distances of samples with ``features`` (n, d) to every shard, in order."""
        owner = self._nearest_shard(torch.from_numpy(features)).numpy()
        found = []
        for k, shard in enumerate(self._shards):
            own = features[owner == k]
            distance = self._distance(own, k) if len(own) > 1 else None
            found.append(ShardDistance(k, len(shard), self._distance(features, k), len(own), distance))
        return tuple(found)

    def _distance(self, features: Features, k: int) -> Distance:
        shard, moments = self._shards[k], self._moments[k]
        return measure(features, shard, self._resamples, allow_few=True, target=moments)

    def _nearest_shard(self, rows: Tensor) -> Tensor:
        owners = []
        for chunk in rows.split(_CHUNK):
            nearest = [torch.cdist(chunk, torch.from_numpy(shard)).amin(1) for shard in self._shards]
            owners.append(torch.stack(nearest).argmin(0))
        return torch.cat(owners)
