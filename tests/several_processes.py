"""Trainings by several processes that know of each other, on CPUs."""

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hddm.data.shard_records import PIXELS
from hddm.data.shards import Rows, Samples, open_shard
from hddm.networks.transformers import ExpertTransformer
from hddm.training.expert import new_network
from hddm.training.loop import Fitted, Task, run_task
from hddm.training.objectives import drawing, loss_of, objective_of
from hddm.training.settings import ExpertRecipe, ExpertSettings, RunOptions, resolve
from hddm.training.sharding import own_part
from hddm.training.state import TrainingState
from hddm.utils.errors import Stopped
from hddm.utils.files import write_json
from hddm.utils.records import WEIGHTS
from tests.artefacts import pixels_of
from tests.killed_runs import in_a_process

SECONDS = 300


@dataclass(frozen=True)
class NotedRows(Rows):
    """Rows that remember which were read."""

    read: list[list[int]] = field(default_factory=list)

    def take(self, rows: Tensor) -> Tensor:
        self.read.append(rows.tolist())
        return super().take(rows)


LOSSES = "losses.json"


def held_bytes(state: TrainingState) -> dict[str, int]:
    """Bytes of memory behind a training's tensors in this process, by kind."""
    parameters = list(state.network.parameters())
    moments: list[Tensor] = []
    for each in state.optimizer.state.values():
        moments += [value for value in each.values() if isinstance(value, Tensor)]
    kinds: dict[str, list[Any]] = {
        "weights": parameters,
        "gradients": [parameter.grad for parameter in parameters],
        "averages": list(state.ema.tensors().values()),
        "moments": moments,
    }
    held: dict[str, int] = {}
    for kind, tensors in kinds.items():
        # Several may lie in one storage.
        storages = [own_part(one).untyped_storage() for one in tensors]
        held[kind] = sum({one.data_ptr(): one.nbytes() for one in storages}.values())
    return held


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
    each process writes the rows that it read, and those that complete the network `held_bytes`.
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

    def complete(fitted: Fitted) -> Callable[[Path], None]:
        held = held_bytes(fitted.state)
        out.with_name(f"{out.name}.held{os.environ.get('RANK', '')}").write_text(json.dumps(held))
        trained, _ = fitted.whole()

        def write(draft: Path) -> None:
            save_file(trained.state_dict(), draft / WEIGHTS)
            write_json(draft / LOSSES, fitted.state.losses)

        return write

    def stop(step: int, loss: float, seconds: float) -> None:
        if step == until:
            signal.raise_signal(signal.SIGTERM)

    with contextlib.suppress(Stopped):
        run_task(task, chosen, out, LOSSES, complete, {}, on_step=stop, run=run)
    out.with_name(f"{out.name}.rows{os.environ.get('RANK', '')}").write_text(json.dumps(noted.read))


def rows_read(out: Path, rank: str = "") -> Any:
    return json.loads(out.with_name(f"{out.name}.rows{rank}").read_text())


def _as_one(
    rank: int, number: int, port: int, target: Callable[..., None], *arguments: object
) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": number, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    target(*arguments)


def together(number: int, target: Callable[..., None], *arguments: object) -> None:
    """Call a function in processes that know of each other, as a launcher starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        in_a_process(_as_one, rank, number, port, target, *arguments) for rank in range(number)
    ]
    for process in processes:
        process.join(SECONDS)
    assert [process.exitcode for process in processes] == [0] * number


def check_close(found: Path, expected: Path, atol: float = 1e-6) -> None:
    """Compare the tensors of two files."""
    one, other = load_file(found), load_file(expected)
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=atol)
