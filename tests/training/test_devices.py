"""Trainings on each device, and by several processes, as accelerate starts them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import hddm
from hddm.training.expert import train_expert
from hddm.training.resume import run_folder_of
from hddm.training.settings import ExpertSettings, RunOptions
from hddm.utils.records import WEIGHTS
from tests.artefacts import Died, ending_at, expert_settings
from tests.killed_runs import checkpoint
from tests.several_processes import (
    SECONDS,
    check_close,
    rows_read,
    together,
    train_in_float64,
)


@pytest.mark.gpu
def test_a_training_that_is_gone_on_with_is_that_of_a_cpu(whole: Path, tmp_path: Path) -> None:
    """Devices round differently; a lost moment or a wrong step count would show at once."""
    cuda = {"device": "cuda", "mixed_precision": "no"}
    settings = expert_settings("flow", steps=12, threads=1, **cuda)
    on_cpu = train_expert(whole, tmp_path / "cpu", settings.model_copy(update={"device": "cpu"}))
    run = RunOptions(checkpoint_every=3, resume=True)
    with pytest.raises(Died):
        train_expert(whole, tmp_path / "out", settings, on_step=ending_at(7), run=run)
    losses = train_expert(whole, tmp_path / "out", settings, run=run)
    # Products are in TF32, with 10 bits.
    assert losses == pytest.approx(on_cpu, rel=2e-3)
    check_close(tmp_path / "out" / WEIGHTS, tmp_path / "cpu" / WEIGHTS, atol=1e-3)


@pytest.mark.gpu
def test_samples_on_a_gpu_are_those_of_a_cpu(flow_expert: Path, ensemble: Path) -> None:
    for folder in (flow_expert, ensemble):
        expected, found = (
            hddm.sample(hddm.load(folder, device=one), num=4, seed=1, steps=5)
            for one in ("cpu", "cuda")
        )
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)


def _launched(
    shard: Path, out: Path, settings: ExpertSettings, *more: str
) -> subprocess.Popen[str]:
    """Two processes that train ``out``, in a group of their own."""
    file = out.with_name("run.yaml")
    file.write_text(
        "".join(f"{k}: {v}\n" for k, v in settings.model_dump(exclude_none=True).items())
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    if settings.shard_weights:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    verb = ["-m", "hddm_cli", "train", "expert", shard, "--out", out, "--config", file, *more]
    return subprocess.Popen(
        [*command, *map(str, verb)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _finish(process: subprocess.Popen[str]) -> None:
    told, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, told


@pytest.fixture(scope="module", params=["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def alone(
    request: pytest.FixtureRequest, whole: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A training by one process."""
    out = tmp_path_factory.mktemp("alone") / str(request.param)
    train_in_float64(whole, out, _settings_of(out), RunOptions(checkpoint_every=100))
    return out


def _settings_of(alone: Path) -> ExpertSettings:
    chosen = {"steps": 100, "batch_size": 12, "threads": 1, "device": "cpu"}
    return expert_settings("flow", optimizer=alone.name, **chosen)


@pytest.mark.integration
@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_two_processes_train_to_the_weights_of_one_and_each_reads_its_own_images(
    parts: int, alone: Path, whole: Path, tmp_path: Path
) -> None:
    """In one part of a batch, or in three."""
    out, changes = tmp_path / "two", {"gradient_accumulation_steps": parts}
    together(2, train_in_float64, whole, out, _settings_of(alone).model_copy(update=changes))
    check_close(out / WEIGHTS, alone / WEIGHTS)
    first, second = rows_read(out, "0"), rows_read(out, "1")
    assert {len(rows) for rows in (*first, *second)} == {6}
    assert [a + b for a, b in zip(first, second, strict=True)] == rows_read(alone)


@pytest.mark.integration
@pytest.mark.parametrize("begun_by", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_goes_on_with_another_number_of_processes(
    begun_by: int, alone: Path, whole: Path, tmp_path: Path
) -> None:
    out, run = tmp_path / "out", RunOptions(resume=True, checkpoint_every=100)
    for processes in (begun_by, 3 - begun_by):
        until = 40 if processes == begun_by else None
        arguments = (whole, out, _settings_of(alone), run, until)
        if processes == 1:
            train_in_float64(*arguments)
        else:
            together(2, train_in_float64, *arguments)
        assert out.exists() == (until is None)
    for name in checkpoint(run_folder_of(out)):
        place = Path("checkpoints") / "step_00000100" / name
        check_close(run_folder_of(out) / place, run_folder_of(alone) / place)


@pytest.mark.slow
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "number"), [("adamw", signal.SIGTERM), ("muon", signal.SIGKILL)]
)
def test_two_processes_that_are_stopped_together_go_on_as_if_nothing_had_been(
    optimizer: str, number: signal.Signals, is_split: bool, whole: Path, tmp_path: Path
) -> None:
    """The signal goes to all of them and to their launcher, which passes SIGTERM on once more."""
    chosen = {"steps": 400, "threads": 1, "device": "cpu", "gradient_accumulation_steps": 2}
    if is_split:
        chosen |= {"steps": 100, "shard_weights": True, "noise_range": "0:0.5"}
    settings = expert_settings("flow", **chosen, optimizer=optimizer)
    for name in ("straight", "stopped"):
        (tmp_path / name).mkdir()
    _finish(_launched(whole, tmp_path / "straight" / "out", settings))
    out = tmp_path / "stopped" / "out"
    process = _launched(whole, out, settings, "--checkpoint-every", "5")
    saved, end = out.with_name("out.run") / "checkpoints", time.monotonic() + SECONDS
    while not list(saved.glob("step_*")) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    os.killpg(process.pid, number)
    process.communicate(timeout=SECONDS)
    assert not out.exists()
    _finish(_launched(whole, out, settings, "--checkpoint-every", "5", "--resume"))
    straight = tmp_path / "straight" / "out"
    assert (out / WEIGHTS).read_bytes() == (straight / WEIGHTS).read_bytes()
    assert checkpoint(out.with_name("out.run")) == checkpoint(straight.with_name("out.run"))
