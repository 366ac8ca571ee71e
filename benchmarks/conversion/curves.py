"""Steps that a training curve needs to reach a loss, and what follows from them."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def marks(steps: int, first: int, ratio: float = 1.3) -> list[int]:
    """Steps to measure at: 0, then about ``ratio`` apart from ``first`` on, and the last."""
    found, at = [0], float(first)
    while at < steps / ratio**0.5:
        found.append(round(at))
        at *= ratio
    return [*dict.fromkeys(found), steps]


def steps_to_reach(steps: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """Where a piecewise linear curve first is at or below ``target``; None where it never is."""
    for i, loss in enumerate(losses):
        if loss <= target:
            if i == 0:
                return float(steps[0])
            share = (losses[i - 1] - target) / (losses[i - 1] - loss)
            return steps[i - 1] + share * (steps[i] - steps[i - 1])
    return None


def loss_at(steps: Sequence[float], losses: Sequence[float], step: float) -> float:
    """A piecewise linear curve at ``step``, between its first step and its last."""
    for i in range(1, len(steps)):
        if step <= steps[i]:
            share = (step - steps[i - 1]) / (steps[i] - steps[i - 1])
            return losses[i - 1] + share * (losses[i] - losses[i - 1])
    return losses[-1]


@dataclass(frozen=True)
class Reached:
    """Steps of one start to a target, a seed each; None where it was not reached in the budget."""

    steps: tuple[float | None, ...]
    reference: tuple[float, ...]
    budget: int

    @property
    def ratios(self) -> list[float]:
        """Reference steps over own steps, of the seeds that reached; at least one step counts."""
        pairs = zip(self.reference, self.steps, strict=True)
        return [reference / max(own, 1.0) for reference, own in pairs if own is not None]

    def __str__(self) -> str:
        found = [step for step in self.steps if step is not None]
        if not found:
            return f"not in {self.budget:,}"
        text = f"{statistics.fmean(found):,.0f}"
        if len(found) > 1:
            text += f" (s {statistics.stdev(found):,.0f})"
        return text if len(found) == len(self.steps) else f"{text}, {len(found)} of {len(self.steps)}"

    @property
    def speedup(self) -> str:
        """How many times faster than the reference: mean and deviation over seeds."""
        ratios = self.ratios
        if len(ratios) < len(self.steps):
            return "–"
        text = f"{statistics.fmean(ratios):.2f}×"
        return f"{text} (s {statistics.stdev(ratios):.2f})" if len(ratios) > 1 else text


def reached(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], reference: str, share: float | None
) -> dict[str, Reached]:
    """Steps that every start needs to a loss of ``reference``, seed by seed.

    Args:
        runs: per start its runs, in the order of seeds; ``steps`` and ``losses`` are a run's curve.
        reference: the start whose loss is the target.
        share: the target is its loss after this share of its steps, None its lowest.
    """
    targets = [
        min(run["losses"])
        if share is None
        else loss_at(run["steps"], run["losses"], share * run["steps"][-1])
        for run in runs[reference]
    ]

    def steps_of(each: Sequence[Mapping[str, Any]]) -> tuple[float | None, ...]:
        pairs = zip(each, targets, strict=True)
        return tuple(steps_to_reach(run["steps"], run["losses"], target) for run, target in pairs)

    base = tuple(step for step in steps_of(runs[reference]) if step is not None)
    return {start: Reached(steps_of(each), base, int(each[0]["steps"][-1])) for start, each in runs.items()}
