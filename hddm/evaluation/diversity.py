"""How varied images are, all of them and under one condition."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hddm.errors import HddmError

MOST_ROWS = 5000
Between = Callable[[Tensor, Tensor], Tensor]
"""Distances (p,) between the images of two lists of row numbers (p,)."""


@dataclass(frozen=True)
class ConditionDiversity:
    """Mean distance between two images of one condition, averaged over ``conditions``.

    ``reference`` is that of the training images of the same classes, None where they have none. ``distance``
    is "LPIPS (AlexNet)", or "features" with the reason why it is not LPIPS in ``why_not_lpips``.
    """

    distance: str
    why_not_lpips: str | None
    conditions: int
    images: float
    reference: float | None


def diversity(features: Tensor, reference: Tensor) -> float:
    """Mean distance between pairs of ``features`` (n, d), over that of ``reference`` (m, d).

    1 is as varied as the reference, 0 all the same. It does not say that the *right* things vary. Of more
    than `MOST_ROWS` rows a side, as many random ones are taken.

    Raises:
        HddmError: for fewer than 2 rows on a side, or a reference without any variation.
    """
    spread = mean_pair_distance(reference)
    if spread == 0:
        raise HddmError("all reference images have the same features: diversity has no scale")
    return mean_pair_distance(features) / spread


def mean_pair_distance(rows: Tensor) -> float:
    """Mean Euclidean distance between two of ``rows`` (n, d).

    Raises:
        HddmError: for fewer than 2.
    """
    if len(rows) < 2:
        raise HddmError(f"diversity needs at least 2 images, not {len(rows)}")
    if len(rows) > MOST_ROWS:
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:MOST_ROWS]]
    return torch.pdist(rows.float()).mean().item()


def within_conditions(labels: Tensor, between: Between, pairs: int, seed: int = 0) -> dict[int, float]:
    """Mean distance between two images of each condition that has two or more.

    Args:
        labels: (n,), the condition of each image.
        between: distances by row numbers.
        pairs: of one condition at most; where it has more, as many random ones.
        seed: of those.
    """
    found = {}
    for label in labels.unique().tolist():
        rows = (labels == label).nonzero()[:, 0]
        if len(rows) < 2:
            continue
        first, second = (rows[torch.from_numpy(side)] for side in _pairs(len(rows), pairs, seed))
        found[int(label)] = between(first, second).double().mean().item()
    return found


def _pairs(num: int, most: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    if num * (num - 1) // 2 <= most:
        first, second = np.triu_indices(num, 1)
        return first, second
    draws = np.random.default_rng(seed)
    first = draws.integers(num, size=most)
    return first, (first + draws.integers(1, num, size=most)) % num
