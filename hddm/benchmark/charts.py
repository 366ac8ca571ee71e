"""Pictures of the report: distance against sampling cost, as inline SVG."""

import html
import io
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from hddm.benchmark.results import Results, Row

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f5f2a", "#666666")
"""Colours distinguishable without red or green (Okabe and Ito)."""
_MARKERS = {"o": "●", "^": "▲", "s": "■", "D": "◆", "v": "▼", "P": "✚", "X": "✖", "<": "◀", ">": "▶"}


def costs(results: Results) -> dict[str, Any]:
    """Chart distance against counted FLOP per image, by number of images, since distances fall with it.

    ``panels`` are SVG elements, ``legend`` has the colour, the symbol and the meaning of each entry.
    """
    rows = results.rows
    # They repeat where there are more names.
    colours = dict(zip(dict.fromkeys(row.one.of for row in rows), itertools.cycle(COLOURS), strict=False))
    markers = dict(zip(dict.fromkeys(map(_strategy, rows)), itertools.cycle(_MARKERS), strict=False))

    def panel(number: int) -> str:
        canvas = Canvas(figsize=(4.0, 2.9), layout="constrained")
        axes = canvas.subplots()
        for series in _by_steps([row for row in rows if row.one.evaluation.images == number]):
            found = [results.decisive(row) for row in series]
            axes.errorbar(
                [row.sampling_flop / 1e6 for row in series],
                [one.mean for one in found],
                [one.spread or 0 for one in found],
                color=colours[series[0].one.of],
                marker=markers[_strategy(series[0])],
                markersize=5,
                elinewidth=0.8,
                alpha=0.85,
            )
        axes.set(xscale="log", yscale="log", xlabel="sampling cost, MFLOP per image (counted)")
        axes.set_ylabel(f"distance to {results.images_of} images")
        axes.set_title(f"{number:,} images", loc="left")
        axes.autoscale_view()
        for axis in (axes.xaxis, axes.yaxis):
            # Plain numbers, some on each axis however short it is.
            low, high = axis.get_view_interval()
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)) if high > 10 * low else MaxNLocator(5))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_locator(NullLocator())
        alt = (
            f"Fréchet distance against counted operations per image, of {number} images. Lower left is best."
        )
        return _as_element(canvas, f"cost{number}", alt)

    with rc_context(fname=Path(__file__).with_suffix(".mplstyle")):
        panels = tuple(
            panel(number) for number in sorted({row.one.evaluation.images for row in rows}, reverse=True)
        )
    legend = [(colour, "━", name) for name, colour in colours.items()]
    legend += [("black", _MARKERS[marker], strategy) for strategy, marker in markers.items()]
    return {"panels": panels, "legend": legend}


def _strategy(row: Row) -> str:
    return str(row.setting("strategy") or "one network")


def _by_steps(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows that differ in the number of steps alone, each group sorted by cost."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        same = found.setdefault(re.sub(r" --(steps|out) \S+", "", row.one.command), [])
        if all(one.setting("steps") != row.setting("steps") for one in same):
            same.append(row)
    return [sorted(series, key=lambda row: row.sampling_flop) for series in found.values()]


def _as_element(canvas: Canvas, name: str, alt: str) -> str:
    """An ``<svg>`` element with ``alt`` for screen readers, whose ids begin with ``name``."""
    text = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    canvas.savefig(text, format="svg", transparent=True, metadata=nothing)
    head = re.search(r'<svg[^>]*viewBox="([^"]+)"[^>]*>', text.getvalue())
    assert head is not None
    # Matplotlib's only style, which as part of a page would be the page's; it stands in the page's own sheet.
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text.getvalue()[head.end() :], flags=re.DOTALL)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body.replace("xlink:href", "href"))
    body = re.sub(r"\n\s*", "\n", body)
    return f'<svg viewBox="{head[1]}" role="img" aria-label="{html.escape(alt)}">{body}'
