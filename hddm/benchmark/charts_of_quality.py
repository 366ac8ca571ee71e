"""Charts of what samples are worth: of every model, and against what they cost."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes

from hddm.benchmark.conversions import EXACT
from hddm.benchmark.results import Results, Row, SeedRow
from hddm.benchmark.svg import GREY, SYMBOLS, Chart, colour, panel, plain_ticks

_MARKERS = {"draw": "o", "top-1": "^", "top-2": "s", "full": "D"}
_OTHER_MARKERS = ("v", "P", "X", "<", ">")
_DASHES, _LINES = ("-", "--", ":", "-."), ("━", "╌", "┄", "╍")
_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}


def ranges(results: Results) -> Chart:
    """The deciding distance of the first table: seeds, their mean, and its interval over samples."""
    table, rows = next(iter(results.tables.items()))
    real = results.real["to_training"]["value"]
    ours = {
        row.name: [_value(one, results.decides) for one in _records(results, table, row.name)] for row in rows
    }

    def paint(axes: Axes) -> None:
        for place, row in enumerate(rows):
            found = row.figures[results.decides]
            axes.hlines(
                place,
                found.mean - (found.half_width or 0),
                found.mean + (found.half_width or 0),
                color=colour(0),
                linewidth=5,
                alpha=0.3,
            )
            axes.plot(ours[row.name], [place] * len(ours[row.name]), "o", color=colour(0), ms=4, mfc="none")
            axes.plot(found.mean, place, "|", color="black", ms=13, mew=1.8)
            axes.text(
                0, place - 0.3, row.name, transform=axes.get_yaxis_transform(), va="bottom", bbox=_WHITE
            )
        axes.axvline(real, color=GREY, linestyle="--", linewidth=1)
        axes.set_ylim(len(rows) - 0.5, -0.95)
        axes.set_yticks([])
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(f"Fréchet distance to {results.score_on} images")

    said = "; ".join(
        f"{row.name} {row.figures[results.decides].told(results.mark(row.model))}" for row in rows
    )
    alt = f"Fréchet distance to {results.score_on} images of every model. {said}."
    legend = (
        ("black", "❘", "mean"),
        (colour(0), "○", "one training seed"),
        (colour(0), "▬", "95 % interval over samples (bootstrap)"),
        (GREY, "┆", "real images, to the training images"),
    )
    return Chart((panel("ranges", alt, paint, 0.75 + 0.42 * len(rows)),), legend)


def costs(results: Results) -> Chart | None:
    """Quality against counted operations an image; a panel a number of images, as distances fall with it."""
    rows = [row for rows in results.tables.values() for row in rows if row.point.conversion == EXACT]
    models = list(dict.fromkeys(row.model for row in rows))
    solvers = list(dict.fromkeys(row.point.solver for row in rows))
    markers = _markers(dict.fromkeys(row.point.strategy for row in rows))
    numbers = sorted({row.point.num_images for row in rows}, reverse=True)

    def paint(axes: Axes, number: int) -> None:
        for series in _series([row for row in rows if row.point.num_images == number]):
            first = series[0]
            cost = [row.sampling_flop.mean / 1e6 for row in series]
            distances = [row.figures[results.decides] for row in series]
            axes.errorbar(
                cost,
                [one.mean for one in distances],
                [one.spread or 0 for one in distances],
                color=colour(models.index(first.model)),
                marker=markers[first.point.strategy],
                linestyle=_DASHES[solvers.index(first.point.solver) % len(_DASHES)],
                markersize=5,
                elinewidth=0.8,
                alpha=0.85,
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        plain_ticks(axes)
        axes.set_xlabel("sampling cost, MFLOP an image (counted)")
        axes.set_ylabel(f"distance to {results.score_on} images")
        axes.set_title(f"{number:,} images", loc="left")

    panels = []
    for number in numbers:
        alt = (
            f"Fréchet distance against counted operations an image, of {number} images; lower left is better."
        )
        panels.append(panel(f"cost{number}", alt, partial(paint, number=number)))
    legend = [(colour(k), "━", model) for k, model in enumerate(models)]
    legend += [("black", SYMBOLS[marker], strategy) for strategy, marker in markers.items()]
    if len(solvers) > 1:
        legend += [("black", _LINES[k % len(_LINES)], solver) for k, solver in enumerate(solvers)]
    return Chart(tuple(panels), tuple(legend))


def _series(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that differ in the number of steps alone, by cost."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        same = found.setdefault((row.model, row.point.model_copy(update={"steps": 1})), [])
        if all(one.point.steps != row.point.steps for one in same):
            same.append(row)
    return [sorted(series, key=lambda row: row.sampling_flop.mean) for series in found.values()]


def _markers(strategies: Iterable[str]) -> dict[str, str]:
    others = iter(_OTHER_MARKERS * len(SYMBOLS))
    return {name: _MARKERS.get(name) or next(others) for name in strategies}


def _records(results: Results, table: str, row: str) -> list[SeedRow]:
    return [one for one in results.records if (one.table, one.row) == (table, row)]


def _value(record: SeedRow, name: str) -> float:
    return float(record.scores[name]["value"])
