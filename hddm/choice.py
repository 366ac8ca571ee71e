"""A choice of experts: who runs for which samples of a batch, and with which weight."""

import torch
from torch import Tensor

from hddm.utils.tensors import sent


class Choice:
    """Which experts run for which samples: ``weights`` (batch, K) on the CPU, grouped once by expert."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights
        used = weights != 0
        self.rows: dict[int, Tensor] = {}
        """Indices of an expert's samples, by expert."""
        for k in used.any(0).nonzero()[:, 0].tolist():
            self.rows[k] = used[:, k].nonzero()[:, 0]
        self._parts: dict[int, tuple[Tensor | None, Tensor]] | None = None

    @classmethod
    def of(cls, expert: Tensor, num_experts: int) -> "Choice":
        """The choice of one expert for each sample, ``expert`` (batch,) on the CPU."""
        return cls(torch.nn.functional.one_hot(expert.long(), num_experts).float())

    def parts(self, device: torch.device) -> dict[int, tuple[Tensor | None, Tensor]]:
        """Rows (None for all) and weights of each expert on ``device``, sent there once."""
        if self._parts is None:
            parts: dict[int, tuple[Tensor | None, Tensor]] = {}
            for k, rows in self.rows.items():
                there = None if len(rows) == len(self.weights) else sent(rows, device)
                parts[k] = there, sent(self.weights[rows, k], device)
            self._parts = parts
        return self._parts


def pick_experts(prior: Tensor, uniform: Tensor) -> Tensor:
    """Expert index (batch,) for ``uniform`` (batch,) in [0, 1), by inverting ``prior`` (K,) or (batch, K)."""
    bounds = prior.expand(len(uniform), -1).cumsum(1)[:, :-1].contiguous()
    return torch.searchsorted(bounds, uniform[:, None].contiguous(), right=True)[:, 0]
