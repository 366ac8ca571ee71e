"""Report of a benchmark: its tables in Markdown, and one HTML page that needs no other file.

The page has charts of distance against sampling cost, as inline SVG.
"""

import io
import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from hddm.benchmark.objective import JUDGED
from hddm.benchmark.results import (
    MARK,
    SECOND,
    Comparison,
    ObjectiveComparison,
    Results,
    Row,
    number,
)
from hddm.data.images import contact_sheet
from hddm.data.shard_records import named_shards
from hddm.data.sources.base import SUFFIXES
from hddm.evaluation.compare import escaped, markdown_table
from hddm.evaluation.score_records import LEARNED, RECOGNISED
from hddm.objective.records import BITS, MEAN_ERROR, error_at
from hddm.utils.files import write_whole
from hddm.utils.pages import COLOURS, as_element, charts, data_address, plain_numbers, templates

REPORT_FILE = "report.html"
PUBLISHED = 50_000
LEAST = 0.02
"""Share of the samples of a model from which a class counts as made."""
GRID_IMAGES, GRID_COLUMNS, CELL = 64, 8, 64
SHOWN_TIMES = (0.02, 0.1, 0.3, 0.6)
"""Noise levels of errors in tables; all of them are in `hddm.objective.errors.TIMES`."""
_NONE = "–"
_signed = partial(number, signed=True)


@dataclass(frozen=True)
class Cell:
    """The text of a cell, the number to sort it by, and the judgement that colours it."""

    text: str
    key: float | None = None
    judgement: str = ""


@dataclass(frozen=True)
class CellTable:
    """Rows of cells under a head; the first cell of a row names it."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


Column = tuple[str, Callable[[Row], Cell]]
"""Head of a column, and what it shows of a row."""


def tables_text(results: Results) -> str:
    """All tables in Markdown, verdicts against the baselines, and what does not compare."""
    return _rendered(
        "tables.md.j2", results, tables=_tables(results, *results.tables), markdown=_markdown
    )


def write_report(folder: Path, results: Results, headline: str | None = None) -> None:
    """Write ``report.html`` into the ``folder`` of ``results``, whose links lead to the samples."""
    first, *others = results.tables
    title = headline or results.settings.title or f"hddm benchmark {results.name}"
    content = {
        "The file in full": results.settings.model_dump(mode="json"),
        "Images and features": results.real.model_dump(mode="json", include={"data", "features"}),
        "Machines and versions": results.machines,
    }
    records = {}
    for name, one in content.items():
        records[name] = json.dumps(one, indent=2, ensure_ascii=False)
    page = _rendered(
        "report.html.j2",
        results,
        headline=title,
        first=_tables(results, first),
        others=_tables(results, *others),
        measures=measures_table(results),
        rows=list(_pictured(folder, results)),
        costs=costs(results),
        records=records,
    )
    write_whole(folder / REPORT_FILE, lambda draft: draft.write_text(page, encoding="utf-8"))


def _rendered(name: str, results: Results, **values: Any) -> str:
    """The template called ``name``; only HTML is escaped as such."""
    pages = templates(is_html="html" in name)
    pages.filters["escaped"] = escaped
    limits = {"LEARNED": LEARNED, "RECOGNISED": RECOGNISED, "LEAST": LEAST, "PUBLISHED": PUBLISHED}
    signs = {"MARK": MARK, "number": number, "signed": _signed}
    template = pages.get_template(f"benchmark/{name}")
    return template.render(results=results, **limits, **signs, **values)


def _markdown(table: CellTable) -> str:
    rows = []
    for row in table.rows:
        rows.append([cell.text for cell in row])
    return "\n".join(markdown_table(table.head, rows))


def _tables(results: Results, *names: str) -> list[CellTable]:
    """Tables of the benchmark, each followed by its rows by second features, by domain and by objective."""
    tables = []
    for name in names:
        tables += [
            comparison_table(results, name),
            second_table(results, name),
            domain_table(results, name),
            objective_table(results, name),
        ]
    return tables


def comparison_table(results: Results, name: str) -> CellTable:
    """One table of the benchmark: distances with both uncertainties, verdicts, and cost."""
    further = (
        (f"to {results.images_of} images by {_second(results)}", f"{SECOND}{results.decides}"),
        ("to training images", "splits.training.distance"),
        ("recognised", "recognised.share"),
        ("of real images", "recognised.real"),
        ("diversity", "diversity"),
        ("nearest-image ratio", "memorisation.ratio"),
    )
    columns: list[Column] = [
        *_figures(results, [(f"to {results.images_of} images", results.decides)]),
        *_verdict_columns(results, name, results.comparisons, "", _shown_verdict),
        *_figures(results, further),
        ("training FLOP", lambda row: _flop(row.training_flop)),
        ("experts per step", lambda row: Cell(f"{row.experts_a_step:.2f}", row.experts_a_step)),
        ("MFLOP per image", lambda row: Cell(f"{row.sampling_flop / 1e6:,.1f}", row.sampling_flop)),
        ("images", lambda row: Cell(f"{row.one.evaluation.images:,}", row.one.evaluation.images)),
    ]
    return _table(name, results.tables[name], columns)


def _second(results: Results) -> str:
    return str(results.settings.evaluate.second_features)


def second_table(results: Results, name: str) -> CellTable:
    """Distances of rows of a table by the second features, with verdicts; empty without such features."""
    distance = (f"to {results.images_of} images", f"{SECOND}{results.decides}")
    further = (
        (f"kernel distance, {results.images_of}", f"{SECOND}splits.{results.split}.kernel"),
        ("to training images", f"{SECOND}splits.training.distance"),
        ("kernel distance, training", f"{SECOND}splits.training.kernel"),
    )
    columns = [
        *_figures(results, [distance]),
        *_verdict_columns(results, name, results.by_second, "", _shown_verdict),
        *_figures(results, further),
    ]
    rows = results.tables[name] if results.second_real is not None else ()
    return _table(f"{name}, by {_second(results)}", rows, columns)


def domain_table(results: Results, name: str) -> CellTable:
    """What rows of a table make of each domain; empty without domains."""
    domains = results.settings.evaluate.domains
    of_each = (
        ("share", "share"),
        ("to training images", "splits.training.distance"),
        (f"to {results.images_of} images", results.decides),
        ("recall", f"splits.{results.split}.overlap.recall"),
    )
    figures = []
    for domain in domains:
        for title, path in of_each:
            figures.append((f"{domain}: {title}", f"domains.{domain}.{path}"))
    figures.append(("label accuracy", "label_accuracy"))
    columns: list[Column] = [("classes made", _classes_made), *_figures(results, figures)]
    rows = results.tables[name] if domains else ()
    return _table(f"{name}, by domain", rows, columns)


def objective_table(results: Results, name: str) -> CellTable:
    """Errors by noise level and bits per dimension of rows of a table; empty where none has any."""
    rows = results.tables[name]
    if not any(row.one.objective is not None and row.one.objective.figures for row in rows):
        rows = []
    figures = [(error_at(time), error_at(time)) for time in SHOWN_TIMES]
    columns: list[Column] = []
    for head, figure in [*figures, ("mean error", MEAN_ERROR), ("bits per dimension", BITS)]:
        columns.append((head, partial(_objective_cell, figure)))
        if figure in JUDGED:
            compared = [one for one in results.by_objective if one.figure == figure]
            columns += _verdict_columns(results, name, compared, f"{head} ", _shown_gap)
    return _table(f"{name}, by the objective", rows, columns)


def _objective_cell(figure: str, row: Row) -> Cell:
    found = row.objective(figure)
    if found is None:
        return Cell(_NONE)
    # Errors of models differ by little, so they have four digits.
    text = f"{found.mean:.4g} ± {found.half_width:.2g}".replace("-", "−")
    if found.spread is not None:
        mark = MARK if row.group.is_one_model else ""
        text += f" (s {found.spread:.2g}{mark})"
    return Cell(text, found.mean)


def _shown_gap(one: Comparison) -> str:
    text = f"{one.verdict.gap:+.2g}".replace("-", "−")
    if one.verdict.judgement != "no verdict":
        text += f" {one.verdict.judgement}"
    is_over_images = isinstance(one, ObjectiveComparison) and one.over == "images"
    return f"{text}, over images" if is_over_images else text


def _classes_made(row: Row) -> Cell:
    """How many classes have at least `LEAST` of the samples."""
    counts = [one.evaluation.recognised.classes for one in row.scored if one.evaluation.recognised]
    if not counts:
        return Cell(_NONE)
    totals = []
    for name in counts[0]:
        totals.append(sum(one[name] for one in counts))
    least = LEAST * sum(totals)
    made = sum(number >= least for number in totals)
    return Cell(f"{made} of {len(totals)}", made)


def measures_table(results: Results) -> CellTable:
    """Memorisation, diversity, kernel distances, precision and recall of the first table's rows."""
    own, training = f"splits.{results.split}", "splits.training"
    figures = (
        ("nearest-image ratio", "memorisation.ratio"),
        ("share near", "memorisation.share_near"),
        ("diversity (1: as training images)", "diversity"),
        ("distance within a condition", "within_conditions.images"),
        ("of training images", "within_conditions.reference"),
        (f"precision, {results.images_of}", f"{own}.overlap.precision"),
        (f"recall, {results.images_of}", f"{own}.overlap.recall"),
        ("precision, training", f"{training}.overlap.precision"),
        ("recall, training", f"{training}.overlap.recall"),
        (f"kernel distance, {results.images_of}", f"{own}.kernel"),
        ("kernel distance, training", f"{training}.kernel"),
    )
    return _table("measures", results.first, _figures(results, figures))


def _verdict_columns(
    results: Results,
    table: str,
    comparisons: Sequence[Comparison],
    prefix: str,
    shown: Callable[[Comparison], str],
) -> Iterator[Column]:
    """A column per baseline, and one for changes of a setting."""
    of = {row.name: row.one.of for row in results.tables[table]}
    found: dict[str, dict[str, Comparison]] = {}
    for one in comparisons:
        if one.table == table:
            against = of[one.against] if one.kind == "model" else "the first row of its model"
            found.setdefault(f"{prefix}against {against}", {})[one.row] = one
    for title, by_row in found.items():
        yield title, partial(_judged, by_row, shown)


def _judged(by_row: dict[str, Comparison], shown: Callable[[Comparison], str], row: Row) -> Cell:
    one = by_row.get(row.name)
    if one is None:
        return Cell(_NONE)
    return Cell(shown(one), one.verdict.gap, one.verdict.judgement)


def _shown_verdict(one: Comparison) -> str:
    judgement = one.verdict.judgement
    text = _signed(one.verdict.gap)
    return text if judgement == "no verdict" else f"{text} {judgement}"


def _table(title: str, rows: Sequence[Row], columns: Sequence[Column]) -> CellTable:
    """Make a table, without columns that have nothing to show."""
    heads = [title]
    shown = [[Cell(row.name) for row in rows]]
    for head, cell in columns:
        cells = [cell(row) for row in rows]
        if any(one.text != _NONE for one in cells):
            heads.append(head)
            shown.append(cells)
    return CellTable(title, tuple(heads), tuple(zip(*shown, strict=True)))


def _figures(results: Results, figures: Iterable[tuple[str, str]]) -> list[Column]:
    """Columns of scores, by their heads and their places in the results."""

    def cell(row: Row, path: str) -> Cell:
        found = row.figure(path)
        return Cell(results.shown(row, path), None if found is None else found.mean)

    return [(head, partial(cell, path=path)) for head, path in figures]


def _flop(value: float | None) -> Cell:
    if value is None:
        return Cell("not known")
    return Cell(f"{value:.2e}".replace("e+", "e") if value else "0", value)


def _pictured(folder: Path, results: Results) -> Iterator[dict[str, Any]]:
    """Sheets of real images and of each row of the first table, with what the first samples show."""
    paths = _real_images(folder, results)
    # From all over, since they are sorted by class.
    sheet = _sheet(paths[:: len(paths) // GRID_IMAGES or 1])
    yield {"name": f"real images, {results.images_of}", "first": [], "sheet": sheet}
    domains = results.settings.evaluate.domains
    number_of: dict[str, int] = {}
    for k, names in enumerate(domains.values()):
        number_of |= dict.fromkeys(names.split(","), k)
    for row in results.first:
        scores = row.one.evaluation
        paths = sorted((folder / shlex.split(row.one.command)[-1]).glob("*.png"))
        seen = scores.recognised.first if scores.recognised and domains else ()
        first = []
        for path, name in zip(paths, seen, strict=False):
            address = data_address(path.read_bytes())
            first.append((address, name, number_of.get(name, len(domains))))
        shares = [f"{100 * one.share:.0f} % {one.domain}" for one in scores.domains]
        yield {
            "name": row.name,
            "caption": results.settings.captions.get(row.one.of, row.name),
            "shares": ", ".join(shares),
            "first": first,
            "sheet": _sheet(paths),
        }


def _real_images(folder: Path, results: Results) -> list[Path]:
    """Files of the real images that the rows are scored on."""
    commands = (step.command for step in results.steps if step.name.endswith("scores/real"))
    real = shlex.split(next(commands))[2]
    # Images of the user may be named by a path from where the benchmark was started.
    named = folder / real if (folder / real).exists() else Path(real)
    paths: list[Path] = []
    for place in named_shards(named, are_held_out=True) or [named]:
        paths += [path for path in sorted(place.rglob("*")) if path.suffix in SUFFIXES]
    return paths


def _sheet(paths: Sequence[Path]) -> str:
    """The data address of the first images side by side; empty without any."""
    if not paths:
        return ""
    sheet = io.BytesIO()
    contact_sheet(paths[:GRID_IMAGES], Image.open, GRID_COLUMNS, CELL).save(sheet, "png")
    return data_address(sheet.getvalue())


_MARKERS = {
    "o": "●",
    "^": "▲",
    "s": "■",
    "D": "◆",
    "v": "▼",
    "P": "✚",
    "X": "✖",
    "<": "◀",
    ">": "▶",
}


def costs(results: Results) -> dict[str, Any]:
    """Chart distance against counted FLOP per image, by number of images, since distances fall with it.

    ``panels`` are SVG elements, ``legend`` has the colour, the symbol and the meaning of each entry.
    """
    rows = results.rows
    # They repeat where there are more names.
    next_colour = itertools.cycle(COLOURS)
    next_marker = itertools.cycle(_MARKERS)
    colours: dict[str, str] = {}
    markers: dict[str, str] = {}
    for row in rows:
        if row.one.of not in colours:
            colours[row.one.of] = next(next_colour)
        if _strategy(row) not in markers:
            markers[_strategy(row)] = next(next_marker)

    def panel(number: int) -> str:
        canvas = figure(figsize=(4.0, 2.9), layout="constrained")
        axes = canvas.subplots()
        for series in _by_steps([row for row in rows if row.one.evaluation.images == number]):
            found = [results.decisive(row) for row in series]
            spreads = [one.spread or 0 for one in found]
            axes.errorbar(
                [row.sampling_flop / 1e6 for row in series],
                [one.mean for one in found],
                spreads,
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
            plain_numbers(axis)
        alt = (
            f"Fréchet distance against counted operations per image, of {number} images. "
            "Lower left is best."
        )
        return as_element(canvas, f"cost{number}", alt)

    numbers = sorted({row.one.evaluation.images for row in rows}, reverse=True)
    with charts() as figure:
        panels = tuple(map(panel, numbers))
    legend = [(colour, "━", name) for name, colour in colours.items()]
    legend += [("black", _MARKERS[marker], strategy) for strategy, marker in markers.items()]
    return {"panels": panels, "legend": legend}


def _strategy(row: Row) -> str:
    """The strategy that the row was sampled with, as the legend names it."""
    return str(row.setting("strategy") or "one network")


def _by_steps(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows that differ in the number of steps alone, each group sorted by cost."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        same = found.setdefault(re.sub(r" --(steps|out) \S+", "", row.one.command), [])
        if all(one.setting("steps") != row.setting("steps") for one in same):
            same.append(row)
    return [sorted(series, key=lambda row: row.sampling_flop) for series in found.values()]
