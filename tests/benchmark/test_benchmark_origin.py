"""What a row is said to have cost, which rows compare, and which images it must not have seen."""

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hddm.benchmark import results as results_module
from hddm.benchmark import run
from hddm.benchmark.costs import (
    calibration_flop,
    cost_path,
    evaluation_flop,
    forward_flop,
    trained_size,
)
from hddm.benchmark.file import BenchmarkFile
from hddm.benchmark.overlap import refuse_shared_images
from hddm.benchmark.plan import SeedPlan
from hddm.benchmark.results import Results
from hddm.benchmark.steps import Step
from hddm.experts.loading import load
from hddm.experts.records import read_router
from hddm.training.router_temperatures import NOISED
from hddm.utils.records import parse_record
from hddm.utils.work import Work
from hddm.velocity import VelocityField
from hddm_cli.app import run_words
from hddm_cli.lines import LINES
from tests.artefacts import refusal
from tests.benchmark_files import inline, run_inline, write_sides

pytestmark = pytest.mark.integration
TRAIN = "train expert $parts/shard_0 --size tiny"
SMALL: dict[str, Any] = {
    "name": "small",
    "defaults": {
        "train expert": "--batch-size 8 --objective flow --steps 2 --threads 1",
        "sample": "--num-images 12 --solver euler --steps 1 --strategy draw",
    },
    "steps": {
        "parts": "partition $data/train --shards 2 --held-out 0.4",
        "one": TRAIN,
        "other": "train expert $parts/shard_1 --size tiny --steps 4",
        "pair": "assemble $one $other",
    },
    "rows": {"one": "$one"},
    "evaluate": {
        "reference": "$parts",
        "held_out": "$data/test",
        "features": "classifier",
        "options": "--allow-few --brief",
    },
    "seeds": [0],
}


def small(**changes: Any) -> BenchmarkFile:
    return parse_record(SMALL | changes, BenchmarkFile, "small")


def plan_of(data: Path, jobs: Path, **changes: Any) -> SeedPlan:
    return SeedPlan(small(**changes), 0, Work(jobs), LINES, data)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sides(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Jobs of the small benchmark, to which tests add their own."""
    folder = tmp_path_factory.mktemp("jobs")
    run_inline(small(rows={"one": "$one", "pair": "$pair"}), folder / "out", data)
    return folder / "out" / "jobs"


def costs(results: Results) -> dict[str, int | None]:
    return {one.model: one.training_flop for one in results.models}


# What a model cost.


def test_an_expert_taken_out_of_an_ensemble_cost_its_own_training(
    data: Path, jobs: Path, tmp_path: Path
) -> None:
    steps = {
        **SMALL["steps"],
        "more": "train expert $parts/shard_0 --init $pair/experts/1 --steps 3",
        "fitted": "calibrate $pair/experts/0 --data $parts/shard_0",
        "rest": "assemble $pair/experts/1 $more",
    }
    names = ["one", "other", "more", "fitted", "rest"]
    rows = {name: f"${name}" for name in names} | {"first": "$pair/experts/0"}
    results = run_inline(small(steps=steps, rows=rows), tmp_path / "new", data, jobs=jobs)
    parts = {one.model: one.parts for one in results.models}
    assert parts["more"] == ("other", "more")
    assert parts["fitted"] == ("one", "fitted")
    assert parts["rest"] == ("other", "more")
    assert parts["$pair/experts/0"] == ("one",)
    assert costs(results)["$pair/experts/0"] == costs(results)["one"]


def test_a_changed_ensemble_cost_what_is_left_of_it(data: Path, jobs: Path, tmp_path: Path) -> None:
    steps = {
        **SMALL["steps"],
        "more": "train expert $parts/shard_0 --init $other --steps 3",
        "router": "train router $parts --steps 2 --batch-size 8",
        "routed": "assemble $one $other --router $router",
        "without-one": "assemble $routed --remove 0",
        "exchanged": "assemble $routed --add $more --remove 0",
        "by-moments": "assemble $routed --router moments",
        "again": "assemble $without-one --strategy draw",
        "router-of": "assemble $more $other --router $routed/router",
    }
    rows = {name: f"${name}" for name in list(steps)[-6:]}
    results = run_inline(small(steps=steps, rows=rows), tmp_path / "new", data, jobs=jobs)
    parts = {one.model: one.parts for one in results.models}
    assert parts == {
        "routed": ("one", "other", "router"),
        "without-one": ("other", "router"),
        "exchanged": ("other", "router", "more"),
        "by-moments": ("one", "other"),
        "again": ("other", "router"),
        "router-of": ("other", "more", "router"),
    }
    assert all(cost is not None for cost in costs(results).values())


def test_an_expert_that_no_step_trained_has_no_known_cost(
    data: Path, jobs: Path, tmp_path: Path
) -> None:
    found = tmp_path / "found"
    shutil.copytree(plan_of(data, jobs).steps["other"].path, found)
    steps = {**SMALL["steps"], "with": f"assemble $one {found}"}
    rows = {"one": "$with/experts/0", "found": "$with/experts/1"}
    # The weights of another step, but of a folder that nothing of this benchmark made.
    results = run_inline(small(steps=steps, rows=rows), tmp_path / "new", data, jobs=jobs)
    assert costs(results)["$with/experts/0"] is not None
    assert costs(results)["$with/experts/1"] is None


def test_a_finished_model_and_a_step_of_one_name_are_two_models(
    data: Path, jobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(plan_of(data, jobs).steps["other"].path, tmp_path / "one")
    monkeypatch.chdir(tmp_path)
    rows = {"own": "$one", "found": "one"}
    results = run_inline(small(rows=rows), tmp_path / "new", data, jobs=jobs)
    flop = {row.name: row.training_flop for row in results.first}
    assert flop["own"] is not None
    assert flop["found"] is None


MEMORY = {
    **SMALL["steps"],
    "memory": "sample $one --num-images 24",
    "with-memory": "partition $parts/shard_1/images $memory --shards 1",
    "tuned": "train expert $with-memory/shard_0 --init $one",
    "whole": "assemble $one --strategy draw",
}
"""Training that goes on with samples of the model itself."""


def test_samples_that_a_training_learns_from_count_for_it(
    data: Path, jobs: Path, tmp_path: Path
) -> None:
    rows = {"one": "$one", "tuned": "$tuned"}
    results = run_inline(small(steps=MEMORY, rows=rows), tmp_path / "new", data, jobs=jobs)
    tuned = next(one for one in results.models if one.model == "tuned")
    assert tuned.parts == ("one", "memory", "tuned")
    # Of 7 operations per image, which is what this benchmark counts.
    alone = costs(results)["one"] or 0
    by_hand = model_cost_without_samples(plan_of(data, jobs, steps=MEMORY).steps["tuned"])
    assert tuned.training_flop == alone + 24 * 7 + by_hand


def model_cost_without_samples(step: Step) -> int:
    num_steps, batch_size = trained_size(step)
    cost = step.work.record(cost_path(step))
    of_steps: int = num_steps * (batch_size * cost["image"] + cost["update"])
    return of_steps + calibration_flop(step)


@pytest.mark.parametrize("not_counted", [["one"], ["memory"], ["one", "memory"]])
def test_a_model_that_was_there_before_costs_its_own_training_whatever_comes_of_it(
    not_counted: list[str], data: Path, jobs: Path, tmp_path: Path
) -> None:
    rows = {"one": "$one", "tuned": "$tuned", "whole": "$whole"}
    changed = small(steps=MEMORY, rows=rows, not_counted=not_counted)
    results = run_inline(changed, tmp_path / "new", data, jobs=jobs)
    alone = run_inline(small(), tmp_path / "alone", data, jobs=jobs)
    parts = {one.model: one.parts for one in results.models}
    assert parts["tuned"] == (("memory", "tuned") if not_counted == ["one"] else ("tuned",))
    assert parts["one"] == ("one",)
    assert costs(results)["one"] == costs(alone)["one"]
    # It took nothing that was not there before, which is known.
    assert (parts["whole"], costs(results)["whole"]) == ((), 0)
    assert "not known" not in (tmp_path / "new" / "tables.md").read_text()


def test_a_calibration_on_own_samples_costs_these_samples_too(
    data: Path, jobs: Path, tmp_path: Path
) -> None:
    steps = {
        **SMALL["steps"],
        "by-data": "calibrate $one --data $parts/shard_0",
        "by-samples": "calibrate $one --num-images 24 --steps 3",
    }
    rows = {"by-data": "$by-data", "by-samples": "$by-samples"}
    results = run_inline(small(steps=steps, rows=rows), tmp_path / "new", data, jobs=jobs)
    expert = load(plan_of(data, jobs).steps["one"].path)
    assert isinstance(expert, VelocityField)
    expert.calibration = None
    known = {one.model: one.calibration_flop or 0 for one in results.models}
    assert known["by-samples"] - known["by-data"] == 24 * 3 * evaluation_flop(expert)


def test_a_student_of_few_steps_is_charged_no_calibration(
    data: Path, jobs: Path, tmp_path: Path
) -> None:
    distill = "distill $pair --data $parts --init $one --steps 2 --batch-size 8 --teacher routed"
    steps = {
        **SMALL["steps"],
        "pair": "assemble $one $other --router moments",
        "few": f"{distill} --sampling-steps 2 --trajectories 8 --strategy full",
    }
    rows = {"one": "$one", "few": "$few"}
    results = run_inline(small(steps=steps, rows=rows), tmp_path / "new", data, jobs=jobs)
    known = {one.model: one.calibration_flop for one in results.models}
    # Of the experts that it learned from, not of itself.
    assert known["few"] == 2 * (known["one"] or 0)


@pytest.mark.parametrize("sizes", [("tiny", "tiny"), ("tiny", "1x16/2")])
def test_a_student_of_unlike_experts_of_their_shards_has_no_known_cost(
    sizes: tuple[str, str], data: Path, jobs: Path, tmp_path: Path
) -> None:
    steps = {"parts": SMALL["steps"]["parts"]}
    for k, size in enumerate(sizes):
        steps[f"of-{k}"] = f"train expert $parts/shard_{k} --size {size}"
    steps["pair"] = "assemble $of-0 $of-1"
    steps["student"] = "distill $pair --data $parts --size tiny --steps 2 --batch-size 8"
    changed = small(steps=steps, rows={"student": "$student"})
    results = run_inline(changed, tmp_path / "new", data, jobs=jobs)
    assert (costs(results)["student"] is None) == (sizes[0] != sizes[1])


@pytest.mark.parametrize("other", ["tiny", "1x16/2"])
def test_a_student_whose_teacher_runs_other_experts_for_some_images_has_no_known_cost(
    other: str, data: Path, jobs: Path, tmp_path: Path
) -> None:
    """What is counted are the first images, and the next seed would have others."""
    steps = {
        **SMALL["steps"],
        "other": f"train expert $parts/shard_1 --size {other}",
        "pair": "assemble $one $other --router moments",
    }
    strategies = ["full", "top-1", "nucleus-0.9", "threshold-0.3"]
    for strategy in strategies:
        options = f"--teacher routed --strategy {strategy} --size tiny --steps 2 --batch-size 8"
        steps[strategy.partition(".")[0]] = f"distill $pair --data $parts {options}"
    rows = {name: f"${name}" for name in ("full", "top-1", "nucleus-0", "threshold-0")}
    results = run_inline(small(steps=steps, rows=rows), tmp_path / "new", data, jobs=jobs)
    known = {name for name, cost in costs(results).items() if cost is not None}
    assert known == ({"full", "top-1"} if other == "tiny" else {"full"})


def test_a_student_costs_what_is_known_of_the_experts_alone(
    data: Path, jobs: Path, tmp_path: Path
) -> None:
    """The router of its teacher is another network, which does not run for the experts' own shards."""
    steps = {
        **SMALL["steps"],
        "router": "train router $parts --steps 2 --batch-size 8 --size 1x16/2",
        "routed": "assemble $one $other --router $router",
        "student": "distill $routed --data $parts --size tiny --steps 2 --batch-size 8",
    }
    changed = small(steps=steps, rows={"student": "$student"})
    results = run_inline(changed, tmp_path / "new", data, jobs=jobs)
    assert costs(results)["student"] is not None


def test_the_calibration_of_a_router_costs_as_many_images_as_it_noised(
    data: Path, jobs: Path, tmp_path: Path
) -> None:
    steps = {
        **SMALL["steps"],
        "router": "train router $parts --steps 2 --batch-size 8 --calibrate",
        "routed": "assemble $one $other --router $router",
    }
    changed = small(steps=steps, rows={"routed": "$routed"})
    results = run_inline(changed, tmp_path / "new", data, jobs=jobs)
    network, record = read_router(plan_of(data, jobs, steps=steps).steps["router"].path)
    noised = record.calibration["noised_images"]
    assert noised != NOISED
    x = torch.zeros(1, *record.sample_shape)
    of_experts = sum(calibration_flop(plan_of(data, jobs).steps[name]) for name in ("one", "other"))
    of_router = noised * forward_flop(network, x, torch.ones(1))
    assert results.models[0].calibration_flop == of_experts + of_router


def test_experts_of_a_part_of_noise_are_counted(data: Path, jobs: Path, tmp_path: Path) -> None:
    steps = {
        "parts": SMALL["steps"]["parts"],
        "late": f"{TRAIN} --noise-range 0.5:1",
        "early": f"{TRAIN} --noise-range 0:0.5",
        "both": "assemble $late $early",
    }
    results = run_inline(
        small(steps=steps, rows={"both": "$both"}), tmp_path / "new", data, jobs=jobs
    )
    assert costs(results)["both"] is not None


def test_results_name_all_machines_that_did_their_steps(
    data: Path, jobs: Path, tmp_path: Path
) -> None:
    other = {**run.machine(), "processor": "another one"}
    steps = {**SMALL["steps"], "more": f"{TRAIN} --steps 5"}
    with mock.patch.object(run, "machine", return_value=other):
        changed = small(steps=steps, rows={"more": "$more"})
        results = run_inline(changed, tmp_path / "new", data, jobs=jobs)
    assert [one["processor"] for one in results.machines].count("another one") == 1
    assert len(results.machines) == 2
    page = (tmp_path / "new" / "report.html").read_text()
    assert "another one" in page
    assert run.machine()["processor"] in page


# Images that it must not have seen.


@pytest.mark.parametrize("verb", ["train expert", "train router", "calibrate"])
def test_scores_on_images_that_a_step_learned_from_are_refused(
    verb: str, data: Path, jobs: Path, tmp_path: Path
) -> None:
    lines = {
        "train expert": "train expert $whole/shard_0 --size tiny",
        "train router": "train router $whole --steps 2 --batch-size 8",
        "calibrate": "calibrate $one --data $whole/shard_0",
    }
    steps = {
        **SMALL["steps"],
        "whole": "partition $data/train --shards 2",
        "learned": lines[verb],
        "both": "assemble $one $other --router $learned",
    }
    if verb != "train router":
        steps["both"] = "assemble $learned $other"
    evaluate = {**SMALL["evaluate"], "held_out": "$parts"}
    changed = small(steps=steps, rows={"both": "$both"}, evaluate=evaluate)
    told = refusal(run_inline, changed, tmp_path / "new", data, jobs=jobs)
    assert "`held_out`" in told
    assert "are also training images of" in told


def test_scores_on_images_that_no_step_of_a_row_learned_from_are_fine(
    data: Path, jobs: Path, tmp_path: Path
) -> None:
    steps = {
        **SMALL["steps"],
        "whole": "partition $data/train --shards 1",
        "unused": "train expert $whole/shard_0 --size tiny",
    }
    evaluate = {**SMALL["evaluate"], "held_out": "$parts"}
    run_inline(small(steps=steps, evaluate=evaluate), tmp_path / "new", data, jobs=jobs)


def shard_of(images: Path, shard: Path) -> None:
    """A partition of one shard, in place of what is there."""
    run_words(["partition", str(images), "--shards", "1", "--out", str(shard), "--overwrite"])


OWN_SHARDS: dict[str, Any] = {
    "steps": {"one": "train expert $data/mine/shard_0 --size tiny"},
    "evaluate": {
        "reference": "$data/reference",
        "held_out": "$data/test/shard_0",
        "features": "classifier",
    },
}
"""A benchmark of shards that are on the disk before it."""


@pytest.fixture
def own(data: Path, tmp_path: Path) -> Path:
    """A folder of such shards."""
    folder = tmp_path / "own"
    shard_of(data / "train", folder / "reference")
    shard_of(data / "train", folder / "mine")
    shard_of(data / "test", folder / "test")
    return folder


def test_shards_that_are_replaced_by_scored_images_are_noticed(data: Path, own: Path) -> None:
    jobs = own / "jobs"
    refuse_shared_images(plan_of(own, jobs, **OWN_SHARDS))
    shard_of(data / "test", own / "mine")
    told = refusal(refuse_shared_images, plan_of(own, jobs, **OWN_SHARDS))
    assert "are also training images of" in told


def test_shards_that_change_while_they_are_looked_at_are_told(data: Path, own: Path) -> None:
    plan = plan_of(own, own / "jobs", **OWN_SHARDS)
    _ = plan.steps["one"].identity
    shutil.copytree(own / "mine" / "shard_0", own / "mine" / "shard_0" / "more")
    assert "has changed since" in refusal(refuse_shared_images, plan)


def test_shards_that_are_there_already_are_looked_at_before_anything_runs(own: Path) -> None:
    evaluate = {**OWN_SHARDS["evaluate"], "held_out": "$data/mine/shard_0"}
    steps = {"parts": "partition $data/reference/shard_0/images --shards 1"} | OWN_SHARDS["steps"]
    chosen = small(steps=steps, evaluate={**evaluate, "reference": "$data/test"}, seeds=[0, 1])
    with inline() as commands:
        told = refusal(run.run_benchmark, chosen, own / "out", LINES, data=own)
    assert "are also training images of" in told
    assert commands == []


def test_a_model_is_scored_on_images_that_only_others_of_its_ensemble_saw(
    data: Path, jobs: Path, tmp_path: Path
) -> None:
    steps = {
        **SMALL["steps"],
        "rest": "assemble $pair --remove 1",
        "more": "train expert $parts/shard_0 --init $pair/experts/0 --steps 3",
    }
    evaluate = {**SMALL["evaluate"], "reference": "$parts/shard_0", "held_out": "$parts/shard_1"}
    rows = {"first": "$pair/experts/0", "rest": "$rest", "more": "$more"}
    changed = small(steps=steps, rows=rows, evaluate=evaluate)
    assert run_inline(changed, tmp_path / "new", data, jobs=jobs).scored
    for row in ("$pair/experts/1", "$pair"):
        changed = small(steps=steps, rows={"x": row}, evaluate=evaluate)
        told = refusal(run_inline, changed, tmp_path / "other", data, jobs=jobs)
        assert "are also training images of" in told


def test_equal_images_of_no_seed_are_counted_once(data: Path, jobs: Path, tmp_path: Path) -> None:
    found = plan_of(data, jobs).steps["one"].path
    steps = {
        "parts": SMALL["steps"]["parts"],
        "first": f"sample {found} --seed 3 --num-images 5",
        "second": f"sample {found} --seed 3 --num-images 4",
    }
    same = {"the same": ["first", "second"]}
    changed = small(steps=steps, rows={"found": str(found)}, same=same, seeds=[0, 1])
    (counted,) = run_inline(changed, tmp_path / "new", data, jobs=jobs).same
    assert (counted.images, counted.equal) == (4, 4)


# Which rows compare.


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


@pytest.mark.parametrize(
    ("options", "differing"),
    [
        ("--steps 3", "steps 3 against 1"),
        ("--solver heun", 'solver "heun" against "euler"'),
        ("--strategy full", 'strategy "full" against "draw"'),
        ("--shift 2", "shift 2.0 against none"),
        ("", None),
    ],
)
def test_models_that_are_not_sampled_alike_get_no_verdict(
    options: str,
    differing: str | None,
    data: Path,
    jobs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(results_module, "LEARNED", 0)
    steps = {
        **SMALL["steps"],
        "pair": "assemble $one $other --router moments",
        "twin": "assemble $other $one --router moments --share one=0.3 --share other=0.7",
    }
    rows = {"twin": "$twin", "pair": f"$pair {options}", "one": "$one"}
    for varies in ((), ("steps", "solver", "strategy", "shift")):
        compare = {"candidates": ["pair"], "baselines": ["twin"], "varies": varies}
        changed = small(steps=steps, rows=rows, compare=compare)
        results = run_inline(changed, tmp_path / f"{len(varies)}", data, jobs=jobs)
        (pair,) = results.comparisons
        assert pair.verdict.judgement == "no verdict"
        why = str(pair.verdict.why)
        if differing is None or varies:
            assert "not sampled alike" not in why
        else:
            assert f"not sampled alike: {differing}; compare.varies" in why
    # Of the network alone, no strategy.
    compare = {"candidates": ["pair"], "baselines": ["one"]}
    changed = small(steps=steps, rows=rows, compare=compare)
    (pair,) = run_inline(changed, tmp_path / "alone", data, jobs=jobs).comparisons
    is_told = "not sampled alike" in str(pair.verdict.why)
    assert is_told == (differing is not None and "strategy" not in differing)


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
