"""Reports of experiments: how their numbers, tables and verdicts are worded."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# A colour-blind-safe order (Okabe and Ito), reference first.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#999999", "#F0E442")
SIDES = {"to_training": "to training images", "to_held_out": "to held-out images"}
SCORES = (*SIDES.values(), "diversity", "nearest-image ratio")
"""Columns of `score_cells`."""
Runs = Sequence[Mapping[str, Any]]
"""One a training seed, with the scores of its ``rows`` by name."""


@dataclass(frozen=True)
class Summary:
    """Mean, standard deviation over trainings (None for one), and mean half-width over samples."""

    mean: float
    spread: float | None
    half_width: float | None = None

    def __str__(self) -> str:
        return self.to(1 if abs(self.mean) >= 10 else 2)

    def to(self, digits: int) -> str:
        """All numbers to so many decimals."""
        half = "" if self.half_width is None else f" ± {self.half_width:.{digits}f}"
        spread = "" if self.spread is None else f" (s {self.spread:.{digits}f})"
        return f"{self.mean:.{digits}f}{half}{spread}"


def figure(values: Sequence[float], half_widths: Sequence[float] | None = None) -> Summary:
    """The summary of ``values``, one a seed."""
    return Summary(
        statistics.fmean(values),
        statistics.stdev(values) if len(values) > 1 else None,
        statistics.fmean(half_widths) if half_widths else None,
    )


def mean_spread(values: Sequence[float], digits: int = 3) -> str:
    """``mean (s deviation)`` to ``digits`` significant digits of the mean; the mean alone of one value."""
    found = figure(values)
    if not math.isfinite(found.mean):
        return "–"
    places = max(0, digits - 1 - (math.floor(math.log10(abs(found.mean))) if found.mean else 0))

    def number(value: float) -> str:
        return f"{value:.1e}" if places > 5 else f"{value:,.{places}f}"

    return number(found.mean) + ("" if found.spread is None else f" (s {number(found.spread)})")


def judged(gaps: Sequence[float], digits: int = 1) -> str:
    """A mean gap between two rows of the same trainings, and whether it is more than noise."""
    gap = figure(gaps)
    if gap.spread is None:
        return f"{gap.mean:+.{digits}f}, one training, no verdict"
    clear = abs(gap.mean) > 2 * gap.spread
    return f"{gap.mean:+.{digits}f} (s {gap.spread:.{digits}f}), {'clear' if clear else 'within noise'}"


def score_cells(runs: Runs, row: str) -> list[str]:
    """Distances, diversity and nearest-image ratio of a row over trainings."""
    each = [run["rows"][row] for run in runs]
    distances = [
        figure([one[side]["value"] for one in each], [one[side]["half_width"] for one in each])
        for side in SIDES
    ]
    others = [figure([one[key] for one in each]) for key in ("diversity", "nearest_ratio")]
    return list(map(str, (*distances, *others)))


def about_scores(real: Mapping[str, Any], runs: Runs) -> str:
    """What the distances are, and what they are not."""
    return (
        'Fréchet distances on 64 features of a small classifier, **not comparable with published FID**. "±" '
        f'is the 95 % half-width over samples, "s" the standard deviation over {len(runs)} trainings; gaps '
        "are paired by training, and clear where their mean exceeds twice their s. Real held-out images are "
        f"at {real['value']:.1f} from the training images."
    )


def met(value: float, limit: float, at_most: bool = True) -> str:
    """Word for a ``value`` on the right side of ``limit``, or not."""
    return "met" if (value <= limit if at_most else value >= limit) else "missed"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table, legible as plain text; the first column is left-aligned."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    rule = [f"{'-' * (width + 1)}{'-' if k == 0 else ':'}" for k, width in enumerate(widths)]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return f"| {' | '.join(padded)} |"

    return [line(columns), f"|{'|'.join(rule)}|", *map(line, rows)]
