"""Ensembles whose experts are weighed on held-out images, and experts' own samplers, in a benchmark."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hddm.benchmark import results as results_module
from hddm.benchmark.counting import evaluation_flop, forward_flop
from hddm.benchmark.origin import Origin
from hddm.ensemble import Ensemble
from hddm.experts.ensemble_records import read_ensemble_record
from hddm.experts.loading import load
from hddm.objective.reliability import TIMES
from hddm.reliability import ReliabilityRouter
from tests.artefacts import refusal
from tests.benchmark.small import SMALL, plan_of, small
from tests.benchmark_files import run_inline

WEIGHED = {
    **SMALL["steps"],
    "even": "assemble $one $other --router reliability --strategy full",
    "weighed": "calibrate $even --data $parts/held_out",
}


# Experts that are weighed.


@pytest.mark.slow
def test_experts_are_weighed_in_a_step_and_its_cost_counts(
    data: Path, jobs: Path, tmp_path: Path
) -> None:
    rows = {"one": "$one", "even": "$even", "weighed": "$weighed", "part": "$weighed/experts/0"}
    changed = small(steps=WEIGHED, rows=rows)
    results = run_inline(changed, tmp_path / "new", data, jobs=jobs)
    folder = tmp_path / "new" / "weighed"
    record = read_ensemble_record(folder)
    assert record.reliability is not None
    # All held-out images were looked at, by all experts at all times.
    held_out = images_held_out(tmp_path / "new")
    assert record.reliability.images == held_out
    model = load(folder)
    assert isinstance(model, Ensemble)
    each = sum(map(evaluation_flop, model.experts))
    by_model = {one.model: one for one in results.models}
    cost, before = by_model["weighed"], by_model["even"]
    assert cost.training_flop is not None
    assert before.training_flop is not None
    assert cost.training_flop - before.training_flop == len(TIMES) * held_out * each
    assert "weighed" in cost.parts
    # An expert of it is what its own training made.
    assert [one.parts for one in results.models if one.model.endswith("experts/0")] == [("one",)]


def images_held_out(out: Path) -> int:
    return len(list((out / "parts" / "held_out").rglob("*.png")))


@pytest.mark.integration
def test_the_router_below_the_weights_counts_too(data: Path, jobs: Path, tmp_path: Path) -> None:
    steps = WEIGHED | {"even": "assemble $one $other --router moments --strategy full"}
    results = run_inline(
        small(steps=steps, rows={"a": "$even", "b": "$weighed"}), tmp_path / "new", data, jobs=jobs
    )
    model = load(tmp_path / "new" / "weighed")
    assert isinstance(model, Ensemble)
    assert isinstance(model.router, ReliabilityRouter)
    assert model.router.base is not None
    router = forward_flop(model.router.base, torch.zeros(1, 1, 4, 4), torch.full((1,), 0.75))
    each = sum(map(evaluation_flop, model.experts)) + router
    one, other = results.models
    assert one.training_flop is not None
    assert other.training_flop is not None
    held_out = images_held_out(tmp_path / "new")
    assert router > 0
    assert other.training_flop - one.training_flop == len(TIMES) * held_out * each


@pytest.mark.integration
@pytest.mark.parametrize(
    ("weighed_on", "scored_on"),
    [
        ("$data/test", "$data/test"),
        ("$parts/held_out", "$parts/held_out"),
        # A partition stands for the images that it holds out.
        ("$parts", "$parts/held_out"),
    ],
)
def test_scores_on_images_that_weighed_the_experts_are_refused_before_anything_is_trained(
    weighed_on: str, scored_on: str, data: Path, tmp_path: Path
) -> None:
    steps = WEIGHED | {"weighed": f"calibrate $even --data {weighed_on}"}
    evaluate = SMALL["evaluate"] | {"held_out": scored_on}
    changed = small(steps=steps, rows={"weighed": "$weighed"}, evaluate=evaluate)
    told = refusal(run_inline, changed, tmp_path / "new", data)
    assert "held_out" in told
    assert "also training images of" in told
    assert not list((tmp_path / "new" / "jobs").glob("train-expert-*"))


@pytest.mark.integration
def test_images_that_weighed_one_model_may_score_others(
    data: Path, jobs: Path, tmp_path: Path
) -> None:
    """Of experts that were taken out, and of ensembles that were changed since, the weights are gone."""
    steps = WEIGHED | {
        "weighed": "calibrate $even --data $data/test",
        "again": "assemble $weighed --strategy top-1",
    }
    rows = {"even": "$even", "expert": "$weighed/experts/0", "again": "$again"}
    results = run_inline(small(steps=steps, rows=rows), tmp_path / "new", data, jobs=jobs)
    assert len(results.scored) == 3
    plan = plan_of(data, jobs, steps=steps, rows=rows)
    learned = [step.name for step in Origin.of(plan.find("again")).steps if step.kind.learns]
    assert learned == ["one", "other"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("calibrate $even", "is required for an ensemble"),
        ("calibrate $even --data $data/test --steps 7", "is for an expert's own samples"),
        ("calibrate $halves --data $data/test", "experts that cover parts of the noise"),
    ],
)
def test_what_cannot_be_weighed_is_refused_before_anything_runs(
    line: str, message: str, data: Path, tmp_path: Path
) -> None:
    half = "train expert $parts/shard_0 --size tiny --noise-range"
    steps = SMALL["steps"] | {
        "even": WEIGHED["even"],
        "early": f"{half} 0:0.5",
        "late": f"{half} 0.5:1",
        "halves": "assemble $early $late",
        "weighed": line,
    }
    told = refusal(plan_of, data, tmp_path, steps=steps, rows={"weighed": "$weighed"})
    assert "step 'weighed'" in told
    assert message in told


def test_a_weighed_ensemble_has_the_strategies_of_its_experts(data: Path, tmp_path: Path) -> None:
    steps = WEIGHED | {
        "even": "assemble $one $other",
        "more": "calibrate $weighed --data $data/test",
    }
    tables = {"models": {"vary": {"strategy": ["draw", "full"]}}}
    plan = plan_of(data, tmp_path, steps=steps, rows={"x": "$more"}, tables=tables)
    assert [row.samples.values["strategy"] for row in plan.rows] == ["draw", "full"]
    told = refusal(
        lambda: plan_of(data, tmp_path, steps=steps, rows={"x": "$more --expert 2"}).rows
    )
    assert "`expert` 2: choose from 0 to 1" in told or "expert 2" in told


# Samplers of the experts' own kind.


def native(data: Path, folder: Path, **changes: Any) -> list[dict[str, Any]]:
    found = []
    for row in plan_of(data, folder, **changes).rows:
        values = row.samples.values
        found.append({name: values[name] for name in ("native", "solver", "steps")})
    return found


def test_an_own_sampler_takes_the_place_of_solvers_that_rows_share(
    data: Path, tmp_path: Path
) -> None:
    own = [{"native": "ddim", "solver": None, "steps": 1}]
    # SMALL has a solver for all samples.
    assert native(data, tmp_path, rows={"one": "$one --native ddim"}) == own
    table = {"models": {"sample": "--solver heun --shift 2"}}
    assert native(data, tmp_path, rows={"one": "$one --native ddim"}, tables=table) == own
    table = {"models": {"sample": "--native ddim"}}
    assert native(data, tmp_path, rows={"one": "$one --solver heun"}, tables=table) == own
    table = {"models": {"sample": "--shift 2", "vary": {"native": ["ddim", "unipc"]}}}
    assert native(data, tmp_path, rows={"one": "$one --solver heun"}, tables=table) == [
        own[0],
        own[0] | {"native": "unipc"},
    ]


@pytest.mark.parametrize(
    ("rows", "tables", "message"),
    [
        ({"one": "$one --native ddim --solver heun"}, {}, "`native` ddim: has its own steps"),
        ({"one": "$one"}, {"sample": "--native ddim --shift 2"}, "drop `shift`"),
        ({"pair": "$pair --strategy full --native ddim"}, {}, "full mixes"),
        ({"noise": "$noise"}, {"vary": {"native": ["ddim", "flow-euler"]}}, "is for flow experts"),
        ({"early": "$early --native ddim"}, {}, "covers a part of the noise"),
    ],
)
def test_own_samplers_that_a_model_does_not_have_are_refused_before_anything_runs(
    rows: dict[str, str], tables: dict[str, Any], message: str, data: Path, tmp_path: Path
) -> None:
    steps = SMALL["steps"] | {
        "pair": "assemble $one $other --router moments",
        "noise": "train expert $parts/shard_0 --size tiny --objective ddpm",
        "early": "train expert $parts/shard_0 --size tiny --noise-range 0:0.5",
    }
    changes = {"steps": steps, "rows": rows, "tables": {"models": tables}}
    told = refusal(lambda: plan_of(data, tmp_path, **changes).rows)
    assert message in told


@pytest.mark.integration
def test_rows_of_own_samplers_are_sampled_and_not_compared_with_others(
    data: Path, jobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_module, "LEARNED", 0)
    rows = {"one": "$one", "pair": "$pair"}
    compare = {"baselines": ["one"]}
    tables = {"models": {"rows": ["one", "pair"]}, "own": {"vary": {"native": ["ddim", "unipc"]}}}
    changed = small(rows=rows, tables=tables, compare=compare)
    results = run_inline(changed, tmp_path / "new", data, jobs=jobs)
    samplers = {row.name: row.setting("native") for row in results.tables["own"]}
    assert samplers == {
        "one, ddim": "ddim",
        "one, unipc": "unipc",
        "pair, ddim": "ddim",
        "pair, unipc": "unipc",
    }
    rows = {"one": "$one", "pair": "$pair --native ddim"}
    changed = small(rows=rows, compare=compare)
    results = run_inline(changed, tmp_path / "mixed", data, jobs=jobs)
    (pair,) = results.comparisons
    assert 'native "ddim" against null' in str(pair.verdict.why)
