"""Sheets: all images of a folder of samples in one PNG beside it."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from hddm.data.images import CELL, contact_sheet
from hddm.pipelines.picture_texts import KEY
from hddm.utils.files import write_whole

COLUMNS, ROWS = 20, 40
"""Maximum numbers of images side by side, and of rows."""
LARGEST = 256
"""Largest height and width of a cell in pixels."""


def sheet_path(out: Path) -> Path:
    """Path of the sheet for the samples in ``out``: ``samples.grid.png`` beside ``samples``."""
    return out.with_name(f"{out.name}.grid.png")


_IN_SHEET = (
    "prompts",
    "negative_prompt",
    "clip_skip",
    "long_prompt",
    "class_names",
    "steps",
    "solver",
    "guidance_scale",
    "seed",
)
"""What a sheet's file says of all its images."""


def write_sheet(out: Path, images: Sequence[Path], record: Mapping[str, Any] | None = None) -> str:
    """Write images of one size as one PNG, a square if there are few; return a line about it for the user.

    The file says what they have in common, by the ``record`` of their folder; nothing without one.
    """
    path = sheet_path(out)
    columns = min(math.ceil(math.sqrt(len(images))), COLUMNS)
    chosen = images[: columns * ROWS]
    with Image.open(images[0]) as first:
        longest = max(first.size)
    cell = longest * max(1, CELL // longest) if longest <= LARGEST else LARGEST
    sheet = contact_sheet(chosen, Image.open, columns, cell)
    texts = PngInfo()
    if record is not None:
        names = (*_IN_SHEET, "strategy", "source_sha256", "hddm")
        content = {name: record[name] for name in names if record[name]}
        texts.add_itxt(KEY, json.dumps(content, ensure_ascii=False))
    write_whole(path, lambda draft: sheet.save(draft, "png", pnginfo=texts), overwrite=False)
    return f"{path}: {len(chosen)} of {len(images)}"
