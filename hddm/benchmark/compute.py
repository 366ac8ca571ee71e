"""Compute of training and sampling in counted floating-point operations, a multiply-add being two.

    training = steps × batch × (one step of one image) + calibration
    calibration = states that it looks at × one evaluation

One real step of each network is counted. The single model is given as many steps as it can take for what the
homogeneous ensemble costs with its router, so that the two differ by less than one of its steps.
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
from hddm.ensemble import Router
from hddm.experts.loading import load
from hddm.networks.transformers import ExpertTransformer, RouterTransformer
from hddm.training.continuation import continue_expert
from hddm.training.expert import new_network, train_expert
from hddm.training.router import NOISED, train_router
from hddm.training.settings import ExpertSettings, LoopSettings, RouterSettings
from hddm.utils.errors import HddmError
from hddm.velocity import VelocityField

# Late enough for a calibration to take part.
_TIME = 0.75


@contextlib.contextmanager
def counting() -> Iterator[FlopCounterMode]:
    """Counts floating-point operations within the block."""
    # The fused attention kernels for the CPU have no entry in torch's counter.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        yield counter


def evaluation_flop(field: VelocityField, **conditions: Tensor) -> int:
    """Operations of one velocity of one image, the expert's calibration included, without guidance."""
    assert field.sample_shape is not None
    x = torch.zeros(1, *field.sample_shape, device=field.device)
    t = torch.full((1,), _TIME, dtype=torch.float64, device=field.device)
    return _forward(field.velocity, x, t, **conditions)


def router_flop(router: object, x: Tensor) -> int:
    """Operations of one answer of a router for a state like ``x``; 0 for what is no `Router`."""
    t = torch.full((1,), _TIME, device=x.device)
    return _forward(router, x[:1], t) if isinstance(router, Router) else 0


@torch.no_grad()
def _forward(function: Callable[..., object], x: Tensor, t: Tensor, **conditions: Tensor) -> int:
    with counting() as counter:
        function(x, t, **conditions)
    return int(counter.get_total_flops())


# What has no say in what a step of one image costs.
_FREE = {
    *("steps", "batch_size", "gradient_accumulation_steps", "learning_rate", "warmup", "weight_decay"),
    *("ema_decay", "max_grad_norm", "max_non_finite", "calibrate", "seed"),
    *("device", "threads", "mixed_precision", "compile"),
}


@dataclass(frozen=True)
class Cost:
    """Operations of one image: ``step`` of training, forward and backward; ``forward`` alone."""

    step: int
    forward: int

    def steps(self, settings: LoopSettings) -> int:
        """All steps of a training."""
        return settings.steps * settings.batch_size * self.step

    @property
    def calibration(self) -> int:
        """Of an expert, after its training."""
        return LEVELS * STATES * self.forward

    def of_expert(self, settings: LoopSettings) -> int:
        """A whole training of an expert, with the calibration that follows."""
        return self.steps(settings) + self.calibration

    def of_router(self, settings: RouterSettings) -> int:
        """A whole training of a router, with its calibration where it has one."""
        return self.steps(settings) + settings.calibrate * NOISED * self.forward

    def most_steps(self, budget: int, batch_size: int) -> int:
        """Steps that an expert can take for ``budget``, with the calibration that follows; 1 at least."""
        return max(1, (budget - self.calibration) // (batch_size * self.step))


class _TwoSteps(Exception):
    """Two steps were made; nothing after them is wanted."""


def count_step(train: Callable[..., object], settings: LoopSettings) -> int:
    """Operations of the second step that ``train(out, settings, on_step=…)`` makes, forward and backward.

    Of one image, in float32 on the CPU, so that they are the same anywhere. What is done once before the
    first step, as moments of a shard are taken, is no part of one.
    """
    changes: dict[str, Any] = {"steps": 2, "batch_size": 1, "gradient_accumulation_steps": 1}
    changes |= {"mixed_precision": "no", "compile": False, "device": "cpu", "threads": 1}
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
    """Of the new network that ``settings`` train on images as those of ``shard``.

    Raises:
        HddmError: for an adapter, which needs something to adapt, and as `train_expert`.
    """
    if settings.lora_rank is not None:
        raise HddmError(
            f"lora_rank {settings.lora_rank}: adapts an expert that exists; give the model an init, and flow "
            "for all its objectives"
        )
    images = open_shard(shard)
    classes = len(images.classes) if settings.class_conditional else None
    network = new_network(ExpertTransformer, settings.size, images.shape, 0, num_classes=classes)
    step = count_step(functools.partial(train_expert, shard), settings)
    return Cost(step, _network_flop(network, images.shape, **_labels(settings)))


def count_continued(init: Path, shard: Path, settings: ExpertSettings) -> Cost:
    """Of the network in ``init`` as ``settings`` train it on; raises as `continue_expert`."""
    step = count_step(functools.partial(continue_expert, init, shard), settings)
    field = load(init)
    assert isinstance(field, VelocityField)
    field.calibration = None
    return Cost(step, evaluation_flop(field, **_labels(settings)))


def count_router(shards: Path, settings: RouterSettings) -> Cost:
    """Of the router that ``settings`` train on a partition."""
    folders = find_shards(shards)
    shape = open_shard(folders[0]).shape
    network = new_network(RouterTransformer, settings.size, shape, 0, num_experts=len(folders))
    step = count_step(functools.partial(train_router, shards), settings)
    return Cost(step, _network_flop(network, shape))


def _labels(settings: ExpertSettings) -> dict[str, Tensor]:
    return {"class_labels": torch.zeros(1, dtype=torch.long)} if settings.class_conditional else {}


def _network_flop(network: nn.Module, shape: tuple[int, ...], **conditions: Tensor) -> int:
    return _forward(network, torch.zeros(1, *shape), torch.full((1,), 0.5), **conditions)


class Costs:
    """Costs of trainings, each kind of network counted once and kept in the store."""

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
        """`count_router`."""
        return self._kept("router", settings, lambda: count_router(self._shards, settings))

    def _kept(
        self, network: str, settings: LoopSettings, count: Callable[[], Cost], **start: str | None
    ) -> Cost:
        counted = {"network": network, **settings.model_dump(mode="json", exclude=_FREE)}
        job = Job("cost", counted, {"images": self._hash, "shards": len(self._folders), **start})
        return Cost(**self._store.once(job, lambda _: vars(count())))


def single_steps(settings: BenchmarkSettings, objective: str, costs: Costs, **changes: Any) -> int:
    """Steps of the single model for what the ensemble of its objective costs with its router.

    ``changes`` are its own, as `BenchmarkSettings.single` takes them; the ensemble is without.
    """
    expert, router = settings.expert(objective, 0), settings.router(0)
    budget = settings.partition.shards * costs.expert(expert).of_expert(expert)
    if settings.partition.shards > 1:
        budget += costs.router(router).of_router(router)
    single = settings.single(objective, 0, 1, **changes)
    return costs.expert(single).most_steps(budget, single.batch_size)
