"""Which experts a sampling used, a time bin, and what is wrong with it."""

from typing import Any

import torch
from torch import Tensor

BINS = 10
MOST = 0.9
"""Share of the weight that one expert may take before it is worth a warning."""
FEWEST_EXPECTED = 3
"""Samples that ``draw`` must be expected to give an expert before their absence says anything."""


class ExpertUse:
    """A tally of weights (samples, K) over time, in `BINS` even bins of t in [0, 1]."""

    def __init__(self, num_experts: int) -> None:
        self._weight = torch.zeros(BINS, num_experts, dtype=torch.float64)
        self._runs = torch.zeros(BINS, num_experts, dtype=torch.float64)
        self._samples = torch.zeros(BINS, dtype=torch.float64)

    def add(self, t: float, weights: Tensor) -> None:
        """Count one call of the velocity at ``t`` with ``weights`` (samples, K)."""
        place = min(int(t * BINS), BINS - 1)
        self._weight[place] += weights.sum(0).double().cpu()
        self._runs[place] += (weights != 0).sum(0).double().cpu()
        self._samples[place] += len(weights)

    @property
    def shares(self) -> Tensor:
        """Share of each expert in all weight (K,)."""
        return self._weight.sum(0) / self._weight.sum()

    @property
    def experts_a_sample(self) -> float:
        """Experts that ran for a sample and call, on average."""
        return float(self._runs.sum() / self._samples.sum())

    def report(self) -> dict[str, Any]:
        """Plain values: a row a bin that was visited, from data to noise."""
        visited = [place for place in range(BINS) if self._samples[place]]
        return {
            "experts_a_sample": round(self.experts_a_sample, 4),
            "shares": _rounded(self.shares),
            "by_time": [
                {
                    "t": [place / BINS, (place + 1) / BINS],
                    "shares": _rounded(self._weight[place] / self._weight[place].sum()),
                    "runs": _rounded(self._runs[place] / self._samples[place]),
                }
                for place in visited
            ],
        }

    def warnings(self, expected: Tensor | None = None) -> list[str]:
        """What looks wrong: an expert that takes more than 90 % of the weight, or none of it.

        Args:
            expected: with ``draw``, how many samples each expert should get, (K,). It explains a large
                share, and an absence where few are expected.
        """
        lines = []
        shares = self.shares
        for k, share in enumerate(shares.tolist()):
            due = float(expected[k] / expected.sum()) if expected is not None else 0.0
            if len(shares) > 1 and share > MOST and due <= MOST:
                if expected is None or expected.sum() >= FEWEST_EXPECTED * len(shares):
                    lines.append(f"expert {k} takes {share:.0%} of the weight; is the router trained?")
            elif not self._runs[:, k].any() and (expected is None or expected[k] >= FEWEST_EXPECTED):
                lines.append(f"expert {k} is never used")
        return lines


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
