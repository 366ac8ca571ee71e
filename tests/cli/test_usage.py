"""Wrong usage is told in one style: the option or key, the value, what may stand there; exit code 2."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from hddm.editing import DEFAULT_RESAMPLING
from hddm.settings import Conversion, SampleSettings
from hddm.solvers import SOLVERS
from hddm.velocity import PredictionType
from hddm_cli.app import commands
from hddm_cli.serve import Cluster, lines_of_ready
from tests.artefacts import Command, contents, in_a_fresh_process

TRAIN = "train expert {shard} --out {out} --objective flow --steps 3"
ALL = "train all --shards {shards} --out {out} --steps 3"


# A path that is not there …
GONE = [
    *(
        "data check {gone}",
        "inspect {gone}",
        "verify {gone}",
        "push {gone} me/model",
        "compare {gone} {gone}",
    ),
    *(
        "partition {gone} --out {out} --shards 2",
        "encode {gone} --out {out}",
        "convert {gone} --out {out}",
    ),
    *("convert {shard} --out {out} --base {gone}", "merge {shard} {gone} --out {out}"),
    *(TRAIN.replace("{shard}", "{gone}"), "train router {gone} --out {out} --steps 3"),
    *(
        ALL.replace("{shards}", "{gone}") + " --objective flow",
        "distill {gone} --data {shards} --out {out}",
    ),
    *("calibrate {gone}", "calibrate {shard} --data {gone}", "assemble {gone} --out {out}"),
    "sample {gone} --out {out}",
    "evaluate {gone} --reference {shard}",
]
# … what the parser, the settings of a verb or a look at its input finds …
SLIPS = [
    *((line, "{gone}: no such f") for line in GONE),
    ("dream", "dream is not a command of hddm; choose one of"),
    (
        "train exprt",
        "exprt is not a command of hddm train; choose one of expert, router, all; did you mean",
    ),
    (
        TRAIN + " --lerning-rate 1",
        "--lerning-rate: no such option of hddm train expert; did you mean '-",
    ),
    (TRAIN + " --seed", "--seed: requires an argument"),
    ("train expert --out {out}", "SHARD is required; hddm train expert --help says what it is"),
    ("train expert {shard} --objective flow", "--out is required"),
    (
        TRAIN.replace("--objective flow", "--objective flwo"),
        "--objective flwo: choose one of ddpm, flow; did you mean 'flow'?",
    ),
    (TRAIN + " --learning-rate fast", "--learning-rate fast: must be a number"),
    ("sample {shard} --out {out} --strategy best", "--strategy best: choose commit-X, threshold-X"),
    (
        "sample {shard} --out {out} --device gpu",
        "--device gpu: choose one of auto, cpu, cuda, cuda:1, mps",
    ),
    (
        TRAIN + " --noise-range 1:0.5",
        "--noise-range 1:0.5: must be LOW:HIGH, with 0 <= LOW < HIGH <= 1",
    ),
    (TRAIN + " --config {run}", "{run}: key 'size' (is 'smal'): choose one of tiny, mini, small"),
    ("benchmark digts --out {out}", "digts: no such preset; give the path of your own file"),
    ("assemble {shard}", "--out is required"),
    *(
        (
            f"{line} --quantize int8 --dtype float64",
            "--quantize int8: does not run in --dtype float64; choose",
        )
        for line in ("sample {shard} --out {out}", "play {shard}", "serve {shard}")
    ),
    (
        ALL + " --objective 0=ddpm",
        "--objective 0=ddpm: name ddpm or flow once for each of shards 0 to 1, as",
    ),
    (TRAIN + " --init {shard} --size tiny", "--size: --init fixes it; leave it out"),
    (
        "convert {shard} --out {out} --base {shard} --variant fp16",
        "--variant: --base converts a LoRA file",
    ),
    (
        "merge {shard} {shard} --out {out} --weights a,b",
        "--weights a,b: write one number per expert, as 0.5",
    ),
]
# … and what only the work itself finds.
LATER = [
    (
        "sample {ensemble} --out {out} --guidance-interval 0.9 0.1",
        "--guidance-interval 0.9 0.1: must be two t",
    ),
    (
        "sample {ensemble} --out {out} --max-memory=1,5GB",
        "--max-memory 1,5GB: is not an amount of memory",
    ),
    (
        "sample {ensemble} --out {out} --max-memory 5",
        "--max-memory 5: names no unit, and would be 5 bytes; write 5GB or 5MB",
    ),
    (
        "serve {ensemble} --max-upload 24000",
        "--max-upload 24000: names no unit, and would be 24000 bytes; write 24000GB or 24000MB",
    ),
    (
        "partition {images} --out {out} --shards 2 --features dino",
        "or OWNER/NAME; did you mean 'dinov2'?",
    ),
    (TRAIN + " --init {expert} --config {fixed}", "--prediction: --init fixes it; leave it out"),
    (TRAIN + " --config {part}", "{part}: key 'noise_range' (is '0.5'): must be LOW:HIGH"),
    (TRAIN + " --lora-rank 2", "--lora-rank adapts an existing expert; pass --init"),
    (
        "sample {expert} --out {out} --prompt cat",
        "--prompt: the model is unconditional; drop the option",
    ),
    ("push {expert} model", "model: write OWNER/NAME"),
    (
        TRAIN + " --init {none}",
        "{none}: no expert folder (expert.json); hddm convert makes an expert of a",
    ),
    (
        "assemble {expert} {none} --out {out}",
        "{none}: no expert folder (expert.json); hddm convert makes an",
    ),
    (
        "merge {none} {expert} --out {out}",
        "{none}: no expert folder (expert.json); hddm convert makes an",
    ),
    (
        "describe {ensemble} --text cats",
        "(expert.json); it is an ensemble; name one of its experts",
    ),
    ("partition {digits} --out {out} --shards 2", "holds train and held_out; name {digits}/train"),
    (
        "train expert {shards} --out {out} --objective flow --steps 3",
        "{shards}: is a partition, not a shard",
    ),
    ("train router {shard} --out {out} --steps 2", "{shard}: is a shard, not a partition"),
    (
        "sample {expert} --out {out} --class-labels 3",
        "--class-labels 3: no class '3'; the model's classes",
    ),
    ("sample {ensemble} --out {out} --strategy top-5", "top-5 needs 5 experts and there are 2"),
    ("sample {ensemble} --out {out} --shift 0", "--shift 0.0: must be above 0"),
]
# Files that do not fit exit with 1.
FILES = [
    ("partition {none} --shards 2", "{none}: holds no images"),
    ("sample {ensemble} --guidance-scale 2", "guidance needs a condition"),
    ("evaluate {images} --reference {none}", "{none}: holds no images"),
    ("benchmark photographs --data {none}", "{none}/train: no such file or folder"),
]
WRONG = [
    *((2, *one) for one in LATER),
    *((1, f"{line} --out {{out}}", said) for line, said in FILES),
]


@pytest.fixture
def names(images: Path, shards: Path, ensemble: Path, tmp_path: Path) -> dict[str, Path]:
    """What stands in a line for a path."""
    files = {
        "run": "size: smal",
        "fixed": "steps: 3\nprediction: epsilon",
        "part": 'noise_range: "0.5"',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for name in ("none", "digits/train", "digits/held_out"):
        (tmp_path / name).mkdir(parents=True)
    made = {"images": images, "shards": shards, "shard": shards / "shard_0", "ensemble": ensemble}
    made["expert"] = ensemble / "experts" / "0"
    return made | {name: tmp_path / name for name in (*files, "out", "gone", "none", "digits")}


@pytest.mark.integration
def test_a_slip_is_one_line_before_anything_heavy_is_imported(
    names: dict[str, Path], tmp_path: Path
) -> None:
    before = contents(tmp_path)
    runs = in_a_fresh_process([line.format(**names).split() for line, _ in SLIPS])
    for (line, said), (code, output, heavy) in zip(SLIPS, runs, strict=True):
        assert (code, output.count("\n"), heavy) == (2, 1, set()), (line, output)
        assert output.startswith("hddm: ")
        assert said.format(**names) in output
    assert contents(tmp_path) == before


@pytest.mark.parametrize(("code", "line", "said"), WRONG)
def test_wrong_usage_and_wrong_files_are_one_line(
    code: int, line: str, said: str, names: dict[str, Path], tmp_path: Path, hddm: Command
) -> None:
    before = contents(tmp_path)
    ended, out, error = hddm(*line.format(**names).split())
    assert (ended, out) == (code, "")
    assert error.startswith("hddm: ")
    assert error.count("\n") == 1
    assert said.format(**names) in error
    assert contents(tmp_path) == before
    assert not names["out"].exists()


def _verbs(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every verb by its words, and what the parser knows of it."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _verbs(inner, *path, name)


VERBS = dict(_verbs(typer.main.get_command(commands)))


def test_help_is_quick_and_shows_every_name_on_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    runs = in_a_fresh_process([[*words, "--help"] for words in VERBS])
    for (words, verb), (code, shown, heavy) in zip(VERBS.items(), runs, strict=True):
        assert (code, heavy) == (0, set()), words
        names = (name for one in verb.params for name in (*one.opts, *one.secondary_opts))
        seen = {word.strip(",/") for word in shown.replace("/--", " --").split()}
        assert {name for name in names if name.startswith("--")} <= seen, words
        assert words or "--debug" in seen


def test_choices_are_those_there_are_and_a_device_is_chosen_alike_by_all_verbs() -> None:
    solvers, _ = get_args(SampleSettings.model_fields["solver"].annotation)
    assert get_args(solvers) == tuple(SOLVERS)
    told = SampleSettings.model_fields["resampling_steps"].description
    assert told is not None
    assert told.endswith(f"Default: {DEFAULT_RESAMPLING}.")
    kinds, _ = get_args(Conversion.model_fields["prediction_type"].annotation)
    assert get_args(kinds) == tuple(one.value for one in PredictionType)
    devices = {
        one.default for verb in VERBS.values() for one in verb.params if one.name == "device"
    }
    assert devices == {"auto"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--negative-prompt cat --negative-prompt dog",
            "--negative-prompt cat and dog: takes one value; keep",
        ),
        ("--steps 2 --steps 3", "--steps 2 and 3: takes one value; keep one"),
        ("--steps 2 --steps=2", "--steps 2 and 2: takes one value; keep one"),
        (
            "--solver heun --seed 1 --solver=euler",
            "--solver heun and euler: takes one value; keep one",
        ),
        (
            "--guidance-interval 0.1 0.9 --guidance-interval 0 1",
            "--guidance-interval 0.1 0.9 and 0 1: takes one value; keep one",
        ),
        ("--out other --out third", "--out {out} and other and third: takes one value; keep one"),
    ],
)
def test_a_second_value_of_an_option_that_takes_one_is_refused(
    words: str, said: str, tmp_path: Path, hddm: Command
) -> None:
    out = tmp_path / "out"
    code, shown, error = hddm("sample", tmp_path, "--out", out, "--prompt", "a", *words.split())
    assert (code, shown) == (2, "")
    assert error.startswith(f"hddm: {said.format(out=out)}")
    assert error.count("\n") == 1


def test_a_flag_may_be_repeated_and_not_contradicted(tmp_path: Path, hddm: Command) -> None:
    serve = ["serve", tmp_path, "--batching", "--port", "1"]
    assert hddm(*serve, "--no-batching") == (
        2,
        "",
        "hddm: --batching and --no-batching: contradict each other; keep one\n",
    )
    code, _, error = hddm("sample", tmp_path, "--out", tmp_path / "out", "--grid", "--grid", "--prompt", "a",
                          "--prompt", "b")  # fmt: skip
    assert code != 0
    assert "keep one" not in error


def test_a_service_says_under_which_names_its_models_are_requested() -> None:
    folder = Path("runs/cat's grown")
    first, models, example = lines_of_ready(
        folder, Cluster(host="::1"), ["ddpm", "1"], " -H 'a: b'"
    )
    assert first == f"{folder}: 2 experts ready; Ctrl-C ends this"
    assert models.startswith("  model cat's grown, the default, is all experts together; ")
    assert models.endswith("each alone: cat's grown/ddpm, cat's grown/1")
    words = shlex.split(example)
    assert words[:-1] == ["curl", "http://[::1]:8000/v1/images/generations", "-H", "a: b", "-d"]
    assert json.loads(words[-1]) == {"model": "cat's grown", "seed": 7}
    # An expert that is served alone has no other name.
    first, example = lines_of_ready(Path("runs/flow"), Cluster(), ["0"])
    assert first == "runs/flow: 1 expert ready; Ctrl-C ends this"
    assert json.loads(shlex.split(example)[-1])["model"] == "flow"
