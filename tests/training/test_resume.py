"""Trainings that are killed, and go on as if nothing had been."""

import shutil
import signal
from pathlib import Path

import pytest

from hddm.training.expert import train_expert
from hddm.training.settings import RunOptions
from hddm.training.state import Run
from hddm.utils.errors import HddmError
from hddm.utils.records import EXPERT_FILE, MANIFEST, damage, read_folder_manifest
from tests.artefacts import contents
from tests.killed_runs import STEPS, checkpoint, entries, settings, start, train


@pytest.fixture(scope="module")
def uninterrupted(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert _ended(whole, folder) == 0
    return folder


def _same(folder: Path, uninterrupted: Path) -> None:
    """Losses, samples, weights, averages and moments, to the last bit."""
    assert entries(folder / "diary") == entries(uninterrupted / "diary")
    assert checkpoint(folder / "expert.run") == checkpoint(uninterrupted / "expert.run")
    here, there = contents(folder / "expert"), contents(uninterrupted / "expert")
    assert here.keys() == there.keys()
    # Of what was computed in how many lives the record tells, and so its hash.
    for name in here.keys() - {EXPERT_FILE, MANIFEST}:
        assert here[name] == there[name], name
    assert damage(folder / "expert", EXPERT_FILE) == ()
    listed, expected = (
        read_folder_manifest(place / "expert").files for place in (folder, uninterrupted)
    )
    assert listed | {EXPERT_FILE: ""} == expected | {EXPERT_FILE: ""}


WORST = {
    "checkpoints": [
        ("step", "3"),
        # A checkpoint's files are written, it gets its name, and an older one is removed.
        ("open", "step_00000010.part"),
        ("os.rename", "step_00000010"),
        ("shutil.rmtree", "step_00000005"),
    ],
    # Within an epoch and at its end, three times without a new checkpoint, at the step of one, and the last.
    "steps": [("step", step) for step in ("7", "8", "8", "9", "10", "14", "20", str(STEPS))],
    "records": [("os.rename", ".run.json"), ("os.rename", ".expert.part")],
}
"""Moments at which one training after another is killed."""


@pytest.mark.slow
@pytest.mark.parametrize("moments", WORST.values(), ids=WORST)
def test_kills_at_the_worst_moments_change_nothing(
    moments: list[tuple[str, str]], whole: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    for moment in moments:
        assert _ended(whole, tmp_path, moment) == -signal.SIGKILL, moment
        assert not (tmp_path / "expert").exists()
    assert _ended(whole, tmp_path) == 0
    _same(tmp_path, uninterrupted)
    left = [path.name for path in (tmp_path / "expert.run" / "checkpoints").iterdir()]
    assert sorted(left) == ["step_00000020", f"step_{STEPS:08d}"]


@pytest.mark.integration
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        # As SIGTERM; test_logs.py stops by SIGUSR1 too, test_workers.py by SIGINT.
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
    ],
    ids=lambda n: n.name,
)
def test_a_signal_saves_within_a_step_and_exits_with_its_code(
    number: signal.Signals, whole: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    assert _ended(whole, tmp_path, ("signal", str(int(number)))) == 128 + number
    assert not (tmp_path / "expert").exists()
    (saved,) = (tmp_path / "expert.run" / "checkpoints").iterdir()
    # The signal came in step 3, long before the first checkpoint was due.
    assert saved.name == "step_00000003"
    assert _ended(whole, tmp_path) == 0
    _same(tmp_path, uninterrupted)


def _ended(whole: Path, folder: Path, moment: tuple[str, str] | None = None) -> int | None:
    """Train in a process, which may die at ``moment``; its exit code."""
    process = start(whole, folder / "expert", folder / "diary", moment)
    process.join()
    return process.exitcode


@pytest.mark.integration
def test_a_second_signal_exits_at_once_and_one_that_comes_by_two_ways_saves_as_one(
    whole: Path, tmp_path: Path
) -> None:
    number = int(signal.SIGTERM)
    for sent, kept in ((f"{number} later", []), (str(number), ["step_00000003"])):
        (tmp_path / sent).mkdir()
        assert _ended(whole, tmp_path / sent, ("signals", sent)) == 128 + number
        found = (tmp_path / sent / "expert.run" / "checkpoints").glob("*")
        assert [path.name for path in found] == kept


@pytest.mark.integration
def test_the_last_checkpoint_that_is_whole_counts(
    whole: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    """A flipped bit, a missing file, and no manifest."""
    _ended(whole, tmp_path, ("step", "13"))
    for name in ("optimizer.safetensors", "ema.safetensors", "manifest.json"):
        folder = Path(
            shutil.copytree(tmp_path / "expert.run", tmp_path / name / "expert.run")
        ).parent
        shutil.copy(tmp_path / "diary", folder)
        spoilt = folder / "expert.run" / "checkpoints" / "step_00000010" / name
        if name.startswith("optimizer"):
            _flip(spoilt)
        else:
            spoilt.unlink()
        assert _ended(whole, folder) == 0
        _same(folder, uninterrupted)


def test_damaged_checkpoints_do_not_push_out_those_that_are_written_after_them(
    whole: Path, tmp_path: Path
) -> None:
    """Two are kept, and the two newest are damaged: the run begins anew, and must be able to go on."""
    _ended(whole, tmp_path, ("step", "13"))
    folder = tmp_path / "expert.run" / "checkpoints"
    damaged = sorted(path.name for path in folder.iterdir())
    assert len(damaged) == 2
    for name in damaged:
        _flip(folder / name / "ema.safetensors")
    _ended(whole, tmp_path, ("step", "7"))
    kept = Run(tmp_path / "expert.run", RunOptions()).newest()
    assert kept is not None
    assert kept.name == "step_00000005"
    assert not (folder / damaged[-1]).exists()


def test_a_finished_run_is_neither_trained_again_nor_taken_for_another_training(
    whole: Path, uninterrupted: Path, shards: Path, tmp_path: Path
) -> None:
    shutil.copytree(uninterrupted, tmp_path / "copy")
    before = contents(tmp_path / "copy")
    train(whole, tmp_path / "copy" / "expert", tmp_path / "copy" / "diary")
    assert contents(tmp_path / "copy") == before
    # As a process leaves it that was killed once the expert was in place.
    (tmp_path / "copy" / ".expert.lock").touch()
    train(whole, tmp_path / "copy" / "expert", tmp_path / "copy" / "diary")
    assert not (tmp_path / "copy" / ".expert.lock").exists()
    longer = settings().model_copy(update={"steps": 900})
    for data, message, key in (
        (shards / "shard_0", "used other data", "data.shard"),
        (whole, "was started with different settings", "settings.steps"),
    ):
        with pytest.raises(HddmError, match=message) as refused:
            train_expert(data, tmp_path / "copy" / "expert", longer, run=RunOptions(resume=True))
        assert any(key in line for line in refused.value.details)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
