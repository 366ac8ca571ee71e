"""Distances between two sets of features: Fréchet, kernel (KID), and precision and recall."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from hddm.utils.errors import HddmError
from hddm.utils.records import Count, OpenRecord
from hddm.utils.streams import Use, generator, stream

Features = NDArray[np.float64]
Number = Annotated[float, Field(ge=-1e30, le=1e30)]
"""A number whose square, and sums of it, are finite too."""
Width = Annotated[Number, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
FEWEST = 4
NEIGHBOURS = 3
MOST_IMAGES = 10_000
_BLOCKS = 10
_CHUNK = 1024


@dataclass(frozen=True)
class Gaussian:
    """Mean (d,) and covariance (d, d) of features."""

    mean: Features
    covariance: Features

    @classmethod
    def of(cls, features: Features) -> "Gaussian":
        """Moments of ``features`` (n, d), normalised by n - 1 as numpy's ``cov``."""
        if features.ndim != 2 or len(features) < 2:
            raise HddmError(f"features must be (n, d) with n >= 2, not {features.shape}")
        if not np.isfinite(features).all():
            raise HddmError("features hold NaN or Inf: the images or their extractor are broken")
        wide = features.astype(np.float64)
        return cls(wide.mean(0), np.atleast_2d(np.cov(wide, rowvar=False)))

    @cached_property
    def root(self) -> Features:
        """Symmetric root C^½ (d, d), cached since a reference is compared many times."""
        values, vectors = np.linalg.eigh(self.covariance)
        root: Features = (vectors * np.sqrt(values.clip(0))) @ vectors.T
        return root


def frechet_distance(a: Gaussian, b: Gaussian) -> float:
    """||m_a - m_b||² + tr(C_a) + tr(C_b) - 2 tr((C_b^½ C_a C_b^½)^½).

    The last trace is the sum of square roots of the eigenvalues of a symmetric positive matrix: real and
    non-negative for any rank, where ``sqrtm`` of the plain product C_a C_b gives complex numbers. Source:
    arXiv:1706.08500 (FID), there on Inception features; on others it is not an FID.
    """
    product = b.root @ a.covariance @ b.root
    cross = np.sqrt(np.linalg.eigvalsh((product + product.T) / 2).clip(0)).sum()
    difference = a.mean - b.mean
    distance = difference @ difference + np.trace(a.covariance) + np.trace(b.covariance) - 2 * cross
    # Rounding leaves a distance of about -1e-6 between equal sets.
    return max(float(distance), 0.0)


class Distance(OpenRecord):
    """A Fréchet distance and the half-width of its 95 % interval from resampling one side."""

    value: Number
    half_width: Width | None = None
    few_images: bool = False
    """True if one side has no more images than features, so the distance does not compare."""


def measure(
    features: Features, reference: Features, resamples: int = 100, seed: int = 0, allow_few: bool = False
) -> Distance:
    """Fréchet distance of ``features`` (n, d) from ``reference`` (m, d).

    The half-width is 1.96 standard errors over ``resamples`` bootstrap draws of ``features``: the variation
    over samples of the same model, not over trainings. (Percentiles of the draws are not used, since
    resampling adds an upward bias.) Raises `HddmError` for no more images than features on a side, unless
    ``allow_few``.
    """
    few = has_few(features.shape[1], (len(features), len(reference)), allow_few)
    target = Gaussian.of(reference)
    draws = np.random.default_rng(stream(seed, Use.BOOTSTRAP))
    resampled = [
        frechet_distance(Gaussian.of(features[draws.integers(len(features), size=len(features))]), target)
        for _ in range(resamples)
    ]
    spread = 1.96 * float(np.std(resampled, ddof=1)) if resamples > 1 else None
    value = frechet_distance(Gaussian.of(features), target)
    return Distance(value=value, half_width=spread, few_images=few)


def has_few(dimensions: int, counts: Sequence[int], allow_few: bool = True) -> bool:
    """True if a side with one of these ``counts`` of images has no more images than features.

    Raises `HddmError` for that unless ``allow_few``.
    """
    few = min(counts) <= dimensions
    if few and not allow_few:
        raise HddmError(
            f"a Fréchet distance over {dimensions} features needs more images a side than "
            f"{' and '.join(map(str, counts))}; `allow_few=True` computes a number that is not comparable"
        )
    return few


class KernelDistance(OpenRecord):
    """Squared maximum mean discrepancy (may be negative for similar sets) and its standard error.

    The error is over draws of the samples, with a fixed reference. ``subset_size`` is the number of images a
    side in each of the averaged subsets.
    """

    value: Number
    standard_error: Width = 0.0
    subset_size: Count = 0


def kernel_distance(
    features: Features, reference: Features, subsets: int = 100, subset_size: int = 1000, seed: int = 0
) -> KernelDistance:
    """KID: mean of `squared_mmd` over random subsets of at most ``subset_size`` images a side.

    ``features`` are (n, d), ``reference`` (m, d). The deviation over such subsets, often reported, is no
    error of their mean, since they overlap. The standard error here is that of a mean over ten or more
    disjoint blocks of ``features``, all against one reference, which is no less. Raises `HddmError` for fewer
    than `FEWEST` images on a side. Source: arXiv:1801.01401, there on Inception features; on others it is not
    a KID.
    """
    fewest = min(len(features), len(reference))
    if fewest < FEWEST:
        raise HddmError(f"a kernel distance needs at least {FEWEST} images a side, not {fewest}")
    draws = np.random.default_rng(stream(seed, Use.KERNEL_SUBSETS))
    size = min(fewest, subset_size)
    repeats = 1 if size == len(features) == len(reference) else subsets
    values = [
        squared_mmd(*(side[draws.choice(len(side), size, replace=False)] for side in (features, reference)))
        for _ in range(repeats)
    ]
    error = _standard_error(features, reference, subset_size, draws)
    return KernelDistance(value=float(np.mean(values)), standard_error=error, subset_size=size)


def squared_mmd(x: Features, y: Features) -> float:
    """Mean of k(x_i, x_j) and of k(y_i, y_j) over i ≠ j, less twice the mean of k(x_i, y_j).

    k(a, b) = (a·b / d + 1)³ for ``x`` (n, d) and ``y`` (m, d), n, m ≥ 2. Unbiased, so it may be negative.
    """
    return _within(x) + _within(y) - 2 * float(_kernel(x, y).mean())


def _standard_error(
    features: Features, reference: Features, subset_size: int, draws: np.random.Generator
) -> float:
    size = min(subset_size, max(len(features) // _BLOCKS, FEWEST // 2))
    order = draws.permutation(len(features))
    target = reference[draws.permutation(len(reference))[: _BLOCKS * subset_size]]
    # The reference's own term is the same for all blocks.
    values = [
        _within(block) - 2 * float(_kernel(block, target).mean())
        for block in (features[order[k : k + size]] for k in range(0, len(order) - size + 1, size))
    ]
    deviation = float(np.std(values, ddof=1))
    return deviation / float(len(values) ** 0.5)


def _within(a: Features) -> float:
    gram = _kernel(a, a)
    total = float(gram.sum() - np.trace(gram))
    return total / (len(a) * (len(a) - 1))


def _kernel(a: Features, b: Features) -> Features:
    values: Features = (a @ b.T / a.shape[1] + 1) ** 3
    return values


class PrecisionRecall(OpenRecord):
    """Shares in [0, 1]; both depend on the number of ``images`` a side, so only equal numbers compare."""

    precision: Share
    recall: Share
    images: Annotated[Count, Field(ge=1)]


def precision_recall(
    features: Tensor, reference: Tensor, neighbours: int = NEIGHBOURS, most: int = MOST_IMAGES, seed: int = 0
) -> PrecisionRecall:
    """Improved precision and recall.

    The manifold of a set is the union of balls around its rows, with the distance to the row's k-th nearest
    other row as radius. Precision is the share of ``features`` (n, d) in the manifold of ``reference`` (m,
    d); recall the share of ``reference`` in that of ``features``. Both sides are cut to the same number of
    random rows, at ``most``. Raises `HddmError` for no more than ``neighbours`` images on a side. Source:
    arXiv:1904.06991, there on VGG-16 features.
    """
    num = min(len(features), len(reference), most)
    if num <= neighbours:
        raise HddmError(f"precision and recall need more than {neighbours} images a side, not {num}")
    draws = generator(seed, Use.PRECISION_ROWS)
    # Centred, since products of large means would hide small distances.
    ours, theirs = (
        side[torch.randperm(len(side), generator=draws)[:num]].double() - reference.double().mean(0)
        for side in (features, reference)
    )
    return PrecisionRecall(
        precision=_covered(ours, theirs, _radii(theirs, neighbours)),
        recall=_covered(theirs, ours, _radii(ours, neighbours)),
        images=num,
    )


def _radii(rows: Tensor, neighbours: int) -> Tensor:
    """Distance (n,) of each row to its k-th nearest other."""
    radii = []
    for start in range(0, len(rows), _CHUNK):
        distances = torch.cdist(rows[start : start + _CHUNK], rows)
        own = torch.arange(len(distances))
        distances[own, start + own] = torch.inf
        radii.append(distances.kthvalue(neighbours, dim=1).values)
    return torch.cat(radii)


def _covered(rows: Tensor, centres: Tensor, radii: Tensor) -> float:
    inside = [(torch.cdist(chunk, centres) <= radii).any(1) for chunk in rows.split(_CHUNK)]
    return torch.cat(inside).double().mean().item()
