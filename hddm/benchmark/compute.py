"""Counted floating-point operations of training and sampling, a multiply-add being two.

    training = steps × (batch × one image's step + the optimiser's update) + calibration
    calibration = states that it looks at × one evaluation

Real steps of each network are counted; only matrix products count, as those of Muon's update. The single
model gets as many steps as fit the cost of the homogeneous ensemble with its router, so that the two differ
by less than one of its steps.
"""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hddm.benchmark.jobs import Job, Store
from hddm.benchmark.settings import BenchmarkSettings
from hddm.calibration import LEVELS, STATES
from hddm.data.shard_records import find_shards, read_manifest
from hddm.data.shards import open_shard
from hddm.experts.loading import load
from hddm.networks.transformers import ExpertTransformer, RouterTransformer
from hddm.routers import Router
from hddm.training.continuation import continue_expert
from hddm.training.expert import new_network, train_expert
from hddm.training.recipe import resolve
from hddm.training.router import NOISED, train_router
from hddm.training.settings import ExpertRecipe, ExpertSettings, LoopSettings, RouterSettings
from hddm.utils.errors import HddmError
from hddm.velocity import VelocityField

# Late enough for a calibration to take part.
_TIME = 0.75


@contextlib.contextmanager
def counting() -> Iterator[FlopCounterMode]:
    """Count floating-point operations within the block."""
    # The fused attention kernels for the CPU have no entry in torch's counter.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        yield counter


def evaluation_flop(field: VelocityField, **conditions: Tensor) -> int:
    """Count one velocity of one image, with the expert's calibration and without guidance."""
    assert field.sample_shape is not None
    x = torch.zeros(1, *field.sample_shape, device=field.device)
    t = torch.full((1,), _TIME, dtype=torch.float64, device=field.device)
    return _forward(field.velocity, x, t, **conditions)


def router_flop(router: object, x: Tensor) -> int:
    """Count one call of a router for a state like ``x``; 0 for anything but a `Router`."""
    t = torch.full((1,), _TIME, device=x.device)
    return _forward(router, x[:1], t) if isinstance(router, Router) else 0


@torch.no_grad()
def _forward(function: Callable[..., object], x: Tensor, t: Tensor, **conditions: Tensor) -> int:
    with counting() as counter:
        function(x, t, **conditions)
    return int(counter.get_total_flops())


# Settings that do not affect the cost of a step of one image.
_FREE = {
    *("steps", "batch_size", "gradient_accumulation_steps", "warmup", "weight_decay"),
    *("learning_rate", "muon_learning_rate", "weighting", "time_sampling"),
    *("ema_decay", "max_grad_norm", "max_non_finite", "calibrate", "seed"),
    *("device", "threads", "mixed_precision", "compile", "fsdp"),
}


@dataclass(frozen=True)
class Cost:
    """Operations: ``step`` of training on one image, ``forward`` alone, ``update`` of a step's weights."""

    step: int
    forward: int
    update: int = 0

    def steps(self, settings: LoopSettings) -> int:
        return settings.steps * self.of_step(settings.batch_size)

    @property
    def calibration(self) -> int:
        """Cost of an expert's calibration after its training."""
        return LEVELS * STATES * self.forward

    def of_expert(self, settings: LoopSettings) -> int:
        """Cost of training an expert, calibration included."""
        return self.steps(settings) + self.calibration

    def of_router(self, settings: RouterSettings) -> int:
        """Cost of training a router, with its calibration where it has one."""
        return self.steps(settings) + settings.calibrate * NOISED * self.forward

    def most_steps(self, budget: int, batch_size: int) -> int:
        """Steps of an expert within ``budget``, calibration included; at least 1."""
        return max(1, (budget - self.calibration) // self.of_step(batch_size))

    def of_step(self, batch_size: int) -> int:
        """Cost of one step of training."""
        return batch_size * self.step + self.update


class _TwoSteps(Exception):
    """Raised to end a training after two steps."""


def count_step(train: Callable[..., object], settings: LoopSettings) -> tuple[int, int]:
    """Count a step of ``train(out, settings, on_step=…)``: one image's part, and the part of any batch."""
    one, two = (_count_batch(train, settings, size) for size in (1, 2))
    return two - one, 2 * one - two


def _count_batch(train: Callable[..., object], settings: LoopSettings, batch_size: int) -> int:
    """Count the second step of a training, forward, backward and update.

    It runs in float32 on the CPU, so that the count is the same everywhere. Work that is done once before the
    first step, such as taking moments, does not count.
    """
    changes: dict[str, Any] = {"steps": 2, "batch_size": batch_size, "gradient_accumulation_steps": 1}
    changes |= {"mixed_precision": "no", "compile": False, "fsdp": False, "device": "cpu", "threads": 1}
    if isinstance(settings, RouterSettings):
        changes["calibrate"] = False
    totals: list[int] = []

    def stop(step: int, loss: float, seconds: float) -> None:
        totals.append(counter.get_total_flops())
        if len(totals) == 2:
            raise _TwoSteps

    with tempfile.TemporaryDirectory() as folder, counting() as counter:
        with contextlib.suppress(_TwoSteps):
            train(Path(folder) / "out", settings.model_copy(update=changes), on_step=stop)
        first, second = totals
    return second - first


def count_expert(shard: Path, settings: ExpertSettings) -> Cost:
    """Count the new network that ``settings`` train on ``shard``; an adapter raises `HddmError`."""
    if settings.lora_rank is not None:
        raise HddmError(
            f"lora_rank {settings.lora_rank}: adapts an existing expert; give the model an init, and "
            f"flow as its only objective"
        )
    images = open_shard(shard)
    classes = len(images.classes) if settings.class_conditional else None
    rotary = resolve(ExpertRecipe, settings).rotary
    network = new_network(
        ExpertTransformer, settings.size, images.shape, 0, num_classes=classes, rotary=rotary
    )
    step, update = count_step(functools.partial(train_expert, shard), settings)
    return Cost(step, _network_flop(network, images.shape, **_labels(settings)), update)


def count_continued(init: Path, shard: Path, settings: ExpertSettings) -> Cost:
    """Count the network in ``init`` as ``settings`` continue it; raises as `continue_expert`."""
    step, update = count_step(functools.partial(continue_expert, init, shard), settings)
    field = load(init)
    assert isinstance(field, VelocityField)
    field.calibration = None
    return Cost(step, evaluation_flop(field, **_labels(settings)), update)


def count_router(shards: Path, settings: RouterSettings) -> Cost:
    """Count the router that ``settings`` train on a partition."""
    folders = find_shards(shards)
    shape = open_shard(folders[0]).shape
    network = new_network(RouterTransformer, settings.size, shape, 0, num_experts=len(folders))
    step, update = count_step(functools.partial(train_router, shards), settings)
    return Cost(step, _network_flop(network, shape), update)


def _labels(settings: ExpertSettings) -> dict[str, Tensor]:
    return {"class_labels": torch.zeros(1, dtype=torch.long)} if settings.class_conditional else {}


def _network_flop(network: nn.Module, shape: tuple[int, ...], **conditions: Tensor) -> int:
    return _forward(network, torch.zeros(1, *shape), torch.full((1,), 0.5), **conditions)


class Costs:
    """Costs of trainings; each kind of network is counted once and kept in the store."""

    def __init__(self, store: Store, shards: Path) -> None:
        self._store, self._shards, self._folders = store, shards, find_shards(shards)
        self._hash = read_manifest(self._folders[0]).hash

    def expert(
        self, settings: ExpertSettings, init: Path | None = None, init_hash: str | None = None
    ) -> Cost:
        """`count_expert`; of an expert that goes on with ``init``, of this content, `count_continued`."""
        shard = self._folders[0]
        if init is None:
            return self._kept("expert", settings, lambda: count_expert(shard, settings))
        return self._kept("expert", settings, lambda: count_continued(init, shard, settings), init=init_hash)

    def router(self, settings: RouterSettings) -> Cost:
        return self._kept("router", settings, lambda: count_router(self._shards, settings))

    def _kept(
        self, network: str, settings: LoopSettings, count: Callable[[], Cost], **start: str | None
    ) -> Cost:
        counted = {"network": network, **settings.model_dump(mode="json", exclude=_FREE)}
        job = Job("cost", counted, {"images": self._hash, "shards": len(self._folders), **start})
        return Cost(**self._store.once(job, lambda _: vars(count())))


def single_steps(settings: BenchmarkSettings, objective: str, costs: Costs, **changes: Any) -> int:
    """Return the single model's steps for the cost of the ensemble of its objective, router included.

    ``changes`` are the single model's own (`BenchmarkSettings.single`), not the ensemble's.
    """
    expert, router = settings.expert(objective, 0), settings.router(0)
    budget = settings.partition.shards * costs.expert(expert).of_expert(expert)
    if settings.partition.shards > 1:
        budget += costs.router(router).of_router(router)
    single = settings.single(objective, 0, 1, **changes)
    return costs.expert(single).most_steps(budget, single.batch_size)
