"""How much of the samples lies on the data (precision), and how much of the data they reach (recall)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hddm.errors import HddmError

NEIGHBOURS = 3
MOST_IMAGES = 10_000
_CHUNK = 1024


@dataclass(frozen=True)
class PrecisionRecall:
    """Shares in [0, 1], of ``images`` a side: both depend on that number, so only equal ones compare."""

    precision: float
    recall: float
    images: int


def precision_recall(
    features: Tensor, reference: Tensor, neighbours: int = NEIGHBOURS, most: int = MOST_IMAGES, seed: int = 0
) -> PrecisionRecall:
    """Improved precision and recall.

    The manifold of a set is the union of balls around its rows, each as far as the row's k-th nearest other.
    Precision is the share of ``features`` in the manifold of ``reference``; recall the share of ``reference``
    in that of ``features``. Both sides are cut to the same number of random rows.

    Args:
        features: (n, d).
        reference: (m, d).
        neighbours: k.
        most: images a side at most.
        seed: of the cut.

    Raises:
        HddmError: for no more than ``neighbours`` images on a side.

    Source: arXiv:1904.06991, there on VGG-16 features.
    """
    num = min(len(features), len(reference), most)
    if num <= neighbours:
        raise HddmError(f"precision and recall need more than {neighbours} images a side, not {num}")
    draws = torch.Generator().manual_seed(seed)
    # About their common centre, where products of large means do not hide small distances.
    ours, theirs = (
        side[torch.randperm(len(side), generator=draws)[:num]].double() - reference.double().mean(0)
        for side in (features, reference)
    )
    return PrecisionRecall(
        _covered(ours, theirs, _radii(theirs, neighbours)),
        _covered(theirs, ours, _radii(ours, neighbours)),
        num,
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
