"""Trainings on each device, and by several processes, as accelerate starts them."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import hddm
from hddm.data.shards import PIXELS, Rows, Samples, open_shard
from hddm.experts.lora import ADAPTER_WEIGHTS
from hddm.networks.folders import WEIGHTS
from hddm.networks.transformers import ExpertTransformer
from hddm.training.continuation import continue_expert
from hddm.training.device import Device
from hddm.training.expert import new_network, train_expert
from hddm.training.loop import Fitted, Task, train
from hddm.training.objectives import drawing, loss_of, objective_of
from hddm.training.resume import run_folder_of
from hddm.training.settings import ExpertRecipe, ExpertSettings, RunOptions, resolve
from hddm.utils.errors import Stopped
from hddm.utils.files import write_json
from tests.artefacts import Died, ending_at, expert_settings, pixels_of
from tests.killed_runs import checkpoint, in_a_process


@pytest.mark.gpu
def test_a_training_that_is_gone_on_with_is_that_of_a_cpu(whole: Path, tmp_path: Path) -> None:
    """Devices round differently; a lost moment or a wrong step count would show at once."""
    settings = expert_settings("flow", steps=12, threads=1, device="cuda")
    on_cpu = train_expert(whole, tmp_path / "cpu", settings.model_copy(update={"device": "cpu"}))
    run = RunOptions(checkpoint_every=3, resume=True)
    with pytest.raises(Died):
        train_expert(whole, tmp_path / "out", settings, on_step=ending_at(7), run=run)
    losses = train_expert(whole, tmp_path / "out", settings, run=run)
    assert losses == pytest.approx(on_cpu, rel=1e-4)
    _check_close(tmp_path / "out" / WEIGHTS, tmp_path / "cpu" / WEIGHTS, atol=1e-4)


@pytest.mark.gpu
def test_samples_on_a_gpu_are_those_of_a_cpu(flow_expert: Path, ensemble: Path) -> None:
    for folder in (flow_expert, ensemble):
        expected, found = (
            hddm.sample(hddm.load(folder, device=one), num=4, seed=1, steps=5) for one in ("cpu", "cuda")
        )
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)


SECONDS = 300


def _launched(shard: Path, out: Path, settings: ExpertSettings, *more: str) -> subprocess.Popen[str]:
    """Two processes that train ``out``, in a group of their own."""
    file = out.with_name("run.yaml")
    file.write_text("".join(f"{k}: {v}\n" for k, v in settings.model_dump(exclude_none=True).items()))
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
    folder: Path, out: Path, settings: ExpertSettings, run: RunOptions | None = None, until: int | None = None
) -> None:
    """Train a network in float64 and write it; a signal at step ``until`` stops all processes.

    The order of a sum leaves no trace there; in float32 Adam scales it up where a gradient is nothing else,
    as that of a bias of keys, and Muon's iteration where it turns the rounding to bfloat16. Beside ``out``
    each process writes the rows that it read and the bytes that it held in the end.
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
        assert {type(module).__module__ for module in network.modules()}.isdisjoint({FSDPModule.__module__})
        assert {type(value) for value in network.parameters()} == {nn.Parameter}
        save_file(network.state_dict(), draft / WEIGHTS)
        write_json(draft / LOSSES, fitted.losses)

    def stop(step: int, loss: float, seconds: float) -> None:
        if step == until:
            signal.raise_signal(signal.SIGTERM)

    held: dict[str, int] = {}
    with mock.patch.object(Device, "update", _weighing(held)), contextlib.suppress(Stopped):
        train(task, chosen, out, LOSSES, write, {}, on_step=stop, run=run)
    facts = {"rows": noted.read, "held": held}
    out.with_name(f"{out.name}.facts{os.environ.get('RANK', '')}").write_text(json.dumps(facts))


def _weighing(held: dict[str, int]) -> Callable[[Device, torch.optim.Optimizer, Tensor], None]:
    """A step of the optimiser that notes the bytes of parameters, gradients and state in this process."""
    update = Device.update

    def bytes_of(values: Iterable[Tensor]) -> int:
        own = [value.to_local() if isinstance(value, DTensor) else value for value in values]
        # Gradients that were exchanged together lie in one storage.
        return sum({one.data_ptr(): one.nbytes() for one in map(Tensor.untyped_storage, own)}.values())

    def weigh(device: Device, optimizer: torch.optim.Optimizer, skipped: Tensor) -> None:
        update(device, optimizer, skipped)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        held["parameters"] = bytes_of(parameters)
        held["gradients"] = bytes_of(p.grad for p in parameters)
        held["state"] = bytes_of(value for one in optimizer.state.values() for value in one.values())

    return weigh


def _facts(out: Path, rank: str = "") -> Any:
    return json.loads(out.with_name(f"{out.name}.facts{rank}").read_text())


def _as_one_of_two(rank: int, port: int, target: Callable[..., None], *arguments: object) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in place.items()} | {"MASTER_PORT": str(port)})
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


def _check_close(found: Path, expected: Path, atol: float = 1e-6, without_keys: bool = False) -> None:
    """Compare the tensors of two files; or, of the bias of attention, all but the part of the keys.

    A softmax does not see that part: its gradient is rounding, which AdamW makes a step.
    """
    one, other = load_file(found), load_file(expected)
    assert one.keys() == other.keys()
    for name, value in one.items():
        if without_keys and name.endswith("in_proj_bias"):
            value, other[name] = (torch.cat(each.chunk(3)[::2]) for each in (value, other[name]))
        torch.testing.assert_close(value, other[name], rtol=0, atol=atol)


@pytest.fixture(scope="module", params=["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def alone(request: pytest.FixtureRequest, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training by one process."""
    out = tmp_path_factory.mktemp("alone") / str(request.param)
    train_in_float64(whole, out, _settings_of(out), RunOptions(checkpoint_every=100))
    return out


def _settings_of(alone: Path) -> ExpertSettings:
    chosen = {"steps": 100, "batch_size": 12, "threads": 1, "device": "cpu"}
    return expert_settings("flow", optimizer=alone.name, **chosen)


@pytest.mark.integration
@pytest.mark.parametrize("fsdp", [pytest.param(False, marks=pytest.mark.slow), True])
def test_two_processes_train_to_the_weights_of_one_and_each_reads_its_own_images(
    fsdp: bool, alone: Path, whole: Path, tmp_path: Path
) -> None:
    """With --fsdp each holds its half alone, in three parts of a batch."""
    out, parts = tmp_path / "two", 3 if fsdp else 1
    changes = {"fsdp": fsdp, "gradient_accumulation_steps": parts}
    _by_two(train_in_float64, whole, out, _settings_of(alone).model_copy(update=changes))
    _check_close(out / WEIGHTS, alone / WEIGHTS)
    expected, *found = _facts(alone), _facts(out, "0"), _facts(out, "1")
    first, second = (one["rows"] for one in found)
    assert {len(rows) for rows in (*first, *second)} == {6}
    assert [a + b for a, b in zip(first, second, strict=True)] == expected["rows"]
    for one in found:
        for what, size in expected["held"].items():
            assert one["held"][what] <= 0.6 * size if fsdp else one["held"][what] == size


@pytest.mark.integration
@pytest.mark.parametrize("begun_by", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_with_split_weights_goes_on_with_them_whole_and_the_other_way_round(
    begun_by: int, alone: Path, whole: Path, tmp_path: Path
) -> None:
    """With the same options, or without --fsdp where it has nothing to split."""
    out, run = tmp_path / "out", RunOptions(resume=True, checkpoint_every=100)
    settings = _settings_of(alone)
    lives = [(1, settings), (2, settings.model_copy(update={"fsdp": True}))]
    for processes, chosen in lives if begun_by == 1 else reversed(lives):
        until = 40 if processes == begun_by else None
        arguments = (train_in_float64, whole, out, chosen, run, until)
        if processes == 1:
            train_in_float64(*arguments[1:])
        else:
            _by_two(*arguments)
        assert out.exists() == (until is None)
        assert len(checkpoint(run_folder_of(out))) == 4
    _check_close(out / WEIGHTS, alone / WEIGHTS)
    for name in checkpoint(run_folder_of(out)):
        place = Path("checkpoints") / "step_00000100" / name
        _check_close(run_folder_of(out) / place, run_folder_of(alone) / place)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"mixed_precision": "bf16", "gradient_checkpointing": True, "gradient_accumulation_steps": 2},
        {"lora_rank": 2, "gradient_checkpointing": True},
    ],
    ids=["bf16", "adapter"],
)
def test_split_weights_go_with_adapters_parts_checkpointing_and_bf16(
    changes: dict[str, Any], flow_expert: Path, whole: Path, tmp_path: Path
) -> None:
    """In float32, as two processes train that have the whole network, to a tenth of a step's rate at most."""
    chosen = {"steps": 20, "batch_size": 12, "threads": 1, "device": "cpu", **changes}
    settings = expert_settings("flow", **chosen)
    for fsdp in (False, True):
        out = tmp_path / f"{fsdp}"
        _by_two(continue_expert, flow_expert, whole, out, settings.model_copy(update={"fsdp": fsdp}))
    is_adapter = "lora_rank" in changes
    name, atol = (ADAPTER_WEIGHTS, 1e-6) if is_adapter else (WEIGHTS, 3e-4)
    _check_close(tmp_path / "True" / name, tmp_path / "False" / name, atol, without_keys=not is_adapter)


# Muon's iteration is in bfloat16, where the order of a sum counts: a quarter of a step's rate is allowed.


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "number"), [("adamw", signal.SIGTERM), ("muon", signal.SIGKILL)])
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
