"""A shard's two experts as one: at each noise level the one whose error was lower there."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hddm.ensemble import Ensemble
from hddm.schedules import LinearSchedule
from hddm.velocity import PredictionType, VelocityField

Choice = tuple[tuple[float, bool], ...]
"""Times, and whether the DDPM expert stands for the noise levels that are nearest to each."""


def choice(ddpm: Mapping[str, Any], flow: Mapping[str, Any]) -> Choice:
    """By the errors of both experts of a shard at the same levels."""
    pairs = zip(ddpm["levels"], flow["levels"], strict=True)
    return tuple((a["t"], a["expert"] < b["expert"]) for a, b in pairs)


def blended(flow: VelocityField, ddpm: VelocityField, chosen: Choice) -> VelocityField:
    """One field that costs one evaluation a state, as each of the two does."""
    return VelocityField(
        _ByNoise(flow, ddpm, chosen),
        LinearSchedule(),
        PredictionType.FLOW_PREDICTION,
        conditions=flow.conditions,
        null_conditions=flow.null_conditions,
        sample_shape=flow.sample_shape,
        classes=flow.classes,
        shift=flow.shift,
    )


def blended_experts(flow: Ensemble, ddpm: Ensemble, choices: Sequence[Choice]) -> list[VelocityField]:
    """Shard by shard."""
    return [blended(*both) for both in zip(flow.experts, ddpm.experts, choices, strict=True)]


class _ByNoise(nn.Module):
    """A velocity network on the common path that asks one of two fields."""

    def __init__(self, flow: VelocityField, ddpm: VelocityField, chosen: Choice) -> None:
        super().__init__()
        self.networks = nn.ModuleList([field.network for field in (flow, ddpm)])  # type: ignore[misc]
        self.fields = (flow, ddpm)
        times = torch.tensor([t for t, _ in chosen], dtype=torch.float64)
        self.edges = (times[1:] + times[:-1]) / 2
        self.is_ddpm = torch.tensor([is_ddpm for _, is_ddpm in chosen])

    def forward(self, x: Tensor, t: Tensor, **conditions: Tensor) -> Tensor:
        wanted = self.is_ddpm[torch.bucketize(t.cpu().double(), self.edges)]
        v = torch.empty_like(x)
        for is_ddpm, field in enumerate(self.fields):
            rows = (wanted == bool(is_ddpm)).nonzero()[:, 0].to(x.device)
            if len(rows):
                given = {name: value[rows] for name, value in conditions.items()}
                v[rows] = field.velocity(x[rows], t[rows].double(), 1.0, None, **given).to(v)
        return v
