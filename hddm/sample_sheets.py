"""One picture of what was sampled, beside the folder of single images, which holds samples alone."""

import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from hddm.data.contact_sheets import CELL, contact_sheet, lines_of
from hddm.errors import HddmError
from hddm.files import write_whole

COLUMNS, ROWS = 20, 40
"""Images of a sheet, at most."""
LARGEST = 256
"""Pixels of a cell's side, at most."""


def sheet_path(out: Path) -> Path:
    """Where the sheet of the samples in the folder ``out`` lies: ``samples.grid.png`` beside ``samples``."""
    return out.with_name(f"{out.name}.grid.png")


def check_absent_sheet(out: Path, overwrite: bool) -> None:
    """Refuse a sheet that is there already, to fail before the work.

    Raises:
        HddmError: unless ``overwrite``.
    """
    path = sheet_path(out)
    if path.exists() and not overwrite:
        raise HddmError(f"{path} exists: choose another --out, or pass --overwrite to replace it")


def write_sheet(out: Path, images: Sequence[Path], conditions: Sequence[str] = ()) -> str:
    """Write images of one size as one PNG, a row a condition where one has several images, else a square.

    Args:
        out: the folder of samples.
        images: their files.
        conditions: the name of what each is of, or nothing.

    Returns:
        What the sheet shows, for the user.
    """
    path, by_condition = sheet_path(out), dict[str, list[Path]]()
    for image, condition in zip(images, conditions, strict=bool(conditions)):
        by_condition.setdefault(condition, []).append(image)
    told = ""
    if any(len(row) > 1 for row in by_condition.values()):
        rows: Sequence[Sequence[Path]] = [row[:COLUMNS] for row in by_condition.values()][:ROWS]
        told = f", a row each of {shortened(list(by_condition)[:ROWS])}"
    else:
        rows = lines_of(images, min(math.ceil(math.sqrt(len(images))), COLUMNS))[:ROWS]
    with Image.open(images[0]) as first:
        longest = max(first.size)
    cell = longest * max(1, CELL // longest) if longest <= LARGEST else LARGEST
    sheet = contact_sheet(rows, Image.open, max(map(len, rows)), cell)
    write_whole(path, lambda draft: sheet.save(draft, "png"), overwrite=False)
    return f"{path}: {sum(map(len, rows))} of {len(images)}{told}"


def shortened(names: Sequence[str]) -> str:
    """The first of ``names``, and the beginning of each, for a line to read."""
    first = [name if len(name) <= 30 else f"{name[:29]}…" for name in names[:10]]
    return ", ".join([*first, *(["…"] if len(names) > 10 else [])])
