"""Schedules in continuous time: the common path and the cosine."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hddm.schedules.base import Schedule
from hddm.tensors import to_float64


@dataclass(frozen=True)
class LinearSchedule(Schedule):
    """The common path, of flow matching and rectified flow: alpha = 1 - t, sigma = t, t in [0, 1]."""

    end = 1.0

    @property
    def config(self) -> dict[str, Any]:
        return {"name": "linear"}

    def alpha_sigma(self, time: Tensor) -> tuple[Tensor, Tensor]:
        return 1 - time, time

    def derivatives(self, time: Tensor) -> tuple[Tensor, Tensor]:
        return -torch.ones_like(time), torch.ones_like(time)

    def match(self, t: Tensor) -> Tensor:
        return to_float64(t)

    def _time(self, log_snr: Tensor) -> Tensor:
        return torch.sigmoid(-log_snr / 2)


@dataclass(frozen=True)
class CosineSchedule(Schedule):
    """Continuous cosine: alpha = cos(pi t/2), sigma = sin(pi t/2), t in [0, 1].

    Not `squaredcos_cap_v2` (Nichol & Dhariwal), which is discrete, offset and clipped.
    """

    end = 1.0

    @property
    def config(self) -> dict[str, Any]:
        return {"name": "cosine"}

    def alpha_sigma(self, time: Tensor) -> tuple[Tensor, Tensor]:
        # The sine of the complement is exactly 0 at t = 1, where cos(pi/2) is 6e-17.
        return torch.sin(math.pi / 2 * (1 - time)), torch.sin(math.pi / 2 * time)

    def derivatives(self, time: Tensor) -> tuple[Tensor, Tensor]:
        alpha, sigma = self.alpha_sigma(time)
        return -math.pi / 2 * sigma, math.pi / 2 * alpha

    def _time(self, log_snr: Tensor) -> Tensor:
        return 2 / math.pi * torch.atan(torch.exp(-log_snr / 2))
