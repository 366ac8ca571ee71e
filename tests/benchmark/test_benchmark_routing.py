"""The routing benchmark on tiny models, and its verdicts by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import QUICKSTART, Start, check_kept, expert_job, router_job
from benchmarks.reports import judged
from benchmarks.routing.jobs import Data, knots_job, sample_job
from benchmarks.routing.measure import measure_routing
from benchmarks.routing.picture import draw_picture
from benchmarks.routing.report import lines
from benchmarks.routing.settings import CLASSES, FLOW, LONG_ROUTER, QUICK, WHOLE_ROUTER, Row
from hddm.benchmark.settings import SamplingPoint
from hddm.data.shards import load_shard
from hddm.experts.records import read_router
from hddm.utils.errors import HddmError
from hddm.utils.files import read_json
from tests.artefacts import SIDE, expert_settings, router_settings


def ignore(units: int) -> None:
    pass


@pytest.fixture(scope="module")
def place(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of one training seed."""
    folder = tmp_path_factory.mktemp("routing")
    for kind in (FLOW, CLASSES):
        settings = expert_settings("flow", class_conditional=kind == CLASSES)
        for k in range(2):
            expert_job(shards / f"shard_{k}", folder / kind / str(k), settings, None, ignore)
    for name, calibrate in (("router", True), (LONG_ROUTER, True), (WHOLE_ROUTER, False)):
        router_job(shards, folder / name, router_settings(calibrate=calibrate), ignore)
    return folder


def test_every_row_of_the_quick_mode_can_be_sampled(shards: Path, place: Path) -> None:
    data = Data.of(shards)
    for name, row in QUICK.rows().items():
        found = sample_job(place, data, row, SamplingPoint(steps=2, num_images=8), 0, ignore)
        assert found.pixels.shape == (8, 1, SIDE, SIDE), name
        assert found.experts_a_step == (2 if row.strategy == "top-2" else 1), name
        assert (found.labels is not None) == (row.experts == CLASSES), name


def test_a_router_that_is_asked_rarely_costs_less(shards: Path, place: Path) -> None:
    data, point = Data.of(shards), SamplingPoint(steps=4, num_images=2)

    def cost(row: Row) -> float:
        return sample_job(place, data, row, point, 0, ignore).mflop_a_step

    costs = [cost(Row("top-2", router_every=n)) for n in (1, 2, 3, 4)]
    no_router = 2 * cost(Row("draw"))
    shares = [(cost - no_router) / (costs[0] - no_router) for cost in costs]
    assert shares == pytest.approx([1, 0.5, 0.5, 0.25])


def test_the_images_of_a_class_are_counted_by_shard(shards: Path) -> None:
    data = Data.of(shards)
    each = [load_shard(shards / f"shard_{k}") for k in range(2)]
    assert data.class_images.sum(0).tolist() == [len(shard) for shard in each]
    assert data.labels.bincount().tolist() == [24, 24]
    for k, shard in enumerate(each):
        assert shard.labels is not None
        assert data.class_images[0, k] == (shard.labels == 0).sum()


def test_knots_are_tried_on_what_the_router_was_not_trained_on(shards: Path, place: Path) -> None:
    record = read_router(place / "router")[1]
    found = knots_job(shards, place / "router", [1, 5], 7, ignore)
    assert found[5]["temperatures"] == record.temperatures
    assert found[5]["ece_after"] == record.calibration["ece_after"]
    assert len(found[1]["temperatures"]) == 1
    assert found[1]["held_out_images"] == sum(record.calibration["held_out_images"])


def test_models_and_rows_of_other_settings_are_not_taken(tmp_path: Path) -> None:
    folder, start = tmp_path / QUICK.name, Start(tmp_path / "results", tmp_path)
    for settings in (QUICK, replace(QUICK, every=(1, 2, 5), knots=(1,)), QUICK):
        check_kept(folder, settings.kept(), growing=("rows",))
    assert set(read_json(folder / "settings.json")["rows"]) == {*QUICK.rows(), "top-2, every 5"}
    longer = replace(QUICK, quickstart=QUICKSTART, long_factor=3)
    with pytest.raises(HddmError) as caught:
        measure_routing(longer, start)
    assert str(caught.value) == (
        f"{folder}: keeps models and rows of other settings (quickstart, long_factor)"
        "; pass another work, or delete that folder"
    )
    other = QUICK.kept()["rows"] | {"top-1": {"strategy": "full"}}
    with pytest.raises(HddmError, match=r"other settings \(rows\)"):
        check_kept(folder, QUICK.kept() | {"rows": other}, growing=("rows",))
    (folder / "settings.json").unlink()
    (folder / "seed_0").mkdir()
    with pytest.raises(HddmError, match=r"no settings\.json says of which settings"):
        measure_routing(QUICK, start)
    assert not (tmp_path / "results").exists()


def test_a_gap_counts_where_its_mean_exceeds_twice_its_spread() -> None:
    assert judged([1.0, 2.0, 3.0]) == "+2.0 (s 1.0), within noise"
    assert judged([-2.0, -2.5, -3.0]) == "-2.5 (s 0.5), clear"
    assert judged([0.25], 3) == "+0.250, one training, no verdict"


def test_the_report_has_a_row_for_each_and_pairs_gaps_by_training(tmp_path: Path) -> None:
    def row(distance: float) -> dict[str, Any]:
        side = {"value": distance, "half_width": 0.5}
        figures = dict.fromkeys(("diversity", "nearest_ratio", "experts_a_step", "mflop_a_step"), 1.0)
        return {"to_training": side, "to_held_out": side, "label_accuracy": 0.5, **figures}

    measures = ("ece_before", "ece_after", "cross_entropy_before", "cross_entropy_after")
    figures = dict.fromkeys(measures, 0.25)
    record = {**figures, "time_bins": [{"from": 0.0, "to": 1.0, **figures}], "held_out_images": 7}
    calibrations = {name: {"temperatures": [2.0], "calibration": record} for name in ("router", LONG_ROUTER)}
    runs = []
    for seed in range(2):
        # Trainings differ by 10; within one, a calibrated top-2 is better by 1.
        rows = {name: row(20.0 + 10 * seed) for name in QUICK.rows()}
        rows["top-2, calibrated"] = row(19.0 + 10 * seed)
        each = {n: {**record, "temperatures": [1.0] * n} for n in QUICK.knots}
        knots = {name: each for name in ("router", LONG_ROUTER)}
        runs.append({"seed": seed, "rows": rows, "knots": knots, "calibrations": calibrations})
    content = {"real": {"value": 9.0}, "real_accuracy": 0.97, "runs": runs}
    path = Start(tmp_path, command="routing").write(
        "routing", lines(QUICK, content), content, draw_picture(QUICK, runs)
    )
    text = path.read_text()
    assert "· `routing` ·" in text
    assert "- top-2, calibrated against not: to training images -1.0 (s 0.0), clear" in text
    first = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert set(QUICK.rows()) <= set(first)
    assert "24.0 ± 0.5 (s 7.1)" in first["top-2, calibrated"]
    lengths = {line.count("|") for line in text.splitlines() if line.startswith("| draw")}
    assert lengths == {8, 9}
    assert json.loads(path.with_suffix(".json").read_text())["runs"][0]["seed"] == 0
    assert path.with_suffix(".png").stat().st_size > 5_000
