"""A whole benchmark in miniature: what it writes is complete, consistent and self-contained."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from hddm.benchmark.data import write_digits
from hddm.benchmark.presets import load_settings, parse_settings
from hddm.benchmark.report import tables_text
from hddm.benchmark.results import Results
from hddm.benchmark.run import run_benchmark
from hddm.benchmark.samples import write_grid
from hddm.data.images import load_images
from tests.artefacts import contents

MODELS = ["single model", "homogeneous flow", "homogeneous DDPM", "mixed 1:1"]


STRATEGIES = ["draw", "top-1", "top-2", "threshold-0.2", "nucleus-0.9", "full"]
PRESET = load_settings("quickstart").model_dump(mode="json")
MIXED = {"name": "mixed 1:1", "objectives": "1:1"}
SHORT = {"steps": 4, "batch_size": 8, "learning_rate": 4e-3, "size": "tiny"}
SETTINGS = parse_settings(
    PRESET
    | {
        "partition": {"shards": 2},
        "training": {"expert": SHORT, "router": SHORT},
        "models": [*PRESET["models"][:3], MIXED],
        "compare": PRESET["compare"] | {"candidates": ["mixed 1:1"]},
        "sampling": PRESET["sampling"] | {"steps": 2, "num_images": 80},
        "tables": [{"name": "models"}, PRESET["tables"][1] | {"models": ["mixed 1:1"], "base": {}}],
        "resamples": 3,
        "workers": 1,
    },
    "small quickstart",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("benchmark") / "out"


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return run_benchmark(SETTINGS, folder)


def test_the_two_tables_have_all_their_rows(results: Results, folder: Path) -> None:
    names = {table: [row.name for row in rows] for table, rows in results.tables.items()}
    assert names == {"models": MODELS, "strategies": STRATEGIES}
    assert results.score_on == "held-out"
    assert [one.steps for one in results.models[1:]] == [(4, 4)] * 3
    assert len(load_images(folder / "digits" / "train")) == 1438
    assert (folder / "shards" / "shard_1").is_dir()


def test_every_figure_is_finite_and_every_distance_has_an_interval(results: Results, folder: Path) -> None:
    text = (folder / "results.json").read_text()
    assert Results.model_validate(json.loads(text, parse_constant=pytest.fail)) == results
    for row in (row for rows in results.tables.values() for row in rows):
        distance, diversity = row.figure("to_held_out"), row.figure("diversity")
        assert distance is not None
        assert distance.mean > 0
        assert distance.half_width
        assert diversity is not None
        assert diversity.mean > 0


def test_compute_is_equal_and_counted(results: Results) -> None:
    models = {one.model: one for one in results.models}
    single, ensemble = models["single model"], models["homogeneous flow"]
    assert single.training_flop is not None
    assert ensemble.training_flop is not None
    step = (single.training_flop - ensemble.training_flop) / single.training_flop
    assert -0.02 < step <= 0
    assert len({models[name].training_flop for name in MODELS[1:]}) == 1
    rows = {row.name: row for row in results.tables["strategies"]}
    evaluations = {name: row.experts_a_step for name, row in rows.items()}
    assert (evaluations["draw"], evaluations["top-1"], evaluations["top-2"]) == (1, 1, 2)
    cost = {name: row.sampling_flop for name, row in rows.items()}
    assert cost["draw"] < cost["top-1"] < cost["full"]
    assert ensemble.batch_sizes == (8, 8)


def test_the_terminal_shows_what_the_results_say(results: Results, folder: Path) -> None:
    text = tables_text(results)
    assert len(results.answers) == 2
    assert all(one.sentence in text for one in results.answers)
    assert (folder / "tables.md").read_text() == text + "\n"
    assert (folder / "report.html").is_file()
    for row in (row for rows in results.tables.values() for row in rows):
        assert row.name in text
        assert results.shown(row, "to_held_out") in text


def test_a_finished_benchmark_says_so_and_does_nothing_again(
    results: Results, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = {path: path.stat().st_mtime_ns for path in (folder / "jobs").rglob("job.json")}
    assert run_benchmark(SETTINGS, folder) == results
    assert f"{folder}: was finished on {results.date}" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in made} == made


def test_the_digits_are_scikit_learns_each_on_one_side(tmp_path: Path) -> None:
    training, held_out = (load_images(folder) for folder in write_digits(tmp_path))
    assert len(training) + len(held_out) == 1797
    assert len(held_out) == 1797 // 5
    assert training.classes == held_out.classes == tuple("0123456789")
    bunch = load_digits()
    for side in (training, held_out):
        rows = [int(Path(name).stem) for name in side.files]
        assert side.labels is not None
        assert bunch.target[rows].tolist() == side.labels.tolist()
        error = np.abs(side.pixels[:, 0].numpy() / 255 - bunch.images[rows] / 16)
        assert error.max() <= 0.5 / 255 + 1e-9


def test_a_grid_shows_every_image_in_reading_order(tmp_path: Path) -> None:
    pixels = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1).expand(10, 1, 2, 2)
    write_grid(pixels * 20, tmp_path / "a" / "grid.png")
    with Image.open(tmp_path / "a" / "grid.png") as image:
        shown = np.asarray(image)
    assert shown.shape == (2 * 10, 8 * 10)
    assert [shown[5, 5 + 10 * k] for k in range(8)] == [20 * k for k in range(8)]
    assert [shown[15, 5 + 10 * k] for k in range(3)] == [160, 180, 96]
    assert list(contents(tmp_path)) == ["a/grid.png"]
