"""DDPM schedules: discrete betas, read continuously."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hddm.errors import HddmError
from hddm.schedules.base import Schedule
from hddm.tensors import to_float64


@dataclass(frozen=True, eq=False)
class DiscreteSchedule(Schedule):
    """A variance-preserving DDPM schedule, read at fractional timestep indices too.

    alpha² + sigma² = 1, and alpha² at index i is the product of (1 - beta) over 0 … i. Between
    indices the log-SNR is linear in the index, as in k-diffusion. Where the last index has zero SNR,
    alpha/sigma is linear in the last interval instead, so that alpha reaches 0 there and nowhere before.

    Args:
        betas: (T,), each in (0, 1), the last one possibly 1 (zero terminal SNR).
        source: what the schedule was built from, for the record; `from_diffusers` fills it.

    Raises:
        HddmError: for fewer than 2 betas or one outside its range.
    """

    betas: Tensor
    source: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        betas = to_float64(torch.as_tensor(self.betas)).cpu()
        inside = (betas > 0) & (betas < 1)
        if betas.ndim != 1 or len(betas) < 2 or not inside[:-1].all() or not 0 < betas[-1] <= 1:
            raise HddmError("betas must be at least 2 numbers in (0, 1), of which only the last may be 1")
        log_alpha_squared = torch.log1p(-betas).cumsum(0)
        # log(1 - alpha²) without cancellation where alpha² is close to 1
        table = log_alpha_squared - torch.log(-torch.expm1(log_alpha_squared))
        object.__setattr__(self, "end", float(len(betas) - 1))
        object.__setattr__(self, "_tables", {torch.device("cpu"): table})

    @property
    def config(self) -> dict[str, Any]:
        if self.source:
            return dict(self.source)
        return {"name": "discrete", "betas": self.betas.tolist()}

    @property
    def zero_terminal_snr(self) -> bool:
        """Whether alpha is 0 at the last index."""
        return bool(self._table(torch.device("cpu"))[-1].isneginf())

    def alpha_sigma(self, time: Tensor) -> tuple[Tensor, Tensor]:
        log_snr = self._log_snr(time)
        return torch.sigmoid(log_snr).sqrt(), torch.sigmoid(-log_snr).sqrt()

    def _table(self, device: torch.device) -> Tensor:
        tables: dict[torch.device, Tensor] = self._tables  # type: ignore[attr-defined]
        if device not in tables:
            tables[device] = tables[torch.device("cpu")].to(device)
        return tables[device]

    def _log_snr(self, time: Tensor) -> Tensor:
        table = self._table(time.device)
        index = time.floor().long().clamp(0, len(table) - 2)
        fraction = time - index
        high, low = table[index], table[index + 1]
        linear = torch.where(fraction == 0, high, high + fraction * (low - high))
        return torch.where(low.isneginf(), high + 2 * torch.log1p(-fraction), linear)

    def _time(self, log_snr: Tensor) -> Tensor:
        table = self._table(log_snr.device)
        inside = log_snr.clamp(table[-1], table[0])
        index = torch.searchsorted(-table, -inside).clamp(1, len(table) - 1)
        high, low = table[index - 1], table[index]
        linear = (high - inside) / (high - low)
        to_zero = -torch.expm1((inside - high) / 2)
        return index - 1 + torch.where(low.isneginf(), to_zero, linear)
