"""Scores of a set of images: all figures, against training images, held-out images and each shard."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hddm.data.images import to_unit_range
from hddm.evaluation.distances import (
    Distance,
    Features,
    Gaussian,
    KernelDistance,
    PrecisionRecall,
    kernel_distance,
    measure,
    precision_recall,
)
from hddm.evaluation.diversity import (
    FEATURE_PAIRS,
    LPIPS,
    PAIRS,
    Between,
    ConditionDiversity,
    Memorisation,
    diversity,
    feature_distance,
    lpips_distance,
    memorisation,
    nearest_distances,
    why_not_lpips,
    within_conditions,
)
from hddm.evaluation.features import FeatureExtractor
from hddm.utils.errors import HddmError

_CHUNK = 1024
_BATCH = 512


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


@dataclass(frozen=True)
class Scores:
    """Figures of a set of images; ``extractor`` names the features, without which they mean nothing.

    What needs held-out images, labels or shards is None or empty without them; kernel distances, precision
    and recall, and the diversity within conditions are measured by a ``complete`` `Scorer` alone.
    """

    extractor: str
    images: int
    to_training: Distance
    to_held_out: Distance | None
    diversity: float
    nearest_ratio: float | None
    memorisation: Memorisation | None = None
    kernel_to_training: KernelDistance | None = None
    kernel_to_held_out: KernelDistance | None = None
    on_training: PrecisionRecall | None = None
    on_held_out: PrecisionRecall | None = None
    within_conditions: ConditionDiversity | None = None
    shards: tuple[ShardDistance, ...] = ()


class _Group:
    """Images with what every measurement needs of them again."""

    def __init__(self, pixels: Tensor, features: Features) -> None:
        self.pixels, self.features = pixels, features

    @cached_property
    def moments(self) -> Gaussian:
        return Gaussian.of(self.features)


class Scorer:
    """Scores sets of images against training images and held-out images.

    Args:
        extractor: of the features.
        training, held_out: the two sides, as bytes (n, C, H, W); without held-out images, what needs
            them is None.
        resamples: of the bootstrap.
        allow_few: whether fewer images than features are measured all the same, and marked.
        complete: whether the measures that take longer are made too, see `Scores`.
        training_labels: classes (n,) of the training images, for the diversity within classes.
        shards: training images of each shard, as bytes, for the distances to each.
        mirrored: whether models were trained on mirrored images too, so that a mirrored copy is a copy.
    """

    def __init__(
        self,
        extractor: FeatureExtractor,
        training: Tensor,
        held_out: Tensor | None,
        resamples: int = 100,
        allow_few: bool = False,
        *,
        complete: bool = False,
        training_labels: Tensor | None = None,
        shards: Sequence[Tensor] = (),
        mirrored: bool = False,
    ) -> None:
        self._extractor, self._resamples, self._allow_few = extractor, resamples, allow_few
        self._complete, self._labels, self._mirrored = complete, training_labels, mirrored
        self._training = self._group(training)
        self._held_out = None if held_out is None else self._group(held_out)
        self._shards = ShardMeter([self._of(shard) for shard in shards], resamples) if shards else None
        self._within_training: dict[int, float] = {}

    def real(self) -> Distance:
        """Distance of the held-out images themselves to the training images.

        Raises:
            HddmError: where there are none.
        """
        if self._held_out is None:
            raise HddmError("there are no held-out images to measure")
        return self._distance(self._held_out.features, self._training)

    def score(self, pixels: Tensor, labels: Tensor | None = None) -> Scores:
        """Figures of images (n, C, H, W) in bytes, made under the conditions ``labels`` (n,).

        Labels are class numbers of the training images where these have some.

        Raises:
            HddmError: as `hddm.evaluation.distances.measure`, for too few images.
        """
        group = self._group(pixels)
        training, held_out = self._training, self._held_out
        memory = None if held_out is None else self._memorisation(pixels)
        complete = self._complete
        return Scores(
            extractor=self._extractor.name,
            images=len(pixels),
            to_training=self._distance(group.features, training),
            to_held_out=None if held_out is None else self._distance(group.features, held_out),
            diversity=diversity(torch.from_numpy(group.features), torch.from_numpy(training.features)),
            nearest_ratio=None if memory is None else memory.ratio,
            memorisation=memory,
            kernel_to_training=_kernel(group, training) if complete else None,
            kernel_to_held_out=_kernel(group, held_out) if complete and held_out else None,
            on_training=_overlap(group, training) if complete else None,
            on_held_out=_overlap(group, held_out) if complete and held_out else None,
            within_conditions=self._within(group, labels) if complete and labels is not None else None,
            shards=self._shards.measure(group.features) if self._shards else (),
        )

    def _distance(self, features: Features, group: _Group) -> Distance:
        return measure(
            features, group.features, self._resamples, allow_few=self._allow_few, target=group.moments
        )

    def _memorisation(self, pixels: Tensor) -> Memorisation:
        return memorisation(self._to_nearest(pixels), self._fresh_distances, self._mirrored)

    @cached_property
    def _fresh_distances(self) -> Tensor:
        assert self._held_out is not None
        return self._to_nearest(self._held_out.pixels)

    def _to_nearest(self, pixels: Tensor) -> Tensor:
        return nearest_distances(pixels, self._training.pixels, self._mirrored)

    def _within(self, group: _Group, labels: Tensor) -> ConditionDiversity | None:
        why = why_not_lpips(min(group.pixels.shape[-2:]))
        pairs = FEATURE_PAIRS if why else PAIRS

        def between(of: _Group) -> Between:
            return feature_distance(torch.from_numpy(of.features)) if why else lpips_distance(of.pixels)

        found = within_conditions(labels, between(group), pairs)
        if not found:
            return None
        reference = None
        if self._labels is not None:
            missing = [label for label in found if label not in self._within_training]
            rows = torch.isin(self._labels, torch.tensor(missing, dtype=self._labels.dtype)).nonzero()[:, 0]
            part = _Group(self._training.pixels[rows], self._training.features[rows.numpy()])
            self._within_training |= within_conditions(self._labels[rows], between(part), pairs)
            known = [self._within_training.get(label) for label in found]
            if all(value is not None for value in known):
                reference = _mean([value for value in known if value is not None])
        name = "features" if why else LPIPS
        return ConditionDiversity(name, why, len(found), _mean(list(found.values())), reference)

    def _group(self, pixels: Tensor) -> _Group:
        return _Group(pixels, self._of(pixels))

    def _of(self, pixels: Tensor) -> Features:
        batches = [self._extractor.features(to_unit_range(batch)) for batch in pixels.split(_BATCH)]
        return torch.cat(batches).double().numpy()


def _kernel(group: _Group, reference: _Group) -> KernelDistance:
    return kernel_distance(group.features, reference.features)


def _overlap(group: _Group, reference: _Group) -> PrecisionRecall:
    return precision_recall(torch.from_numpy(group.features), torch.from_numpy(reference.features))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
