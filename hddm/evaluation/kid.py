"""Kernel distance between two sets of features (KID), unbiased at any number of images."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hddm.errors import HddmError

Features = NDArray[np.float64]
FEWEST = 4
_BLOCKS = 10


@dataclass(frozen=True)
class KernelDistance:
    """A squared maximum mean discrepancy and its standard error.

    ``value`` may be negative where the sets are alike. ``standard_error`` is that of another draw of the
    samples, against the same reference; ``subset_size`` is the number of images a side in each of the subsets
    that were averaged.
    """

    value: float
    standard_error: float
    subset_size: int


def kernel_distance(
    features: Features, reference: Features, subsets: int = 100, subset_size: int = 1000, seed: int = 0
) -> KernelDistance:
    """KID: the mean of `squared_mmd` over random subsets of at most ``subset_size`` images a side.

    The deviation over such subsets, which is often printed, is no error of their mean, since they overlap.
    The standard error here is that of a mean over ten or more disjoint blocks of ``features``, all against
    one reference, which is no less.

    Args:
        features: (n, d).
        reference: (m, d).
        subsets: how many; one where a subset is all there is.
        subset_size: images a side at most.
        seed: of the subsets.

    Raises:
        HddmError: for fewer than `FEWEST` images on a side.

    Source: arXiv:1801.01401, there on Inception features; on others it is not a KID.
    """
    fewest = min(len(features), len(reference))
    if fewest < FEWEST:
        raise HddmError(f"a kernel distance needs at least {FEWEST} images a side, not {fewest}")
    draws = np.random.default_rng(seed)
    size = min(fewest, subset_size)
    repeats = 1 if size == len(features) == len(reference) else subsets
    values = [
        squared_mmd(*(side[draws.choice(len(side), size, replace=False)] for side in (features, reference)))
        for _ in range(repeats)
    ]
    return KernelDistance(
        float(np.mean(values)), _standard_error(features, reference, subset_size, draws), size
    )


def squared_mmd(x: Features, y: Features) -> float:
    """Mean of k(x_i, x_j) and of k(y_i, y_j) over i ≠ j, less twice the mean of k(x_i, y_j).

    k(a, b) = (a·b / d + 1)³ for features of d dimensions. Unbiased, so at times negative.

    Args:
        x: (n, d), n at least 2.
        y: (m, d), m at least 2.
    """
    return _within(x) + _within(y) - 2 * float(_kernel(x, y).mean())


def _standard_error(
    features: Features, reference: Features, subset_size: int, draws: np.random.Generator
) -> float:
    size = min(subset_size, max(len(features) // _BLOCKS, FEWEST // 2))
    order = draws.permutation(len(features))
    target = reference[draws.permutation(len(reference))[: _BLOCKS * subset_size]]
    # The term of the reference alone is the same for all blocks.
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
