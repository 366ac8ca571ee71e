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

    ``value`` may be negative where the sets are alike. ``standard_error`` is that of another draw of *both*
    sets; ``subset_size`` is the number of images a side in each of the subsets that were averaged.
    """

    value: float
    standard_error: float
    subset_size: int


def kernel_distance(
    features: Features, reference: Features, subsets: int = 100, subset_size: int = 1000, seed: int = 0
) -> KernelDistance:
    """KID: the mean of `squared_mmd` over random subsets of at most ``subset_size`` images a side.

    The deviation over such subsets, which is often printed, is no error of their mean, since they overlap.
    The standard error here is that of a mean over ten or more disjoint blocks, which is no less.

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
    block = min(subset_size, max(fewest // _BLOCKS, FEWEST // 2))
    orders = [draws.permutation(len(side)) for side in (features, reference)]
    blocks = [
        squared_mmd(features[orders[0][start : start + block]], reference[orders[1][start : start + block]])
        for start in range(0, fewest - block + 1, block)
    ]
    error = float(np.std(blocks, ddof=1)) / len(blocks) ** 0.5
    return KernelDistance(float(np.mean(values)), error, size)


def squared_mmd(x: Features, y: Features) -> float:
    """Mean of k(x_i, x_j) and of k(y_i, y_j) over i ≠ j, less twice the mean of k(x_i, y_j).

    k(a, b) = (a·b / d + 1)³ for features of d dimensions. Unbiased, so at times negative.

    Args:
        x: (n, d), n at least 2.
        y: (m, d), m at least 2.
    """

    def kernel(a: Features, b: Features) -> Features:
        values: Features = (a @ b.T / a.shape[1] + 1) ** 3
        return values

    def within(a: Features) -> float:
        gram = kernel(a, a)
        return float((gram.sum() - np.trace(gram)) / (len(a) * (len(a) - 1)))

    return within(x) + within(y) - 2 * float(kernel(x, y).mean())
