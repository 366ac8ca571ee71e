"""All scores of a set of images, against training images, held-out images and each shard."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
    """Fréchet distances to the ``images`` of one shard, marked if a side has no more images than features.

    ``all`` is of all samples, to judge one expert. ``own`` is of the ``samples`` whose nearest training image
    in feature space is in this shard, to judge a mixture; None for fewer than 2.
    """

    shard: int
    images: int
    all: Distance
    samples: int
    own: Distance | None


@dataclass(frozen=True)
class FeatureSet:
    """Features (n, d) of images, with cached moments for distances."""

    features: Features

    @cached_property
    def moments(self) -> Gaussian:
        """Mean and covariance."""
        return Gaussian.of(self.features)


def shard_distances(
    features: Features, shards: Sequence[FeatureSet], resamples: int = 100
) -> tuple[ShardDistance, ...]:
    """Distances of samples with ``features`` (n, d) to every shard."""

    def distance(rows: Features, shard: FeatureSet) -> Distance:
        return measure(rows, shard.features, resamples, allow_few=True, target=shard.moments)

    owners = []
    for chunk in torch.from_numpy(features).split(_CHUNK):
        nearest = [torch.cdist(chunk, torch.from_numpy(shard.features)).amin(1) for shard in shards]
        owners.append(torch.stack(nearest).argmin(0))
    owner = torch.cat(owners).numpy()
    found = []
    for k, shard in enumerate(shards):
        own = features[owner == k]
        of_own = distance(own, shard) if len(own) > 1 else None
        found.append(ShardDistance(k, len(shard.features), distance(features, shard), len(own), of_own))
    return tuple(found)


RECOGNISED = 0.9
"""A classifier recognises an image that it gives a class with more than this probability."""
LEARNED = 0.5
"""Samples of a model that has learned are recognised at least this many times as often as real images."""


@dataclass(frozen=True)
class Recognised:
    """Shares of the samples and of real images (held-out ones, where there are any) that are recognised."""

    share: float
    real: float


@dataclass(frozen=True)
class Scores:
    """Scores of a set of images; they depend on the features, which ``extractor`` names.

    Fields that need held-out images, labels or shards are None or empty without them, as is ``recognised``
    for features that are not a classifier's. Kernel distances, precision and recall, and the diversity within
    conditions need a ``complete`` `Scorer`.
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
    recognised: Recognised | None = None


class Scorer:
    """Scores sets of images against training images and held-out images, both as bytes (n, C, H, W).

    ``resamples`` is of the bootstrap; ``allow_few`` accepts no more images than features, and marks them;
    ``complete`` adds slower scores, see `Scores`. ``training_labels`` (n,) serve the diversity within
    classes, ``shards`` (images as bytes) the distances to each. ``mirrored`` tells that models were trained
    on mirrored images too, so that a mirrored copy is a copy.
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
        self._pixels, self._fresh_pixels = training, held_out
        self._training = self._features(training)
        self._held_out = None if held_out is None else self._features(held_out)
        self._shards = [self._features(shard) for shard in shards]
        self._within_training: dict[int, float] = {}

    def real(self) -> Distance:
        """Distance of the held-out images to the training images; raises `HddmError` without any."""
        if self._held_out is None:
            raise HddmError("there are no held-out images to measure")
        return self._distance(self._held_out, self._training)

    def score(self, pixels: Tensor, labels: Tensor | None = None) -> Scores:
        """Score images (n, C, H, W) in bytes, made under the conditions ``labels`` (n,).

        Labels are class numbers of the training images, if these have some. Raises `HddmError` as
        `hddm.evaluation.distances.measure`, for too few images.
        """
        images, training, held_out = self._features(pixels), self._training, self._held_out
        memory = None
        if held_out is not None:
            memory = memorisation(self._to_nearest(pixels), self._fresh_distances, self._mirrored)
        further: dict[str, Any] = {}
        if self._complete:
            sides = {"training": training} | ({} if held_out is None else {"held_out": held_out})
            for name, side in sides.items():
                further[f"kernel_to_{name}"] = kernel_distance(images.features, side.features)
                further[f"on_{name}"] = _overlap(images, side)
            if labels is not None:
                further["within_conditions"] = self._within(pixels, images.features, labels)
        return Scores(
            extractor=self._extractor.name,
            images=len(pixels),
            to_training=self._distance(images, training),
            to_held_out=None if held_out is None else self._distance(images, held_out),
            diversity=diversity(torch.from_numpy(images.features), torch.from_numpy(training.features)),
            nearest_ratio=None if memory is None else memory.ratio,
            memorisation=memory,
            shards=shard_distances(images.features, self._shards, self._resamples) if self._shards else (),
            recognised=self._recognised(images),
            **further,
        )

    def _recognised(self, images: FeatureSet) -> Recognised | None:
        if (confidence := self._extractor.confidence) is None:
            return None
        sides = (images, self._held_out or self._training)
        share, real = (
            (confidence(torch.from_numpy(side.features)) > RECOGNISED).double().mean().item()
            for side in sides
        )
        return Recognised(share, real)

    def _distance(self, images: FeatureSet, reference: FeatureSet) -> Distance:
        return measure(
            images.features,
            reference.features,
            self._resamples,
            allow_few=self._allow_few,
            target=reference.moments,
        )

    @cached_property
    def _fresh_distances(self) -> Tensor:
        assert self._fresh_pixels is not None
        return self._to_nearest(self._fresh_pixels)

    def _to_nearest(self, pixels: Tensor) -> Tensor:
        return nearest_distances(pixels, self._pixels, self._mirrored)

    def _within(self, pixels: Tensor, features: Features, labels: Tensor) -> ConditionDiversity | None:
        why = why_not_lpips(min(pixels.shape[-2:]))
        pairs = FEATURE_PAIRS if why else PAIRS

        def measured(pixels: Tensor, features: Features, conditions: Tensor) -> dict[int, float]:
            between = feature_distance(torch.from_numpy(features)) if why else lpips_distance(pixels)
            return within_conditions(conditions, between, pairs)

        found = measured(pixels, features, labels)
        if not found:
            return None
        known = self._within_training
        if self._labels is not None:
            missing = torch.tensor([one for one in found if one not in known], dtype=self._labels.dtype)
            rows = torch.isin(self._labels, missing).nonzero()[:, 0]
            known |= measured(self._pixels[rows], self._training.features[rows.numpy()], self._labels[rows])
        reference = _mean([known[label] for label in found]) if found.keys() <= known.keys() else None
        name = "features" if why else LPIPS
        return ConditionDiversity(name, why, len(found), _mean(list(found.values())), reference)

    def _features(self, pixels: Tensor) -> FeatureSet:
        batches = [self._extractor.features(to_unit_range(batch)) for batch in pixels.split(_BATCH)]
        return FeatureSet(torch.cat(batches).double().numpy())


def _overlap(images: FeatureSet, reference: FeatureSet) -> PrecisionRecall:
    return precision_recall(torch.from_numpy(images.features), torch.from_numpy(reference.features))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
