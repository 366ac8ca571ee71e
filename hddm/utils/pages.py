"""Pages that need no other file: charts are inline SVG, pictures data addresses, and one style serves all."""

import base64
import contextlib
import functools
import html
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from hddm.utils.progress import duration

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f5f2a", "#666666")
"""Colours distinguishable without red or green (Okabe and Ito)."""


@functools.cache
def templates(is_html: bool, **options: Any) -> Environment:
    """Templates of the package, by their paths in it; only those of HTML escape values.

    Further ``options`` are Jinja's. Each template is compiled once a process.
    """
    loader = PackageLoader("hddm", "")
    found = Environment(loader=loader, autoescape=is_html, undefined=StrictUndefined, **options)
    found.globals["duration"] = duration
    return found


@contextlib.contextmanager
def charts() -> Iterator[type["Figure"]]:
    """Matplotlib's figure class, in the style of the pages."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(fname=Path(__file__).with_suffix(".mplstyle")):
        yield Figure


def as_element(figure: "Figure", name: str, alt: str) -> str:
    """An ``<svg>`` element with ``alt`` for screen readers, whose ids begin with ``name``."""
    text = io.StringIO()
    nothing: dict[str, Any] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    head = re.search(r'<svg[^>]*viewBox="([^"]+)"[^>]*>', text.getvalue())
    assert head is not None
    # Matplotlib's only style, which as part of a page would be the page's; it stands in the page's own sheet.
    body = re.sub(
        r"<defs>\s*<style.*?</style>\s*</defs>", "", text.getvalue()[head.end() :], flags=re.DOTALL
    )
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body.replace("xlink:href", "href"))
    body = re.sub(r"\n\s*", "\n", body)
    return f'<svg viewBox="{head[1]}" role="img" aria-label="{html.escape(alt)}">{body}'


def plain_numbers(axis: "Axis") -> None:
    """Plain numbers on a logarithmic axis, some on each however short it is."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)) if high > 10 * low else MaxNLocator(5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def data_address(png: bytes) -> str:
    """The address of a PNG that stands in the page itself."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
