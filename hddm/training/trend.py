"""Where the loss of a training came from and got to."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hddm.wording import counted

LONGEST = 100
SHORTEST = 10
"""Steps that a mean is taken over, a tenth of all, at most and at least."""


@dataclass(frozen=True)
class Trend:
    """Means of the loss over the ``over`` first and last steps of a training, which took ``steps``.

    A single step's loss says more of its images, noise and times than of the weights. Where the steps are too
    few to compare, both means are that of all; NaN where no loss was finite.
    """

    steps: int
    over: int
    first: float = math.nan
    last: float = math.nan

    def told(self, loss: str = "loss") -> str:
        """In words; ``loss`` is what to call it."""
        whole = f"trained for {counted(self.steps, 'step')}"
        if not math.isfinite(self.last):
            return whole
        if self.over == self.steps:
            return f"{whole}, {loss} {self.last:.4f} (mean of all steps)"
        means = f"means of the first and the last {self.over} steps"
        return f"{whole}, {loss} {self.first:.4f} → {self.last:.4f} ({means})"


def trend_of(losses: Sequence[float]) -> Trend | None:
    """The trend of the losses of all steps, those left out that were not finite; None of no steps."""
    over = min(LONGEST, len(losses) // 10)
    ends = mean(losses[:over]), mean(losses[len(losses) - over :])
    if over < SHORTEST or not all(map(math.isfinite, ends)):
        over, ends = len(losses), (mean(losses), mean(losses))
    return Trend(len(losses), over, *ends) if losses else None


def mean(losses: Sequence[float]) -> float:
    """The mean of those that are finite; NaN of none."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return sum(finite) / len(finite) if finite else math.nan
