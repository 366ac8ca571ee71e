"""The trainings of a benchmark: what they are, and the jobs that do them in worker processes.

A training that is killed goes on from its last checkpoint, in the work folder of its job.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hddm.benchmark.jobs import Job, Store, end_with_parent, finish_work, publish_work, work_folder
from hddm.experts.records import EXPERT_FILE, ROUTER_FILE, weights_in
from hddm.training.continuation import continue_expert
from hddm.training.expert import train_expert
from hddm.training.loop import OnStep
from hddm.training.router import train_router
from hddm.training.settings import ExpertSettings, LoopSettings, RouterSettings, RunOptions
from hddm.training.state import wait_for_run
from hddm.utils.files import read_json, sha256_of
from hddm.utils.processes import Call, Report

MODEL = "model"
_LOSSES = "losses.safetensors"
# What may differ between machines without making another model of it.
_MACHINE = {"device", "threads"}
_PATIENCE = 60.0

Train = Callable[[Path, OnStep, RunOptions], list[float]]


@dataclass(frozen=True)
class Training:
    """One expert: on which shard and how.

    Args:
        shard: the folder.
        shard_hash: of its content.
        settings: see `ExpertSettings`.
        start: the training whose expert this one goes on with.
        init: an expert folder, not trained here, that it goes on with.
        init_hash: of its weights.
    """

    shard: Path
    shard_hash: str
    settings: ExpertSettings
    start: "Training | None" = None
    init: Path | None = None
    init_hash: str | None = None

    @property
    def job(self) -> Job:
        """By which the expert is found again."""
        inputs = {"shard": self.shard_hash}
        if self.start is not None:
            inputs["start"] = self.start.job.hash
        if self.init_hash is not None:
            inputs["start"] = self.init_hash
        return Job("expert", _recipe(self.settings), inputs)

    @property
    def total_steps(self) -> int:
        """With those of the training that this one goes on with."""
        return self.settings.steps + (self.start.total_steps if self.start is not None else 0)

    def call(self, store: Store, checkpoint_every: int) -> Call:
        """Work of one process; ``start`` must be complete."""
        init = self.init if self.start is None else store.path(self.start.job) / MODEL
        arguments = {
            "folder": store.folder,
            "job": self.job,
            "shard": self.shard,
            "settings": self.settings,
            "init": init,
            "checkpoint_every": checkpoint_every,
        }
        return Call(expert_job, arguments, self.settings.steps * self.settings.batch_size)


def router_training(shards: list[str], settings: RouterSettings) -> Job:
    """The job of a router of shards with these hashes."""
    return Job("router", _recipe(settings), {"shards": shards})


def router_call(store: Store, job: Job, shards: Path, settings: RouterSettings, every: int) -> Call:
    """Work of one process."""
    arguments = {
        "folder": store.folder,
        "job": job,
        "shards": shards,
        "settings": settings,
        "checkpoint_every": every,
    }
    return Call(router_job, arguments, settings.steps * settings.batch_size)


def expert_job(
    folder: Path,
    job: Job,
    shard: Path,
    settings: ExpertSettings,
    init: Path | None,
    checkpoint_every: int,
    report: Report,
) -> None:
    """Train an expert, or go on."""

    def train(out: Path, on_step: OnStep, run: RunOptions) -> list[float]:
        if init is not None:
            return continue_expert(init, shard, out, settings, on_step=on_step, run=run)
        return train_expert(shard, out, settings, on_step=on_step, run=run)

    _train(folder, job, train, settings, checkpoint_every, report)


def router_job(
    folder: Path, job: Job, shards: Path, settings: RouterSettings, checkpoint_every: int, report: Report
) -> None:
    """Train a router, or go on."""

    def train(out: Path, on_step: OnStep, run: RunOptions) -> list[float]:
        return train_router(shards, out, settings, on_step=on_step, run=run)

    _train(folder, job, train, settings, checkpoint_every, report)


def _train(
    folder: Path, job: Job, train: Train, settings: LoopSettings, checkpoint_every: int, report: Report
) -> None:
    end_with_parent()
    if publish_work(folder, job):
        return
    work = work_folder(folder, job)
    work.mkdir(exist_ok=True)
    out, reported = work / MODEL, 0
    if out.exists():
        # Its losses were not written any more; from the last checkpoint both come at once.
        shutil.rmtree(out)

    def on_step(step: int, loss: float, seconds: float) -> None:
        nonlocal reported
        report((step - reported) * settings.batch_size)
        reported = step

    wait_for_run(out, _PATIENCE)
    options = RunOptions(resume=True, checkpoint_every=checkpoint_every, keep=1, log_every=100)
    losses = train(out, on_step, options)
    save_file({"loss": torch.tensor(losses)}, work / _LOSSES)
    weights = weights_in(out)
    assert weights is not None
    result: dict[str, Any] = {
        "weights_sha256": sha256_of(weights),
        "images_seen": settings.steps * settings.batch_size,
    }
    facts = read_json(out / (EXPERT_FILE if job.kind == "expert" else ROUTER_FILE))
    finish_work(folder, job, result, facts["training"]["seconds"])


def _recipe(settings: LoopSettings) -> dict[str, Any]:
    return settings.model_dump(mode="json", exclude=_MACHINE) | {"warmup": settings.warmup_steps}
