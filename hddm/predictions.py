"""From what a network predicts to data, noise and velocity. Pure functions, one formula each.

The state of an expert is y = a x_0 + s eps on its own schedule, (a, s) = (alpha, sigma) at its native
time; the same point on the common path is x = y/(a + s), at t = s/(a + s).
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from hddm.errors import HddmError


class PredictionType(StrEnum):
    """What a network predicts, spelt as diffusers spells it."""

    EPSILON = "epsilon"
    """The noise eps."""
    SAMPLE = "sample"
    """The data x_0."""
    V_PREDICTION = "v_prediction"
    """Salimans & Ho's v = a eps - s x_0 (arXiv:2202.00512); not a velocity in general."""
    FLOW_PREDICTION = "flow_prediction"
    """The velocity of the expert's own path, a' x_0 + s' eps, per unit of its native time."""

    @classmethod
    def parse(cls, name: str) -> "PredictionType":
        """The member called ``name``; `HddmError` names the four that exist."""
        try:
            return cls(name)
        except ValueError:
            known = ", ".join(member.value for member in cls)
            raise HddmError(f"unknown prediction type {name!r}: choose one of {known}") from None


@dataclass(frozen=True)
class Point:
    """One state in both coordinates; every tensor broadcasts against ``x``.

    ``x`` is on the common path at ``t``, ``y = (alpha + sigma) x`` on the expert's own path at its
    native time, where ``derivatives`` gives (d alpha, d sigma).
    """

    x: Tensor
    y: Tensor
    t: Tensor
    alpha: Tensor
    sigma: Tensor
    derivatives: Callable[[], tuple[Tensor, Tensor]]


def x_0_and_eps(prediction_type: PredictionType, output: Tensor, at: Point) -> tuple[Tensor, Tensor]:
    """Estimates (x_0, eps) that a network's ``output`` implies for y = alpha x_0 + sigma eps.

        epsilon:          x_0 = (y - s eps)/a                  singular at a = 0
        sample:           eps = (y - a x_0)/s                  singular at s = 0
        v_prediction:     x_0 = (a y - s v)/(a² + s²),  eps = (s y + a v)/(a² + s²)
        flow_prediction:  x_0 = (s' y - s u)/D,  eps = (a u - a' y)/D,  D = a s' - s a'

    At a singular point the result is inf or nan; `VelocityField` never asks there.
    """
    a, s, y = at.alpha, at.sigma, at.y
    match prediction_type:
        case PredictionType.EPSILON:
            return (y - s * output) / a, output
        case PredictionType.SAMPLE:
            return output, (y - a * output) / s
        case PredictionType.V_PREDICTION:
            norm = a**2 + s**2
            return (a * y - s * output) / norm, (s * y + a * output) / norm
        case PredictionType.FLOW_PREDICTION:
            d_a, d_s = at.derivatives()
            det = a * d_s - s * d_a
            return (d_s * y - s * output) / det, (a * output - d_a * y) / det


def velocity(prediction_type: PredictionType, output: Tensor, at: Point) -> Tensor:
    """Velocity eps - x_0 of the common path through ``at.x``, per unit of t.

        epsilon:          (eps - x)/(1 - t)                    singular at t = 1
        sample:           (x - x_0)/t                          singular at t = 0
        v_prediction:     [(s - a) y + (a + s) v]/(a² + s²)    nowhere singular
        flow_prediction:  [(a + s) u - (a' + s') y]/(a s' - s a')

    On the linear path the last one is the output itself. Its sign is diffusers' (noise minus data),
    the negative of that in SiT and in facebookresearch/flow_matching.

    Sources: arXiv:2412.06264 (affine paths); Diff2Flow (arXiv:2506.02221) for epsilon and v.
    """
    a, s = at.alpha, at.sigma
    match prediction_type:
        case PredictionType.EPSILON:
            return (output - at.x) / (1 - at.t)
        case PredictionType.SAMPLE:
            return (at.x - output) / at.t
        case PredictionType.V_PREDICTION:
            return ((s - a) * at.y + (a + s) * output) / (a**2 + s**2)
        case PredictionType.FLOW_PREDICTION:
            d_a, d_s = at.derivatives()
            return ((a + s) * output - (d_a + d_s) * at.y) / (a * d_s - s * d_a)
