"""Pictures of the report: distance against sampling cost, as inline SVG."""

import html
import io
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from hddm.benchmark.results import Results, Row

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f5f2a", "#666666")
"""Colours distinguishable without red or green (Okabe and Ito)."""
WIDTH, HEIGHT = 4.0, 2.9
"""Inches of a panel."""
_MARKERS = {"o": "●", "^": "▲", "s": "■", "D": "◆", "v": "▼", "P": "✚", "X": "✖", "<": "◀", ">": "▶"}
_DASHES = {"-": "━", "--": "╌", ":": "┄", "-.": "╍"}
_STYLE: Any = {
    # Text stays text: found, selected, read aloud, and a tenth of the size of outlines.
    "svg.fonttype": "none",
    # Equal results are equal files.
    "svg.hashsalt": "hddm",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#777777",
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.4,
    "path.simplify_threshold": 0.4,
    "text.parse_math": False,
}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_DECADE = 10


@dataclass(frozen=True)
class Chart:
    """Panels as SVG elements, and a legend of (colour, symbol, meaning)."""

    panels: tuple[str, ...]
    legend: tuple[tuple[str, str, str], ...]


def costs(results: Results) -> Chart:
    """Chart distance against counted FLOP per image, by number of images, since distances fall with it."""
    rows = [row for each in results.tables.values() for row in each]
    colours = _in_turn(COLOURS, [row.of for row in rows])
    markers = _in_turn(_MARKERS, [_strategy(row) for row in rows])
    dashes = _in_turn(_DASHES, [str(row.setting("solver")) for row in rows])

    def paint(axes: Axes, number: int) -> None:
        for series in _by_steps([row for row in rows if row.images == number]):
            found = [results.decisive(row) for row in series]
            axes.errorbar(
                [row.sampling_flop / 1e6 for row in series],
                [one.mean for one in found],
                [one.spread or 0 for one in found],
                color=colours[series[0].of],
                marker=markers[_strategy(series[0])],
                linestyle=dashes[str(series[0].setting("solver"))],
                markersize=5,
                elinewidth=0.8,
                alpha=0.85,
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        _plain_ticks(axes)
        axes.set_xlabel("sampling cost, MFLOP per image (counted)")
        axes.set_ylabel(f"distance to {results.images_of} images")
        axes.set_title(f"{number:,} images", loc="left")

    panels = [
        _panel(
            f"cost{number}",
            f"Fréchet distance against counted operations per image, of {number} images. Lower left is best.",
            partial(paint, number=number),
        )
        for number in sorted({row.images for row in rows}, reverse=True)
    ]
    legend = [(colour, "━", model) for model, colour in colours.items()]
    legend += [("black", _MARKERS[marker], strategy) for strategy, marker in markers.items()]
    legend += [("black", _DASHES[dash], solver) for solver, dash in dashes.items() if len(dashes) > 1]
    return Chart(tuple(panels), tuple(legend))


def _strategy(row: Row) -> str:
    return str(row.setting("strategy") or "one network")


def _by_steps(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows that differ in the number of steps alone, each group sorted by cost."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        command = re.sub(r" --(steps|out) \S+", "", row.scored[0].command)
        same = found.setdefault(command, [])
        if all(one.setting("steps") != row.setting("steps") for one in same):
            same.append(row)
    return [sorted(series, key=lambda row: row.sampling_flop) for series in found.values()]


def _in_turn(symbols: Iterable[str], names: Sequence[str]) -> dict[str, str]:
    """A symbol or colour for each name, which repeat where there are more names."""
    return dict(zip(dict.fromkeys(names), itertools.cycle(symbols), strict=False))


def _plain_ticks(axes: Axes) -> None:
    """Plain numbers on a logarithmic axis, some on each however short it is."""
    axes.autoscale_view()
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)) if high > _DECADE * low else MaxNLocator(5))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())


def _panel(name: str, alt: str, paint: Callable[[Axes], None]) -> str:
    """Draw an ``<svg>`` element with ``alt`` for screen readers.

    All ids begin with ``name``, which must be unique in the page.
    """
    with rc_context(_STYLE):
        canvas = Canvas(figsize=(WIDTH, HEIGHT), layout="constrained")
        paint(canvas.subplots())
        text = io.StringIO()
        canvas.savefig(text, format="svg", transparent=True, metadata=_NO_METADATA)
    head = re.search(r'<svg[^>]*viewBox="([^"]+)"[^>]*>', text.getvalue())
    assert head is not None
    body = text.getvalue()[head.end() :]
    # Matplotlib's only style, which as part of a page would be the page's; it stands in the page's own sheet.
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, flags=re.DOTALL)
    body = body.replace("xlink:href", "href")
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body)
    body = re.sub(r"\n\s*", "\n", body)
    return f'<svg viewBox="{head[1]}" role="img" aria-label="{html.escape(alt)}">{body}'
