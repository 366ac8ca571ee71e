"""Which experts a sampling used, over time, and what about it is worth a warning."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

BINS = 10
MOST = 0.9
"""Share of the weight that one expert may take without a warning."""
FEWEST_EXPECTED = 3
"""Expected samples of an expert from which on ``draw`` warns that it made none."""


class ExpertUse:
    """A tally of weights (samples, K) over time, in `BINS` even bins of t in [0, 1]."""

    def __init__(self, num_experts: int) -> None:
        self.tally = torch.zeros(3, BINS, num_experts, dtype=torch.float64)
        """Weight, runs and samples, by bin and expert."""
        self.last = torch.zeros(0, num_experts)
        """Weights (samples, K) of the last call of the velocity."""
        self.kept: Tensor | None = None
        """The one expert (samples,) that made, or ended, each sample of the last batch; None if mixed."""

    def __repr__(self) -> str:
        return f"<ExpertUse, shares {_rounded(self.shares)}>"

    def add(self, t: float, weights: Tensor) -> None:
        """Count one call of the velocity at ``t`` with ``weights`` (samples, K) on the CPU."""
        self.last = weights
        each = torch.stack([weights, weights != 0, torch.ones_like(weights)])
        self.tally[:, min(int(t * BINS), BINS - 1)] += each.sum(1)

    @property
    def shares(self) -> Tensor:
        """Share of each expert in all weight (K,); 0 where none ran."""
        weight = self.tally[0]
        return (weight.sum(0) / weight.sum()).nan_to_num()

    @property
    def experts_a_sample(self) -> float:
        """Experts that ran for a sample and call, on average; 0 where none ran."""
        _, runs, samples = self.tally
        return float((runs.sum() / samples[:, 0].sum()).nan_to_num())

    def report(self) -> dict[str, Any]:
        """Plain values: one row per bin that was visited, from data to noise."""
        weight, runs, samples = self.tally
        by_time = []
        for place in samples[:, 0].nonzero()[:, 0].tolist():
            row = {
                "t": [place / BINS, (place + 1) / BINS],
                "shares": _rounded(weight[place] / weight[place].sum()),
                "runs": _rounded(runs[place] / samples[place]),
            }
            by_time.append(row)
        return {
            "experts_a_sample": round(self.experts_a_sample, 4),
            "shares": _rounded(self.shares),
            "by_time": by_time,
        }

    def warnings(
        self, expected: Tensor | None = None, domains: Sequence[int] = (), is_learned: bool = True
    ) -> list[str]:
        """Warnings of an expert that takes more than 90 % of the weight, or none of it.

        Args:
            expected: how many samples each expert should get by p(k | conditions), (K,), where that is
                known. It explains a large share, and an absence where few are expected.
            domains: as `Ensemble.domains`; experts of one domain count together, under the first of them.
                By default each expert counts alone.
            is_learned: true if a router that is trained chooses the experts.
        """
        lines = []
        first = torch.tensor(domains or range(len(self.shares)))
        same = (first[:, None] == first).double()
        shares, runs = self.shares @ same, self.tally[1].sum(0) @ same
        wanted = None if expected is None else expected.double() @ same
        leads = first.unique().tolist()
        for k in leads:
            due = 0.0
            if wanted is not None and expected is not None:
                due = float(wanted[k] / expected.sum())
            if len(leads) > 1 and shares[k] > MOST and due <= MOST:
                if expected is None or expected.sum() >= FEWEST_EXPECTED * len(leads):
                    doubt = "; is the router trained?" if is_learned else ""
                    lines.append(f"expert {k} takes {shares[k]:.0%} of the weight{doubt}")
            elif not runs[k] and (wanted is None or wanted[k] >= FEWEST_EXPECTED):
                lines.append(f"expert {k} is never used")
        return lines


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
