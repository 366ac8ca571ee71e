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

import torch
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
    """Adams-Bashforth predictor and Adams-Moulton corrector, order 3, one call per step.

    With steps h_1, h_0 and now h, and the velocities v_2, v_1 and v at their beginnings, the velocity at s
    after the beginning of a step is predicted as a line and part of a bend:

        u(s) = v + d s + w b s (s + h_0)     d = (v - v_1) / h_0,  b = (d - (v_1 - v_2) / h_1) / (h_0 + h_1)

    The step is x += ∫ u(s) ds from 0 to h; the first one is Euler's, the second one has no bend. The velocity
    v' at a predicted state corrects that state, and serves the next prediction (mode PEC):
    x += g (v' - u(h)). Here g is the integral of the next polynomial, which is 0 where velocities are used,
    and 1 at h. The last state is a prediction.

    Each sample has a weight w of its own, since the velocity bends smoothly in some regions and turns sharply
    in others. It is the one that would have fitted the steps so far, the last ones above all (`_Fit`).
    Source: Hairer, Nørsett & Wanner, Solving Ordinary Differential Equations I, sections III.1 and III.5.
    """
    slopes: list[Tensor] = []
    steps: list[float] = []
    end = expected = bend_at_end = x
    gain: float | Tensor = 0.0
    fit = _Fit()
    for index, (now, then) in enumerate(itertools.pairwise(times)):
        step = float(then - now)
        slope = velocity(x, now, then)
        if index > 0:
            x = x + gain * (slope - expected)
        if index > 2:
            fit.add(slope - end, bend_at_end)
        mean = end = expected = slope
        gain = step / 2
        if index > 0:
            last = steps[-1]
            rise = (slope - slopes[-1]) / last
            mean = slope + step / 2 * rise
            end = expected = slope + step * rise
            gain = step * (2 * step + 3 * last) / (6 * (step + last))
        if index > 1:
            before = steps[-2]
            bend = (rise - (slopes[-1] - slopes[-2]) / before) / (last + before)
            bend_at_end = step * (step + last) * bend
            weight = fit.weight(x)
            mean = mean + weight * (step * (2 * step + 3 * last) / 6) * bend
            expected = end + weight * bend_at_end
            gain = gain + weight * (_gain(step, last, before) - gain)
        x = on_step(index, x + step * mean)
        slopes = [*slopes[-1:], slope]
        steps = [*steps[-1:], step]
    return x


def _gain(step: float, last: float, before: float) -> float:
    """∫ s (s + h_0) (s + h_0 + h_1) ds from 0 to h, over its integrand at h."""
    first, second = last, last + before
    integral = step**4 / 4 + (first + second) * step**3 / 3 + first * second * step**2 / 2
    return integral / (step * (step + first) * (step + second))


class _Fit:
    """The share of the bend in the velocities that came, for each sample.

    Of steps i with the deviation r_i of a velocity from the line, and the bend b_i that was expected there,
    w = Σ m_i r_i·b_i / Σ m_i |b_i|², from -1 to 1, where m_i falls by `_MEMORY` with each step. It is 0
    before the first of them, and tends to 1 on a smooth path. Below 0 the velocity turned the other way.
    Noise in velocities looks like this, too, so such a w counts as far as it explains the deviations, by
    R² = (Σ m_i r_i·b_i)² / (Σ m_i |b_i|² Σ m_i |r_i|²).
    """

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    def add(self, deviation: Tensor, bend: Tensor) -> None:
        new = [_dot(deviation, bend), _dot(bend, bend), _dot(deviation, deviation)]
        if self._sums:
            new = [one + _MEMORY * before for one, before in zip(new, self._sums, strict=True)]
        self._sums = new

    def weight(self, x: Tensor) -> Tensor:
        """The weights, in the dtype of ``x``, to multiply its samples by."""
        shape = (len(x), *[1] * (x.dim() - 1))
        if not self._sums:
            return x.new_zeros(shape)
        along, bend, deviation = self._sums
        least = torch.finfo(bend.dtype).tiny
        weight = along / bend.clamp(min=least)
        explained = weight * along / deviation.clamp(min=least)
        weight = weight.clamp(-1, 1) * torch.where(weight < 0, explained, 1.0)
        return weight.reshape(shape).to(x.dtype)


_MEMORY = 0.8


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Products of samples (batch,), in float32 at least."""
    product = a * b if a.dtype == torch.float64 else a.float() * b.float()
    return product.reshape(len(a), -1).sum(1)


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
