"""Pictures of the report: distance against sampling cost as inline SVG, and strips of samples as one file."""

import html
import io
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from torch import Tensor
from torch.nn import functional

from hddm.benchmark.results import Results, Row
from hddm.benchmark.settings import SamplingPoint

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


def write_strips(
    strips: Sequence[tuple[str, Tensor, Sequence[int]]], domains: Mapping[str, Sequence[str]], path: Path
) -> None:
    """Write a picture of strips: a name, images (n, C, H, W) in bytes, and the domain of each, its frame."""
    colours = torch.tensor([[int(one[k : k + 2], 16) for k in (1, 3, 5)] for one in COLOURS]).byte()
    height, width = len(strips), strips[0][1].shape[0]
    with rc_context(_STYLE | {"axes.grid": False}):
        canvas = Canvas(figsize=(2.4 + 0.36 * width, 0.6 + 0.42 * height), layout="constrained")
        for axes, (name, pixels, of) in zip(canvas.subplots(height, 1), strips, strict=True):
            big = pixels.expand(-1, 3, -1, -1).repeat_interleave(4, 2).repeat_interleave(4, 3)
            framed = colours[list(of)][:, :, None, None].repeat(1, 1, *(side + 8 for side in big.shape[2:]))
            framed[:, :, 4:-4, 4:-4] = big
            spaced = functional.pad(framed, (2, 2), value=255)
            axes.imshow(torch.cat([*spaced], 2).permute(1, 2, 0).numpy(), interpolation="nearest")
            axes.text(-0.01, 0.5, name, transform=axes.transAxes, ha="right", va="center")
            axes.axis("off")
        known = [
            Patch(color=colour, label=f"{name}: {', '.join(classes)}")
            for colour, (name, classes) in zip(COLOURS, domains.items(), strict=False)
        ]
        canvas.legend(handles=known, loc="outside upper right", ncols=len(known), frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        canvas.savefig(path, dpi=110, metadata={"Software": None})


def costs(results: Results) -> Chart:
    """Chart distance against counted FLOP per image, by number of images, since distances fall with it."""
    rows = [row for each in results.tables.values() for row in each]
    colours = _in_turn(COLOURS, [row.model for row in rows])
    markers = _in_turn(_MARKERS, [row.point.strategy for row in rows])
    dashes = _in_turn(_DASHES, [row.point.solver for row in rows])

    def paint(axes: Axes, number: int) -> None:
        for series in _by_steps([row for row in rows if row.point.num_images == number]):
            found = [results.decisive(row) for row in series]
            axes.errorbar(
                [row.sampling_flop / 1e6 for row in series],
                [one.mean for one in found],
                [one.spread or 0 for one in found],
                color=colours[series[0].model],
                marker=markers[series[0].point.strategy],
                linestyle=dashes[series[0].point.solver],
                markersize=5,
                elinewidth=0.8,
                alpha=0.85,
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        _plain_ticks(axes)
        axes.set_xlabel("sampling cost, MFLOP an image (counted)")
        axes.set_ylabel(f"distance to {results.score_on} images")
        axes.set_title(f"{number:,} images", loc="left")

    panels = [
        _panel(
            f"cost{number}",
            f"Fréchet distance against counted operations an image, of {number} images. Lower left is best.",
            partial(paint, number=number),
        )
        for number in sorted({row.point.num_images for row in rows}, reverse=True)
    ]
    legend = [(colour, "━", model) for model, colour in colours.items()]
    legend += [("black", _MARKERS[marker], strategy) for strategy, marker in markers.items()]
    legend += [("black", _DASHES[dash], solver) for solver, dash in dashes.items() if len(dashes) > 1]
    return Chart(tuple(panels), tuple(legend))


def _by_steps(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows that differ in the number of steps alone, each group sorted by cost."""
    found: dict[tuple[str, SamplingPoint], list[Row]] = {}
    for row in rows:
        same = found.setdefault((row.model, row.point.model_copy(update={"steps": 1})), [])
        if all(one.point.steps != row.point.steps for one in same):
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
