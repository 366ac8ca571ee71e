"""The command line: every verb does its work, and says in one line why it does not."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from hddm_cli.app import app
from tests.artefacts import CLASSES, contents, copied, edit_json, largest_file

HDDM = Path(sys.executable).parent / "hddm"
VERBS = ["quickstart", "partition", "train expert", "train router", "calibrate", "assemble", "sample"]
VERBS += ["evaluate", "inspect"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def hddm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit code, standard output and standard error of a command, run in this process."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hddm", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            app()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return run


def test_help_comes_in_half_a_second() -> None:
    fastest = float("inf")
    for _ in range(6):
        started = time.perf_counter()
        shown = subprocess.run([HDDM, "--help"], capture_output=True, text=True, check=True).stdout
        fastest = min(fastest, time.perf_counter() - started)
        if fastest < 0.5:
            break
    assert fastest < 0.5
    for verb in VERBS:
        assert verb.split()[0] in shown


def test_no_help_imports_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from hddm_cli.app import commands\n"
        "for verb in sys.argv[1:]:\n"
        "    shown = CliRunner().invoke(commands, [*verb.split(), '--help'])\n"
        "    assert shown.exit_code == 0 and '--help' in shown.output, verb\n"
        "assert not {'torch', 'numpy', 'hddm'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, *VERBS], check=True)


def test_the_whole_work_from_images_to_samples(images: Path, tmp_path: Path, hddm: Run) -> None:
    def ok(*arguments: object) -> str:
        code, out, err = hddm(*arguments)
        assert code == 0, err
        return out

    shards, router, ensemble = tmp_path / "shards", tmp_path / "router", tmp_path / "ensemble"
    assert ok("partition", images, "--out", shards, "--shards", 2).count("24 images") == 2
    training = ["--steps", 3, "--batch-size", 8, "--size", "tiny", "--seed", 1]
    for k, options in enumerate((["ddpm"], ["flow", "--time-sampling", "logit-normal"])):
        out = tmp_path / str(k)
        shown = ok("train", "expert", shards / f"shard_{k}", "--out", out, "--objective", *options, *training)
        assert f"{out}: loss " in shown
    assert "cross-entropy" in ok("train", "router", shards, "--out", router, *training)
    ok("assemble", tmp_path / "0", tmp_path / "1", "--router", router, "--out", ensemble)
    ok("calibrate", tmp_path / "0", "--data", shards / "shard_0", "--seed", 3)
    options = ["--num-images", 5, "--steps", 3, "--strategy", "top-1", "--seed", 4, "--solver", "heun"]
    ok("sample", ensemble, "--out", tmp_path / "samples", *options)
    names = [f"{k:05d}.png" for k in range(5)]
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [*names, "sampling.json"]
    with Image.open(tmp_path / "samples" / "00004.png") as image:
        assert image.size == (4, 4)
    settings = json.loads((tmp_path / "samples" / "sampling.json").read_text())
    assert settings["strategy"] == "top-1"
    assert settings["seed"] == 4
    assert settings["source"] == str(ensemble)


def test_an_image_does_not_depend_on_its_batch(ensemble: Path, tmp_path: Path, hddm: Run) -> None:
    for size in (1, 5):
        out = tmp_path / str(size)
        hddm("sample", ensemble, "--out", out, "--num-images", 5, "--steps", 3, "--batch-size", size)
    assert contents(tmp_path / "1") == contents(tmp_path / "5")


def test_classes_are_asked_for_by_name_or_number(class_expert: Path, tmp_path: Path, hddm: Run) -> None:
    for name, labels in (("names", ",".join(CLASSES)), ("numbers", "0, 1"), ("swapped", "1,0")):
        options = ["--class-labels", labels, "--num-images", 3, "--steps", 2, "--guidance-scale", 1.5]
        assert hddm("sample", class_expert, "--out", tmp_path / name, *options)[0] == 0
    images = {name: contents(tmp_path / name)["00002.png"] for name in ("names", "numbers", "swapped")}
    assert images["names"] == images["numbers"] != images["swapped"]


def test_evaluate_prints_scores_as_json(
    images: Path, tmp_path: Path, hddm: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    code, out, _ = hddm("evaluate", images, "--reference", images, "--allow-few")
    assert code == 0
    assert json.loads(out)["to_training"]["value"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("kind", ["expert", "router", "ensemble", "shard"])
def test_inspect_tells_what_a_folder_is(
    kind: str, ddpm_expert: Path, router: Path, ensemble: Path, whole: Path, hddm: Run
) -> None:
    folder = {"expert": ddpm_expert, "router": router, "ensemble": ensemble, "shard": whole}[kind]
    code, out, _ = hddm("inspect", folder, "--json")
    facts = json.loads(out)
    assert (code, facts["kind"]) == (0, kind)
    plain = hddm("inspect", folder)[1]
    assert all(f"{key}: " in plain for key in facts)


def _refused(hddm: Run, *arguments: object) -> str:
    code, out, err = hddm(*arguments)
    assert code in (1, 2)
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("hddm: ")
    return err


TRAIN = ["--objective", "flow", "--steps", 2, "--size", "tiny"]


def test_what_is_missing_is_named(ensemble: Path, tmp_path: Path, hddm: Run) -> None:
    gone, out = tmp_path / "gone", ["--out", tmp_path / "out"]
    for arguments in (
        ["partition", gone, *out, "--shards", 2],
        ["train", "expert", gone, *out, *TRAIN],
        ["train", "router", gone, *out, "--steps", 2],
        ["assemble", gone, *out],
        ["assemble", ensemble / "experts" / "0", "--router", gone, *out],
        ["sample", gone, *out],
        ["calibrate", gone, "--data", gone],
        ["evaluate", gone, "--reference", gone],
        ["inspect", gone],
    ):
        assert str(gone) in _refused(hddm, *arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--strategy", "best"], "unknown strategy 'best'"),
        (["--strategy", "top-5"], "top-5 needs 5 experts and there are 2"),
        (["--solver", "magic"], "'magic'"),
        (["--shift", "0"], "shift"),
        (["--class-labels", "0"], "no class '0'; the model's classes are none"),
        (["--guidance-scale", "2"], "guidance"),
    ],
)
def test_a_wrong_setting_of_sample_writes_nothing(
    options: list[str], message: str, ensemble: Path, tmp_path: Path, hddm: Run
) -> None:
    assert message in _refused(hddm, "sample", ensemble, "--out", tmp_path / "out", *options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("label", ["2", "-1", "circles", "0,,1", ""])
def test_an_unknown_class_is_refused_with_the_known_ones(
    label: str, class_expert: Path, tmp_path: Path, hddm: Run
) -> None:
    message = _refused(hddm, "sample", class_expert, "--out", tmp_path / "out", f"--class-labels={label}")
    assert "the model's classes are columns, rows" in message
    assert not list(tmp_path.iterdir())


def test_a_wrong_training_writes_nothing(shards: Path, tmp_path: Path, hddm: Run) -> None:
    small = copied(shards / "shard_0", tmp_path)
    manifest = json.loads((small / "manifest.json").read_text())
    edit_json(small / "manifest.json", images=manifest["images"][:3])
    options = ["--out", tmp_path / "out", *TRAIN]
    before = contents(tmp_path)
    assert "has 3 images; an expert needs at least 16" in _refused(hddm, "train", "expert", small, *options)
    good = ["train", "expert", shards / "shard_0", *options]
    assert "unknown model size 'huge'" in _refused(hddm, *good, "--size", "huge")
    assert "learning_rate" in _refused(hddm, *good, "--learning-rate", "-1")
    assert "logit-normal" in _refused(
        hddm, *good, "--objective", "ddpm", "--time-sampling", "logit-normal"
    )
    assert str(small / "x.json") in _refused(
        hddm, *good, "--objective", "ddpm", "--schedule", small / "x.json"
    )
    assert contents(tmp_path) == before


def test_an_expert_with_an_unknown_key_is_refused_by_every_verb(
    ddpm_expert: Path, shards: Path, tmp_path: Path, hddm: Run
) -> None:
    expert = copied(ddpm_expert, tmp_path)
    edit_json(expert / "expert.json", shedule={})
    before = contents(tmp_path)
    for arguments in (
        ["inspect", expert],
        ["sample", expert, "--out", tmp_path / "out"],
        ["assemble", expert, "--out", tmp_path / "out"],
        ["calibrate", expert, "--data", shards / "shard_0"],
    ):
        assert "unknown key 'shedule'; did you mean 'schedule'?" in _refused(hddm, *arguments)
    assert contents(tmp_path) == before


def test_an_existing_folder_is_kept(
    images: Path, shards: Path, ensemble: Path, tmp_path: Path, hddm: Run
) -> None:
    (tmp_path / "mine").write_text("precious")
    before = contents(tmp_path)
    for arguments in (
        ["partition", images, "--shards", 2],
        ["train", "expert", shards / "shard_0", *TRAIN],
        ["train", "router", shards, "--steps", 2],
        ["assemble", ensemble / "experts" / "0"],
        ["sample", ensemble],
        ["quickstart"],
    ):
        assert "--overwrite" in _refused(hddm, *arguments, "--out", tmp_path)
    assert contents(tmp_path) == before


def test_a_broken_image_is_named(images: Path, tmp_path: Path, hddm: Run) -> None:
    spoilt = copied(images, tmp_path)
    (spoilt / "rows" / "03.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    message = _refused(hddm, "partition", spoilt, "--out", tmp_path / "out", "--shards", 2)
    assert str(spoilt / "rows" / "03.png") in message
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_one_line(whole: Path, tmp_path: Path, hddm: Run) -> None:
    with largest_file(20_000):
        code, _, err = hddm("train", "expert", whole, "--out", tmp_path / "out", *TRAIN)
    assert code == 1
    assert "File too large" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "expert", "shard", "--out", "out", "--objective", "gan", "--steps", "3"],
        ["train", "expert", "shard", "--out", "out", "--objective", "flow"],
        ["sample", "model", "--out", "out", "--num-images", "0"],
        ["sample", "model", "--out", "out", "--colour", "red"],
        ["dream"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(arguments: list[str], hddm: Run) -> None:
    code, out, err = hddm(*arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    environment = os.environ | {"COLUMNS": "200"}
    command = [HDDM, "inspect", tmp_path, "--debug"]
    debug = subprocess.run(command, capture_output=True, text=True, env=environment)
    plain = subprocess.run(command[:-1], capture_output=True, text=True, env=environment)
    assert "Traceback" in debug.stderr
    assert plain.returncode == debug.returncode == 1
    assert plain.stderr == f"hddm: {tmp_path}: no expert, router, ensemble or shard folder of hddm\n"
