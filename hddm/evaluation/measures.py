"""Measures of two sets of images: distances, precision and recall, diversity, memorisation."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hddm.evaluation.score_records import (
    FEWEST_IMAGES,
    Distance,
    KernelDistance,
    Memorisation,
    PrecisionRecall,
)
from hddm.utils.errors import HddmError
from hddm.utils.streams import Use, generator, stream

Features = NDArray[np.float64]
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
        """Moments of ``features`` (n, d), n ≥ 2, normalised by n - 1 as numpy's ``cov``."""
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
    return _distance(a.mean, np.trace(a.covariance), (product + product.T) / 2, b)


def _distance(mean: Features, trace: float, product: Features, target: Gaussian) -> float:
    """The distance, of a matrix with the eigenvalues of C_b^½ C_a C_b^½, perhaps without some zeros."""
    cross = np.sqrt(np.linalg.eigvalsh(product).clip(0)).sum()
    difference = mean - target.mean
    distance = difference @ difference + trace + np.trace(target.covariance) - 2 * cross
    # Rounding leaves a distance of about -1e-6 between equal sets.
    return max(float(distance), 0.0)


class Resampling:
    """Distances of bootstrap draws of one side.

    A draw of n rows has about 0.63 n different ones. Where these are fewer than the d features, C_a = Yᵀ Y of
    as many rows Y, centred and scaled by how often each was drawn. Then C_b^½ C_a C_b^½ has the eigenvalues
    of the smaller matrix (Y C_b^½) (Y C_b^½)ᵀ, and zeros.
    """

    def __init__(self, features: Features, target: Gaussian) -> None:
        self._features, self._target = features.astype(np.float64), target

    @cached_property
    def _rooted(self) -> Features:
        rooted: Features = self._features @ self._target.root
        return rooted

    def distance(self, rows: NDArray[np.int64]) -> float:
        """Distance of the images with these numbers, each as often as it occurs."""
        different, counts = np.unique(rows, return_counts=True)
        if len(different) >= self._features.shape[1]:
            return frechet_distance(Gaussian.of(self._features[rows]), self._target)
        own, rooted = self._features[different], self._rooted[different]
        weights = counts / len(rows)
        mean = weights @ own
        scale = np.sqrt(counts / (len(rows) - 1))[:, None]
        trace = float(((scale * (own - mean)) ** 2).sum())
        scaled = scale * (rooted - weights @ rooted)
        return _distance(mean, trace, scaled @ scaled.T, self._target)


def measure(
    features: Features, reference: Features, resamples: int = 100, seed: int = 0
) -> Distance:
    """Fréchet distance of ``features`` (n, d) from ``reference`` (m, d).

    The half-width is 1.96 standard errors over ``resamples`` bootstrap draws of ``features``: the variation
    over samples of the same model, not over trainings. (Percentiles of the draws are not used, since
    resampling adds an upward bias.)
    """
    target = Gaussian.of(reference)
    draws = np.random.default_rng(stream(seed, Use.BOOTSTRAP))
    value = frechet_distance(Gaussian.of(features), target)
    resampling, resampled = Resampling(features, target), []
    for _ in range(resamples):
        rows = draws.integers(len(features), size=len(features))
        resampled.append(resampling.distance(rows))
    spread = 1.96 * float(np.std(resampled, ddof=1)) if resamples > 1 else None
    few = has_few(features.shape[1], (len(features), len(reference)))
    return Distance(value=value, half_width=spread, few_images=few)


def has_few(dimensions: int, counts: Sequence[int], allow_few: bool = True) -> bool:
    """True if a side with one of these ``counts`` of images has no more images than features.

    Raises `HddmError` for that unless ``allow_few``.
    """
    few = min(counts) <= dimensions
    if few and not allow_few:
        raise HddmError(
            f"a Fréchet distance over {dimensions} features needs more images per side than "
            f"{' and '.join(map(str, counts))}; `allow_few=True` computes a number that is not comparable"
        )
    return few


def kernel_distance(
    features: Features,
    reference: Features,
    subsets: int = 100,
    subset_size: int = 1000,
    seed: int = 0,
) -> KernelDistance:
    """KID: mean of `squared_mmd` over random subsets of at most ``subset_size`` images per side.

    ``features`` are (n, d), ``reference`` (m, d), at least `FEWEST_IMAGES` each. The deviation over such
    subsets, often reported, is no error of their mean, since they overlap. The standard error here is of a
    mean over ten or more disjoint blocks of ``features``, all against one reference, which is no less.
    Source: arXiv:1801.01401, there on Inception features; on others it is not a KID.
    """
    draws = np.random.default_rng(stream(seed, Use.KERNEL_SUBSETS))
    size = min(len(features), len(reference), subset_size)
    repeats = 1 if size == len(features) == len(reference) else subsets
    values = []
    for _ in range(repeats):
        ours = features[draws.choice(len(features), size, replace=False)]
        theirs = reference[draws.choice(len(reference), size, replace=False)]
        values.append(squared_mmd(ours, theirs))
    error = _standard_error(features, reference, subset_size, draws)
    return KernelDistance(value=float(np.mean(values)), standard_error=error)


def squared_mmd(x: Features, y: Features) -> float:
    """Mean of k(x_i, x_j) and of k(y_i, y_j) over i ≠ j, less twice the mean of k(x_i, y_j).

    k(a, b) = (a·b / d + 1)³ for ``x`` (n, d) and ``y`` (m, d), n, m ≥ 2. Unbiased, so it may be negative.
    """
    return _within(x) + _within(y) - 2 * float(_kernel(x, y).mean())


def _standard_error(
    features: Features, reference: Features, subset_size: int, draws: np.random.Generator
) -> float:
    size = min(subset_size, max(len(features) // _BLOCKS, FEWEST_IMAGES // 2))
    order = draws.permutation(len(features))
    target = reference[draws.permutation(len(reference))[: _BLOCKS * subset_size]]
    values = []
    for k in range(0, len(order) - size + 1, size):
        block = features[order[k : k + size]]
        # The reference's own term is the same for all blocks.
        values.append(_within(block) - 2 * float(_kernel(block, target).mean()))
    deviation = float(np.std(values, ddof=1))
    return deviation / float(len(values) ** 0.5)


def _within(a: Features) -> float:
    gram = _kernel(a, a)
    total = float(gram.sum() - np.trace(gram))
    return total / (len(a) * (len(a) - 1))


def _kernel(a: Features, b: Features) -> Features:
    values: Features = (a @ b.T / a.shape[1] + 1) ** 3
    return values


def precision_recall(
    features: Tensor,
    reference: Tensor,
    neighbours: int = NEIGHBOURS,
    most: int = MOST_IMAGES,
    seed: int = 0,
) -> PrecisionRecall:
    """Improved precision and recall.

    The manifold of a set is the union of balls around its rows, with the distance to the row's k-th nearest
    other row as radius. Precision is the share of ``features`` (n, d) in the manifold of ``reference`` (m,
    d); recall the share of ``reference`` in that of ``features``. Both sides are cut to the same number of
    random rows, at ``most``, and more than ``neighbours``. Source: arXiv:1904.06991, there on VGG-16
    features.
    """
    num = min(len(features), len(reference), most)
    draws = generator(seed, Use.PRECISION_ROWS)
    # Centred, since products of large means would hide small distances.
    centre = reference.double().mean(0)
    ours = features[torch.randperm(len(features), generator=draws)[:num]].double() - centre
    theirs = reference[torch.randperm(len(reference), generator=draws)[:num]].double() - centre
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


MOST_ROWS = 5000
FEW = 40
"""With fewer images on a side, nearest distances say little."""
_NEAR = 0.05
_ROWS, _OTHERS = 1024, 8192
PAIRS = 20_000
"""Most pairs measured per condition."""


def diversity(features: Tensor, reference: Tensor) -> float:
    """Mean distance between pairs of ``features`` (n, d), over that of ``reference`` (m, d).

    1 is as varied as the reference, 0 all equal; it does not show whether the *right* things vary. At most
    `MOST_ROWS` random rows per side are used.
    """
    return _mean_pair_distance(features) / _mean_pair_distance(reference)


def _mean_pair_distance(rows: Tensor) -> float:
    if len(rows) > MOST_ROWS:
        draws = generator(0, Use.DIVERSITY_ROWS)
        rows = rows[torch.randperm(len(rows), generator=draws)[:MOST_ROWS]]
    return torch.pdist(rows.float()).mean().item()


def within_conditions(
    features: Tensor, labels: Tensor, pairs: int = PAIRS, seed: int = 0
) -> dict[int, float]:
    """Mean distance between ``features`` (n, d) of each condition in ``labels`` (n,) with two or more images.

    At most ``pairs`` random pairs per condition are measured.
    """
    found = {}
    for label in labels.unique().tolist():
        rows = (labels == label).nonzero()[:, 0]
        if len(rows) < 2:
            continue
        first, second = _pairs(len(rows), pairs, seed)
        ours = features[rows[torch.from_numpy(first)]]
        theirs = features[rows[torch.from_numpy(second)]]
        found[int(label)] = (ours - theirs).norm(dim=1).double().mean().item()
    return found


def _pairs(num: int, most: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the first and the second rows of all pairs, or of ``most`` random ones."""
    if num * (num - 1) // 2 <= most:
        first, second = np.triu_indices(num, 1)
        return first, second
    draws = np.random.default_rng(stream(seed, Use.DIVERSITY_PAIRS))
    first = draws.integers(num, size=most)
    return first, (first + draws.integers(1, num, size=most)) % num


def memorisation(samples: Tensor, fresh: Tensor, mirrored: bool = False) -> Memorisation:
    """Memorisation from nearest training distances of samples (n,) and of held-out images (m,).

    Raises `HddmError` if held-out images repeat training images exactly.
    """
    ours = samples.double()
    theirs = fresh.double()
    if theirs.mean() == 0:
        raise HddmError("every held-out image is also a training image: hold others out")
    ratio = (ours.mean() / theirs.mean()).item()
    # Error of a ratio of independent means, to first order.
    error = ours.var() / len(ours)
    fresh_error = theirs.var() / len(theirs)
    variance = (error + ratio**2 * fresh_error) / theirs.mean() ** 2
    few = min(len(ours), len(theirs)) < FEW
    near = None if few else (ours < theirs.quantile(_NEAR)).double().mean().item()
    return Memorisation(
        ratio=ratio,
        half_width=1.96 * variance.sqrt().item(),
        share_near=near,
        few_images=few,
        copies=int((theirs == 0).sum()),
        mirrored=mirrored,
    )


def nearest_distances(rows: Tensor, others: Tensor, mirrored: bool = False) -> Tensor:
    """Pixel distance (n,) of each of ``rows`` (n, …) to the nearest of ``others`` (m, …).

    If ``mirrored``, the mirror images of ``others`` count too.
    """
    nearest = []
    for images in rows.split(_ROWS):
        flat = images.flatten(1).float()
        best = torch.full((len(images),), torch.inf)
        for chunk in others.split(_OTHERS):
            for seen in (chunk, chunk.flip(-1)) if mirrored else (chunk,):
                candidates = seen.flatten(1).float()
                # cdist only finds the nearest: its distances of equal rows are not 0.
                found = candidates[torch.cdist(flat, candidates).argmin(1)]
                best = best.minimum((flat - found).norm(dim=1))
        nearest.append(best)
    return torch.cat(nearest)
