"""Trainings on each device, and by several processes, as accelerate starts them."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hddm
from hddm.data.shard_records import PIXELS
from hddm.data.shards import Rows, Samples, open_shard
from hddm.networks.transformers import ExpertTransformer
from hddm.training.expert import new_network, train_expert
from hddm.training.loop import Fitted, Task, run_task
from hddm.training.objectives import drawing, loss_of, objective_of
from hddm.training.resume import run_folder_of
from hddm.training.settings import ExpertRecipe, ExpertSettings, RunOptions, resolve
from hddm.utils.errors import Stopped
from hddm.utils.files import write_json
from hddm.utils.records import WEIGHTS
from tests.artefacts import Died, ending_at, expert_settings, pixels_of
from tests.killed_runs import checkpoint, in_a_process


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
    _check_close(tmp_path / "out" / WEIGHTS, tmp_path / "cpu" / WEIGHTS, atol=1e-3)


@pytest.mark.gpu
def test_samples_on_a_gpu_are_those_of_a_cpu(flow_expert: Path, ensemble: Path) -> None:
    for folder in (flow_expert, ensemble):
        expected, found = (
            hddm.sample(hddm.load(folder, device=one), num=4, seed=1, steps=5)
            for one in ("cpu", "cuda")
        )
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)


SECONDS = 300


def _launched(
    shard: Path, out: Path, settings: ExpertSettings, *more: str
) -> subprocess.Popen[str]:
    """Two processes that train ``out``, in a group of their own."""
    file = out.with_name("run.yaml")
    file.write_text(
        "".join(f"{k}: {v}\n" for k, v in settings.model_dump(exclude_none=True).items())
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
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


@dataclass(frozen=True)
class NotedRows(Rows):
    """Rows that remember which were read."""

    read: list[list[int]] = field(default_factory=list)

    def take(self, rows: Tensor) -> Tensor:
        self.read.append(rows.tolist())
        return super().take(rows)


LOSSES = "losses.json"


def train_in_float64(
    folder: Path,
    out: Path,
    settings: ExpertSettings,
    run: RunOptions | None = None,
    until: int | None = None,
) -> None:
    """Train a network in float64 and write it; a signal at step ``until`` stops all processes.

    The order of a sum leaves no trace there; in float32 Adam scales it up where a gradient is nothing else,
    as that of a bias of keys, and Muon's iteration where it turns the rounding to bfloat16. Beside ``out``
    each process writes the rows that it read.
    """
    torch.set_num_threads(1)
    shard = open_shard(folder)
    noted = NotedRows((pixels_of(shard),))
    shard = replace(shard, stored=Samples({PIXELS: noted}))
    chosen = resolve(ExpertRecipe, settings)
    network = new_network(ExpertTransformer, chosen.size, shard.shape, 0, rotary=True).double()
    objective = objective_of(chosen)

    def in_float64(module: nn.Module) -> Callable[..., Tensor]:
        return lambda y, time: module(y.double(), time.double())

    draw = drawing(shard, objective, chosen, {}, {})
    task = Task(network, len(shard), draw, loss_of(objective, in_float64))

    def write(draft: Path, fitted: Fitted) -> None:
        save_file(network.state_dict(), draft / WEIGHTS)
        write_json(draft / LOSSES, fitted.state.losses)

    def stop(step: int, loss: float, seconds: float) -> None:
        if step == until:
            signal.raise_signal(signal.SIGTERM)

    with contextlib.suppress(Stopped):
        run_task(task, chosen, out, LOSSES, write, {}, on_step=stop, run=run)
    out.with_name(f"{out.name}.rows{os.environ.get('RANK', '')}").write_text(json.dumps(noted.read))


def _rows(out: Path, rank: str = "") -> Any:
    return json.loads(out.with_name(f"{out.name}.rows{rank}").read_text())


def _as_one_of_two(rank: int, port: int, target: Callable[..., None], *arguments: object) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(
        {name: str(value) for name, value in place.items()} | {"MASTER_PORT": str(port)}
    )
    target(*arguments)


def _by_two(target: Callable[..., None], *arguments: object) -> None:
    """Call a function in two processes that know of each other, as a launcher starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [in_a_process(_as_one_of_two, rank, port, target, *arguments) for rank in range(2)]
    for process in processes:
        process.join(SECONDS)
    assert [process.exitcode for process in processes] == [0, 0]


def _check_close(found: Path, expected: Path, atol: float = 1e-6) -> None:
    """Compare the tensors of two files."""
    one, other = load_file(found), load_file(expected)
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=atol)


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
    _by_two(train_in_float64, whole, out, _settings_of(alone).model_copy(update=changes))
    _check_close(out / WEIGHTS, alone / WEIGHTS)
    first, second = _rows(out, "0"), _rows(out, "1")
    assert {len(rows) for rows in (*first, *second)} == {6}
    assert [a + b for a, b in zip(first, second, strict=True)] == _rows(alone)


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
            _by_two(train_in_float64, *arguments)
        assert out.exists() == (until is None)
    for name in checkpoint(run_folder_of(out)):
        place = Path("checkpoints") / "step_00000100" / name
        _check_close(run_folder_of(out) / place, run_folder_of(alone) / place)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "number"), [("adamw", signal.SIGTERM), ("muon", signal.SIGKILL)]
)
def test_two_processes_that_are_stopped_together_go_on_as_if_nothing_had_been(
    optimizer: str, number: signal.Signals, whole: Path, tmp_path: Path
) -> None:
    """The signal goes to all of them and to their launcher, which passes SIGTERM on once more."""
    chosen = {"steps": 400, "threads": 1, "device": "cpu", "gradient_accumulation_steps": 2}
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
