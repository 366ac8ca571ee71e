"""Reports of experiments: how their numbers and tables are worded."""

import math
import statistics
from collections.abc import Sequence

# A colour-blind-safe order (Okabe and Ito), reference first.
COLOURS = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#D55E00",
    "#0072B2",
    "#CC79A7",
    "#999999",
    "#F0E442",
)


def mean_spread(values: Sequence[float], digits: int = 3) -> str:
    """``mean (s deviation)`` to ``digits`` significant digits of the mean; the mean alone of one value."""
    mean = statistics.fmean(values)
    if not math.isfinite(mean):
        return "–"
    places = max(0, digits - 1 - (math.floor(math.log10(abs(mean))) if mean else 0))

    def number(value: float) -> str:
        return f"{value:.1e}" if places > 5 else f"{value:,.{places}f}"

    return number(mean) + (f" (s {number(statistics.stdev(values))})" if len(values) > 1 else "")


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
