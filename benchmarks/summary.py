"""One number over training seeds, as the reports of the experiments write it."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """Mean, standard deviation over trainings (None for one), and mean half-width over samples."""

    mean: float
    spread: float | None
    half_width: float | None = None

    def __str__(self) -> str:
        digits = 1 if abs(self.mean) >= 10 else 2
        text = f"{self.mean:.{digits}f}"
        if self.half_width is not None:
            text += f" ± {self.half_width:.{digits}f}"
        return text + ("" if self.spread is None else f" (s {self.spread:.{digits}f})")


def figure(values: Sequence[float], half_widths: Sequence[float] | None = None) -> Summary:
    """The summary of ``values``, one a seed."""
    return Summary(
        statistics.fmean(values),
        statistics.stdev(values) if len(values) > 1 else None,
        statistics.fmean(half_widths) if half_widths else None,
    )
