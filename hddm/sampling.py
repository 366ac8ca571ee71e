"""From noise to samples: a time grid, a solver and a velocity field.

Sample i depends on (seed, i) alone: its noise, and the expert that ``draw`` gives it, come from a
generator of its own, whatever the batch size. What a batch size does change is rounding.
"""

import copy
import functools
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hddm.ensemble import Ensemble
from hddm.errors import HddmError
from hddm.routing import Strategy
from hddm.solvers import solver_named
from hddm.tensors import generator
from hddm.velocity import VelocityField


def time_grid(steps: int, shift: float = 1.0) -> Tensor:
    """``steps`` + 1 times from 1 to 0, in float64.

        t = shift u / (1 + (shift - 1) u),   u evenly spaced

    A shift above 1 spends more steps on noise (SD3, arXiv:2403.03206, equation 23). It is applied here
    and nowhere else.

    Raises:
        HddmError: for fewer than 1 step or a shift that is not positive.
    """
    if steps < 1:
        raise HddmError(f"steps must be at least 1, not {steps}")
    if not shift > 0:
        raise HddmError(f"shift must be positive, not {shift}")
    u = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return shift * u / (1 + (shift - 1) * u)


def initial_noise(seed: int, start: int, stop: int, shape: tuple[int, ...]) -> Tensor:
    """Noise (stop - start, *shape) of samples ``start`` … ``stop`` - 1, in float32 on the CPU."""
    rows = [torch.randn(shape, generator=generator(seed, i)) for i in range(start, stop)]
    return torch.stack(rows)


def draw_experts(prior: Tensor, seed: int, start: int, stop: int) -> Tensor:
    """Expert index (stop - start,) of each sample, drawn from ``prior`` (K,)."""
    # The second key keeps this stream apart from the noise of the same sample.
    uniform = torch.stack(
        [torch.rand((), generator=generator(seed, i, 1), dtype=torch.float64) for i in range(start, stop)]
    )
    return torch.searchsorted(prior.cumsum(0)[:-1].contiguous(), uniform, right=True)


@torch.no_grad()
def sample(
    model: VelocityField | Ensemble,
    num: int,
    seed: int = 0,
    steps: int = 50,
    strategy: str | None = None,
    solver: str = "euler",
    guidance_scale: float = 1.0,
    *,
    negative: Mapping[str, Tensor] | None = None,
    shift: float = 1.0,
    batch_size: int = 64,
    shape: tuple[int, ...] | None = None,
    on_batch: Callable[[int], None] | None = None,
    **conditions: Tensor,
) -> Tensor:
    """Integrate the model's velocity from noise at t = 1 to data at t = 0.

    Args:
        model: an expert or an ensemble.
        num: number of samples.
        seed: sample i depends on (seed, i) alone.
        steps: solver steps, even in t up to ``shift``.
        strategy: for this call, instead of the ensemble's own; see `hddm.routing`.
        solver: ``euler``, ``heun`` or ``adams-bashforth``; see `hddm.solvers`.
        guidance_scale: classifier-free guidance, 1 for none.
        negative: conditions to guide away from, each (num, …); by default the null ones.
        shift: of the time grid.
        batch_size: samples integrated together; changes a sample by rounding only, which a hard choice of
            experts can amplify.
        shape: (C, H, W) of a sample, where the model does not tell.
        on_batch: called with the number of samples after each batch.
        conditions: keywords of the experts' networks, each (num, …).

    Returns:
        (num, C, H, W) in float32 on the CPU, in the units that the experts were trained in.

    Raises:
        HddmError: for a num below 1, an unknown strategy or solver, a strategy for a single expert,
            conditions of another length than num, or a model of unknown sample shape.
    """
    shape = shape or model.sample_shape
    if shape is None:
        raise HddmError("this model does not tell the shape of a sample: pass shape=(C, H, W)")
    if num < 1 or batch_size < 1 or seed < 0:
        raise HddmError(f"num and batch_size start at 1, seed at 0, not {num}, {batch_size} and {seed}")
    for name, value in (*conditions.items(), *(negative or {}).items()):
        if len(value) != num:
            raise HddmError(f"condition {name!r} has {len(value)} rows for {num} samples")
    conditions = {name: torch.as_tensor(value) for name, value in conditions.items()}
    if isinstance(model, Ensemble):
        # A copy, so that another thread's sampling keeps its own strategy.
        model = copy.copy(model)
        model.strategy = strategy or model.strategy
    elif strategy is not None:
        Strategy.parse(strategy)
        raise HddmError(f"strategy {strategy!r} needs an ensemble; this is a single expert")
    drawn = isinstance(model, Ensemble) and model.strategy == "draw"
    if drawn and conditions:
        warnings.warn("draw picks experts by the prior alone: the conditions have no say in it", stacklevel=2)
    times, integrate = time_grid(steps, shift), solver_named(solver)
    batches = []
    for start in range(0, num, batch_size):
        stop = min(start + batch_size, num)
        given = {key: value[start:stop].to(model.device) for key, value in conditions.items()}
        against = {key: value[start:stop].to(model.device) for key, value in (negative or {}).items()}
        if isinstance(model, Ensemble) and drawn:
            given["expert"] = draw_experts(model.prior, seed, start, stop).to(model.device)
        bound = functools.partial(
            model.velocity, guidance_scale=guidance_scale, negative=against or None, **given
        )
        x = initial_noise(seed, start, stop, shape).to(model.device)
        batches.append(integrate(bound, x, times).cpu())
        if on_batch is not None:
            on_batch(stop - start)
    return torch.cat(batches)
