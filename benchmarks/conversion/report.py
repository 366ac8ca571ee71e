"""Results on disk: Markdown, JSON and a picture each, and what they were measured on."""

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from hddm.benchmark.jobs import machine
from hddm.utils.files import write_json

# A colour-blind-safe order (Okabe and Ito), reference first.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#999999", "#F0E442")


def measured_on() -> dict[str, Any]:
    """The machine, the day, and how busy the machine was when this was called."""
    return {
        "date": date.today().isoformat(),
        "processor": _processor(),
        "load_average": [round(load, 1) for load in os.getloadavg()],
        **machine(),
    }


def head(facts: Mapping[str, Any], command: str, seconds: float, busy_matters: bool = False) -> str:
    """The lines under a result's title."""
    packages = ", ".join(f"{name} {number}" for name, number in facts["packages"].items())
    load = f" Load average when it began: {facts['load_average'][0]}." if busy_matters else ""
    return (
        f"{facts['date']} · `python -m benchmarks.conversion {command}` · {facts['cores']} cores "
        f"({facts['processor']}), no accelerator · {facts['platform']} · Python {facts['python']}, "
        f"{packages} · {seconds:,.0f} s.{load}\n"
    )


def write_result(
    folder: Path, subject: str, text: Sequence[str], content: Mapping[str, Any], picture: Figure | None
) -> Path:
    """Write ``<date>-conversion-<subject>`` as .md, .json and .png; return the first."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{content['measured_on']['date']}-conversion-{subject}"
    lines = list(text)
    if picture is not None:
        picture.savefig(stem.with_suffix(".png"), dpi=130, metadata={"Software": None})
        lines += ["", f"![{subject}]({stem.name}.png)"]
    stem.with_suffix(".md").write_text("\n".join(lines).rstrip() + "\n")
    write_json(stem.with_suffix(".json"), finite(content))
    return stem.with_suffix(".md")


def finite(value: Any) -> Any:
    """``value`` with None for NaN and infinity, which JSON lacks."""
    if isinstance(value, Mapping):
        return {str(key): finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table, legible as plain text; the first column is left-aligned."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    rule = [f"{'-' * (width + 1)}{'-' if k == 0 else ':'}" for k, width in enumerate(widths)]
    return [_line(columns, widths), f"|{'|'.join(rule)}|", *(_line(row, widths) for row in rows)]


def mean_spread(values: Sequence[float], digits: int = 3) -> str:
    """``mean (s deviation)`` to ``digits`` significant digits of the mean; the mean alone of one value."""
    mean = statistics.fmean(values)
    if not math.isfinite(mean):
        return "–"
    places = max(0, digits - 1 - (math.floor(math.log10(abs(mean))) if mean else 0))
    if len(values) == 1:
        return _number(mean, places)
    return f"{_number(mean, places)} (s {_number(statistics.stdev(values), places)})"


def _number(value: float, places: int) -> str:
    return f"{value:.1e}" if places > 5 else f"{value:,.{places}f}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
    return f"| {' | '.join(padded)} |"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
    return names[0].split(":", 1)[1].strip() if names else "processor unknown"
