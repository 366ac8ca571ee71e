"""One picture of all samples, beside their folder."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hddm.data.images import save_png
from hddm.pipelines.sheets import COLUMNS, ROWS, sheet_path, write_sheet
from tests.artefacts import Command, contents

GROUND = 128


def _images(folder: Path, num: int, side: int = 4) -> list[Path]:
    """Image k is of the gray level k, from 1."""
    folder.mkdir()
    paths = [folder / f"{k:05d}.png" for k in range(num)]
    for k, path in enumerate(paths):
        save_png(torch.full((1, side, side), 1 + k % 127, dtype=torch.uint8), path)
    return paths


def _levels(path: Path, side: int) -> list[list[int]]:
    """The gray level of each cell, row by row, without those that hold nothing."""
    with Image.open(path) as sheet:
        cells = np.asarray(sheet)[side // 2 :: side + 2, side // 2 :: side + 2, 0]
    return [[int(level) for level in row if level != GROUND] for row in cells]


def test_labels_are_recorded_by_name(class_expert: Path, tmp_path: Path, hddm: Command) -> None:
    options = ("--num-images", 7, "--steps", 2, "--class-labels", "rows,0", "--start", 3, "--grid")
    code, out, _ = hddm("sample", class_expert, "--out", tmp_path / "samples", *options)
    sheet = tmp_path / "samples.grid.png"
    assert (code, out) == (0, f"{tmp_path / 'samples'}: 7 images\n{sheet}: 7 of 7\n")
    record = json.loads((tmp_path / "samples" / "sampling.json").read_text())
    assert (record["class_labels"], record["class_names"]) == ([1, 0], ["rows", "columns"])
    names = sorted(file.name for file in (tmp_path / "samples").iterdir())
    assert names == [*(f"{k:05d}.png" for k in range(3, 10)), "sampling.json"]


def test_a_sheet_is_replaced_only_on_demand(
    flow_expert: Path, tmp_path: Path, hddm: Command
) -> None:
    out = tmp_path / "samples"
    run = ("sample", flow_expert, "--num-images", 2, "--steps", 1, "--out", out)
    sheet_path(out).write_text("precious")
    code, _, err = hddm(*run, "--grid")
    assert code == 1
    assert (
        err
        == f"hddm: {sheet_path(out)} exists: choose another --out, or pass --overwrite to replace it\n"
    )
    assert list(contents(tmp_path)) == ["samples.grid.png"]
    assert hddm(*run)[0] == 0
    assert sheet_path(out).read_text() == "precious"
    assert hddm(*run, "--grid", "--overwrite", "--seed", 1)[0] == 0
    with Image.open(sheet_path(out)) as sheet:
        assert sheet.size == (2 * 98 - 2, 96)
    assert hddm(*run, "--overwrite", "--seed", 2)[0] == 0
    assert not sheet_path(out).exists()
    assert json.loads((out / "sampling.json").read_text())["class_names"] is None


@pytest.mark.parametrize(
    ("num", "columns", "rows"),
    [(1, 1, 1), (3, 2, 2), (16, 4, 4), (100, 10, 10), (1000, COLUMNS, ROWS)],
)
def test_sheets_are_square_and_in_order(num: int, columns: int, rows: int, tmp_path: Path) -> None:
    told = write_sheet(tmp_path / "out", _images(tmp_path / "out", num))
    levels = _levels(tmp_path / "out.grid.png", 96)
    assert (len(levels), max(map(len, levels))) == (rows, columns)
    shown = min(num, COLUMNS * ROWS)
    assert told == f"{tmp_path / 'out.grid.png'}: {shown} of {num}"
    assert [level for row in levels for level in row] == [1 + k % 127 for k in range(shown)]
