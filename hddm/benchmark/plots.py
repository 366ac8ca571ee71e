"""Sample grids of a comparison, as files beside its results."""

from pathlib import Path

from torch import Tensor

from hddm.benchmark.slugs import SAMPLES, slug
from hddm.data.images import save_png, tiled

GRID_COLUMNS = 8
ENLARGE = 4
REAL = "real images"
"""The name of the grid of images that were not made by a model."""


def grid_path(folder: Path, name: str) -> Path:
    """Where the sample grid of a model lies."""
    return folder / SAMPLES / f"{slug(name)}.png"


def write_grid(pixels: Tensor, path: Path) -> None:
    """Write images (n, C, H, W) in bytes side by side, enlarged, with a thin border between them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_png(tiled(pixels, GRID_COLUMNS, ENLARGE), path)
