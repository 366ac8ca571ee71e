"""Which rows compare, and what a file says that would come to nothing."""

from pathlib import Path
from typing import Any

import pytest

from hddm.benchmark import results as results_module
from hddm_cli.app import run_words
from tests.artefacts import refusal
from tests.benchmark.small import SMALL, TRAIN, plan_of, small
from tests.benchmark_files import run_inline

pytestmark = pytest.mark.integration


# Which rows compare.


@pytest.mark.slow
def test_models_compare_where_they_are_sampled_alike(
    data: Path, jobs: Path, tmp_path: Path
) -> None:
    tables = {
        "singly": {"vary": {"steps": [2, 3], "strategy": ["draw", "nucleus-0.9"]}},
        "product": {"vary": {"steps": [2, 3], "strategy": ["draw", "full"]}, "product": True},
    }
    steps = {**SMALL["steps"], "pair": "assemble $one $other --router moments"}
    rows = {"one": "$one", "pair": "$pair"}
    compare = {"candidates": ["pair"], "baselines": ["one"]}
    changed = small(steps=steps, rows=rows, tables=tables, compare=compare)
    results = run_inline(changed, tmp_path / "new", data, jobs=jobs)
    pairs = []
    for one in results.comparisons:
        if one.kind == "model":
            pairs.append((one.table, one.row, one.against))
    assert pairs == [
        ("singly", "pair", "one"),
        ("singly", "pair, 2 steps", "one, 2 steps"),
        ("singly", "pair, 3 steps", "one, 3 steps"),
        ("singly", "pair, draw", "one"),
        ("singly", "pair, nucleus-0.9", "one"),
        ("product", "pair, 2 steps, draw", "one, 2 steps"),
        ("product", "pair, 2 steps, full", "one, 2 steps"),
        ("product", "pair, 3 steps, draw", "one, 3 steps"),
        ("product", "pair, 3 steps, full", "one, 3 steps"),
    ]


def test_two_ensembles_compare_by_the_same_strategy_alone(
    data: Path, jobs: Path, tmp_path: Path
) -> None:
    steps = {
        **SMALL["steps"],
        "pair": "assemble $one $other --router moments",
        "twin": "assemble $other $one --router moments --share one=0.3 --share other=0.7",
    }
    rows = {"twin": "$twin", "pair": "$pair"}
    tables = {"strategies": {"vary": {"strategy": ["full"], "router_every": [1]}}}
    defaults = {**SMALL["defaults"], "sample": "--num-images 12 --solver euler --steps 2"}
    changed = small(
        steps=steps, rows=rows, tables=tables, defaults=defaults, compare={"baselines": ["twin"]}
    )
    results = run_inline(changed, tmp_path / "new", data, jobs=jobs)
    pairs = {(one.row, one.against) for one in results.comparisons if one.kind == "model"}
    assert pairs == {("pair", "twin"), ("pair, full", "twin, full"), ("pair, 1", "twin, 1")}


DIFFERING = {
    "3 steps": ("--steps 3", "steps 3 against 1"),
    "heun": ("--solver heun", 'solver "heun" against "euler"'),
    "full": ("--strategy full", 'strategy "full" against "draw"'),
    "shifted": ("--shift 2", "shift 2.0 against none"),
}
"""Rows by name: options of how they are sampled, and what is told of them."""


def test_models_that_are_not_sampled_alike_get_no_verdict(
    data: Path, jobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_module, "LEARNED", 0)
    steps = {
        **SMALL["steps"],
        "pair": "assemble $one $other --router moments",
        "twin": "assemble $other $one --router moments --share one=0.3 --share other=0.7",
    }
    rows = {"twin": "$twin", "one": "$one", "alike": "$pair"}
    for name, (options, _) in DIFFERING.items():
        rows[name] = f"$pair {options}"
    candidates = ["alike", *DIFFERING]

    def compared(folder: str, **compare: Any) -> dict[str, str]:
        """Why each row has no verdict."""
        changed = small(steps=steps, rows=rows, compare={"candidates": candidates, **compare})
        results = run_inline(changed, tmp_path / folder, data, jobs=jobs)
        assert {one.verdict.judgement for one in results.comparisons} == {"no verdict"}
        why = {one.row: str(one.verdict.why) for one in results.comparisons}
        assert list(why) == candidates
        return why

    told = compared("told", baselines=["twin"])
    assert "not sampled alike" not in told["alike"]
    for name, (_, differing) in DIFFERING.items():
        assert f"not sampled alike: {differing}; compare.varies" in told[name]
    varying = ("steps", "solver", "strategy", "shift")
    meant = compared("meant", baselines=["twin"], varies=varying)
    assert not [name for name, why in meant.items() if "not sampled alike" in why]
    # Of the network alone, no strategy.
    alone = compared("alone", baselines=["one"])
    of_network = [name for name, why in alone.items() if "not sampled alike" in why]
    assert of_network == ["3 steps", "heun", "shifted"]


# What a file says that would come to nothing.


def test_an_option_to_vary_has_one_meaning_in_both_spellings(data: Path, tmp_path: Path) -> None:
    vary = {"router-every": [1, 2]}
    rows = {"one": "$one", "pair": "$pair --strategy full"}
    steps = {**SMALL["steps"], "pair": "assemble $one $other --router moments"}
    plan = plan_of(data, tmp_path, steps=steps, rows=rows, tables={"models": {"vary": vary}})
    assert [row.name for row in plan.rows] == ["one", "pair, 1", "pair, 2"]
    twice = {"router-every": [1], "router_every": [2]}
    told = refusal(small, tables={"models": {"vary": twice}})
    assert "'router_every' is there twice, in two spellings" in told


@pytest.mark.parametrize(
    "changes",
    [
        {"compare": {"baselines": ["pair"]}},
        {"compare": {"candidates": ["pair"]}},
        {"budgets": {"equal": ["one", "pair"]}},
    ],
)
def test_a_row_to_compare_that_no_table_has_is_refused(changes: dict[str, Any]) -> None:
    rows = {"one": "$one", "pair": "$pair"}
    tables = {"models": {"rows": ["one"]}}
    told = refusal(small, rows=rows, tables=tables, **changes)
    assert "row 'pair' of compare or budgets is in no table" in told


@pytest.mark.parametrize(
    ("tables", "compare", "message"),
    [
        (
            {"a": {"rows": ["one"]}, "b": {"rows": ["pair"]}},
            {"candidates": ["pair"], "baselines": ["one"]},
            "compare.candidates: row 'pair' has no baseline beside it in any table",
        ),
        (
            {"a": {"rows": ["one"]}, "b": {"rows": ["pair"]}},
            {"baselines": ["one"]},
            "compare.baselines: row 'one' has no candidate beside it in any table",
        ),
        (
            {"a": {}},
            {"baselines": ["one", "pair"]},
            "compare.baselines: row 'one' has no candidate beside it",
        ),
        ({"a": {}}, {"candidates": ["one"]}, "compare.candidates: row 'one' has no baseline"),
        (
            {"a": {}},
            {"candidates": ["one"], "baselines": ["one"]},
            "compare.candidates: row 'one' has no baseline",
        ),
    ],
)
def test_rows_to_compare_that_no_table_has_together_are_refused(
    tables: dict[str, Any], compare: dict[str, Any], message: str
) -> None:
    rows = {"one": "$one", "pair": "$pair"}
    assert message in refusal(small, rows=rows, tables=tables, compare=compare)


def test_a_candidate_may_be_the_baseline_of_others(data: Path, jobs: Path, tmp_path: Path) -> None:
    rows = {"one": "$one", "other": "$other", "pair": "$pair"}
    compare = {"candidates": ["one", "pair"], "baselines": ["one", "other"]}
    changed = small(rows=rows, compare=compare)
    results = run_inline(changed, tmp_path / "new", data, jobs=jobs)
    pairs = [(one.row, one.against) for one in results.comparisons]
    assert pairs == [("one", "other"), ("pair", "one"), ("pair", "other")]


@pytest.mark.parametrize(
    "alone",
    [
        TRAIN,
        "assemble $one",
        "assemble $early $late",
        "calibrate $one --data $parts/shard_0",
    ],
)
def test_options_of_routing_that_many_rows_share_do_not_reach_a_network_alone(
    alone: str, data: Path, tmp_path: Path
) -> None:
    steps = {
        **SMALL["steps"],
        "early": f"{TRAIN} --noise-range 0:0.5",
        "late": f"{TRAIN} --noise-range 0.5:1",
        "pair": "assemble $one $other --router moments",
        "alone": alone,
        "images": "sample $alone",
    }
    rows = {"alone": "$alone", "pair": "$pair"}
    tables = {
        "models": {},
        "by table": {"sample": "--strategy full"},
        "varied": {"vary": {"strategy": ["full", "top-1"]}},
    }
    plan = plan_of(data, tmp_path, steps=steps, rows=rows, tables=tables)
    for step in (plan.steps["images"], *(row.samples for row in plan.rows if row.row == "alone")):
        assert step.values["strategy"] is None
    others = [row.samples.values["strategy"] for row in plan.rows if row.row == "pair"]
    assert others == ["draw", "full", "full", "top-1"]
    told = refusal(plan_rows, data, tmp_path, steps=steps, rows={"a": "$alone --strategy full"})
    assert "--strategy full: has no effect on a network alone; leave it out" in told
    steps["images"] = "sample $alone --strategy full"
    assert "--strategy full: has no effect" in refusal(plan_of, data, tmp_path, steps=steps)


def plan_rows(data: Path, jobs: Path, **changes: Any) -> None:
    _ = plan_of(data, jobs, **changes).rows


def test_folders_of_finished_ensembles_are_known_by_their_experts(
    data: Path, jobs: Path, tmp_path: Path
) -> None:
    one = plan_of(data, jobs).steps["one"].path
    other = plan_of(data, jobs).steps["other"].path
    run_words(["assemble", str(one), "--out", str(tmp_path / "single")])
    run_words(["assemble", str(one), str(other), "--out", str(tmp_path / "pair")])
    rows = {"single": str(tmp_path / "single"), "pair": str(tmp_path / "pair")}
    rows["within"] = "$pair/experts/0"
    plan = plan_of(data, jobs, rows=rows)
    strategies = {row.row: row.samples.values["strategy"] for row in plan.rows}
    assert strategies == {"single": None, "pair": "draw", "within": None}
