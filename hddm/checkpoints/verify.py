"""The check that a conversion runs on itself: what was written against the source's own network.

At `TIMES` noise levels inside the expert's range, on fixed inputs in float32: the raw outputs of both
networks, and the expert's velocity against the closed form

    u with s(u)/a(u) = t/(1 - t),  y = (a + s) x,  v from the source's output at (y, u)

computed here a second time, in float64 and from the betas themselves.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hddm.checkpoints.conventions import Conventions
from hddm.checkpoints.layouts import Forward
from hddm.interfaces import FLUX, text_width
from hddm.predictions import PredictionType
from hddm.schedules import CosineSchedule, DiscreteSchedule, Schedule
from hddm.velocity import VelocityField

TIMES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Shares of the expert's range of noise levels."""
LARGEST_DIFFERENCE = 1e-4
LARGEST_VELOCITY_ERROR = 1e-4
TOKENS = 8
_ENOUGH = {"UNet2DModel": 64, "UNet2DConditionModel": 64, "SD3Transformer2DModel": 64, FLUX: 16}
"""Sides at which networks that take several are compared: the function of the weights is the same, and a
large sample costs minutes, of a network of 12 billion weights hours."""


@dataclass(frozen=True)
class Verified:
    """What the check measured.

    ``difference`` is the largest of any output number; ``function_error`` the same as a root mean square,
    relative to the source's; ``velocity_errors`` are relative, a time t each.
    """

    difference: float
    function_error: float
    velocity_errors: Mapping[float, float]

    @property
    def is_exact(self) -> bool:
        """Whether both are within their limits."""
        return (
            self.difference <= LARGEST_DIFFERENCE
            and max(self.velocity_errors.values()) <= LARGEST_VELOCITY_ERROR
        )

    @property
    def is_finite(self) -> bool:
        """Whether no number is NaN or Inf."""
        return math.isfinite(self.difference) and all(map(math.isfinite, self.velocity_errors.values()))


@torch.no_grad()
def verify(
    source: Forward | None,
    written: VelocityField,
    outputs: list[Tensor],
    conventions: Conventions,
    conditions: Mapping[str, Tensor],
    extra: Mapping[str, Tensor] | None = None,
    network: str = "",
) -> Verified:
    """Measure both networks and the velocity, a state at a time.

    Args:
        source: the source's own network; None where the head is fresh, so that there is no function to
            compare, and the velocity is held against the written network's own output.
        written: the expert as its folder has it, uncalibrated.
        outputs: grows by the raw output of ``written``'s network at every call.
        conventions: of the source.
        conditions: one row each, of the source.
        extra: further ones that the converted network takes, such as text that was added.
        network: its class, by which a large sample is replaced by a smaller one.
    """
    assert written.sample_shape is not None
    channels, *sides = written.sample_shape
    sides = [min(side, _ENOUGH.get(network, side)) for side in sides]
    schedule, prediction_type = conventions.schedule, conventions.prediction_type
    low, high = written.range
    noise = torch.Generator().manual_seed(0)
    squares, wanted, largest, errors = 0.0, 0.0, 0.0, {}
    for share in TIMES:
        t = low + share * (high - low)
        x = torch.randn(1, channels, *sides, generator=noise) * math.hypot(1 - t, t)
        given: dict[str, Any] = {**conditions, **(extra or {})}
        v = written.velocity(x, torch.tensor([t], dtype=torch.float64), **given)
        a, s, u = _native(schedule, t)
        y = (a + s) * x
        timestep = torch.tensor([u * conventions.time_scale], dtype=torch.float32)
        expected = outputs[-1] if source is None else source(y, timestep, conditions)
        difference = (outputs[-1] - expected).double()
        squares, wanted = squares + difference.square().sum().item(), wanted + expected.square().sum().item()
        # A comparison with NaN is false, so the maximum would hide one.
        largest = max(largest, difference.abs().max().item()) if difference.isfinite().all() else math.nan
        closed = _closed_form(
            prediction_type, expected[:, : x.shape[1]].double(), x.double(), y.double(), a, s, t
        )
        errors[round(t, 4)] = ((v.double() - closed).norm() / closed.norm().clamp_min(1e-30)).item()
        if not math.isfinite(largest):
            break
    return Verified(largest, math.sqrt(squares / max(wanted, 1e-30)), errors)


def _native(schedule: Schedule, t: float) -> tuple[float, float, float]:
    """(a, s, u) with s/a = t/(1 - t)."""
    if isinstance(schedule, DiscreteSchedule):
        kept = np.cumprod(1 - schedule.betas.double().numpy())
        kept = kept[kept > 0]
        log_ratio = np.log1p(-kept) - np.log(kept)
        wanted = 2 * math.log(t / (1 - t))
        u = float(np.interp(wanted, log_ratio, np.arange(len(kept))))
        if wanted > log_ratio[-1]:
            # Beyond it alpha/sigma goes to the zero of the last index in a straight line.
            u += 1 - math.exp((log_ratio[-1] - wanted) / 2)
        return 1 / math.sqrt(1 + math.exp(wanted)), 1 / math.sqrt(1 + math.exp(-wanted)), u
    if isinstance(schedule, CosineSchedule):
        u = 2 / math.pi * math.atan2(t, 1 - t)
        return math.cos(math.pi * u / 2), math.sin(math.pi * u / 2), u
    return 1 - t, t, t


def _closed_form(
    kind: PredictionType, output: Tensor, x: Tensor, y: Tensor, a: float, s: float, t: float
) -> Tensor:
    match kind:
        case PredictionType.EPSILON:
            return output - (y - s * output) / a
        case PredictionType.SAMPLE:
            return (y - a * output) / s - output
        case PredictionType.V_PREDICTION:
            return (s * y + a * output - (a * y - s * output)) / (a * a + s * s)
        case PredictionType.FLOW_PREDICTION:
            return output


def example_conditions(
    names: tuple[str, ...], network: str, config: Mapping[str, Any], num_classes: int | None
) -> dict[str, Tensor]:
    """One row of fixed random conditions of the shapes that a network takes."""
    noise = torch.Generator().manual_seed(1)
    found: dict[str, Tensor] = {}
    for name in names:
        match name:
            case "class_labels":
                found[name] = torch.randint(num_classes or 1, (1,), generator=noise)
            case "encoder_hidden_states":
                found[name] = torch.randn(1, TOKENS, text_width(config) or 1, generator=noise)
            case "text_embeds":
                count = (
                    config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
                )
                found[name] = torch.randn(1, count, generator=noise)
            case "time_ids":
                found[name] = torch.tensor([[64.0, 64.0, 0.0, 0.0, 64.0, 64.0]])
            case "resolution":
                found[name] = torch.tensor([[64.0, 64.0]])
            case "aspect_ratio":
                found[name] = torch.tensor([[1.0]])
            case "pooled_projections":
                found[name] = torch.randn(1, config["pooled_projection_dim"], generator=noise)
            case "guidance":
                found[name] = torch.tensor([3.5])
    return found
