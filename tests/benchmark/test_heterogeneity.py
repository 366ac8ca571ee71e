"""The sweep over sizes and budgets."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.harness import Start
from benchmarks.heterogeneity.scaling import DIGITS, SHORT, file_of, scaling
from hddm.benchmark.file import read_benchmark
from tests.benchmark_files import inline


@pytest.mark.slow
def test_every_row_of_a_cell_costs_what_its_one_model_costs(tmp_path: Path) -> None:
    start = Start(tmp_path / "results", tmp_path / "work", workers=1)
    with inline(counted=True):
        table = scaling(replace(SHORT, factors=SHORT.factors[:1]), start)
    (cell,) = json.loads(table.with_suffix(".json").read_text())["cells"]
    (line,) = [line for line in table.read_text().splitlines() if line.startswith(f"| {SHORT.sizes[0]}")]
    for ours in cell["rows"].values():
        assert f"{ours[0]:.3g} ({ours[0] / cell['single'][0]:.2f})" in line
    (results,) = (tmp_path / "work").rglob("results.json")
    flop = [model["training_flop"] for model in json.loads(results.read_text())["models"]]
    assert max(flop) == pytest.approx(min(flop), rel=0.1)
    assert Image.open(table.with_suffix(".png")).size[0] > 400


@pytest.mark.parametrize("size", DIGITS.sizes)
def test_cells_differ_from_the_preset_in_size_steps_and_rate_alone(size: str) -> None:
    preset = read_benchmark("digits")
    same, more = (file_of(DIGITS, size, factor, 0.3, 1) for factor in (1, 4))
    for name in ("steps", "router_steps", "ddpm_steps", "flow_steps"):
        assert more.values[name] == 4 * same.values[name] == 4 * preset.values[name]
    assert (same.steps, same.rows, same.defaults) == (preset.steps, preset.rows, preset.defaults)
    assert same.scored_on == "held_out"
