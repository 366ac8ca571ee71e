"""A choice of experts: who runs for which samples of a batch, and with which weight."""

import torch
from torch import Tensor

from hddm.utils.tensors import sent


class Choice:
    """Which experts run for which samples: ``weights`` (batch, K) on the CPU, grouped once by expert."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights
        used = weights != 0
        self.rows = {k: used[:, k].nonzero()[:, 0] for k in used.any(0).nonzero()[:, 0].tolist()}
        """Indices of an expert's samples, by expert."""
        self._parts: dict[int, tuple[Tensor | None, Tensor]] | None = None

    @classmethod
    def of(cls, expert: Tensor, num_experts: int) -> "Choice":
        """The choice of one expert for each sample, ``expert`` (batch,) on the CPU."""
        return cls(torch.nn.functional.one_hot(expert.long(), num_experts).float())

    def parts(self, device: torch.device) -> dict[int, tuple[Tensor | None, Tensor]]:
        """Rows (None for all) and weights of each expert on ``device``, sent there once."""
        if self._parts is None:
            self._parts = {
                k: (
                    None if len(rows) == len(self.weights) else sent(rows, device),
                    sent(self.weights[rows, k], device),
                )
                for k, rows in self.rows.items()
            }
        return self._parts
