"""Samples of all models below each other, cut from the grids that a benchmark keeps: a column is a noise."""

import base64
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hddm.benchmark.results import Results
from hddm.benchmark.samples import ENLARGE, GRID_COLUMNS, REAL, grid_path

COLUMNS = 2 * GRID_COLUMNS

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Strips:
    """Pictures by name, as data addresses: ``rows`` of ``columns`` images, and the whole grids."""

    columns: int
    real: bool
    """Whether real images are the first."""
    rows: tuple[tuple[str, str], ...]
    grids: tuple[tuple[str, str], ...]


def read_strips(folder: Path, results: Results) -> Strips:
    """Strips and grids of real images, where they were kept, and of every model of the first seed."""
    paths = {f"real, {results.score_on}": grid_path(folder, REAL)}
    for name in dict.fromkeys(one.model for one in results.records):
        paths[name] = grid_path(folder / f"seed_{results.seeds[0]}", name)
    kept = {name: _images(path) for name, path in paths.items() if path.is_file()}
    columns = min([COLUMNS, *map(len, kept.values())])
    return Strips(
        columns,
        grid_path(folder, REAL).is_file(),
        tuple((name, _embedded(images[:columns], columns)) for name, images in kept.items()),
        tuple((name, _embedded(images, GRID_COLUMNS)) for name, images in kept.items()),
    )


def _images(path: Path) -> Pixels:
    """The images (n, H, W, C) of a grid that `hddm.benchmark.samples.write_grid` wrote, at their own size."""
    with Image.open(path) as image:
        grid = np.atleast_3d(np.asarray(image))
    cell = grid.shape[1] // GRID_COLUMNS
    rows = np.split(grid, grid.shape[0] // cell)
    cells = np.stack([one for row in rows for one in np.split(row, GRID_COLUMNS, axis=1)])
    return cells[:, 1:-1:ENLARGE, 1:-1:ENLARGE]


def _embedded(images: Pixels, columns: int) -> str:
    """Images side by side with a light border, as a PNG within the page."""
    framed = np.pad(images, ((0, 0), (0, 1), (0, 1), (0, 0)), constant_values=255)
    rows = [np.concatenate(list(framed[k : k + columns]), axis=1) for k in range(0, len(framed), columns)]
    picture = np.concatenate(rows)
    buffer = io.BytesIO()
    Image.fromarray(picture[..., 0] if picture.shape[2] == 1 else picture).save(buffer, format="png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
