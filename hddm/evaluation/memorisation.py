"""Whether samples repeat training images: how near they lie to them, beside images that no model saw."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hddm.errors import HddmError

FEW = 40
"""Fewer images than this on a side say little about its nearest ones."""
_NEAR = 0.05
_ROWS, _OTHERS = 1024, 8192


@dataclass(frozen=True)
class Memorisation:
    """Distances of samples to their nearest training image, against those of held-out images.

    ``ratio`` of the means is about 1 where samples lie as far from the training images as fresh images do,
    well below 1 where they repeat them, above 1 where they lie off the data. ``half_width`` is that of its
    95 % interval. ``share_near`` is the share of samples nearer to a training image than 95 % of the held-out
    images are: 0.05 for fresh images; None with ``few_images``. ``copies`` counts held-out images that are
    training images too, and make samples look better than they are. ``mirrored``: the distances are to the
    nearer of a training image and its mirror image; without it, a mirrored copy passes for a fresh image.
    """

    ratio: float
    half_width: float
    share_near: float | None
    few_images: bool
    copies: int
    mirrored: bool = False


def memorisation(samples: Tensor, fresh: Tensor, mirrored: bool = False) -> Memorisation:
    """The figures of two sets of distances to the nearest training image.

    Args:
        samples: (n,), of samples.
        fresh: (m,), of held-out images.
        mirrored: whether `nearest_distances` took mirror images of both.

    Raises:
        HddmError: for fewer than 2 distances a side, or where held-out images repeat training images exactly.
    """
    if min(len(samples), len(fresh)) < 2:
        raise HddmError(
            f"memorising is judged by at least 2 samples and 2 held-out images, not {len(samples)} and "
            f"{len(fresh)}"
        )
    ours, theirs = samples.double(), fresh.double()
    if theirs.mean() == 0:
        raise HddmError("every held-out image is also a training image: hold others out")
    ratio = (ours.mean() / theirs.mean()).item()
    # Of a ratio of independent means, to first order.
    errors = [side.var() / len(side) for side in (ours, theirs)]
    variance = (errors[0] + ratio**2 * errors[1]) / theirs.mean() ** 2
    few = min(len(ours), len(theirs)) < FEW
    near = None if few else (ours < theirs.quantile(_NEAR)).double().mean().item()
    return Memorisation(ratio, 1.96 * variance.sqrt().item(), near, few, int((theirs == 0).sum()), mirrored)


def nearest_distances(rows: Tensor, others: Tensor, mirrored: bool = False) -> Tensor:
    """Euclidean distance over pixels (n,) of each image in ``rows`` to the nearest of ``others``.

    Args:
        rows: (n, …), of any dtype.
        others: (m, …), in the same scale.
        mirrored: whether ``others`` are taken mirrored left to right too, in twice the time.
    """
    return torch.cat([_nearest(chunk.flatten(1).float(), others, mirrored) for chunk in rows.split(_ROWS)])


def _nearest(rows: Tensor, others: Tensor, mirrored: bool) -> Tensor:
    best = torch.full((len(rows),), torch.inf)
    for chunk in others.split(_OTHERS):
        for seen in (chunk, chunk.flip(-1)) if mirrored else (chunk,):
            flat = seen.flatten(1).float()
            # cdist's distances of equal rows are not 0 (it multiplies matrices); it only finds the nearest.
            found = flat[torch.cdist(rows, flat).argmin(1)]
            best = best.minimum((rows - found).norm(dim=1))
    return best
