"""Sampling that is killed or stopped goes on, and makes the same bytes as sampling that is not."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from hddm.pipelines import samples
from hddm.utils.files import sha256_of
from hddm_cli.app import app
from tests.artefacts import Command, contents, copied, edit_json, largest_file
from tests.ensemble_files import edit_members, three_ends, write_ensemble

OPTIONS = (
    "--num-images",
    "10",
    "--steps",
    "2",
    "--batch-size",
    "4",
    "--strategy",
    "draw",
    "--start",
    "3",
)

# Images 3 … 8 in two batches, then images 9 … 12 in one.
MOMENTS = {
    "before any batch": ("os.mkdir", ".sampling/parts", 0),
    "before the first batch is recorded": ("os.rename", "parts/00003-00000.done.json", 0),
    "before the second batch is recorded": ("os.rename", "parts/00003-00001.done.json", 4),
    "within the images of a batch": ("open", "00011.png", 6),
    "before the last batch is recorded": ("os.rename", "parts/00009-00000.done.json", 6),
    "before the last rename": ("os.rename", ".sampling/whole", 10),
}


@pytest.fixture(autouse=True)
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "ROUND", 6)


def _stopped(number: int, event: str, part: str, *arguments: object) -> tuple[int, str]:
    """Exit code and errors of ``hddm sample`` in a process that gets a signal at an event of Python."""
    log = Path(str(arguments[arguments.index("--out") + 1])).with_suffix(".log")
    if (child := os.fork()) == 0:
        told = []

        def hook(name: str, found: tuple[object, ...]) -> None:
            if name == event and not told and any(part in str(one) for one in found):
                told.append(name)
                os.kill(os.getpid(), number)

        with log.open("w") as file:
            sys.stderr = file
            sys.argv = ["hddm", "sample", *map(str, arguments)]
            sys.addaudithook(hook)
            try:
                app()
            except SystemExit as ended:
                file.flush()
                os._exit(int(ended.code or 0))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = log.read_text()
    log.unlink()
    return code, said


@pytest.mark.integration
@pytest.mark.parametrize(
    ("number", "output"),
    [
        (signal.SIGKILL, "png"),
        (signal.SIGKILL, "latent"),
        (signal.SIGTERM, "png"),
        # Stopped as by SIGTERM, but for the exit code.
        pytest.param(signal.SIGTERM, "latent", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "png", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "latent", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_stopped_at_any_moment_ends_in_the_same_bytes(
    number: signal.Signals, output: str, ensemble: Path, tmp_path: Path, hddm: Command
) -> None:
    options = [ensemble, *OPTIONS, "--output-type", output]
    assert hddm("sample", *options, "--out", tmp_path / "plain")[0] == 0
    out = tmp_path / "out"
    for event, part, kept in MOMENTS.values():
        if output == "latent" and ".png" in part:
            continue
        code, said = _stopped(number, event, part, *options, "--out", out, "--resume")
        assert code == (-number if number == signal.SIGKILL else 128 + number), (event, part, said)
        assert not out.exists()
        if number != signal.SIGKILL:
            line = (
                f"{kept} of 10 images are kept, and --resume goes on"
                if kept
                else "all is as it was before"
            )
            assert said.splitlines()[-1] == f"hddm: {out}: stopped; {line}"
            assert (tmp_path / ".out.sampling").exists() == (kept > 0)
    assert hddm("sample", *options, "--out", out, "--resume")[0] == 0
    assert contents(out) == contents(tmp_path / "plain")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "plain"]


@pytest.fixture
def interrupted(ensemble: Path, tmp_path: Path) -> Path:
    """Where a run was to write that was killed after its first four images."""
    out = tmp_path / "out"
    code, _ = _stopped(
        signal.SIGKILL, "os.rename", "parts/00003-00001.done.json", ensemble, *OPTIONS, "--out", out
    )
    assert code == -signal.SIGKILL
    return out


def test_what_is_unfinished_is_told_and_neither_forgotten_nor_resumed_unasked(
    interrupted: Path, ensemble: Path, hddm: Command
) -> None:
    draft = interrupted.with_name(".out.sampling")
    before = contents(draft)
    code, _, error = hddm("sample", ensemble, *OPTIONS, "--out", interrupted)
    assert (code, error.count("\n")) == (1, 1)
    assert (
        f"{draft} holds an unfinished sampling; --resume continues it, --overwrite starts again"
        in error
    )
    assert contents(draft) == before
    assert (
        hddm("sample", ensemble, *OPTIONS, "--out", interrupted, "--overwrite", "--seed", 1)[0] == 0
    )
    assert json.loads((interrupted / "sampling.json").read_text())["seed"] == 1
    assert [path.name for path in interrupted.parent.iterdir()] == ["out"]


@pytest.mark.integration
def test_only_the_same_images_of_the_same_model_are_resumed(
    interrupted: Path, ensemble: Path, tmp_path: Path, hddm: Command
) -> None:
    changed = copied(ensemble, tmp_path / "other")
    edit_members(changed, share=[1, 3])
    for source, given, line in (
        (ensemble, ["--seed", 1], "seed: was 0, is 1"),
        (ensemble, ["--steps", 3], "steps: was 2, is 3"),
        (ensemble, ["--strategy", "full"], "strategy: was 'draw', is 'full'"),
        (ensemble, ["--batch-size", 2], "batch_size: was 4, is 2"),
        (changed, [], f"source_sha256: was '{sha256_of(ensemble / 'manifest.json')}', is "),
    ):
        options = dict(zip(OPTIONS[::2], OPTIONS[1::2], strict=True)) | dict(
            [given] if given else []
        )
        words = [word for pair in options.items() for word in pair]
        code, _, error = hddm("sample", source, *words, "--out", interrupted, "--resume")
        told, detail = error.splitlines()
        assert (code, "holds an unfinished sampling of other options" in told) == (1, True)
        assert detail.startswith(f"  {line}")
    # Where experts wait decides no image, nor where the model lies.
    moved = tmp_path / "moved" / ensemble.name
    moved.parent.mkdir()
    ensemble.rename(moved)
    try:
        options = [
            moved,
            *OPTIONS,
            "--offload",
            "ram",
            "--out",
            interrupted,
            "--resume",
        ]
        assert hddm("sample", *options)[0] == 0
    finally:
        moved.rename(ensemble)
    options = [ensemble, *OPTIONS, "--out", tmp_path / "plain"]
    assert hddm("sample", *options)[0] == 0
    made, plain = contents(interrupted), contents(tmp_path / "plain")
    made.pop("sampling.json"), plain.pop("sampling.json")
    assert made == plain


def test_what_is_finished_is_not_made_again_nor_taken_for_something_else(
    interrupted: Path, ensemble: Path, hddm: Command, caplog: pytest.LogCaptureFixture
) -> None:
    options = [ensemble, *OPTIONS, "--out", interrupted, "--resume"]
    # Killed after the last rename, it leaves a draft.
    assert _stopped(signal.SIGKILL, "os.remove", "draft.json", *options)[0] == -signal.SIGKILL
    assert interrupted.with_name(".out.sampling").exists()
    before = contents(interrupted)
    code, _, error = hddm("sample", *options, "--seed", 1)
    assert (code, "out: holds samples of other options" in error) == (1, True)
    assert hddm("sample", *options, "--grid")[0] == 0
    assert "is finished" in caplog.text
    assert contents(interrupted) == before
    assert sorted(path.name for path in interrupted.parent.iterdir()) == ["out", "out.grid.png"]
    # Stopped a moment later, it leaves its lock.
    interrupted.with_name(".out.lock").touch()
    assert hddm("sample", *options)[0] == 0
    assert sorted(path.name for path in interrupted.parent.iterdir()) == ["out", "out.grid.png"]
    (interrupted / "00004.png").unlink()
    code, _, error = hddm("sample", *options)
    assert (code, "lacks 00004.png; --overwrite makes all images anew" in error) == (1, True)


def test_a_finished_run_of_the_format_before_is_finished(
    ensemble: Path, tmp_path: Path, hddm: Command, caplog: pytest.LogCaptureFixture
) -> None:
    """It has a default of repeats that no mask used, and does not say who made which image."""
    options = [ensemble, *OPTIONS, "--out", tmp_path / "out"]
    assert hddm("sample", *options)[0] == 0
    record = json.loads((tmp_path / "out/sampling.json").read_text())
    assert record["resampling_steps"] is None
    del record["expert_use"]["made_by"]
    edit_json(
        tmp_path / "out/sampling.json",
        format="1.5",
        resampling_steps=10,
        expert_use=record["expert_use"],
    )
    assert hddm("sample", *options, "--resume")[0] == 0
    assert "is finished" in caplog.text


@pytest.mark.parametrize(
    ("options", "begins_at"),
    [
        (("--strategy", "draw"), [0.936, 0.994, 1.0]),
        (("--strategy", "full"), None),
        (("--expert", "0"), 0.936),
        (("--expert", "2"), None),
    ],
    ids=str,
)
def test_the_record_says_where_networks_begin_and_older_runs_of_such_experts_are_refused(
    options: tuple[str, ...], begins_at: object, tmp_path: Path, hddm: Command
) -> None:
    out, file = tmp_path / "out", tmp_path / "out/sampling.json"
    source = write_ensemble(tmp_path / "whole", three_ends(), "draw")
    words = [source, "--num-images", 6, "--steps", 2, *options, "--out", out]
    assert hddm("sample", *words)[0] == 0
    record = json.loads(file.read_text())
    assert record["begins_at"] == (begins_at and pytest.approx(begins_at, abs=1e-3))
    # A finished run of the format before, on the grid from t = 1.
    del record["begins_at"]
    file.write_text(json.dumps(record | {"format": "1.6"}))
    code, _, error = hddm("sample", *words, "--resume")
    assert (code, "holds samples of other options" in error) == (
        (0, False) if begins_at is None else (1, True)
    )


def test_an_unfinished_run_of_the_format_before_is_refused(
    interrupted: Path, ensemble: Path, hddm: Command
) -> None:
    edit_json(interrupted.with_name(".out.sampling") / "draft.json", format="1.6")
    code, _, error = hddm("sample", ensemble, *OPTIONS, "--out", interrupted, "--resume")
    assert (code, "holds an unfinished sampling of other options" in error) == (1, True)
    assert hddm("sample", ensemble, *OPTIONS, "--out", interrupted, "--overwrite")[0] == 0


def test_a_part_that_a_power_failure_spoilt_is_made_again(
    interrupted: Path, ensemble: Path, tmp_path: Path, hddm: Command
) -> None:
    part = min(interrupted.with_name(".out.sampling").rglob("*.png"))
    part.write_bytes(part.read_bytes()[:-4] + bytes(4))
    for out, more in ((tmp_path / "plain", ()), (interrupted, ("--resume",))):
        assert hddm("sample", ensemble, *OPTIONS, "--out", out, *more)[0] == 0
    assert contents(interrupted) == contents(tmp_path / "plain")


def test_a_full_disk_keeps_what_is_made_and_says_how_to_go_on(
    interrupted: Path, ensemble: Path, hddm: Command
) -> None:
    options = [ensemble, *OPTIONS, "--out", interrupted, "--resume"]
    with largest_file(60):
        code, _, error = hddm("sample", *options)
    assert code == 1
    remedy = "free some space; 4 of 10 images are kept, and --resume goes on"
    assert error == f"hddm: {interrupted}: cannot be written (File too large); {remedy}\n"
    assert not interrupted.exists()
    assert hddm("sample", *options)[0] == 0
