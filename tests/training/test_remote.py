"""Trainings whose result goes to an address: checkpoints are uploaded, and any machine continues."""

import itertools
import logging
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

import hddm
from hddm.training.train import TrainingProgress
from hddm.utils import uploading
from hddm.utils.errors import HddmError
from hddm.utils.uploading import upload
from tests.artefacts import contents, refusal
from tests.s3 import KEY, S3, SECRET, command_of, in_its_own

STEPS, EVERY = 12, 4
KILLS = 20
SETTINGS: dict[str, Any] = {
    "objective": "flow",
    "steps": STEPS,
    "size": "tiny",
    "batch_size": 8,
    "device": "cpu",
    "checkpoint_every": EVERY,
    "keep": 1,
}
OUT = "s3://bucket/experts/a"


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


@pytest.fixture(scope="session")
def expected(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Weights of the training on one machine."""
    out = tmp_path_factory.mktemp("alone") / "a"
    hddm.train(shards / "shard_0", out, **SETTINGS)
    return weights(out)


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an address on this disk; the cache is empty."""
    monkeypatch.setenv("HDDM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "remote"


def machine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on this is another machine, with an empty disk."""
    monkeypatch.setenv("HDDM_CACHE", str(tmp_path / name))


def fails_at(step: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """In this step the machine fails."""
    reach = TrainingProgress.reach

    def failing(self: TrainingProgress, done: int, *more: Any) -> None:
        if done == step:
            raise KeyError("the machine fails")
        reach(self, done, *more)

    return monkeypatch.setattr(TrainingProgress, "reach", failing)


@pytest.mark.integration
def test_another_machine_continues_from_the_uploaded_checkpoint_to_the_same_bits(
    s3: S3,
    shards: Path,
    expected: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from hddm.utils.addresses import address_of

    shard_address = address_of("s3://bucket/shards/shard_0")
    assert shard_address is not None
    upload(shards / "shard_0", shard_address, "manifest.json")
    arguments = {**SETTINGS, "resume": True}
    with monkeypatch.context() as broken:
        fails_at(10, broken)
        with pytest.raises(KeyError):
            hddm.train("s3://bucket/shards/shard_0", OUT, **arguments)
    names = s3.names("experts")
    assert {name.split("/")[2] for name in names if "checkpoints" in name} == {"step_00000008"}
    assert not any(name.startswith("a/") for name in names)
    # Without --resume, a run that was begun is in the way.
    machine("second", tmp_path, monkeypatch)
    told = refusal(hddm.train, "s3://bucket/shards/shard_0", OUT, **SETTINGS)
    assert told.startswith(f"{OUT}.run: already holds a run of {OUT}; `resume=True` continues it")
    seen: list[int] = []
    with monkeypatch.context() as noted, caplog.at_level(logging.INFO, "hddm"):
        noted.setattr(TrainingProgress, "reach", lambda self, done, *more: seen.append(done))
        hddm.train("s3://bucket/shards/shard_0", OUT, **arguments)
    assert seen == [9, 10, 11, 12]
    assert f"{OUT}.run: fetched the checkpoint of step 8" in caplog.text
    opened = Path(s3_folder(s3, "experts/a", tmp_path / "got"))
    assert weights(opened) == expected
    assert "step_00000012" in " ".join(s3.names("experts/a.run"))
    # A third machine finds nothing to do, and anyone can open the expert.
    machine("third", tmp_path, monkeypatch)
    with caplog.at_level(logging.INFO, "hddm"):
        hddm.train("s3://bucket/shards/shard_0", OUT, **arguments)
    assert "is finished; there is nothing to resume" in caplog.text
    assert hddm.load(OUT).velocity is not None
    assert refusal(hddm.train, "s3://bucket/shards/shard_0", OUT, **SETTINGS) == (
        f"{OUT} exists: choose another address"
    )
    for name, content in s3.contents().items():
        assert KEY.encode() not in content, name
        assert SECRET.encode() not in content, name
    for name, content in contents(tmp_path).items():
        assert SECRET.encode() not in content, name


def s3_folder(s3: S3, folder: str, target: Path) -> Path:
    for name, content in s3.contents(folder).items():
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    return target


@pytest.mark.integration
def test_a_training_goes_on_while_uploads_fail_and_says_at_the_end_what_is_kept(
    shards: Path,
    expected: dict[str, bytes],
    remote: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    out = f"file://{remote}/a"
    with monkeypatch.context() as broken:

        def fail(*given: object) -> None:
            raise ConnectionResetError("the other side is gone")

        broken.setattr(uploading, "_put", fail)
        with pytest.raises(HddmError) as caught:
            hddm.train(shards / "shard_0", out, **SETTINGS)
    assert str(caught.value).startswith(f"{out}: cannot be reached (ConnectionResetError")
    assert "the same command continues" in str(caught.value)
    assert f"{out}.run: cannot be reached" in caplog.text
    hddm.train(shards / "shard_0", out, **SETTINGS, resume=True)
    assert weights(remote / "a") == expected


@pytest.mark.integration
def test_a_checkpoint_that_was_not_uploaded_whole_is_passed_over(
    shards: Path,
    expected: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine("first", tmp_path, monkeypatch)
    out, there = f"file://{tmp_path}/remote/a", tmp_path / "remote" / "a.run" / "checkpoints"
    with monkeypatch.context() as broken:
        fails_at(11, broken)
        with pytest.raises(KeyError):
            hddm.train(shards / "shard_0", out, **{**SETTINGS, "keep": 2, "resume": True})
    assert [path.name for path in sorted(there.iterdir())][-1] == "step_00000008"
    whole = there / "step_00000008"
    # One without its manifest, and a newer one of which a file is damaged.
    damaged = there / "step_00000010"
    damaged.mkdir()
    for path in whole.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    (damaged / "weights.safetensors").write_bytes(b"half")
    half = there / "step_00000011"
    half.mkdir()
    (half / "weights.safetensors").write_bytes(b"half")
    machine("second", tmp_path, monkeypatch)
    with caplog.at_level(logging.INFO, "hddm"):
        hddm.train(shards / "shard_0", out, **{**SETTINGS, "keep": 2, "resume": True})
    assert "step_00000010 is damaged; it is skipped" in caplog.text
    assert "fetched the checkpoint of step 8" in caplog.text
    assert weights(tmp_path / "remote" / "a") == expected


@pytest.mark.integration
def test_an_outage_is_one_warning_for_each_checkpoint_and_the_last_is_uploaded_after_it(
    shards: Path,
    remote: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    out = f"file://{remote}/a"
    put = uploading._put

    def failing_at_first(there: Any, files: Any, *more: Any) -> None:
        # All but the last words of the training: its end, and what an exception leaves.
        if not stopping:
            raise ConnectionResetError("the other side is gone")
        put(there, files, *more)

    stopping: list[bool] = []
    reach = TrainingProgress.reach

    def reached(self: TrainingProgress, done: int, *more: Any) -> None:
        # Time for uploads that are under way, so that each checkpoint has its own.
        time.sleep(0.3)
        if done == 11:
            stopping.append(True)
            raise KeyError("the machine fails")
        reach(self, done, *more)

    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING, "hddm"):
        broken.setattr(uploading, "_put", failing_at_first)
        broken.setattr(TrainingProgress, "reach", reached)
        with pytest.raises(KeyError):
            hddm.train(shards / "shard_0", out, **{**SETTINGS, "resume": True})
    warnings = [one for one in caplog.records if "the training goes on" in one.getMessage()]
    assert 1 <= len(warnings) <= 2
    there = remote / "a.run" / "checkpoints"
    assert [path.name for path in there.iterdir()] == ["step_00000008"]


@pytest.mark.integration
def test_without_the_right_to_remove_files_checkpoints_stay_and_the_expert_is_uploaded(
    shards: Path,
    expected: dict[str, bytes],
    remote: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:

    def denied(*given: object, **named: object) -> None:
        raise PermissionError("AccessDenied: s3:DeleteObject")

    for name in ("rm", "rm_file"):
        monkeypatch.setattr(LocalFileSystem, name, denied)
    hddm.train(shards / "shard_0", f"file://{remote}/a", **SETTINGS)
    assert weights(remote / "a") == expected
    assert "access is denied" in caplog.text
    there = remote / "a.run" / "checkpoints"
    assert "step_00000012" in [path.name for path in there.iterdir()]


@pytest.mark.integration
def test_a_refused_command_uploads_nothing(
    shards: Path, remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that this machine began is in the way, and stays here alone."""
    out = f"file://{remote}/a"
    with monkeypatch.context() as broken:
        fails_at(10, broken)
        broken.setattr(uploading, "_put", lambda *given: 1 / 0)
        with pytest.raises(KeyError):
            hddm.train(shards / "shard_0", out, **SETTINGS)
    assert "already holds a run" in refusal(hddm.train, shards / "shard_0", out, **SETTINGS)
    assert not list((remote).rglob("*.json"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    told = refusal(hddm.train, shards / "shard_0", out, **SETTINGS)
    assert (
        told
        == f"{out}: a training by several processes writes to a folder that they all see; name one"
    )


@pytest.mark.integration
def test_a_bucket_that_is_not_there_is_refused_before_the_work(
    s3: S3, shards: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    monkeypatch.setattr(TrainingProgress, "reach", lambda self, done, *more: steps.append(done))
    told = "its bucket does not exist; create it, or check the address"
    out = "s3://nobucket/experts/a"
    for resume in (False, True):
        said = refusal(hddm.train, shards / "shard_0", out, **SETTINGS, resume=resume)
        assert said.endswith(told), said
    assert steps == []
    said = refusal(hddm.partition, images, "s3://nobucket/shards", 2)
    assert said.endswith(told), said
    # Nothing of the check is left.
    hddm.partition(images, "s3://bucket/shards", 2)
    assert not any("probe" in name for name in s3.names())


@pytest.mark.slow
def test_trainings_killed_at_many_moments_on_machine_after_machine_end_with_the_same_bits(
    s3: S3, shards: Path, tmp_path: Path
) -> None:
    """Each life has an empty disk; whatever is at the address is whole."""
    settings = {**SETTINGS, "steps": 60, "checkpoint_every": 1}
    alone = tmp_path / "alone" / "a"
    hddm.train(shards / "shard_0", alone, **settings)
    draws = random.Random(0)
    words = ["train", "expert", shards / "shard_0", "--out", OUT, "--resume"]
    for name, value in settings.items():
        if name != "keep":
            words.append(f"--{name.replace('_', '-')}={value}")
    command = command_of(*words)
    kills = 0
    for life in itertools.count():
        own = in_its_own(HDDM_CACHE=str(tmp_path / f"machine_{life}"))
        own.pop("capture_output")
        quiet: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, **own, **quiet) as process:
            before = s3.names("experts")
            try:
                if kills < KILLS:
                    # Until something new is there, and a moment longer.
                    while s3.names("experts") == before and process.poll() is None:
                        time.sleep(0.02)
                    time.sleep(draws.uniform(0, 0.4))
                    process.send_signal(signal.SIGKILL)
                    kills += process.wait() == -signal.SIGKILL
                else:
                    assert process.wait() == 0, process.stdout and process.stdout.read()
            finally:
                process.kill()
        if any(name == "a/expert.json" for name in s3.names("experts")):
            break
    assert kills == KILLS
    assert weights(s3_folder(s3, "experts/a", tmp_path / "got")) == weights(alone)
