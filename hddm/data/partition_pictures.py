"""Images of any sizes side by side."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from hddm.data.decoding import open_image
from hddm.data.sources import ImageSource

COLUMNS = 8
CELL = 96
"""Pixels of a cell's side."""
_GAP = 2
_GROUND = (128, 128, 128)


def write_grid(source: ImageSource, rows: Sequence[int], path: Path) -> None:
    """Write images ``rows`` of ``source`` as one PNG, `COLUMNS` a line.

    Each is scaled to fit its cell: small ones by a whole factor, so that their pixels stay what they are.
    """
    lines = -(-len(rows) // COLUMNS)
    pitch = CELL + _GAP
    sheet = Image.new("RGB", (COLUMNS * pitch - _GAP, lines * pitch - _GAP), _GROUND)
    for place, row in enumerate(rows):
        image = fitted(open_image(source.read(row), source.root / source.files[row]).convert("RGB"), CELL)
        left, top = place % COLUMNS * pitch, place // COLUMNS * pitch
        sheet.paste(image, (left + (CELL - image.width) // 2, top + (CELL - image.height) // 2))
    sheet.save(path)


def fitted(image: Image.Image, side: int) -> Image.Image:
    """``image`` as large as a square of ``side`` allows, enlarged by a whole factor only."""
    longest = max(image.size)
    if longest <= side:
        factor = side // longest
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    size = tuple(max(1, round(one * side / longest)) for one in image.size)
    return image.resize((size[0], size[1]), Image.Resampling.LANCZOS)
