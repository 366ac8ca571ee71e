"""Wall time a step of each way to sample, all in turn in one run."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.inference.models import (
    EvenRouter,
    Models,
    Settings,
    Step,
    diffusers_step,
    random_expert,
    random_router,
)
from benchmarks.timing import DTYPES, Taken, Times, between, in_turn, now
from hddm.benchmark.counting import evaluation_flop, forward_flop
from hddm.ensemble import Ensemble
from hddm.experts.expert_set import ExpertSet
from hddm.routers import Router
from hddm.sampling import integrate, time_grid
from hddm.velocity import TIME_SCALE, VelocityField

SINGLE, BARE, DIFFUSERS = "single model", "its network alone", "diffusers' DiT, DDIM"
TOP_1, TOP_2, FULL, LOOP = (
    "ensemble, top-1",
    "ensemble, top-2",
    "ensemble, full",
    "loop over all experts",
)
EVERY = "top-1, router at every "
OFTEN = (SINGLE, TOP_1, TOP_2)
"""What the targets are about."""


@torch.no_grad()
def measure_times(settings: Settings, device: str, dtype: str, compiled: bool) -> Times:
    """Times of every way, after a warm-up."""
    ways = ways_of(Models(settings, device, DTYPES[dtype], compiled), settings, device)

    def timed(way: Step, steps: int) -> Callable[[], Taken]:
        way()

        def measure() -> Taken:
            began = now(device)
            way()
            return between(began, now(device), steps)

        return measure

    return in_turn({name: timed(*way) for name, way in ways.items()}, settings.repeats, OFTEN)


def operations(settings: Settings) -> tuple[float, float]:
    """Millions of floating-point operations of an expert and of the router, a sample and step."""
    shape, patch = settings.sample_shape, settings.patch
    expert = ExpertSet([random_expert(settings.size, shape, patch)])
    router = EvenRouter(random_router(settings.router, shape, patch, settings.experts))
    (field,) = expert.fields()
    x = torch.zeros(1, *shape)
    return evaluation_flop(field) / 1e6, forward_flop(
        Router(router, TIME_SCALE), x, torch.ones(1)
    ) / 1e6


def ways_of(models: Models, settings: Settings, device: str) -> dict[str, tuple[Step, int]]:
    """What is timed, with the steps that it makes."""
    fields = models.experts.fields()
    x = torch.randn(settings.batch, *settings.sample_shape).to(device)
    t = torch.full((settings.batch,), 0.5, dtype=torch.float64)
    by_strategy = {
        name: Ensemble(fields, models.router, name) for name in ("top-1", "top-2", "full")
    }

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
