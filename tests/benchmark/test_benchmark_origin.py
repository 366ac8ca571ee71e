"""What a row is said to have cost, and which images it must not have seen."""

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hddm.benchmark import seed_run
from hddm.benchmark.costs import cost_path, trained_size
from hddm.benchmark.counting import calibration_flop, evaluation_flop, forward_flop
from hddm.benchmark.overlap import refuse_shared_images
from hddm.benchmark.run import run_benchmark
from hddm.benchmark.steps import Step
from hddm.experts.loading import load
from hddm.experts.record_folders import read_router
from hddm.training.router_temperatures import NOISED
from hddm.velocity import VelocityField
from hddm_cli.app import run_words
from hddm_cli.lines import LINES
from tests.artefacts import refusal
from tests.benchmark.small import SMALL, TRAIN, costs, plan_of, small
from tests.benchmark_files import inline, run_inline

pytestmark = pytest.mark.integration


# What a model cost.


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "not_counted",
    [["one"], pytest.param(["memory"], marks=pytest.mark.slow), ["one", "memory"]],
    ids=" ".join,
)
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    other = {**seed_run.machine(), "processor": "another one"}
    steps = {**SMALL["steps"], "more": f"{TRAIN} --steps 5"}
    with mock.patch.object(seed_run, "machine", return_value=other):
        changed = small(steps=steps, rows={"more": "$more"})
        results = run_inline(changed, tmp_path / "new", data, jobs=jobs)
    assert [one["processor"] for one in results.machines].count("another one") == 1
    assert len(results.machines) == 2
    page = (tmp_path / "new" / "report.html").read_text()
    assert "another one" in page
    assert seed_run.machine()["processor"] in page


# Images that it must not have seen.


@pytest.mark.parametrize("verb", ["train expert", "train router", "calibrate", "old model"])
def test_scores_on_images_that_a_step_learned_from_are_refused(
    verb: str, data: Path, jobs: Path, tmp_path: Path
) -> None:
    lines = {
        "train expert": "train expert $whole/shard_0 --size tiny",
        "train router": "train router $whole --steps 2 --batch-size 8",
        "calibrate": "calibrate $one --data $whole/shard_0",
        "old model": "convert $by-diffusers",
    }
    steps = {
        **SMALL["steps"],
        "whole": "partition $data/train --shards 2",
        "learned": lines[verb],
        "both": "assemble $one $other --router $learned",
    }
    if verb != "train router":
        steps["both"] = "assemble $learned $other"
    if verb == "old model":
        before = {"by-diffusers": "data old-model $whole/shard_0 --steps 1"}
        steps = {"whole": steps["whole"], **before, **steps, "both": "assemble $learned"}
    evaluate = {**SMALL["evaluate"], "held_out": "$parts"}
    changed = small(steps=steps, rows={"both": "$both"}, evaluate=evaluate)
    told = refusal(run_inline, changed, tmp_path / "new", data, jobs=jobs)
    assert "`held_out`" in told
    assert "are also training images of" in told


def test_nothing_is_trained_before_scored_images_are_there_to_compare(
    data: Path, tmp_path: Path
) -> None:
    # A long training, and scored images that little waits for.
    steps = {
        "whole": "partition $data/train --shards 1",
        "scored": "partition $data/train --shards 2",
        "one": "train expert $whole/shard_0 --size tiny --steps 1000",
    }
    evaluate = {**SMALL["evaluate"], "reference": "$whole", "held_out": "$scored/shard_0"}
    chosen = small(steps=steps, evaluate=evaluate)
    with inline() as commands:
        told = refusal(run_benchmark, chosen, tmp_path / "out", LINES, data=data)
    assert "are also training images of" in told
    assert sorted(words[0] for words in commands) == ["partition", "partition"]


def test_samples_of_no_row_are_not_counted(data: Path, tmp_path: Path) -> None:
    steps = {**SMALL["steps"], "apart": "sample $one --num-images 3"}
    with mock.patch.object(seed_run, "_count", wraps=seed_run._count) as counted:
        run_inline(small(steps=steps), tmp_path / "out", data)
    names = {call.kwargs["step"].name for call in counted.call_args_list}
    assert names == {"one", "samples/one"}


def test_what_was_there_before_is_not_even_counted(data: Path, tmp_path: Path) -> None:
    steps = {**SMALL["steps"], "more": "train expert $parts/shard_0 --init $one --steps 3"}
    chosen = small(steps=steps, rows={"more": "$more"}, not_counted=["one"])
    with mock.patch.object(seed_run, "_count", wraps=seed_run._count) as counted:
        run_inline(chosen, tmp_path / "out", data)
    names = {call.kwargs["step"].name for call in counted.call_args_list}
    assert names == {"more", "samples/more"}


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
        told = refusal(run_benchmark, chosen, own / "out", LINES, data=own)
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
