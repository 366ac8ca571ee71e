"""Trainings of a benchmark, as work for processes; a killed one resumes from its last checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hddm.benchmark.jobs import Job, Store
from hddm.data.images import save_png, to_bytes
from hddm.data.partition import partition
from hddm.data.shards import load_shard
from hddm.experts.loading import load
from hddm.experts.records import EXPERT_FILE, ROUTER_FILE
from hddm.sampling import sample
from hddm.training.continuation import continue_expert
from hddm.training.expert import train_expert
from hddm.training.recipe import Start, resolve
from hddm.training.router import train_router
from hddm.training.settings import (
    FIXED_BY_INIT,
    ExpertRecipe,
    ExpertSettings,
    RouterRecipe,
    RouterSettings,
    RunOptions,
)
from hddm.training.state import wait_for_run
from hddm.utils.files import read_json
from hddm.utils.processes import Report
from hddm.utils.records import WHOLE

MODEL = "model"
# What may differ between machines without making another model of it.
_MACHINE = {"device", "threads", "fsdp"}
_PATIENCE = 60.0
_CHECKPOINT_EVERY = 500


@dataclass(frozen=True)
class Training:
    """One expert on one shard."""

    shard: Path
    shard_hash: str
    settings: ExpertSettings
    start: "Training | None" = None
    """The training that this one continues, which must be done first."""
    init: Path | None = None
    """An expert folder, not trained here, that it continues; ``init_hash`` is of its content."""
    init_hash: str | None = None
    replayed: int = 0
    """Number of samples of the model that it continues, to train on beside the shard (generative replay)."""
    checkpoint_every: int = _CHECKPOINT_EVERY

    @property
    def job(self) -> Job:
        start = self.init_hash if self.start is None else self.start.job.hash
        inputs: dict[str, Any] = {"shard": self.shard_hash} | ({} if start is None else {"start": start})
        # Left out where there are none, so that earlier trainings are found.
        inputs |= {"replayed": self.replayed} if self.replayed else {}
        return Job("expert", _identity(ExpertRecipe, self.settings, start is None), inputs)

    @property
    def chain(self) -> "list[Training]":
        """This training, after those that it continues."""
        return [*(self.start.chain if self.start is not None else ()), self]

    @property
    def units(self) -> int:
        return self.settings.steps * self.settings.batch_size

    def do(self, store: Store, report: Report) -> None:
        init = self.init if self.start is None else store.path(self.start.job) / MODEL
        shard = self._with_samples(store, init) if self.replayed and init is not None else self.shard
        train: Callable[..., object] = (
            partial(train_expert, shard) if init is None else partial(continue_expert, init, shard)
        )
        _train(store, self, train, EXPERT_FILE, report)

    def _with_samples(self, store: Store, old: Path) -> Path:
        """A shard of this shard's images and of samples of ``old``, drawn with the training's seed."""

        def make(folder: Path) -> None:
            drawn = sample(load(old), self.replayed, self.settings.seed)
            both = torch.cat([to_bytes(load_shard(self.shard).images), to_bytes(drawn)])
            for index, image in enumerate(both):
                path = folder / "images" / f"{index:06d}.png"
                path.parent.mkdir(exist_ok=True)
                save_png(image, path)
            partition(folder / "images", folder / "shards", 1)

        job = Job("replay", {"samples": self.replayed, "seed": self.settings.seed}, self.job.inputs)
        store.once(job, make)
        return store.path(job) / "shards" / "shard_0"


@dataclass(frozen=True)
class RouterTraining:
    """The router of a partition, whose shards have these hashes."""

    shards: Path
    hashes: tuple[str, ...]
    settings: RouterSettings
    checkpoint_every: int = _CHECKPOINT_EVERY

    @property
    def job(self) -> Job:
        return Job("router", _identity(RouterRecipe, self.settings), {"shards": list(self.hashes)})

    @property
    def units(self) -> int:
        return self.settings.steps * self.settings.batch_size

    def do(self, store: Store, report: Report) -> None:
        _train(store, self, partial(train_router, self.shards), ROUTER_FILE, report)


def _train(
    store: Store,
    task: Training | RouterTraining,
    train: Callable[..., object],
    record: str,
    report: Report,
) -> None:
    job, settings = task.job, task.settings
    work = store.work_folder(job)
    work.mkdir(exist_ok=True)
    out, reported = work / MODEL, 0

    def on_step(step: int, loss: float, seconds: float) -> None:
        nonlocal reported
        report((step - reported) * settings.batch_size)
        reported = step

    if not out.exists():
        wait_for_run(out, _PATIENCE)
        options = RunOptions(resume=True, checkpoint_every=task.checkpoint_every, keep=1, log_every=100)
        train(out, settings, on_step=on_step, run=options)
    store.finish_work(job, read_json(out / record)["training"]["seconds"])


def _identity(
    kind: type[ExpertRecipe] | type[RouterRecipe], settings: Any, is_new: bool = True
) -> dict[str, Any]:
    """Return the recipe of a training; what its start decides is as requested, since its hash tells that."""
    recipe = resolve(kind, settings, Start(is_new)).model_dump(mode="json", exclude=_MACHINE)
    if not is_new:
        recipe |= settings.model_dump(mode="json", include={*FIXED_BY_INIT, "noise_range"})
    # Left out where it is all of t, so that earlier trainings are found.
    if recipe.get("noise_range") in (None, [*WHOLE]):
        recipe.pop("noise_range", None)
    return recipe
