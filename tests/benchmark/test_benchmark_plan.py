"""What a benchmark's file may say, and the command lines and names that follow from it."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hddm.benchmark.file import BenchmarkFile, preset_names, read_benchmark
from hddm.benchmark.plan import SeedPlan, Step
from hddm.utils.errors import HddmError
from hddm.utils.work import Work
from tests.artefacts import Command, refusal
from tests.benchmark_files import CONTENT, MIXED, SINGLE, file, write_sides


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sides(tmp_path_factory.mktemp("data") / "data")


def _yaml(content: dict[str, Any]) -> str:
    return yaml.safe_dump(content, sort_keys=False)


def _plan(data: Path, seed: int = 0, **changes: Any) -> SeedPlan:
    return SeedPlan(file(**changes), seed, Work(Path("jobs")), data)


def _steps(data: Path, seed: int = 0, **changes: Any) -> dict[str, Step]:
    return {step.name: step for step in _plan(data, seed, **changes).all}


def test_a_step_is_a_command_line_with_defaults_seed_and_folders(data: Path) -> None:
    steps = _steps(data, 3)
    assert steps["parts"].shown == f"hddm partition {data}/train --shards 2 --held-out 0.4 --out parts"
    assert steps["single"].shown == (
        "hddm train expert all/shard_0 --objective flow --size tiny --steps 5 --optimizer adamw "
        "--batch-size 8 --learning-rate 3e-3 --ema-decay 0.9 --checkpoint-every 2 --threads 1 --seed 3 "
        "--out seed_3/single"
    )
    command = steps["flow"].command(Path("out"))
    assert command[:3] == ["assemble", "out/seed_3/flow-0", "out/seed_3/flow-1"]
    assert command[-1] == str(steps["flow"].path)
    assert steps["scores/mixed-1-1"].command(Path("out"))[-1] == f"{steps['scores/mixed-1-1'].path}.json"
    assert {step.label for step in _plan(data).all} >= {"flow", "scores/real", "samples/single-model"}


def test_the_same_work_has_the_same_name_and_other_work_another(data: Path, tmp_path: Path) -> None:
    ours, other_seed = _steps(data), _steps(data, 1)
    assert ours["parts"].identity == other_seed["parts"].identity
    assert ours["scores/real"].identity == other_seed["scores/real"].identity
    assert ours["flow"].identity != other_seed["flow"].identity
    renamed = {**CONTENT["steps"], "flow-0": "train expert $parts/shard_0 --size tiny --objective flow"}
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
        return [row.name for row in _plan(data, tables={"models": {"rows": [MIXED], **table}}).rows]

    both = {"solver": ["euler", "heun"], "steps": [2, 4]}
    assert names() == [MIXED]
    assert names(vary={"strategy": ["draw", "full"]}) == ["draw", "full"]
    assert names(vary=both) == [MIXED, "euler", "heun", "2 steps", "4 steps"]
    assert names(vary=both, product=True) == [f"{a}, {b} steps" for a in ("euler", "heun") for b in (2, 4)]
    table = {"rows": [SINGLE, MIXED], "vary": {"strategy": ["draw", "full"]}}
    plan = _plan(data, tables={"models": table})
    # One network has no strategy to vary.
    assert [row.name for row in plan.rows] == [SINGLE, f"{MIXED}, draw", f"{MIXED}, full"]
    commands = [row.samples.option("strategy") for row in plan.rows]
    assert commands == [None, "draw", "full"]


def test_options_of_a_table_come_before_those_of_a_row_and_these_before_defaults(data: Path) -> None:
    rows = {"one": "$mixed --num-images 30 --steps 3"}
    table = {"sample": "--steps 4 --seed 9", "vary": {"steps": [5]}}
    changes = {"rows": rows, "compare": {}, "budgets": {}, "tables": {"models": table}}
    (row,) = _plan(data, **changes).rows
    options = {name: row.samples.option(name) for name in ("steps", "num-images", "solver", "seed")}
    assert options == {"steps": "5", "num-images": "30", "solver": "euler", "seed": "9"}


def test_confirming_takes_other_seeds_and_held_out_images(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(_yaml(CONTENT))
    chosen, confirmed = read_benchmark(str(path)), read_benchmark(str(path), held_out=True)
    assert (chosen.scored_on, chosen.seeds) == ("validation", (0,))
    assert (confirmed.scored_on, confirmed.seeds) == ("held_out", (5,))
    scores = SeedPlan(confirmed, 5, Work(Path("jobs")), data).rows[0].scores
    assert (scores.option("held-out"), scores.option("validation")) == ("$data/test", None)
    assert "is used to choose settings" in refusal(read_benchmark, str(path), {}, "0-2", True)
    assert "is reserved for confirmation" in refusal(read_benchmark, str(path), {}, "4,5")
    assert read_benchmark(str(path), {"steps": "9"}, "7-8,8,10").seeds == (7, 8, 10)
    assert "'8-7' is not a seed" in refusal(read_benchmark, str(path), {}, "8-7")
    assert read_benchmark(str(path), {"steps": "9"}).values["steps"] == "9"
    assert "has no value 'stpes'; choose one of" in refusal(read_benchmark, str(path), {"stpes": "9"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": {SINGLE: "$single"}}, "there is no row"),
        ({"evaluate": {"reference": "$all", "features": "classifier"}}, "evaluate.held_out: is required"),
        ({"confirmation_seeds": [0]}, "seed 0 is in both"),
        ({"values": {"all": 1}}, "'all' is both a step and a value"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_file_gets_wrong_is_told(change: dict[str, Any], message: str) -> None:
    assert message in refusal(file, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"single": "train expert $whole/shard_0"}, "step 'single': $whole: no such step or value above"),
        ({"parts": "partition $data/train --shrads 2"}, "step 'parts': --shrads: no such option"),
        ({"part": "sample"}, "step 'part': SOURCE is required"),
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


def test_two_rows_of_one_folder_are_refused(data: Path) -> None:
    rest = {"compare": {}, "budgets": {}, "tables": {"models": {}}}
    with pytest.raises(HddmError, match="would share a folder"):
        _plan(data, rows={"a b": "$flow", "a-b": "$mixed"}, **rest).rows  # noqa: B018
    assert "is the folder of your images" in refusal(SeedPlan, file(), 0, Work(Path("jobs")), None)


def test_a_finished_model_from_elsewhere_is_a_row(data: Path, flow_expert: Path) -> None:
    rest = {"compare": {}, "budgets": {}, "tables": {"models": {}}}
    (row,) = _plan(data, rows={"theirs": f"{flow_expert} --steps 4"}, **rest).rows
    assert row.samples.command()[:2] == ["sample", str(flow_expert)]
    assert (row.model.name, row.model.upstream) == (str(flow_expert), [row.model])


@pytest.mark.integration
@pytest.mark.parametrize(
    "name",
    [
        one if one in ("quickstart", "grow-cifar10") else pytest.param(one, marks=pytest.mark.slow)
        for one in [*preset_names(), *map(str, Path(__file__).parents[2].glob("benchmarks/*/*.yaml"))]
    ],
)
def test_presets_are_command_lines_that_can_be_run(name: str, tmp_path: Path, hddm: Command) -> None:
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
