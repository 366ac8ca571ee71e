"""A whole quickstart in miniature: what it writes is complete, consistent and self-contained."""

import base64
import io
import json
import math
import re
import statistics
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

import hddm
from hddm.benchmark.conversions import TREATMENTS
from hddm.benchmark.digits import write_digits
from hddm.benchmark.plots import write_grid
from hddm.benchmark.quickstart import quickstart
from hddm.benchmark.results import Row, Run, figure, markdown_tables, summarise, verdict
from hddm.benchmark.settings import QuickstartSettings
from hddm.data.images import load_images
from hddm.errors import HddmError
from hddm.evaluation.frechet import Distance
from hddm.evaluation.scores import Scores
from tests.artefacts import contents

SETTINGS = QuickstartSettings(
    num_shards=2,
    steps=4,
    batch_size=16,
    size="tiny",
    router_batch_size=16,
    sampling_steps=2,
    num_images=80,
    num_images_per_strategy=80,
    resamples=3,
    workers=1,
)
MODELS = ["single model", "homogeneous flow", "homogeneous DDPM", "mixed 1:1"]


@dataclass(frozen=True)
class Finished:
    """A folder that a quickstart wrote, and what it returned."""

    folder: Path
    runs: list[Run]
    results: dict[str, Any]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("quickstart") / "out"
    runs = quickstart(folder, SETTINGS)
    return Finished(folder, runs, json.loads((folder / "results.json").read_text()))


def _numbers(value: object) -> list[float]:
    if isinstance(value, dict):
        return [n for part in value.values() for n in _numbers(part)]
    if isinstance(value, list):
        return [n for part in value for n in _numbers(part)]
    return [value] if isinstance(value, int | float) else []


def test_the_three_tables_have_all_their_rows(finished: Finished) -> None:
    names = {table: [row["name"] for row in rows] for table, rows in finished.results["tables"].items()}
    conversions = [f"{how}, {what}" for how in ("exact", "same x, same t") for what in TREATMENTS]
    assert names == {
        "models": MODELS,
        "strategies": list(SETTINGS.strategies),
        "conversions": [*conversions, "own DDIM sampler"],
    }


def test_every_figure_is_finite_and_every_distance_has_an_interval(finished: Finished) -> None:
    numbers = _numbers(finished.results)
    assert len(numbers) > 300
    assert all(map(math.isfinite, numbers))
    for rows in finished.results["tables"].values():
        for row in rows:
            assert row["to_held_out"]["mean"] > 0
            assert row["to_held_out"]["half_width"] > 0
            assert row["diversity"]["mean"] > 0


def test_compute_is_equal_and_counted(finished: Finished) -> None:
    tables = finished.results["tables"]
    assert {row["training_images"] for row in tables["models"]} == {4 * 16}
    evaluations = {row["name"]: row["evaluations"]["mean"] for row in tables["strategies"]}
    assert (evaluations["draw"], evaluations["top-1"], evaluations["top-2"]) == (1, 1, 2)
    assert evaluations["full"] == 2
    cost = {row["name"]: row["mflop_per_step"]["mean"] for row in tables["strategies"]}
    assert cost["draw"] < cost["top-1"] < cost["full"]
    trained = [json.loads(path.read_text()) for path in finished.folder.glob("seed_0/*/*/expert.json")]
    assert sorted(expert["training"]["batch_size"] for expert in trained) == [8] * 4


def test_every_model_can_be_loaded_and_sampled(finished: Finished) -> None:
    folder = finished.folder / "seed_0"
    for path in (folder / "single", *sorted((folder / "ensembles").iterdir())):
        samples = hddm.sample(hddm.load(path), 2, steps=2)
        assert samples.shape == (2, 1, 8, 8)
        assert samples.isfinite().all()
    assert len(list((folder / "ensembles").iterdir())) == 3
    mixed = hddm.load(folder / "ensembles" / "mixed-1-1")
    assert [expert.prediction_type for expert in mixed.experts] == ["epsilon", "flow_prediction"]


def test_the_report_is_one_page_that_needs_nothing_else(finished: Finished) -> None:
    page = (finished.folder / "report.html").read_text()
    assert not re.search(r"https?://|<script|<link|@import|url\(", page)
    sources = re.findall(r'src="([^"]*)"', page)
    kinds = []
    for source in sources:
        kind, content = re.fullmatch(r"data:image/([a-z+]+);base64,(.+)", source).groups()
        decoded = base64.b64decode(content, validate=True)
        if kind == "png":
            with Image.open(io.BytesIO(decoded)) as image:
                assert np.asarray(image).std() > 0
        else:
            assert decoded.lstrip().startswith(b"<?xml")
            assert b"</svg>" in decoded
        kinds.append(kind)
    # A grid a model and one of training images, expert use, losses.
    assert kinds == ["png"] * (len(MODELS) + 1) + ["svg+xml"] * 2


def test_the_report_and_the_terminal_show_what_the_results_say(finished: Finished) -> None:
    page, text = (finished.folder / "report.html").read_text(), markdown_tables(finished.runs)
    assert len(finished.results["verdict"]) == 2
    for line in finished.results["verdict"]:
        assert line in text
        assert line in page
    assert (finished.folder / "tables.md").read_text() == text + "\n"
    assert "not comparable with published FID" in page
    for rows in finished.results["tables"].values():
        for row in rows:
            shown = str(figure([row["to_held_out"]["mean"]], [row["to_held_out"]["half_width"]]))
            for place in (page, text):
                assert row["name"] in place
                assert shown in place


def test_the_results_say_what_made_them(finished: Finished) -> None:
    assert QuickstartSettings.model_validate(finished.results["settings"]) == SETTINGS
    assert finished.results["machine"]["packages"]["torch"] == version("torch")
    losses = finished.results["runs"][0]["losses"]
    assert set(losses) == {"single", "router", *(f"{o}/{k}" for o in ("flow", "ddpm") for k in range(2))}
    assert all(len(values) == 4 for values in losses.values())


def test_a_finished_quickstart_is_not_overwritten(finished: Finished) -> None:
    before = (finished.folder / "results.json").read_bytes()
    with pytest.raises(HddmError, match="--overwrite"):
        quickstart(finished.folder, SETTINGS)
    assert (finished.folder / "results.json").read_bytes() == before


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


def _run(seed: int, **to_held_out: float) -> Run:
    def row(name: str, value: float) -> Row:
        distance = Distance(value, 1.0, few_images=False)
        return Row(name, Scores("pixels", 9, distance, distance, 1.0, 1.0), 64, 1.0, 2.0)

    rows = [row(name.replace("_", " "), value) for name, value in to_held_out.items()]
    return Run(seed, {"models": rows, "strategies": [], "conversions": []}, {}, {}, Distance(9.0, 1.0, False))


@pytest.mark.parametrize(
    ("flow", "mixed", "words"),
    [
        ([10.0], [5.0], "no verdict"),
        # Pairs differ by -0.5, -1.5 and -1.0: twice their deviation is as much as their mean.
        ([10.0, 12.0, 11.0], [9.5, 10.5, 10.0], "-1.0, within noise (s 0.5)"),
        # The seeds spread more than the gap, but every pair agrees.
        ([10.0, 20.0, 15.0], [8.0, 17.9, 13.1], "-2.0, better (s 0.1)"),
        ([8.0, 17.9, 13.1], [10.0, 20.0, 15.0], "+2.0, worse (s 0.1)"),
    ],
)
def test_a_paired_gap_under_twice_its_spread_is_called_noise(
    flow: list[float], mixed: list[float], words: str
) -> None:
    runs = [
        _run(seed, single_model=f + 9, homogeneous_flow=f, homogeneous_DDPM=20.0, mixed_a=m, mixed_b=m + 1)
        for seed, (f, m) in enumerate(zip(flow, mixed, strict=True))
    ]
    lines = verdict(runs)
    assert [line.split(":")[0] for line in lines] == [
        f"{mix} against {other}"
        for mix in ("mixed a", "mixed b")
        for other in ("homogeneous flow", "single model")
    ]
    assert words in lines[0]
    (row,) = (row for row in summarise(runs, "models") if row["name"] == "mixed a")
    assert row["to_held_out"].mean == pytest.approx(statistics.mean(mixed))
    assert row["to_held_out"].spread == (statistics.stdev(mixed) if len(mixed) > 1 else None)
    assert row["to_held_out"].half_width == 1.0


def test_unequal_compute_is_refused() -> None:
    with pytest.raises(HddmError, match="does not divide into 3 shards"):
        QuickstartSettings(num_shards=3).expert("flow", 0)
