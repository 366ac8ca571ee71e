"""Experiments: the sweep over sizes and budgets, and conversions on a finished benchmark."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.conversion.grid import grid
from benchmarks.harness import Start
from benchmarks.heterogeneity.scaling import DIGITS, SHORT, scaling, settings_of
from hddm.benchmark.presets import load_settings
from tests.benchmark_files import Finished, of_models, run_inline


def test_conversions_of_a_finished_benchmark_are_sampled_and_scored(
    miniature: Finished, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run_inline(of_models({"name": "homogeneous DDPM", "objectives": "ddpm"}), out, miniature.data)
    lines = list(grid(out))
    assert len(lines) == 7
    assert len({line.partition(": ")[2] for line in lines}) > 3
    # What was drawn once is not scored again.
    assert list(grid(out)) == lines


@pytest.mark.slow
def test_every_row_of_a_cell_costs_what_its_one_model_costs(tmp_path: Path) -> None:
    start = Start(tmp_path / "results", tmp_path / "work", workers=1)
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
    preset = load_settings("digits").training
    same, more = (settings_of(DIGITS, size, factor, 1).training for factor in (1, 4))
    assert more.expert["steps"] == 4 * same.expert["steps"] == 4 * preset.expert["steps"]
    assert more.router["steps"] == 4 * preset.router["steps"]
    assert same.expert | {"size": "mini", "learning_rate": 8e-3} == preset.expert
    assert same.router == preset.router
