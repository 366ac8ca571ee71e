"""Diversity of images, overall and within conditions, and memorisation of training images."""

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hddm.data.images import to_unit_range
from hddm.evaluation.distances import Number, Share, Width
from hddm.utils.errors import HddmError
from hddm.utils.records import Count, OpenRecord
from hddm.utils.streams import Use, generator, stream

MOST_ROWS = 5000
FEW = 40
"""With fewer images on a side, nearest distances say little."""
_NEAR = 0.05
_ROWS, _OTHERS = 1024, 8192
TRUNK = "alexnet-owt-7be5be79.pth"
"""torchvision's AlexNet, the trunk of LPIPS; the package ``lpips`` has the last layers."""
SMALLEST = 32
"""Fewest pixels a side; below this AlexNet's last feature maps vanish."""
LPIPS = "LPIPS (AlexNet)"
PAIRS, FEATURE_PAIRS = 100, 20_000
"""Most pairs measured per condition, by LPIPS and in feature space."""
_BATCH = 32
Between = Callable[[Tensor, Tensor], Tensor]
"""Distances (p,) between the images of two lists of row numbers (p,)."""


class ConditionDiversity(OpenRecord):
    """Mean distance between two images of one condition, averaged over ``conditions``.

    ``reference`` is that of training images of the same classes, if any. ``distance`` is "LPIPS (AlexNet)",
    or "features" with the reason in ``why_not_lpips``.
    """

    distance: str
    why_not_lpips: str | None = None
    conditions: Count = 0
    images: Number
    reference: Number | None = None


def diversity(features: Tensor, reference: Tensor) -> float:
    """Mean distance between pairs of ``features`` (n, d), over that of ``reference`` (m, d).

    1 is as varied as the reference, 0 all equal; it does not tell whether the *right* things vary. At most
    `MOST_ROWS` random rows a side are used. Raises `HddmError` for fewer than 2 rows on a side, or a
    reference without any variation.
    """
    spread = _mean_pair_distance(reference)
    if spread == 0:
        raise HddmError("all reference images have the same features: diversity has no scale")
    return _mean_pair_distance(features) / spread


def _mean_pair_distance(rows: Tensor) -> float:
    if len(rows) < 2:
        raise HddmError(f"diversity needs at least 2 images, not {len(rows)}")
    if len(rows) > MOST_ROWS:
        rows = rows[torch.randperm(len(rows), generator=generator(0, Use.DIVERSITY_ROWS))[:MOST_ROWS]]
    return torch.pdist(rows.float()).mean().item()


def within_conditions(labels: Tensor, between: Between, pairs: int, seed: int = 0) -> dict[int, float]:
    """Mean distance between two images of each condition in ``labels`` (n,) with two or more images.

    At most ``pairs`` random pairs per condition are measured.
    """
    found = {}
    for label in labels.unique().tolist():
        rows = (labels == label).nonzero()[:, 0]
        if len(rows) < 2:
            continue
        first, second = (rows[torch.from_numpy(part)] for part in _pairs(len(rows), pairs, seed))
        found[int(label)] = between(first, second).double().mean().item()
    return found


def _pairs(num: int, most: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    if num * (num - 1) // 2 <= most:
        first, second = np.triu_indices(num, 1)
        return first, second
    draws = np.random.default_rng(stream(seed, Use.DIVERSITY_PAIRS))
    first = draws.integers(num, size=most)
    return first, (first + draws.integers(1, num, size=most)) % num


class Memorisation(OpenRecord):
    """Distances of samples to their nearest training image, against those of held-out images.

    ``ratio`` of the means is about 1 if samples are as far from the training images as held-out images are,
    well below 1 if they repeat them, above 1 if they are off the data. ``half_width`` is that of its 95 %
    interval. ``share_near`` is the share of samples nearer to a training image than 95 % of the held-out
    images are: 0.05 for fresh images; None with ``few_images``. ``copies`` counts held-out images that are
    also training images, which hides memorisation. ``mirrored`` distances are to the nearer of a training
    image and its mirror image; otherwise a mirrored copy passes for a new image.
    """

    ratio: Number
    half_width: Width | None = None
    share_near: Share | None = None
    few_images: bool = False
    copies: Count = 0
    mirrored: bool = False


def memorisation(samples: Tensor, fresh: Tensor, mirrored: bool = False) -> Memorisation:
    """Memorisation from nearest training distances of samples (n,) and of held-out images (m,).

    Raises `HddmError` for fewer than 2 distances a side, or if held-out images repeat training images
    exactly.
    """
    if min(len(samples), len(fresh)) < 2:
        raise HddmError(
            f"memorisation needs at least 2 samples and 2 held-out images, not {len(samples)} and "
            f"{len(fresh)}"
        )
    ours, theirs = samples.double(), fresh.double()
    if theirs.mean() == 0:
        raise HddmError("every held-out image is also a training image: hold others out")
    ratio = (ours.mean() / theirs.mean()).item()
    # Error of a ratio of independent means, to first order.
    errors = [one.var() / len(one) for one in (ours, theirs)]
    variance = (errors[0] + ratio**2 * errors[1]) / theirs.mean() ** 2
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
    """Pixel distance (n,) of ``rows`` (n, …) to the nearest of ``others`` (m, …), ``mirrored`` too."""
    nearest = []
    for images in rows.split(_ROWS):
        flat, best = images.flatten(1).float(), torch.full((len(images),), torch.inf)
        for chunk in others.split(_OTHERS):
            for seen in (chunk, chunk.flip(-1)) if mirrored else (chunk,):
                candidates = seen.flatten(1).float()
                # cdist only finds the nearest: its distances of equal rows are not 0.
                found = candidates[torch.cdist(flat, candidates).argmin(1)]
                best = best.minimum((flat - found).norm(dim=1))
        nearest.append(best)
    return torch.cat(nearest)


def why_not_lpips(side: int) -> str | None:
    """Reason why LPIPS does not work for images of ``side`` pixels, None if it does."""
    if side < SMALLEST:
        return f"LPIPS needs images of {SMALLEST} pixels a side, and these have {side}"
    if find_spec("lpips") is None:
        return "the package lpips is not installed"
    if not _trunk().is_file():
        return f"{TRUNK} is not in {_trunk().parent}"
    return None


def feature_distance(features: Tensor) -> Between:
    """Euclidean distance between rows of ``features`` (n, d)."""
    return lambda first, second: (features[first] - features[second]).norm(dim=1)


def lpips_distance(pixels: Tensor) -> Between:
    """LPIPS (arXiv:1801.03924, v0.1, AlexNet) between ``pixels`` (n, C, H, W) in bytes, C = 1 or 3."""
    import lpips

    with warnings.catch_warnings():
        # lpips loads the trunk by a deprecated torchvision call.
        warnings.simplefilter("ignore")
        network: Any = lpips.LPIPS(net="alex", verbose=False).eval()

    @torch.no_grad()
    def between(first: Tensor, second: Tensor) -> Tensor:
        found = [
            network(*(to_unit_range(pixels[rows]).expand(-1, 3, -1, -1) for rows in both)).flatten()
            for both in zip(first.split(_BATCH), second.split(_BATCH), strict=True)
        ]
        return torch.cat(found)

    return between


def _trunk() -> Path:
    return Path(torch.hub.get_dir()) / "checkpoints" / TRUNK
