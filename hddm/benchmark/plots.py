"""Sample grids of a comparison, as files beside its results."""

import re
from pathlib import Path

import torch
from torch import Tensor

from hddm.data.images import save_png

GRID_COLUMNS = 8
ENLARGE = 4
REAL = "real images"
"""The name of the grid of images that were not made by a model."""


def slug(name: str) -> str:
    """A model's name as part of a path."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def grid_path(folder: Path, name: str) -> Path:
    """Where the sample grid of a model lies."""
    return folder / "samples" / f"{slug(name)}.png"


def write_grid(pixels: Tensor, path: Path) -> None:
    """Write images (n, C, H, W) in bytes side by side, enlarged, with a thin border between them."""
    big = pixels.repeat_interleave(ENLARGE, 2).repeat_interleave(ENLARGE, 3)
    big = torch.nn.functional.pad(big, (1, 1, 1, 1), value=96)
    missing = -len(big) % GRID_COLUMNS
    big = torch.cat([big, torch.full((missing, *big.shape[1:]), 96, dtype=torch.uint8)])
    rows = [torch.cat(list(row), dim=2) for row in big.split(GRID_COLUMNS)]
    path.parent.mkdir(parents=True, exist_ok=True)
    save_png(torch.cat(rows, dim=1), path)
