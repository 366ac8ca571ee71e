"""Real trainings in processes of their own, that are killed from outside or at a moment of their choice."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

# These are imported late, once a process; here, once for all.
import accelerate
import diffusers.hooks
import torch
from torch import Tensor

from hddm.data.shard_records import PIXELS
from hddm.data.shards import ALL, Own, Rows, Samples, open_shard
from hddm.training import expert
from hddm.training.resume import run_folder_of
from hddm.training.settings import RunOptions
from hddm.utils.errors import Stopped
from hddm.utils.processes import TOGETHER
from tests.artefacts import expert_settings, killing, pixels_of

STEPS, BATCH, EVERY = 24, 7, 5

CONTEXT = get_context("forkserver")
# Imported once, so that a process costs milliseconds.
LATE = [accelerate.__name__, diffusers.hooks.__name__, "hddm.networks.families.vaes"]
CONTEXT.set_forkserver_preload([__name__, *LATE])


def in_a_process(target: Callable[..., None], *arguments: object) -> ForkServerProcess:
    """A call that runs in a process of its own."""
    process = CONTEXT.Process(target=target, args=arguments)
    process.start()
    return process


def settings() -> Any:
    """48 images in batches of 7: epochs end within batches."""
    sizes = {"steps": STEPS, "batch_size": BATCH, "threads": 1, "device": "cpu"}
    return expert_settings("flow", class_conditional=True, random_flip=True, **sizes)


@dataclass(frozen=True)
class NotedPixels(Samples):
    """Pixels that remember which were taken."""

    taken: list[list[int]] = field(default_factory=list)

    def take(
        self, rows: Tensor, noise: torch.Generator | None, flip: Tensor | None, own: Own = ALL
    ) -> Tensor:
        self.taken.append(rows[own].tolist())
        return super().take(rows, noise, flip, own)


def train(shard: Path, out: Path, diary: Path, moment: tuple[str, str] | None = None) -> None:
    """Train, or go on; note what every step saw in ``diary``; be killed at ``moment``.

    ``moment`` is ("step", "17"); ("signal", "15") for that signal in step 3, ("signals", "15") for two at
    once, ("signals", "15 later") for two one after the other; or an audit event of Python and a part of its
    arguments: ("os.rename", "step_00000010").
    """
    torch.set_num_threads(1)
    if moment is not None:
        sys.addaudithook(killing(*moment))
    read = open_shard(shard)
    noted = NotedPixels({PIXELS: Rows((pixels_of(read),))})
    begun: list[int] = []

    def note(step: int, loss: float, seconds: float) -> None:
        begun.append(step)
        # Those of later steps are taken ahead.
        batches = [rows for rows in noted.taken if len(rows) == BATCH]
        with diary.open("a") as file:
            file.write(json.dumps([step, batches[step - begun[0]], loss]) + "\n")
        if moment == ("step", str(step)):
            os.kill(os.getpid(), signal.SIGKILL)
        if moment is not None and moment[0].startswith("signal") and step == 3:
            number, _, later = moment[1].partition(" ")
            signal.raise_signal(signal.Signals(int(number)))
            if moment[0] == "signals":
                time.sleep(TOGETHER if later else 0)
                signal.raise_signal(signal.Signals(int(number)))

    options = RunOptions(resume=True, checkpoint_every=EVERY)
    try:
        with mock.patch.object(expert, "open_shard", return_value=replace(read, stored=noted)):
            expert.train_expert(shard, out, settings(), on_step=note, run=options)
    except Stopped as stopped:
        sys.exit(stopped.exit_code)


def start(
    shard: Path, out: Path, diary: Path, moment: tuple[str, str] | None = None
) -> ForkServerProcess:
    """`train` in a process of its own."""
    return in_a_process(train, shard, out, diary, moment)


def entries(diary: Path) -> dict[int, tuple[list[int], float]]:
    """Samples and loss by step; a step that ran in several lives must have been the same in all."""
    found: dict[int, tuple[list[int], float]] = {}
    for line in diary.read_text().splitlines():
        try:
            step, rows, loss = json.loads(line)
        except json.JSONDecodeError:
            # Its process was killed as it wrote.
            continue
        assert found.setdefault(step, (rows, loss)) == (rows, loss), (
            f"step {step} differs between lives"
        )
    return found


def checkpoint(run: Path) -> dict[str, bytes]:
    """The last checkpoint's tensors, as bytes."""
    last = max((run / "checkpoints").glob("step_*"))
    return {path.name: path.read_bytes() for path in last.glob("*.safetensors")}


def holder(out: Path) -> int:
    """The process that trains ``out``."""
    return int((run_folder_of(out) / "lock").read_text().split()[1])
