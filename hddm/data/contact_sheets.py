"""Images of any sizes side by side in one picture."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from PIL import Image

CELL = 96
"""Pixels of a cell's side."""
_GAP = 2
_GROUND = (128, 128, 128)
Key = TypeVar("Key")


def contact_sheet(
    rows: Sequence[Sequence[Key]], read: Callable[[Key], Image.Image], columns: int, cell: int = CELL
) -> Image.Image:
    """One picture of the images that ``read`` gives, one of them in memory at a time.

    Args:
        rows: what stands for each image, row by row.
        read: the image that something stands for.
        columns: images in a row, at most.
        cell: side in pixels of the square that each is scaled to fit: small ones by a whole factor, so that
            their pixels stay what they are.
    """
    pitch = cell + _GAP
    sheet = Image.new("RGB", (columns * pitch - _GAP, len(rows) * pitch - _GAP), _GROUND)
    for line, row in enumerate(rows):
        for column, key in enumerate(row):
            image = fitted(read(key).convert("RGB"), cell)
            left, top = column * pitch, line * pitch
            sheet.paste(image, (left + (cell - image.width) // 2, top + (cell - image.height) // 2))
    return sheet


def fitted(image: Image.Image, side: int) -> Image.Image:
    """``image`` as large as a square of ``side`` allows, enlarged by a whole factor only."""
    longest = max(image.size)
    if longest <= side:
        factor = side // longest
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    size = tuple(max(1, round(one * side / longest)) for one in image.size)
    return image.resize((size[0], size[1]), Image.Resampling.LANCZOS)


def lines_of(keys: Sequence[Key], columns: int) -> list[Sequence[Key]]:
    """``keys`` in rows of ``columns``."""
    return [keys[start : start + columns] for start in range(0, len(keys), columns)]
