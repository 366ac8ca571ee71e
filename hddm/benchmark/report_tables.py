"""The report's tables of models and settings: distances, cost, memorisation, diversity."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from hddm.benchmark.numbers import number
from hddm.benchmark.report_cells import (
    NOTHING,
    Cell,
    Table,
    count,
    figure_of,
    half_width,
    millions,
    operations,
    over_seeds,
    over_trainings,
    spread,
)
from hddm.benchmark.results import Results, Row, Verdict

Column = tuple[str, Callable[[Row], Cell]]


def comparison(results: Results, table: str) -> Table:
    """One table of the benchmark: distances with both uncertainties apart, cost, and verdicts.

    What all rows have in common is said once, above it.
    """
    rows = results.tables[table]
    compared = [
        *_distance(results, results.decides, f"to {results.score_on} images"),
        *_judged(results, table),
    ]
    plain: list[Column] = [
        ("training FLOP", _training),
        ("MFLOP an image", lambda row: millions(row.sampling_flop.mean)),
        ("MFLOP a step", lambda row: millions(row.sampling_flop.mean / row.point.steps)),
        ("experts a step", lambda row: Cell(f"{row.evaluations.mean:.2f}", row.evaluations.mean)),
        ("training images seen", lambda row: count(row.images_seen)),
        ("diversity", lambda row: figure_of(row, "diversity")),
    ]
    counts = sorted({row.point.num_images for row in rows})
    notes = [f"{' and '.join(map(str, counts))} images a row"]
    for title, cell in plain:
        texts = {cell(row).text for row in rows}
        if len(texts) > 1 or len(rows) == 1:
            compared.append((title, cell))
        else:
            notes.append(f"{title}: {texts.pop()}")
    compared += _distance(results, "to_training", "to training images")
    shown = [(title, cell) for title, cell in compared if any(cell(row) != NOTHING for row in rows)]
    return Table(
        table,
        (table, *(title for title, _ in shown)),
        tuple((Cell(row.name), *(cell(row) for _, cell in shown)) for row in rows),
        "; ".join(notes),
    )


def measures(results: Results) -> Table:
    """Memorisation, diversity, kernel distances, precision and recall of the first table's models."""
    name = results.decides.removeprefix("to_")
    found: list[Column] = []
    for title, key in (
        ("nearest-image ratio", "memorisation.ratio"),
        ("± samples", "memorisation.half_width"),
        ("share near", "memorisation.share_near"),
        ("diversity (1: as training images)", "diversity"),
        ("distance within a condition", "within_conditions.images"),
        ("of training images", "within_conditions.reference"),
        (f"precision, {results.score_on}", f"on_{name}.precision"),
        (f"recall, {results.score_on}", f"on_{name}.recall"),
        ("precision, training", "on_training.precision"),
        ("recall, training", "on_training.recall"),
        (f"kernel distance, {results.score_on}", f"kernel_to_{name}"),
        ("kernel distance, training", "kernel_to_training"),
    ):
        rows = next(iter(results.tables.values()))
        if any(key in row.figures for row in rows):
            found.append((title, partial(_measured, results, key)))
    rows = next(iter(results.tables.values()))
    cells = tuple((Cell(row.name), *(cell(row) for _, cell in found)) for row in rows)
    return Table("measures", ("model", *(title for title, _ in found)), cells)


def shard_distances(results: Results) -> Table | None:
    """Distance of each model's images to the training images of each shard, where they were measured.

    They are of as many samples as lie nearest to that shard, a number that every cell says.
    """
    table, rows = next(iter(results.tables.items()))
    shards: list[int] = []
    cells = []
    for row in rows:
        seeds = [
            {part["shard"]: part for part in one.scores["shards"]}
            for one in results.records
            if (one.table, one.row) == (table, row.name)
        ]
        if not seeds or not seeds[0]:
            return None
        shards = sorted(seeds[0])
        mark = results.mark(row.model)
        cells.append((Cell(row.name), *(_to_shard([one[k] for one in seeds], mark) for k in shards)))
    return Table("shards", ("model", *(f"shard {k}" for k in shards)), tuple(cells))


def _to_shard(seeds: Sequence[Mapping[str, Any]], mark: str) -> Cell:
    known = [one for one in seeds if one["own"]]
    found = over_seeds([one["own"]["value"] for one in known], mark)
    if not known:
        return found
    counts = sorted({one["samples"] for one in known})
    told = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    few = ", too few" if any(one["own"]["few_images"] for one in known) else ""
    return Cell(f"{found.text} of {told}{few}", found.key)


def _training(row: Row) -> Cell:
    return operations(None if row.training_flop is None else row.training_flop.mean)


def _distance(results: Results, name: str, title: str) -> Iterator[Column]:
    yield title, lambda row: figure_of(row, name)
    yield "± samples", lambda row: half_width(row.figures.get(name))
    yield "s trainings", lambda row: spread(row.figures.get(name), results.mark(row.model))


def _judged(results: Results, table: str) -> Iterator[tuple[str, Callable[[Row], Cell]]]:
    """A column a baseline, and one for changes of a setting."""
    model = {row.name: row.model for row in results.tables[table]}
    verdicts = [one for one in results.verdicts if one.table == table]
    of_models = [one for one in verdicts if one.kind == "model"]
    for against in dict.fromkeys(model[one.against] for one in of_models):
        by_row = {one.row: one for one in of_models if model[one.against] == against}
        yield f"against {against}", partial(_judged_row, by_row)
    of_settings = {one.row: one for one in verdicts if one.kind == "setting"}
    if of_settings:
        others = list(dict.fromkeys(one.against for one in of_settings.values()))
        title = f"against {others[0]}" if len(others) == 1 else "against the first row of its model"
        yield title, partial(_judged_row, of_settings)


def _judged_row(verdicts: Mapping[str, Verdict], row: Row) -> Cell:
    one = verdicts.get(row.name)
    if one is None:
        return NOTHING
    said = "" if one.judgement == "no verdict" else f" {one.judgement}"
    return Cell(number(one.gap.mean, signed=True) + said, one.gap.mean, one.judgement)


def _measured(results: Results, name: str, row: Row) -> Cell:
    found = row.figures.get(name)
    return NOTHING if found is None else over_trainings(found, results.mark(row.model))
