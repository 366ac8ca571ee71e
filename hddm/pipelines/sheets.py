"""A sheet of all samples of a folder, saved beside it."""

import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from hddm.data.images import CELL, contact_sheet, lines_of
from hddm.utils.files import write_whole

COLUMNS, ROWS = 20, 40
"""Maximum numbers of images side by side, and of rows."""
LARGEST = 256
"""Largest height and width of a cell in pixels."""


def sheet_path(out: Path) -> Path:
    """Path of the sheet for the samples in ``out``: ``samples.grid.png`` beside ``samples``."""
    return out.with_name(f"{out.name}.grid.png")


def write_sheet(out: Path, images: Sequence[Path], conditions: Sequence[str] = ()) -> str:
    """Write images of one size as one PNG; return a line about it for the user.

    With several ``conditions`` (one name per image), each begins a row if one has several images; else the
    sheet is square.
    """
    path, by_condition = sheet_path(out), dict[str, list[Path]]()
    for image, condition in zip(images, conditions, strict=bool(conditions)):
        by_condition.setdefault(condition, []).append(image)
    rows_are = ""
    if len(by_condition) > 1 and any(len(row) > 1 for row in by_condition.values()):
        rows = [row for own in by_condition.values() for row in lines_of(own, COLUMNS)][:ROWS]
        is_one = len(rows) == min(len(by_condition), ROWS)
        names = [name if len(name) <= 30 else f"{name[:29]}…" for name in list(by_condition)[:ROWS]]
        shown = ", ".join([*names[:10], *(["…"] if len(names) > 10 else [])])
        rows_are = f", {'one row' if is_one else 'rows'} each for {shown}"
    else:
        rows = lines_of(images, min(math.ceil(math.sqrt(len(images))), COLUMNS))[:ROWS]
    with Image.open(images[0]) as first:
        longest = max(first.size)
    cell = longest * max(1, CELL // longest) if longest <= LARGEST else LARGEST
    sheet = contact_sheet(rows, Image.open, max(map(len, rows)), cell)
    write_whole(path, lambda draft: sheet.save(draft, "png"), overwrite=False)
    return f"{path}: {sum(map(len, rows))} of {len(images)}{rows_are}"
