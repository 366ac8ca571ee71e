"""Charts as inline SVG: one panel each, as wide as a phone, with text in the page's own font."""

import html
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f5f2a", "#666666")
"""Told apart by readers who see no red or no green (Okabe and Ito)."""
GREY = "#777777"
WIDTH, HEIGHT = 4.0, 2.9
SYMBOLS = {"o": "●", "^": "▲", "s": "■", "D": "◆", "v": "▼", "P": "✚", "X": "✖", "<": "◀", ">": "▶"}
"""Matplotlib's markers as letters."""

_STYLE: Any = {
    # Text stays text: found, selected, read aloud, and a tenth of the size of outlines.
    "svg.fonttype": "none",
    # Equal results are equal files.
    "svg.hashsalt": "hddm",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
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
    """Panels, each an element, and what their colours and symbols mean."""

    panels: tuple[str, ...]
    legend: tuple[tuple[str, str, str], ...] = ()
    """Colour, symbol, meaning."""


def panel(name: str, alt: str, paint: Callable[[Axes], None], height: float = HEIGHT) -> str:
    """An ``<svg>`` element that stands in a page.

    Args:
        name: unique in the page; begins all ids within.
        alt: what a reader who does not see it is told.
        paint: draws on the axes.
        height: in inches, for a width of `WIDTH`.
    """
    with rc_context(_STYLE):
        canvas = Canvas(figsize=(WIDTH, height), layout="constrained")
        paint(canvas.subplots())
        text = io.StringIO()
        canvas.savefig(text, format="svg", transparent=True, metadata=_NO_METADATA)
    return _inline(text.getvalue(), name, alt)


def colour(place: int) -> str:
    """The colour of a series; they repeat after `COLOURS`."""
    return COLOURS[place % len(COLOURS)]


def plain_ticks(axes: Axes) -> None:
    """Numbers as they are spoken on a logarithmic axis, some on each however short it is."""
    axes.autoscale_view()
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() != "log":
            continue
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)) if high > _DECADE * low else MaxNLocator(5))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())


def _inline(text: str, name: str, alt: str) -> str:
    """A whole SVG file as an element: without what an HTML parser knows already."""
    body = text[text.index("<svg") :]
    view = re.search(r'viewBox="([^"]+)"', body)
    assert view is not None
    body = body[body.index(">") + 1 :]
    # Matplotlib's only style, which as part of a page would be the page's; it stands in the page's own sheet.
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, flags=re.DOTALL)
    body = body.replace("xlink:href", "href")
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body)
    body = re.sub(r"\n\s*", "\n", body)
    return f'<svg viewBox="{view[1]}" role="img" aria-label="{html.escape(alt)}">{body}'
