"""When networks run: the first step of samples, which needs none, and the time grid below it.

**The first step.** Above the end of its schedule a network was never trained; Stable Diffusion's ends at
t = 0.936. There the state is almost noise, so the flow of a Gaussian N(m, U diag(c) U^T) carries it on, in
closed form (`hddm.calibration.Moments.flow`):

    x_t = (1 - t) m + U sqrt(((1 - t)² c + t²) / ((1 - s)² c + s²)) U^T (x_s - (1 - s) m)

m and c are those of the expert's calibration, m of the class where it is known. All calls of networks then
lie at or below the end (`VelocityField.end`). An expert whose schedule reaches t = 1 has no first step.

**Without a calibration** other samplers begin with m = 0 and c = 0, x_t = x_s t/s, as if the data's mean were
0. Here the first call asks for that mean: at x_t, at the end t, the network estimates x_0, nearly its mean
there (`mean_seen`), and the next step begins at x_t + (1 - t/s) x_0. So this first step is one of the grid.

A sample of one expert begins at the end of that expert, and samples of a mixture at the largest end of all
experts. Above the smaller end of one of them the rule of `hddm.velocity` holds: to leave that expert out
there was measured, and is worse (benchmarks/first_step.py).
"""

import torch
from torch import Tensor

from hddm.choice import Choice
from hddm.condition_names import LABELS
from hddm.conditions import Conditions, Inputs
from hddm.ensemble import Ensemble
from hddm.guidance import Guidance
from hddm.solvers import Velocity
from hddm.utils.errors import HddmError
from hddm.velocity import VelocityField


def time_grid(steps: int, shift: float = 1.0, first: float = 1.0) -> Tensor:
    """``steps`` + 1 times from ``first`` to 0, in float64.

        t = shift u / (1 + (shift - 1) u),   u evenly spaced

    A shift above 1 spends more steps on noise (SD3, arXiv:2403.03206, equation 23). It is applied here
    and nowhere else.

    Args:
        steps: 1 or more.
        shift: positive and finite.
        first: the time at which networks begin, above 0; see `first_step`.

    Raises:
        HddmError: for steps below 1, a shift that is not positive and finite, or one so far from 1 that
            neighbouring times are equal.
    """
    if steps < 1:
        raise HddmError(f"`steps` {steps}: must be 1 or more")
    highest = 1.0
    if first < 1:
        # The u of ``first``, by the formula above.
        highest = first / (shift - (shift - 1) * first)
    u = torch.linspace(highest, 0, steps + 1, dtype=torch.float64)
    times = shift * u / (1 + (shift - 1) * u)
    if not (times.diff() < 0).all():
        raise HddmError(
            f"`shift` {shift:g}: must be positive, and near enough to 1 for {steps} steps"
        )
    if first < 1:
        # Rounding must not lead above it.
        times[0] = first
    return times


def beginner_of(model: Ensemble, expert: int) -> VelocityField:
    """The expert that samples of an ``expert`` begin with: the one of its domain for the most noise."""
    for k, one in enumerate(model.experts):
        if model.domains[k] == model.domains[expert] and one.noise_range[1] == 1:
            return one
    return model.experts[expert]


def mean_seen(velocity: Velocity, x: Tensor, s: float, t: float) -> Tensor:
    """The x_0 (n, C, H, W) that networks see in states x of time ``s``, asked at their end ``t``.

    Where x_0 stays, x_s is at a time r the state (r/s) x_s + (1 - r/s) x_0.
    """
    at_end = torch.tensor(t, dtype=torch.float64)
    moved = t / s * x
    return moved - t * velocity(moved, at_end, at_end)


def first_step(
    model: Ensemble,
    x: Tensor,
    s: float,
    t: float,
    expert: Tensor | None,
    conditions: Conditions,
    guidance: Guidance,
) -> Tensor:
    """States x (n, C, H, W) of time ``s``, carried to ``t`` without a network; see the module.

    Guidance and the mixing of experts act on the mean velocity (x_s - x_t)/(s - t) of each branch and expert.
    At so much noise the probabilities of experts are those that are known before the first step.

    Args:
        model: the experts.
        x: on the model's device.
        s: above t.
        t: the end of an expert, or below it.
        expert: (n,) the one expert of each sample, on the CPU; None where experts are mixed.
        conditions: of the samples, on the model's device.
        guidance: as in the steps that follow.

    Raises:
        HddmError: as `Ensemble.velocity`, for conditions and guidance.
    """
    if expert is None:
        shares = model.begun(x, s, conditions.given, conditions.prior)
    else:
        shares = Choice.of(expert, len(model.experts)).weights
    choice = Choice(model.at(torch.full((len(x),), s, dtype=torch.float64), shares))
    inputs = model.inputs_by_expert(x, choice, guidance, conditions.negative, conditions.given)
    mean = torch.zeros_like(x)
    for k, (here, share) in choice.parts(x.device).items():
        own = x if here is None else x[here]
        v = share.view(-1, *[1] * (x.ndim - 1)).to(x) * _mean_velocity(
            model.experts[k], own, s, t, inputs[k]
        )
        if here is None:
            mean += v
        else:
            mean.index_add_(0, here, v)
    return x - (s - t) * mean


def _mean_velocity(field: VelocityField, x: Tensor, s: float, t: float, inputs: Inputs) -> Tensor:
    """Mean velocity (n, C, H, W) of an expert's Gaussian from s to t, guided as the expert is."""
    guidance = inputs.guidance

    def of(one: VelocityField, labels: Tensor | None) -> Tensor:
        calibration = one.calibration_of(x)
        if calibration is None:
            return x / s
        reached = calibration.moments.to(x).flow(x.flatten(1), s, t, labels)
        return (x - reached.view_as(x)) / (s - t)

    labels = inputs.conditions.get(LABELS)
    conditional = of(field, labels)
    acts = guidance.acts(torch.full((len(x),), t, dtype=torch.float64))
    if not acts.any():
        return conditional
    if field.weak is not None and guidance.by_weak:
        return guidance.combine(conditional, of(field.weak, labels), acts)
    return guidance.combine(conditional, of(field, inputs.negative.get(LABELS)), acts)
