"""Experiments: the sweep over sizes and budgets, and conversions on a finished benchmark."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.conversion.grid import grid
from benchmarks.harness import Start
from benchmarks.heterogeneity.scaling import DIGITS, SHORT, WAYS, Sweep, scaling, settings_of
from hddm.benchmark.compute import count_expert, count_router
from hddm.data.partition import partition
from hddm.data.shards import load_shard
from tests.artefacts import write_images
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
def test_the_sweep_writes_a_row_a_cell_and_its_chart(tmp_path: Path) -> None:
    table = scaling(SHORT, Start(tmp_path / "results", tmp_path / "work", workers=1))
    cells = json.loads(table.with_suffix(".json").read_text())["cells"]
    rows = [
        line.split(" | ") for line in table.read_text().splitlines() if line.startswith(f"| {SHORT.sizes[0]}")
    ]
    assert len(rows) == len(cells) == len(SHORT.budgets)
    for cell, row in zip(cells, rows, strict=True):
        for way, told in zip(WAYS, row[-2:], strict=True):
            (ours,), (one,) = cell["experts"][way], cell["single"]
            assert told.rstrip(" |") == f"{ours:.3g} ({ours / one:.2f})"
    assert Image.open(table.with_suffix(".png")).size[0] > 600


@pytest.mark.parametrize("sweep", [DIGITS], ids=lambda sweep: sweep.name)
def test_every_cell_of_the_sweep_costs_its_budget(sweep: Sweep, tmp_path: Path) -> None:
    """As the benchmark counts it, on a shard of images of the same shape; calibrations come on top."""
    (shard,) = partition(write_images(tmp_path / "images", side=sweep.shape[1]), tmp_path / "shards", 1)
    shape = load_shard(shard).shape
    for size in (sweep.sizes[0], sweep.sizes[-1]):
        for count in sweep.counts:
            chosen = settings_of(replace(sweep, shape=shape), size, sweep.budgets[-1], count, 1)
            expert, router = chosen.expert("flow", 0), chosen.router(0)
            spent = count * count_expert(shard, expert).steps(expert) + count_router(
                shard.parent, router
            ).steps(router)
            assert spent == pytest.approx(sweep.budgets[-1], rel=0.01)
