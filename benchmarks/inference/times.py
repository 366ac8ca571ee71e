"""Wall time a step of each way to sample, all in turn in one run."""

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.inference.models import (
    EvenRouter,
    Models,
    Step,
    diffusers_step,
    random_expert,
    random_router,
)
from benchmarks.inference.settings import DTYPES, Settings
from hddm.benchmark.compute import forward_mflop
from hddm.ensemble import Ensemble, Router
from hddm.experts.loading import ExpertSet
from hddm.sampling import integrate, time_grid
from hddm.training.objectives import TIME_SCALE
from hddm.velocity import VelocityField

SINGLE, BARE, DIFFUSERS = "single model", "its network alone", "diffusers' DiT, DDIM"
TOP_1, TOP_2, FULL, LOOP = "ensemble, top-1", "ensemble, top-2", "ensemble, full", "loop over all experts"
EVERY = "top-1, router at every "
OFTEN, A_ROUND = (SINGLE, TOP_1, TOP_2), 3
"""What the targets are about is timed three times a round, and counts by the median."""


@dataclass(frozen=True)
class Taken:
    """Seconds that a step took, on the clock and of the processor (all threads of this process)."""

    seconds: float
    processor: float


Times = dict[str, list[Taken]]


@torch.no_grad()
def measure_times(settings: Settings, device: str, dtype: str, compiled: bool) -> Times:
    """Times of every way, one a round; each round takes all of them in an order of its own."""
    models = Models(settings, device, DTYPES[dtype], compiled)
    ways = ways_of(models, settings, device)
    for way, _ in ways.values():
        way()
    shuffled = random.Random(0)
    found: Times = {name: [] for name in ways}
    order = [name for name in ways for _ in range(A_ROUND if name in OFTEN else 1)]
    for _ in range(settings.repeats):
        shuffled.shuffle(order)
        once: Times = {name: [] for name in ways}
        for name in order:
            way, steps = ways[name]
            once[name].append(_taken(way, steps, device))
        for name, each in once.items():
            found[name].append(_middle(each))
    return found


def operations(settings: Settings) -> tuple[float, float]:
    """Millions of floating-point operations of an expert and of the router, a sample and step."""
    shape, patch = settings.sample_shape, settings.patch
    expert = ExpertSet([random_expert(settings.size, shape, patch).unread()])
    router = EvenRouter(random_router(settings.router, shape, patch, settings.experts))
    return forward_mflop(Ensemble(expert.fields(), Router(router, TIME_SCALE)))


def ratios(times: Mapping[str, Sequence[Taken]], name: str, base: str = SINGLE) -> list[float]:
    """Wall time of one way over that of another, round by round."""
    return [a.seconds / b.seconds for a, b in zip(times[name], times[base], strict=True)]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def ways_of(models: Models, settings: Settings, device: str) -> dict[str, tuple[Step, int]]:
    """What is timed, with the steps that it makes."""
    fields = models.experts.fields()
    x = torch.randn(settings.batch, *settings.sample_shape).to(device)
    t = torch.full((settings.batch,), 0.5, dtype=torch.float64)
    by_strategy = {name: Ensemble(fields, models.router, name) for name in ("top-1", "top-2", "full")}

    def velocity(model: VelocityField | Ensemble) -> tuple[Step, int]:
        return lambda: model.velocity(x, t), 1

    def every(number: int) -> tuple[Step, int]:
        times, model = time_grid(settings.solver_steps), by_strategy["top-1"]
        return lambda: integrate(model, x, times, router_every=number), settings.solver_steps

    return {
        SINGLE: velocity(fields[0]),
        BARE: (lambda: fields[0].network(x.to(fields[0].dtype), t.to(x) * TIME_SCALE), 1),
        DIFFUSERS: (diffusers_step(models.dit, x), 1),
        TOP_1: velocity(by_strategy["top-1"]),
        TOP_2: velocity(by_strategy["top-2"]),
        FULL: velocity(by_strategy["full"]),
        LOOP: (lambda: _loop(fields, models, x, t), 1),
        **{f"{EVERY}{number}": every(number) for number in settings.router_every},
    }


def _loop(fields: Sequence[VelocityField], models: Models, x: Tensor, t: Tensor) -> Tensor:
    """What one writes by hand: every expert on the whole batch, mixed by the router's probabilities."""
    weights = models.router(x, t)
    mixed = torch.zeros_like(x)
    for k, field in enumerate(fields):
        mixed = mixed + weights[:, k, None, None, None] * field.velocity(x, t)
    return mixed


def _middle(each: Sequence[Taken]) -> Taken:
    seconds, processor = zip(*((one.seconds, one.processor) for one in each), strict=True)
    return Taken(statistics.median(seconds), statistics.median(processor))


def _taken(way: Step, steps: int, device: str) -> Taken:
    synchronise(device)
    began, processor = time.perf_counter(), time.process_time()
    way()
    synchronise(device)
    return Taken((time.perf_counter() - began) / steps, (time.process_time() - processor) / steps)


def synchronise(device: str) -> None:
    """Wait for the device; the CPU is never ahead."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize()
