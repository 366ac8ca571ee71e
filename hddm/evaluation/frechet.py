"""Fréchet distance between two sets of features, with a bootstrap interval."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hddm.errors import HddmError

Features = NDArray[np.float64]


@dataclass(frozen=True)
class Gaussian:
    """Mean (d,) and covariance (d, d) of features."""

    mean: Features
    covariance: Features

    @classmethod
    def of(cls, features: Features) -> "Gaussian":
        """Moments of ``features`` (n, d), with the n - 1 normalisation of numpy's ``cov``."""
        if features.ndim != 2 or len(features) < 2:
            raise HddmError(f"features must be (n, d) with n >= 2, not {features.shape}")
        if not np.isfinite(features).all():
            raise HddmError("features hold NaN or Inf: the images or their extractor are broken")
        wide = features.astype(np.float64)
        return cls(wide.mean(0), np.atleast_2d(np.cov(wide, rowvar=False)))

    @cached_property
    def root(self) -> Features:
        """The symmetric root C^½ (d, d), kept since a reference meets many others."""
        values, vectors = np.linalg.eigh(self.covariance)
        root: Features = (vectors * np.sqrt(values.clip(0))) @ vectors.T
        return root


def frechet_distance(a: Gaussian, b: Gaussian) -> float:
    """||m_a - m_b||² + tr(C_a) + tr(C_b) - 2 tr((C_b^½ C_a C_b^½)^½).

    The last trace is the sum of square roots of the eigenvalues of a symmetric positive matrix: real
    and non-negative for any rank, where ``sqrtm`` of the plain product C_a C_b gives complex numbers.

    Source: arXiv:1706.08500 (FID), there on Inception features; on others it is not an FID.
    """
    product = b.root @ a.covariance @ b.root
    cross = np.sqrt(np.linalg.eigvalsh((product + product.T) / 2).clip(0)).sum()
    difference = a.mean - b.mean
    distance = difference @ difference + np.trace(a.covariance) + np.trace(b.covariance) - 2 * cross
    # Rounding leaves a distance of about -1e-6 between equal sets.
    return max(float(distance), 0.0)


@dataclass(frozen=True)
class Distance:
    """A Fréchet distance and the half-width of its 95 % interval from resampling one side."""

    value: float
    half_width: float
    few_images: bool
    """Whether one side has no more images than features: then not comparable with anything."""


def measure(
    features: Features,
    reference: Features,
    resamples: int = 100,
    seed: int = 0,
    allow_few: bool = False,
    target: Gaussian | None = None,
) -> Distance:
    """Distance of ``features`` (n, d) from ``reference`` (m, d).

    The half-width is 1.96 standard errors over ``resamples`` bootstrap draws of ``features``. It says
    how much the number moves with another set of samples from the same model; it says nothing about
    another training. (Percentiles of the draws are not used: resampling adds bias upwards.)

    ``target``, the moments of ``reference``, saves their computation where they are known.

    Raises:
        HddmError: for no more images than features on either side, unless ``allow_few``.
    """
    counts = len(features), len(reference)
    few = are_few(features.shape[1], counts)
    if few and not allow_few:
        raise too_few(features.shape[1], counts)
    target = target or Gaussian.of(reference)
    draws = np.random.default_rng(seed)
    resampled = [
        frechet_distance(Gaussian.of(features[draws.integers(len(features), size=len(features))]), target)
        for _ in range(resamples)
    ]
    spread = 1.96 * float(np.std(resampled, ddof=1)) if resamples > 1 else float("nan")
    return Distance(frechet_distance(Gaussian.of(features), target), spread, few)


def are_few(dimensions: int, counts: Sequence[int]) -> bool:
    """Whether one of the sides with these ``counts`` of images has no more of them than features."""
    return min(counts) <= dimensions


def too_few(dimensions: int, counts: Sequence[int], allow: str = "--allow-few") -> HddmError:
    """The refusal of sides with these ``counts`` of images for features of as many ``dimensions``.

    ``allow`` is what a user says to measure them all the same.
    """
    return HddmError(
        f"a Fréchet distance over {dimensions} features needs more images a side than "
        f"{' and '.join(map(str, counts))}; {allow} computes a number that is not comparable"
    )
