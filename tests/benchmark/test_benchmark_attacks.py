"""Ways in which a benchmark could report a wrong number, or end after all its work."""

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hddm.benchmark import seed_run
from hddm.benchmark.costs import cost_path
from hddm.benchmark.counting import count_training
from hddm.benchmark.file import BenchmarkFile, read_benchmark
from hddm.benchmark.lines import Line, RunCommand, Settings
from hddm.benchmark.overlap import refuse_shared_images
from hddm.benchmark.plan import SeedPlan
from hddm.benchmark.results import read_results
from hddm.benchmark.run import run_benchmark
from hddm.utils.records import parse_record
from hddm.utils.work import Work
from hddm_cli.app import run_words
from hddm_cli.lines import LINES
from tests.artefacts import killing, refusal, write_images
from tests.benchmark_files import inline, life, run_inline, write_sides
from tests.killed_runs import in_a_process

pytestmark = pytest.mark.integration
SMALL: dict[str, Any] = {
    "name": "small",
    "values": {"steps": 2},
    "defaults": {
        "train expert": "--batch-size 8 --objective flow --steps $steps --threads 1",
        "sample": "--num-images 12 --solver euler --steps 1",
    },
    "steps": {
        "all": "partition $data/train --shards 1 --held-out 0.4",
        "single": "train expert $all/shard_0 --size tiny",
    },
    "rows": {"single": "$single"},
    "evaluate": {
        "reference": "$all",
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
def finished(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """The small benchmark of seeds 0 and 1."""
    out = tmp_path_factory.mktemp("finished") / "out"
    run_inline(small(seeds=[0, 1]), out, data)
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished benchmark."""
    return Path(shutil.copytree(finished, tmp_path / "finished", symlinks=True))


@pytest.fixture
def jobs(out: Path) -> Path:
    return out / "jobs"


@pytest.fixture
def model(jobs: Path, data: Path, tmp_path: Path) -> Path:
    """A finished model, that the benchmark did not train."""
    return Path(shutil.copytree(plan_of(data, jobs).steps["single"].path, tmp_path / "model"))


# 1. --overwrite with fewer seeds: the old results stay, without a word.


@pytest.mark.slow
def test_fewer_seeds_with_overwrite_replace_the_results(out: Path, data: Path) -> None:
    results = run_inline(small(values={"steps": 3}), out, data, overwrite=True)
    assert results.settings.values == {"steps": 3}
    assert read_results(out) == results


# 2. A store gives a benchmark the result of an ensemble with other shares.


def test_names_of_finished_experts_that_options_use_are_part_of_the_identity(
    jobs: Path, data: Path, tmp_path: Path
) -> None:
    first, second = (
        SeedPlan(small(), seed, Work(jobs), LINES, data).steps["single"].path for seed in (0, 1)
    )
    identities, shares = [], []
    for place, names in (("one", "xy"), ("two", "yx")):
        folders = []
        for source, name in zip((first, second), names, strict=True):
            folders.append(shutil.copytree(source, tmp_path / place / name))
        line = f"assemble {folders[0]} {folders[1]} --share x=0.9 --share y=0.1"
        plan = plan_of(data, jobs, steps={**SMALL["steps"], "both": line})
        run_words([*plan.steps["both"].command()[:-2], "--out", str(tmp_path / place / "both")])
        record = json.loads((tmp_path / place / "both" / "ensemble.json").read_text())
        shares.append([one["share"] for one in record["experts"]])
        identities.append(plan.steps["both"].identity)
    assert shares == [[0.9, 0.1], [0.1, 0.9]]
    assert identities[0] != identities[1]


# 3. Hidden images are read by `partition` and `evaluate`, but are not in the identity.


def test_a_change_of_a_hidden_image_is_noticed(data: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(data, tmp_path / "data"))
    image = next((mine / "train").rglob("*.png"))
    shutil.copy(image, image.with_name(".hidden.png"))
    step, before = (plan_of(one, tmp_path / "jobs").steps["all"] for one in (mine, data))
    run_words(step.command())
    assert json.loads((step.path / "partition.json").read_text())["images"] == 129
    assert step.identity != before.identity


# 4. Data that changes while a benchmark runs: the store keeps the scores under the old data's identity.


class Changing:
    """Verbs of hddm; somebody makes a ``change`` as the first command of ``verb`` begins."""

    def __init__(self, verb: str, change: Callable[[], None]) -> None:
        self.verb, self.changes = verb, [change]

    def read(self, words: Sequence[str]) -> Line:
        return LINES.read(words)

    def settings(self, line: Line) -> Settings:
        return LINES.settings(line)

    @property
    def run(self) -> RunCommand:
        return self._run

    def _run(self, words: list[str]) -> None:
        if words[0] == self.verb and self.changes:
            self.changes.pop()()
        LINES.run(words)


def test_scores_of_data_that_changed_meanwhile_are_not_kept_for_the_old_data(
    finished: Path, data: Path, tmp_path: Path
) -> None:
    mine, jobs = tmp_path / "data", tmp_path / "jobs"
    shutil.copytree(data, mine)

    def remove_half() -> None:
        for path in sorted((mine / "test").rglob("*.png"))[::2]:
            path.unlink()

    lines = Changing("evaluate", remove_half)
    with inline():
        told = refusal(run_benchmark, small(), tmp_path / "out", lines, data=mine, jobs=jobs)
    assert f"{mine}/test: has changed since the benchmark was started" in told
    shutil.rmtree(mine)
    shutil.copytree(data, mine)
    results = run_inline(small(), tmp_path / "again", mine, jobs=jobs)
    right = next(one for one in read_results(finished).scored if one.seed == 0)
    assert results.scored[0].evaluation.splits == right.evaluation.splits


@pytest.mark.parametrize("verb", ["partition", "train"])
def test_a_training_by_a_file_of_settings_that_changed_meanwhile_is_not_kept(
    verb: str, data: Path, tmp_path: Path
) -> None:
    """Whether it changes as the training reads it, or before, when none is begun."""
    config, jobs = tmp_path / "mine.yaml", tmp_path / "jobs"
    config.write_text("learning_rate: 0.01\n")
    steps = {**SMALL["steps"], "single": f"train expert $all/shard_0 --size tiny --config {config}"}
    lines = Changing(verb, lambda: config.write_text("learning_rate: 0.02\n") and None)
    with inline() as told:
        refused = refusal(
            run_benchmark, small(steps=steps), tmp_path / "out", lines, data=data, jobs=jobs
        )
    assert f"{config}: has changed since the benchmark was started" in refused
    assert "train" in [words[0] for words in told]
    assert not list(jobs.glob("train-expert-*"))


# 5. A kill between the removal of a damaged step's record and of its files: the damage becomes the result.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["samples/single", "single"])
def test_damage_is_repaired_whenever_the_repair_is_killed(name: str, out: Path, data: Path) -> None:
    plan = plan_of(data, out / "jobs")
    step = next(one for one in plan.all if one.name == name)
    path = next(one for one in step.path.glob("*") if one.suffix in (".png", ".safetensors"))
    before = path.read_bytes()
    path.unlink()
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    assert life(small(seeds=[0, 1]), out, data, ("shutil.rmtree", step.path.name)) == -9
    run_inline(small(seeds=[0, 1]), out, data)
    assert path.read_bytes() == before


# 6. Operations of pictures and of validation, made within the counted steps, are taken for all steps'.


def test_what_is_measured_on_the_way_is_no_cost_of_training(jobs: Path, data: Path) -> None:
    shard = plan_of(data, jobs).steps["all"].path / "shard_0"
    held_out = str(shard.parent / "held_out" / "shard_0")
    words = [
        "train",
        "expert",
        str(shard),
        *["--size", "tiny", "--objective", "flow", "--steps", "20"],
    ]
    cost = count_training(LINES.read(words), run_words)
    for more in (["--sample-every", "2"], ["--validate-every", "2", "--held-out", held_out]):
        assert count_training(LINES.read([*words, *more]), run_words) == cost, more


# 7. Training cost that is not known, or not counted, is shown as if it were all.


def test_the_cost_of_an_ensemble_with_a_finished_expert_is_not_known(
    model: Path, jobs: Path, data: Path, tmp_path: Path
) -> None:
    steps = {
        **SMALL["steps"],
        "both": f"assemble {model} $single --share {model}=0.5 --share $single=0.5",
        "more": f"train expert $all/shard_0 --init {model}",
    }
    rows = {"model": str(model), "both": "$both", "more": "$more"}
    results = run_inline(small(steps=steps, rows=rows), tmp_path / "new", data, jobs=jobs)
    assert {one.model: one.training_flop for one in results.models if one.model != str(model)} == {
        "both": None,
        "more": None,
    }


@pytest.mark.slow
def test_trajectories_of_the_teacher_are_a_cost_of_a_student(
    jobs: Path, data: Path, tmp_path: Path
) -> None:
    single = plan_of(data, jobs).steps["single"].path
    both, config = tmp_path / "both", tmp_path / "students.yaml"
    run_words(["assemble", str(single), "--out", str(both)])
    config.write_text("sampling_steps: 2\n")
    distill = f"distill {both} --data $all --init {single} --steps 2 --batch-size 8"
    steps = {**SMALL["steps"], "any": distill, "few": f"{distill} --config {config}"}
    plan = plan_of(data, jobs, steps=steps)
    costs = {}
    for name in ("any", "few"):
        seed_run._count(plan.steps[name], run_words, lambda part: None)
        costs[name] = plan.work.record(cost_path(plan.steps[name]))
    # A trajectory of the teacher takes several evaluations, each a forward pass of at most a third of a step.
    assert costs["few"]["trajectory"] > costs["few"]["image"] / 3
    assert costs["any"]["trajectory"] == 0


def test_a_training_of_two_names_is_counted_once(jobs: Path, data: Path, tmp_path: Path) -> None:
    steps = {**SMALL["steps"], "again": SMALL["steps"]["single"], "average": "merge $single $again"}
    chosen = small(steps=steps, rows={"single": "$single", "average": "$average"})
    results = run_inline(chosen, tmp_path / "new", data, jobs=jobs)
    one, other = results.models
    assert (one.parts, other.parts) == (("single",), ("single",))
    assert one.training_flop == other.training_flop


# 8. Options that are ignored without a word.


def test_held_out_without_such_images_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    evaluate = {**SMALL["evaluate"], "validation": "$data/test"}
    del evaluate["held_out"]
    path.write_text(json.dumps(SMALL | {"evaluate": evaluate}))
    assert "names no images as `evaluate.held_out`" in refusal(
        read_benchmark, str(path), held_out=True
    )


@pytest.mark.parametrize("verb", ["train  expert", "train expert ", "train expert --batch-size 4"])
def test_defaults_of_a_verb_that_is_spelt_oddly_are_refused(
    verb: str, data: Path, tmp_path: Path
) -> None:
    steps = {**SMALL["steps"], "single": "train expert $all/shard_0 --objective flow --steps 2"}
    told = refusal(plan_of, data, tmp_path, defaults={verb: "--ema-decay 0.5"}, steps=steps)
    assert told == f"defaults of {verb!r}: name the verb alone, as 'train expert'"


def test_a_file_of_settings_that_a_step_names_comes_before_defaults_and_the_seed(
    data: Path, tmp_path: Path
) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text("steps: 9\nseed: 7\n")
    steps = {**SMALL["steps"], "single": f"train expert $all/shard_0 --config {config}"}
    values = plan_of(data, tmp_path / "jobs", steps=steps).steps["single"].values
    assert (values["steps"], values["seed"]) == (9, 7)


def test_a_file_of_settings_of_each_seed_comes_before_defaults(data: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        (tmp_path / f"mine_{seed}.yaml").write_text(f"steps: {8 + seed}\n")
    chosen = small(
        seeds=[0, 1],
        steps={
            **SMALL["steps"],
            "single": f"train expert $all/shard_0 --config {tmp_path}/mine_$seed.yaml",
        },
    )
    plans = [SeedPlan(chosen, seed, Work(tmp_path / "jobs"), LINES, data) for seed in (0, 1)]
    assert [plan.steps["single"].values["steps"] for plan in plans] == [8, 9]


def test_a_file_of_settings_of_defaults_comes_after_the_defaults_beside_it(
    data: Path, tmp_path: Path
) -> None:
    """As on a command line; of the benchmark's own options it replaces the seed."""
    of_defaults, own = tmp_path / "defaults.yaml", tmp_path / "own.yaml"
    of_defaults.write_text("steps: 9\nseed: 7\nema_decay: 0.5\n")
    own.write_text("ema_decay: 0.25\n")
    defaults = {"train expert": f"--objective flow --steps 2 --config {of_defaults}"}
    steps = {
        **SMALL["steps"],
        "other": "train expert $all/shard_0 --ema-decay 0.75",
        "third": f"train expert $all/shard_0 --config {own}",
    }
    found = plan_of(data, tmp_path / "jobs", defaults=defaults, steps=steps).steps
    names = ("steps", "seed", "ema_decay")
    values = {
        name: tuple(found[name].values[one] for one in names)
        for name in ("single", "other", "third")
    }
    assert values == {"single": (2, 7, 0.5), "other": (2, 7, 0.75), "third": (2, 0, 0.25)}


# What decides no result may change between a kill and the next start.


@pytest.mark.parametrize(
    "moment", [("os.rename", "00000-00001.done"), None], ids=["killed", "not recorded"]
)
def test_samples_of_another_device_are_no_hindrance(
    moment: tuple[str, str] | None, jobs: Path, data: Path
) -> None:
    rows = {"single": "$single --num-images 14 --batch-size 4 --device cpu"}
    plan = plan_of(data, jobs, rows=rows)
    step = plan.rows[0].samples
    step.link_inputs()
    other = step.placed_line.with_options({"device": "cpu:0"})
    words = [*other.words, "--out", str(step.path)]
    process = in_a_process(_sample, words, moment)
    process.join()
    assert process.exitcode == (0 if moment is None else -9)
    seed_run._do(step, run_words, lambda part: None)
    assert step.is_done
    assert json.loads((step.path / "sampling.json").read_text())["device"] == "cpu"


def _sample(words: list[str], moment: tuple[str, str] | None) -> None:
    if moment is not None:
        sys.addaudithook(killing(*moment))
    run_words(words)


@pytest.mark.slow
def test_experts_of_all_shards_go_on_with_other_threads(
    jobs: Path, data: Path, tmp_path: Path
) -> None:
    line = "train all --shards $all --size tiny --objective flow --steps 2 --batch-size 8"
    of_threads = {}
    for threads in (1, 2):
        steps = {**SMALL["steps"], "every": f"{line} --threads {threads} --parallel {threads}"}
        of_threads[threads] = plan_of(data, jobs, steps=steps).steps["every"]
    before, step = of_threads[1], of_threads[2]
    assert before.identity == step.identity
    before.link_inputs()
    run_words(before.command())
    seed_run._do(step, run_words, lambda part: None)
    assert step.is_done


# 9. A command and a link in OUT that lead to another row's samples.


def test_no_two_samples_have_one_folder_in_out(
    model: Path, jobs: Path, data: Path, tmp_path: Path
) -> None:
    chosen = small(rows={"x": str(model), "X": f"{model} --seed 5"}, seeds=[0, 5])
    results = run_inline(chosen, tmp_path / "new", data, jobs=jobs)
    for one in results.scored:
        folder = tmp_path / "new" / shlex.split(one.command)[-1]
        assert folder.resolve().name == one.samples


# 11. Mistakes that pass --dry-run, or are none, and end the run after all the work.


def test_a_store_serves_a_file_in_which_a_step_has_another_name(
    jobs: Path, data: Path, tmp_path: Path
) -> None:
    steps = {"images": SMALL["steps"]["all"], "single": "train expert $images/shard_0 --size tiny"}
    evaluate = {**SMALL["evaluate"], "reference": "$images"}
    run_inline(small(steps=steps, evaluate=evaluate), tmp_path / "new", data, jobs=jobs)


def test_two_names_of_one_step_can_both_be_trained_on(
    jobs: Path, data: Path, tmp_path: Path
) -> None:
    again = {"again": SMALL["steps"]["all"], "other": "train expert $again/shard_0 --size tiny"}
    rows = {"single": "$single", "other": "$other"}
    run_inline(
        small(steps={**again, **SMALL["steps"]}, rows=rows), tmp_path / "new", data, jobs=jobs
    )


def test_a_row_of_an_expert_within_a_step(jobs: Path, data: Path, tmp_path: Path) -> None:
    chosen = small(
        steps={**SMALL["steps"], "both": "assemble $single"}, rows={"single": "$both/experts/0"}
    )
    run_inline(chosen, tmp_path / "new", data, jobs=jobs)


def test_a_row_of_a_finished_model_below_the_data(
    model: Path, jobs: Path, data: Path, tmp_path: Path
) -> None:
    mine = Path(shutil.copytree(data, tmp_path / "data"))
    model.rename(mine / "model")
    run_inline(small(rows={"single": "$data/model"}), tmp_path / "new", mine, jobs=jobs)


@pytest.mark.parametrize("name", ["benchmark", "results", "seed_1", "jobs"])
def test_a_step_that_is_called_as_a_part_of_the_benchmark_is_refused(name: str) -> None:
    steps = {**SMALL["steps"], name: "partition $data/test --shards 1"}
    assert "is taken by the benchmark itself" in refusal(small, steps=steps)


def test_a_reference_of_each_seed_in_a_benchmark_without_seed_0(
    jobs: Path, data: Path, tmp_path: Path
) -> None:
    steps = {**SMALL["steps"], "all": SMALL["steps"]["all"] + " --seed $seed"}
    run_inline(small(steps=steps, seeds=[3]), tmp_path / "new", data, jobs=jobs)


def test_a_router_that_is_not_there_is_refused_at_once(data: Path, tmp_path: Path) -> None:
    steps = {**SMALL["steps"], "both": "assemble $single --router ./no-such-router --strategy full"}
    plan = plan_of(data, tmp_path, steps=steps, rows={"both": "$both"})
    assert "no-such-router: no such file or folder" in refusal(plan.check)


def test_a_long_chain_of_steps_can_be_planned(data: Path, tmp_path: Path) -> None:
    steps, last = dict(SMALL["steps"]), "single"
    for k in range(300):
        steps[f"step-{k}"] = f"train expert $all/shard_0 --init ${last}"
        last = f"step-{k}"
    plan_of(data, tmp_path, steps=steps, rows={"last": f"${last}"}).check()


def test_broken_images_that_evaluations_accept_are_accepted_in_both_splits(
    jobs: Path, data: Path, tmp_path: Path
) -> None:
    mine = Path(shutil.copytree(data, tmp_path / "data"))
    write_images(mine / "more", per_class=20, seed=20)
    for folder in ("test", "more"):
        (mine / folder / "columns" / "broken.png").write_bytes(b"no image")
    evaluate = {**SMALL["evaluate"], "validation": "$data/more", "held_out": "$data/test"}
    for accepted in (0, 1):
        evaluate["options"] = f"--allow-few --brief --max-bad {accepted}"
        plan = plan_of(mine, jobs, evaluate=evaluate)
        if accepted:
            refuse_shared_images(plan)
        else:
            assert "cannot be read" in refusal(refuse_shared_images, plan)
    image = next((mine / "test" / "rows").glob("*.png"))
    shutil.copy(image, mine / "more" / "rows" / "another.png")
    assert "1 of 40 images are also" in refusal(
        refuse_shared_images, plan_of(mine, jobs, evaluate=evaluate)
    )


# 12. Small ones.


def test_data_in_a_folder_with_a_dollar_is_read_from_there(data: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(data, tmp_path / "my$out"))
    command = plan_of(mine, tmp_path / "jobs").steps["all"].command()
    assert command[1] == str(mine / "train")


def test_real_images_are_shown_where_data_is_a_relative_path(
    jobs: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data.parent)
    run_inline(small(), tmp_path / "relative", Path(data.name), jobs=jobs)
    run_inline(small(), tmp_path / "absolute", data, jobs=jobs)
    pages = [(tmp_path / name / "report.html").read_text() for name in ("absolute", "relative")]
    assert pages[0].count("data:image") == pages[1].count("data:image")
