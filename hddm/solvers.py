"""Solvers of ordinary differential equations, for a velocity along a grid of times.

They are plain functions and know nothing of diffusion: ``solver(velocity, x, times)`` integrates
dx/dt = velocity(x, now, then) from ``times[0]`` to ``times[-1]`` through every time between, upwards or
downwards, and returns the last x. ``velocity`` gets x and two scalar float64 tensors: the time of x, and the
time at which the step ends. Only a velocity that is a mean over the step depends on the second. After step i,
from 0, the state goes through ``on_step(i, x)``. Each docstring states the order of the global error in the
step.
"""

import itertools
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from hddm.utils.errors import HddmError, choose

Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]
OnStep = Callable[[int, Tensor], Tensor]


def unchanged(index: int, x: Tensor) -> Tensor:
    """The ``on_step`` that does nothing."""
    return x


class Solver(Protocol):
    """The signature of every solver."""

    def __call__(
        self, velocity: Velocity, x: Tensor, times: Tensor, on_step: OnStep = unchanged
    ) -> Tensor: ...


def euler(velocity: Velocity, x: Tensor, times: Tensor, on_step: OnStep = unchanged) -> Tensor:
    """Euler's method, order 1, one call per step.

    On the common path it is DDIM (arXiv:2010.02502): that sampler's step is Euler's in the variable
    x/alpha over sigma/alpha, and both are exact for a constant x_0 and eps.
    """
    for index, (now, then) in enumerate(itertools.pairwise(times)):
        x = on_step(index, x + float(then - now) * velocity(x, now, then))
    return x


def heun(velocity: Velocity, x: Tensor, times: Tensor, on_step: OnStep = unchanged) -> Tensor:
    """Heun's second-order method (explicit trapezoid), order 2, two calls per step.

    Not Heun's third-order method. Source: arXiv:2206.00364, algorithm 1, without its noise.
    """
    for index, (now, then) in enumerate(itertools.pairwise(times)):
        step = float(then - now)
        slope = velocity(x, now, then)
        x = on_step(index, x + step / 2 * (slope + velocity(x + step * slope, then, then)))
    return x


def adams_moulton(
    velocity: Velocity, x: Tensor, times: Tensor, on_step: OnStep = unchanged
) -> Tensor:
    """Adams-Bashforth predictor and three-point Adams-Moulton corrector, order 3, one call per step.

    With steps h_0, then h, a step is predicted from the velocities v at its beginning and v_before at the
    beginning of the step before. The first step is Euler's:

        x += h [(1 + h/(2 h_0)) v - h/(2 h_0) v_before]

    The velocity at a predicted state corrects that state and serves the next prediction (mode PEC). With the
    velocity u that the predictor expected at the end of h:

        x += h (2h + 3h_0) / (6 (h + h_0)) (v - u)        u = v_before + (h / h_0) (v_before - v_before_that)

    After the first step, x += h/2 (v - v_before). The last state is a prediction.
    Source: Hairer, Nørsett & Wanner, Solving Ordinary Differential Equations I, sections III.1 and III.5.
    """
    before = expected = x
    last_step = gain = 0.0
    for index, (now, then) in enumerate(itertools.pairwise(times)):
        step = float(then - now)
        slope = velocity(x, now, then)
        if index == 0:
            mean = slope
            gain = step / 2
        else:
            x = x + gain * (slope - expected)
            weight = step / (2 * last_step)
            mean = (1 + weight) * slope - weight * before
            gain = step * (2 * step + 3 * last_step) / (6 * (step + last_step))
        x = on_step(index, x + step * mean)
        # The predictor is a line in t, and ``mean`` its value half-way.
        expected = 2 * mean - slope
        before, last_step = slope, step
    return x


SOLVERS: dict[str, Solver] = {
    "euler": euler,
    "heun": heun,
    "adams-moulton": adams_moulton,
}
"""Solvers by name; `hddm.settings.SolverName` lists the names for the command line."""
WITH_MEMORY = (adams_moulton,)
"""Solvers that use earlier steps; their first step is Euler's."""
DEFAULT_SOLVER, DEFAULT_STEPS = "adams-moulton", 25


def solver_named(name: str) -> Solver:
    """The solver called ``name``; `HddmError` lists the known names."""
    if name not in SOLVERS:
        raise HddmError(f"unknown solver {name!r}: {choose(name, list(SOLVERS))}")
    return SOLVERS[name]
