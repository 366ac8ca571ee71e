"""One picture of all samples, beside their folder."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hddm.data.images import save_png
from hddm.pipelines.samples import COLUMNS, ROWS, sheet_path, write_sheet
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


def test_a_class_is_a_row_and_names_are_recorded(class_expert: Path, tmp_path: Path, hddm: Command) -> None:
    options = ("--num-images", 7, "--steps", 2, "--class-labels", "rows,0", "--start", 3)
    code, out, _ = hddm("sample", class_expert, "--out", tmp_path / "samples", *options, "--grid")
    assert code == 0
    path = tmp_path / "samples.grid.png"
    # Image 3 is the first, of the second label.
    assert out.splitlines() == [
        f"{tmp_path / 'samples'}: 7 images",
        f"{path}: 7 of 7, one row each for columns, rows",
    ]
    with Image.open(path) as sheet:
        assert sheet.size == (4 * 98 - 2, 2 * 98 - 2)
        pixels = np.asarray(sheet)
    for row, numbers in enumerate(([3, 5, 7, 9], [4, 6, 8])):
        for column, number in enumerate(numbers):
            with Image.open(tmp_path / "samples" / f"{number:05d}.png") as image:
                expected = np.kron(np.asarray(image), np.ones((24, 24), dtype=np.uint8))
            cell = pixels[98 * row :, 98 * column :][:96, :96]
            assert np.array_equal(cell, np.stack([expected] * 3, -1))
    record = json.loads((tmp_path / "samples" / "sampling.json").read_text())
    assert (record["class_labels"], record["class_names"]) == ([1, 0], ["rows", "columns"])
    assert {file.suffix for file in (tmp_path / "samples").iterdir()} == {".png", ".json"}
    assert len(list((tmp_path / "samples").glob("*.png"))) == 7


def test_a_sheet_is_replaced_only_on_demand(flow_expert: Path, tmp_path: Path, hddm: Command) -> None:
    out = tmp_path / "samples"
    run = ("sample", flow_expert, "--num-images", 2, "--steps", 1, "--out", out)
    sheet_path(out).write_text("precious")
    code, _, err = hddm(*run, "--grid")
    assert code == 1
    assert err == f"hddm: {sheet_path(out)} exists: choose another --out, or pass --overwrite to replace it\n"
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
    ("num", "columns", "rows"), [(1, 1, 1), (3, 2, 2), (16, 4, 4), (100, 10, 10), (1000, COLUMNS, ROWS)]
)
def test_without_conditions_sheets_are_square(num: int, columns: int, rows: int, tmp_path: Path) -> None:
    told = write_sheet(tmp_path / "out", _images(tmp_path / "out", num))
    levels = _levels(tmp_path / "out.grid.png", 96)
    assert (len(levels), max(map(len, levels))) == (rows, columns)
    shown = min(num, COLUMNS * ROWS)
    assert told == f"{tmp_path / 'out.grid.png'}: {shown} of {num}"
    assert [level for row in levels for level in row] == [1 + k % 127 for k in range(shown)]


def test_a_condition_of_many_images_has_several_rows(tmp_path: Path) -> None:
    images = _images(tmp_path / "out", 50)
    told = write_sheet(tmp_path / "out", images, ["cat", "x" * 40] * 25)
    assert told.endswith(f": 50 of 50, rows each for cat, {'x' * 29}…")
    cats, others = list(range(1, 51, 2)), list(range(2, 51, 2))
    assert _levels(tmp_path / "out.grid.png", 96) == [cats[:20], cats[20:], others[:20], others[20:]]
