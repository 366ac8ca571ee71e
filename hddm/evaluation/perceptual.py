"""Distances between two images: LPIPS where its weights are on disk, of features otherwise."""

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hddm.data.images import to_unit_range
from hddm.evaluation.diversity import Between

TRUNK = "alexnet-owt-7be5be79.pth"
"""torchvision's AlexNet, below LPIPS; the last layers come with the package ``lpips``."""
SMALLEST = 32
"""Pixels of a side, below which AlexNet's last maps vanish."""
LPIPS = "LPIPS (AlexNet)"
PAIRS, FEATURE_PAIRS = 100, 20_000
"""Pairs of a condition that are measured at most, by LPIPS and in feature space."""
_BATCH = 32


def why_not_lpips(side: int) -> str | None:
    """Why LPIPS cannot be had for images of ``side`` pixels, None where it can."""
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
    """LPIPS between images of ``pixels`` (n, C, H, W) in bytes, C = 1 or 3.

    Source: arXiv:1801.03924, version 0.1 of its weights on AlexNet.
    """
    import lpips

    with warnings.catch_warnings():
        # It asks torchvision for the trunk in a way that is out of date.
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
