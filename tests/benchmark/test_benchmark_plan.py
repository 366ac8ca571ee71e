"""What a benchmark's file may say, and the command lines and names that follow from it."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from hddm.benchmark import steps as steps_module
from hddm.benchmark.file import TAKEN, BenchmarkFile, preset_names, read_benchmark
from hddm.benchmark.overlap import steps_before_first_comparison
from hddm.benchmark.plan import SeedPlan
from hddm.benchmark.run import commands
from hddm.benchmark.seed_run import longest_first, waits
from hddm.benchmark.steps import Step
from hddm.utils.work import Work
from hddm_cli.lines import LINES
from tests.artefacts import Command, refusal
from tests.benchmark.small import SMALL, plan_of
from tests.benchmark_files import ALONE, CONTENT, MIXED, SINGLE, file, write_sides


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sides(tmp_path_factory.mktemp("data") / "data")


def _yaml(content: dict[str, Any]) -> str:
    return yaml.safe_dump(content, sort_keys=False)


def _plan(data: Path, seed: int = 0, **changes: Any) -> SeedPlan:
    return SeedPlan(file(**changes), seed, Work(Path("jobs")), LINES, data)


def _steps(data: Path, seed: int = 0, **changes: Any) -> dict[str, Step]:
    return {step.name: step for step in _plan(data, seed, **changes).all}


def test_a_step_is_a_command_line_with_defaults_seed_and_folders(data: Path) -> None:
    steps = _steps(data, 3)
    assert (
        steps["parts"].shown == f"hddm partition {data}/train --shards 2 --held-out 0.4 --out parts"
    )
    assert steps["single"].shown == (
        "hddm train expert all/shard_0 --objective flow --size tiny --steps 5 --optimizer adamw "
        "--batch-size 8 --learning-rate 3e-3 --ema-decay 0.9 --checkpoint-every 2 --threads 1 --seed 3 "
        "--out seed_3/single"
    )
    command, inputs = steps["flow"].command(), f"jobs/inputs/{steps['flow'].path.name}"
    assert command[:3] == ["assemble", f"{inputs}/flow-0", f"{inputs}/flow-1"]
    assert command[-1] == str(steps["flow"].path)
    assert steps["scores/mixed-1-1"].command()[-1] == f"{steps['scores/mixed-1-1'].path}.json"
    assert {step.label for step in _plan(data).all} >= {
        "flow",
        "scores/real",
        "samples/single-model",
    }


def test_samples_on_the_grid_from_all_noise_are_made_again_and_no_training_is(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = {name: step.identity for name, step in _steps(data).items()}
    for verb in ("sample", "distill"):
        assert steps_module.STEP_KINDS[verb].version == 2
        kind = steps_module.STEP_KINDS[verb]._replace(version=1)
        monkeypatch.setitem(steps_module.STEP_KINDS, verb, kind)
    before = {name: step.identity for name, step in _steps(data).items()}
    changed = {name.partition("/")[0] for name in now if now[name] != before[name]}
    assert changed >= {"samples", "scores"}
    assert not changed & {"parts", "flow", "flow-0", "single", "router"}
    assert now["scores/real"] == before["scores/real"]


def test_a_training_by_diffusers_is_expected_to_take_as_long_as_one_of_ours(data: Path) -> None:
    own = "train expert $all/shard_0 --objective ddpm --size tiny --steps 1500 --batch-size 32"
    steps = {
        **CONTENT["steps"],
        "old": "data old-model $all/shard_0 --steps 1500",
        "like-old": own,
    }
    found = _steps(data, steps=steps)
    assert found["old"].units == found["like-old"].units > 100_000


def test_what_most_work_waits_for_runs_first(tmp_path: Path) -> None:
    plan = SeedPlan(read_benchmark("quickstart"), 0, Work(tmp_path), LINES)
    waits_for = waits(plan.all, steps_before_first_comparison(plan))
    order = longest_first(plan.all, waits_for)
    names = [step.name for step in order]
    assert names[:3] == ["digits", "shards-old", "old-pipeline"]
    # Although each of the new experts takes half as many steps as fine-tuning.
    assert names.index("router") > names.index("fine-tuned")
    before: set[str] = set()
    for step in order:
        assert waits_for[step.identity] <= before
        before.add(step.identity)
    assert sorted(names) == sorted(step.name for step in plan.all)


def test_scored_images_that_little_reads_are_there_before_much_else(data: Path) -> None:
    steps = {
        "scored": "partition $data/test --shards 1",
        "parts": "partition $data/train --shards 4",
        **{f"one-{k}": f"train expert $parts/shard_{k} --size tiny --steps 900" for k in range(4)},
    }
    evaluate = {**SMALL["evaluate"], "held_out": "$scored"}
    rows = {"one": "$one-0"}
    plan = plan_of(data, Path("jobs"), steps=steps, rows=rows, evaluate=evaluate)
    waits_for = waits(plan.all, steps_before_first_comparison(plan))
    names = [step.name for step in longest_first(plan.all, waits_for)]
    assert set(names[:2]) == {"scored", "parts"}


def test_the_same_work_has_the_same_name_and_other_work_another(data: Path, tmp_path: Path) -> None:
    ours, other_seed = _steps(data), _steps(data, 1)
    assert ours["parts"].identity == other_seed["parts"].identity
    assert ours["scores/real"].identity == other_seed["scores/real"].identity
    assert ours["flow"].identity != other_seed["flow"].identity
    renamed = {
        **CONTENT["steps"],
        "flow-0": "train expert $parts/shard_0 --size tiny --objective flow",
    }
    assert _steps(data, steps=renamed)["flow"].identity == ours["flow"].identity
    train = CONTENT["defaults"]["train expert"]
    for options, is_same in ((f"{train} --device cpu", True), (f"{train} --warmup 2", False)):
        changed = _steps(data, defaults=CONTENT["defaults"] | {"train expert": options})
        assert (changed["flow-0"].identity == ours["flow-0"].identity) == is_same
    # The content of images counts, and not where they lie.
    moved = write_sides(tmp_path / "elsewhere")
    assert _steps(moved)["flow"].identity == ours["flow"].identity
    next((moved / "train").rglob("*.png")).unlink()
    fewer = moved.rename(tmp_path / "fewer")
    assert _steps(fewer)["parts"].identity != ours["parts"].identity


def test_rows_vary_one_option_after_the_other_or_all_together(data: Path) -> None:
    def names(**table: Any) -> list[str]:
        tables = {"models": {"rows": [MIXED], **table}}
        return [row.name for row in _plan(data, tables=tables, **ALONE).rows]

    both = {"solver": ["euler", "heun"], "steps": [2, 4]}
    assert names() == [MIXED]
    assert names(vary={"strategy": ["draw", "full"]}) == ["draw", "full"]
    assert names(vary=both) == [MIXED, "euler", "heun", "2 steps", "4 steps"]
    assert names(vary=both, product=True) == [
        f"{a}, {b} steps" for a in ("euler", "heun") for b in (2, 4)
    ]
    table = {"rows": [SINGLE, MIXED], "vary": {"strategy": ["draw", "full"]}}
    plan = _plan(data, tables={"models": table}, **ALONE)
    # One network has no strategy to vary.
    assert [row.name for row in plan.rows] == [SINGLE, f"{MIXED}, draw", f"{MIXED}, full"]
    commands = [row.samples.values["strategy"] for row in plan.rows]
    assert commands == [None, "draw", "full"]


def test_options_of_a_table_come_before_those_of_a_row_and_these_before_defaults(
    data: Path,
) -> None:
    rows = {"one": "$mixed --num-images 30 --steps 3"}
    table = {"sample": "--steps 4 --seed 9", "vary": {"steps": [5]}}
    changes = {"rows": rows, "compare": {}, "budgets": {}, "tables": {"models": table}}
    (row,) = _plan(data, **changes).rows
    options = {name: row.samples.values[name] for name in ("steps", "num_images", "solver", "seed")}
    assert options == {"steps": 5, "num_images": 30, "solver": "euler", "seed": 9}


def test_confirming_takes_other_seeds_and_held_out_images(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(_yaml(CONTENT))
    chosen, confirmed = read_benchmark(str(path)), read_benchmark(str(path), held_out=True)
    assert (chosen.scored_on, chosen.seeds) == ("validation", (0,))
    assert (confirmed.scored_on, confirmed.seeds) == ("held_out", (5,))
    scores = SeedPlan(confirmed, 5, Work(Path("jobs")), LINES, data).rows[0].scores
    assert (scores.values["held_out"], scores.values["validation"]) == (data / "test", None)
    assert "is used to choose settings" in refusal(read_benchmark, str(path), {}, "0-2", True)
    assert "is reserved for confirmation" in refusal(read_benchmark, str(path), {}, "4,5")
    assert read_benchmark(str(path), {"steps": "9"}, "7-8,8,10").seeds == (7, 8, 10)
    assert "'8-7' is not a seed" in refusal(read_benchmark, str(path), {}, "8-7")
    assert read_benchmark(str(path), {"steps": "9"}).values["steps"] == "9"
    assert "has no value 'stpes'; choose one of" in refusal(
        read_benchmark, str(path), {"stpes": "9"}
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": {SINGLE: "$single"}}, "there is no row"),
        (
            {"evaluate": {"reference": "$all", "features": "classifier"}},
            "evaluate.held_out: is required",
        ),
        ({"confirmation_seeds": [0]}, "seed 0 is in both"),
        ({"values": {"all": 1}}, "'all' is both a step and a value"),
        (
            {"steps": {**CONTENT["steps"], "ALL": "data digits"}},
            "'all' and 'ALL' are one folder on some",
        ),
        ({"steps": {**CONTENT["steps"], "Jobs": "data digits"}}, "'Jobs' is taken"),
        ({"steps": {**CONTENT["steps"], "SEED_1": "data digits"}}, "'SEED_1' is taken"),
        ({"tables": {}}, "tables"),
        ({"tables": {"models": {"vary": {"steps": []}}}}, "vary.steps"),
        (
            {
                "tables": {
                    "models": {"vary": {str(k): [*range(20)] for k in range(8)}, "product": True}
                }
            },
            "at most",
        ),
        ({"rows": {"a" * 300: "$flow"}}, "rows"),
        ({"seeds": "0-3000000000"}, "at most 1000 seeds"),
        ({"workers": 1_000_000_000}, "workers"),
        ({"evaluate": {**CONTENT["evaluate"], "domains": {"a=b": "columns"}}}, "has no ="),
        (
            {"evaluate": {**CONTENT["evaluate"], "domains": {"a": "columns,,rows"}}},
            "write its classes as",
        ),
        (
            {"evaluate": {**CONTENT["evaluate"], "domains": {"a": "rows", "b": "rows"}}},
            "name it once",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_file_gets_wrong_is_told(change: dict[str, Any], message: str) -> None:
    assert message in refusal(file, **change)


def test_a_value_may_have_the_name_of_a_step_in_capitals() -> None:
    assert file(values={**CONTENT["values"], "SINGLE": 1}).values["SINGLE"] == 1


def test_the_guide_names_all_names_that_are_taken() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "own-benchmark.md").read_text()
    (listed,) = re.findall(r"\(Names that are taken: (.*?)\.\)", guide, re.DOTALL)
    assert set(re.findall(r"`(.*?)`", listed)) == {*TAKEN, "seed_<n>"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"single": "train expert $whole/shard_0"},
            "step 'single': $whole: no such step or value above",
        ),
        ({"parts": "partition $data/train --shrads 2"}, "step 'parts': --shrads: no such option"),
        ({"part": "sample"}, "step 'part': SOURCE is required"),
        ({"part": " "}, "step 'part': hddm: needs a command"),
        ({"part": "train"}, "step 'part': hddm train: needs a command"),
        ({"part": "sample --help"}, "step 'part': --help: is no step"),
        ({"part": "sample $mixed --out elsewhere"}, "step 'part': --out: is set by the benchmark"),
        ({"part": "sample $mixed --expert '1"}, "a quote is not closed"),
        ({"part": "sample $parts/../secret"}, "leads out of the step's folder"),
        ({"part": "sample nowhere"}, "step 'part': nowhere: no such file or folder"),
        (
            {"part": "sample s3://nowhere/a"},
            "s3://nowhere/a: a benchmark reads files of this machine",
        ),
        (
            {"parts": "partition s3://a/b --shards 2"},
            "s3://a/b: a benchmark reads files of this machine",
        ),
        ({"part": "inspect $mixed"}, "--out: no such option"),
        ({"single": "train expert $all/shard_0 --config $all/x.yaml"}, "no step can write it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_command_line_that_cannot_be_run_is_told_before_anything_runs(
    change: dict[str, str], message: str, data: Path, tmp_path: Path, hddm: Command
) -> None:
    path, out = tmp_path / "mine.yaml", tmp_path / "out"
    path.write_text(_yaml(CONTENT | {"steps": CONTENT["steps"] | change}))
    code, _, err = hddm("benchmark", path, "--data", data, "--out", out)
    assert (code, message in err) == (1, True), err
    assert not (out / "jobs").exists()


_ROWS_ALONE: dict[str, Any] = {"compare": {}, "budgets": {}, "tables": {"models": {}}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": {"a": " "}}, "row 'a': names no model"),
        ({"rows": {"a": "$flow --steps '3"}}, "a quote is not closed"),
        ({"rows": {"a": "$flow $mixed"}}, "row 'a': unexpected argument"),
        ({"tables": {"t": {"sample": "$mixed"}}}, "only options can stand here"),
        ({"tables": {"t": {"vary": {"stpes": [1]}}}}, "--stpes: no such option"),
        ({"tables": {"t": {"vary": {"steps": ["x"]}}}}, "--steps"),
        (
            {"compare": {"varies": ["sovler"]}},
            "compare.varies: 'sovler' is no option of hddm sample",
        ),
        ({"same": {"x": ["part", "alnoe"]}}, "same 'x': $alnoe: no such step"),
        ({"same": {"x": ["part", "parts"]}}, "is no step that samples"),
        ({"evaluate": {**CONTENT["evaluate"], "options": "--features x"}}, "has a key of its own"),
        ({"evaluate": {**CONTENT["evaluate"], "options": "--held-out x"}}, "has a key of its own"),
        ({"defaults": {"sample": "--sede 3"}}, "defaults of sample: --sede: no such option"),
        ({"defaults": {"smaple": "--seed 3"}}, "defaults of smaple: smaple is not a command"),
        # The split that is not scored, as the one that is.
        (
            {"evaluate": {**CONTENT["evaluate"], "held_out": "$al/held_out"}},
            "evaluate: $al: no such step",
        ),
        (
            {"evaluate": {**CONTENT["evaluate"], "held_out": "nowhere"}},
            "evaluate: nowhere: no such file",
        ),
        ({"evaluate": {**CONTENT["evaluate"], "held_out": "$data/tset"}}, "tset: no such file"),
        (
            {"evaluate": {**CONTENT["evaluate"], "held_out": "$all/../x"}},
            "leads out of the step's folder",
        ),
        (
            {"evaluate": {**CONTENT["evaluate"], "held_out": "a b"}},
            "held_out: 'a b' is no path of images",
        ),
        (
            {"evaluate": {**CONTENT["evaluate"], "held_out": " "}},
            "held_out: ' ' is no path of images",
        ),
        (
            {"evaluate": {**CONTENT["evaluate"], "held_out": "'x"}},
            'evaluate: "\'x": a quote is not closed',
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_row_or_a_key_gets_wrong_is_told_before_anything_runs(
    change: dict[str, Any], message: str, data: Path
) -> None:
    def check() -> None:
        _plan(data, **_ROWS_ALONE | change).check()

    assert message in refusal(check)


def test_images_of_the_split_that_is_not_scored_may_be_those_of_a_seed(
    data: Path, tmp_path: Path
) -> None:
    mine = Path(shutil.copytree(data, tmp_path / "data"))
    (mine / "test").rename(mine / "test_0")
    chosen = file(evaluate={**CONTENT["evaluate"], "held_out": "$data/test_$seed"}, seeds=[0, 1])
    lines = commands(chosen, LINES, mine)
    assert f"{mine}/test_1: no such file or folder" in refusal(list, lines)
    shutil.copytree(mine / "test_0", mine / "test_1")
    assert list(commands(chosen, LINES, mine))


def test_data_of_the_split_that_is_not_scored_is_told() -> None:
    steps = {
        "parts": "partition photos --shards 1",
        "single": "train expert $parts/shard_0 --objective flow --steps 2",
    }
    evaluate = {"reference": "$parts", "validation": "more", "held_out": "$data/test"}
    chosen = file(
        steps=steps, rows={"a": "$single"}, evaluate=evaluate, defaults={}, same={}, **_ROWS_ALONE
    )
    plan = SeedPlan(chosen, 0, Work(Path("jobs")), LINES, None)
    assert refusal(plan.check) == "evaluate: $data: is the folder of your images; name it by `data`"


def test_folders_of_the_working_folder_decide_nothing_about_steps(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those that are called as an option's value nor those that are called as a step."""
    monkeypatch.chdir(tmp_path)
    lines = [
        "train expert $parts/shard_0 --objective flow",
        "partition $data/train --shards 2 --features clip",
        "partition $data/train --shards 2 --features owner/name",
        "sample $flow --prompt cat",
        "evaluate $alone --reference $all --features classifier --save-classifier kept.safetensors",
    ]
    table = {"models": {"rows": [MIXED], "vary": {"strategy": ["draw", "full"]}}}
    before = [_identity(data, line) for line in lines]
    for name in ("flow", "clip", "cat", "kept.safetensors", "classifier"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "expert.json").write_text("{}")
    assert [_identity(data, line) for line in lines] == before
    assert [row.name for row in _plan(data, tables=table, **ALONE).rows] == ["draw", "full"]


def test_an_expert_within_a_step_has_no_strategy_to_vary(data: Path) -> None:
    table = {"models": {"vary": {"strategy": ["draw", "full"]}}}
    rows = {"a": "$mixed/experts/0"}
    (row,) = _plan(data, rows=rows, compare={}, budgets={}, tables=table).rows
    assert row.samples.values["strategy"] is None


def test_rows_of_one_slug_or_of_none_have_folders_of_their_own(data: Path) -> None:
    rows = {
        "a b": "$flow",
        "a-b": "$mixed",
        "..": "$flow --steps 3",
        "real": "$flow --steps 4",
        "猫": "$single",
    }
    found = _plan(data, rows=rows, **_ROWS_ALONE).rows
    names = [row.samples.name.removeprefix("samples/") for row in found]
    assert names == ["a-b", "a-b-2", "row", "real-2", "row-2"]
    long = _plan(
        data, rows={f"{'x' * 199}{k}": f"$flow --steps {k + 1}" for k in range(2)}, **_ROWS_ALONE
    ).rows
    assert len({row.samples.name for row in long}) == 2
    assert all(len(row.samples.name) < 100 for row in long)


def _identity(data: Path, line: str, **steps: str) -> str:
    return _steps(data, steps={**CONTENT["steps"], **steps, "x": line})["x"].identity


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "train expert $parts/shard_1 --threads 1 --objective flow",
            "train expert --objective flow $parts/shard_1",
        ),
        (
            "train expert $parts/shard_1 --objective=flow --steps 6",
            "train expert $parts/shard_1 --objective flow",
        ),
        ("sample $mixed --num-images 016", "sample --num-images=16 $mixed"),
        ("sample $mixed --shift 1e0 --device cpu", "sample $mixed --shift 1"),
        ("train expert $parts/shard_1 --objective flow --no-random-flip", None),
        ("partition $data/train --shards 2 --cache somewhere", "partition $data/train --shards 2"),
        (
            "train all --shards $parts --objective flow --steps 2 --parallel 2 --retries 0",
            "train all --shards $parts --objective flow --steps 2 --ray local",
        ),
    ],
)
def test_the_spelling_of_a_line_decides_nothing(one: str, other: str | None, data: Path) -> None:
    if other is None:
        assert "no such option" in refusal(_identity, data, one)
        return
    assert _identity(data, one) == _identity(data, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "train expert --threads 1 $parts/shard_1 --objective flow",
            "train expert --threads 1 $parts/shard_0 --objective flow",
        ),
        (
            "train expert $parts/shard_1 --objective flow --steps=9",
            "train expert $parts/shard_1 --objective flow --steps=8",
        ),
        (
            "train expert $parts/shard_1 --objective flow --seed=5",
            "train expert $parts/shard_1 --objective flow",
        ),
        ("sample $mixed --class-labels 1,2", "sample $mixed --class-labels 2,1"),
        ("sample $mixed --guidance-interval 0 1", "sample $mixed --guidance-interval 0 0.5"),
        (
            "assemble $ddpm-0 $flow-1 --share $ddpm-0=0.3 --share $flow-1=0.7",
            "assemble $ddpm-0 $flow-1 --share $ddpm-0=0.7 --share $flow-1=0.3",
        ),
        ("assemble $ddpm-0 $flow-1", "assemble $flow-1 $ddpm-0"),
        ("partition $data/train --shards 2", "partition $data/test --shards 2"),
    ],
)
def test_what_a_verb_gets_decides_what_a_step_is(one: str, other: str, data: Path) -> None:
    assert _identity(data, one) != _identity(data, other)


def test_an_own_option_comes_before_a_default_and_a_seed_before_the_benchmarks(data: Path) -> None:
    line = "train expert --steps=9 --seed=5 $parts/shard_0 --objective flow"
    step = _steps(data, 3, steps={**CONTENT["steps"], "x": line})["x"]
    assert (step.values["steps"], step.values["seed"], step.seed) == (9, 5, None)
    assert step.shown.count("--steps") == step.shown.count("--seed") == 1


def test_changed_data_is_noticed_however_it_is_named(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_sides(tmp_path / "photos")
    (tmp_path / "linked").symlink_to("photos")
    (tmp_path / "around").mkdir()
    (tmp_path / "around" / "inner").symlink_to("../photos")
    lines = [
        "partition photos --shards 2",
        "partition linked --shards 2",
        "partition around --shards 2",
        "evaluate $alone --reference $all --validation=./photos",
        "partition $data-more/train --shards 2",
        "sample $flow-1 --init-image photos/test/columns/00.png",
        "partition $data/train --shards 2 --features photos",
    ]
    more = {"data-more": "partition photos --shards 1"}
    before = [_identity(data, line, **more) for line in lines]
    assert before == [_identity(data, line, **more) for line in lines]
    (tmp_path / "photos" / "test" / "columns" / "00.png").write_bytes(b"another")
    after = [_identity(data, line, **more) for line in lines]
    assert [one != other for one, other in zip(before, after, strict=True)] == [True] * len(lines)


def test_a_file_of_settings_is_the_options_that_it_says(data: Path, tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text("# short\nsteps: 9\n")
    by_file = f"train expert $parts/shard_0 --objective flow --config {config}"
    by_option = "train expert $parts/shard_0 --objective flow --steps 9"
    assert _identity(data, by_file) == _identity(data, by_option)
    step = _steps(data, steps={**CONTENT["steps"], "x": by_file})["x"]
    assert step.sources == [config]
    assert "$x.yaml: is read before" in refusal(
        _identity, data, by_file.replace(str(config), "$x.yaml")
    )


def test_shares_belong_to_the_content_of_experts_of_one_name(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identities = []
    for place, contents in (("here", "ab"), ("there", "ba")):
        for name, content in zip(("one", "two"), contents, strict=True):
            (tmp_path / place / name / "x").mkdir(parents=True)
            (tmp_path / place / name / "x" / "config.json").write_text(content)
        monkeypatch.chdir(tmp_path / place)
        experts = "one/x two/x" if place == "here" else "two/x one/x"
        identities.append(
            _identity(data, f"assemble {experts} --share one/x=0.9 --share two/x=0.1")
        )
    assert identities[0] != identities[1]


def test_a_folder_that_is_linked_twice_is_the_same_wherever_it_lies(
    data: Path, tmp_path: Path
) -> None:
    identities = []
    for place, names in (("one", "abc"), ("two", "cba")):
        images = tmp_path / place / "train"
        shutil.copytree(data / "train", images)
        (images / "rows").rename(tmp_path / place / "rows")
        for name in names:
            (images / name).symlink_to(tmp_path / place / "rows")
        identities.append(_identity(tmp_path / place, "partition $data/train --shards 2"))
    assert identities[0] == identities[1]


def test_without_a_folder_of_images_data_is_told(data: Path) -> None:
    assert "is the folder of your images" in refusal(
        SeedPlan, file(), 0, Work(Path("jobs")), LINES, None
    )


def test_a_finished_model_from_elsewhere_is_a_row(data: Path, flow_expert: Path) -> None:
    rest = {"compare": {}, "budgets": {}, "tables": {"models": {}}}
    (row,) = _plan(data, rows={"theirs": f"{flow_expert} --steps 4"}, **rest).rows
    assert row.samples.command()[:2] == ["sample", str(flow_expert)]
    assert (row.model.name, row.model.upstream) == (str(flow_expert), [row.model])


def test_a_finished_model_may_be_that_of_a_seed(
    data: Path, flow_expert: Path, tmp_path: Path
) -> None:
    shutil.copytree(flow_expert, tmp_path / "model_3")
    table = {"models": {"vary": {"strategy": ["draw", "full"]}}}
    rows = {"theirs": f"{tmp_path}/model_$seed"}
    (row,) = _plan(data, 3, rows=rows, compare={}, budgets={}, tables=table).rows
    assert row.model.name == str(tmp_path / "model_3")
    assert row.model.identity


@pytest.mark.integration
@pytest.mark.parametrize(
    "name",
    [
        one if one in ("quickstart", "grow-cifar10") else pytest.param(one, marks=pytest.mark.slow)
        for one in [
            *preset_names(),
            *map(str, Path(__file__).parents[2].glob("benchmarks/*/*.yaml")),
        ]
    ],
)
def test_presets_are_command_lines_that_can_be_run(
    name: str, tmp_path: Path, hddm: Command
) -> None:
    for folder in ("train", "test"):
        (tmp_path / folder).mkdir()
    code, out, err = hddm("benchmark", name, "--data", tmp_path, "--dry-run")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert all(line.startswith(("hddm ", "mkdir ")) for line in lines)
    made = [line.rpartition("--out ")[2] for line in lines if line.startswith("hddm ")]
    assert len(set(made)) == len(made)
    assert isinstance(read_benchmark(name), BenchmarkFile)
    assert name not in preset_names() or re.search(
        rf"[(,]{name}[,)]", re.sub(r"\s", "", hddm("benchmark", "--help")[1])
    )
