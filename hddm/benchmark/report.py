"""Report of a benchmark: its tables in Markdown, and one HTML page that needs no other file."""

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from hddm.benchmark import charts
from hddm.benchmark.domains import CHECKED
from hddm.benchmark.results import MARK, Comparison, Results, Row, number
from hddm.benchmark.samples import REAL, STRIPS, grid_path
from hddm.evaluation.compare import escaped, markdown_table
from hddm.evaluation.scores import LEARNED, RECOGNISED
from hddm.utils.files import write_whole

REPORT_FILE = "report.html"
PERCENT_UNEQUAL = 2.0
PUBLISHED = 50_000
_NONE = "–"
_signed = partial(number, signed=True)


@dataclass(frozen=True)
class Cell:
    """The text of a cell, the number to sort it by, and the judgement that colours it."""

    text: str
    key: float | None = None
    judgement: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells under a head; the first cell of a row names it."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


Column = tuple[str, Callable[[Row], Cell]]
"""Head of a column, and what it shows of a row."""


def tables_text(results: Results) -> str:
    """All tables in Markdown, verdicts against the baselines, and what does not compare."""
    head = [
        f"{results.name}, {results.date}: training seeds {_listed(results.seeds)}, scored on "
        f"{results.images['fresh']:,} {results.score_on} images.",
        "",
        about_figures(results),
        "",
    ]
    lines = [escaped(line) for line in head]
    for name in results.tables:
        for table in (comparison_table(results, name), domain_table(results, name)):
            if table.rows:
                lines += [
                    *markdown_table(table.head, [[cell.text for cell in row] for row in table.rows]),
                    "",
                ]
    lines += [escaped(about_domains(results)), ""] if results.settings.partition.classes else []
    lines += [f"- {escaped(one.sentence)}" for one in results.answers]
    told = [f"- {escaped(line)}" for line in limits(results)]
    lines += ["", "What does not compare, or is not counted:", "", *told]
    return "\n".join(lines)


def write_report(folder: Path, results: Results) -> None:
    """Write ``report.html`` into the ``folder`` of ``results``, which holds the sample grids too."""
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(_text("report.html.j2"))
    first, *others = results.tables
    page = template.render(
        css=_text("report.css"),
        js=_text("report.js"),
        results=results,
        figures=about_figures(results),
        first=comparison_table(results, first),
        strips=_picture(grid_path(folder, STRIPS)),
        by_domain=domain_table(results, first),
        about_domains=about_domains(results),
        compared={row.model for row in results.first},
        limits=limits(results),
        grids=list(_grids(folder, results)),
        costs=charts.costs(results),
        others=[
            each for name in others for each in (comparison_table(results, name), domain_table(results, name))
        ],
        measures=measures_table(results),
        about_measures=about_measures(results),
        comparisons=all_comparisons(results),
        models=models_table(results),
        records=[
            (title, json.dumps(content, indent=2, ensure_ascii=False))
            for title, content in (
                ("Hashes", results.hashes),
                ("Features and samples", results.features | results.sampled_as),
                ("Machine and versions", results.machine),
                ("Settings in full", results.settings.model_dump(mode="json")),
            )
        ],
    )
    write_whole(folder / REPORT_FILE, lambda draft: draft.write_text(page, encoding="utf-8"))


def comparison_table(results: Results, name: str) -> Table:
    """One table of the benchmark: distances with both uncertainties, verdicts, and cost."""
    further = (
        ("to training images", "to_training"),
        ("recognised", "recognised.share"),
        ("of real images", "recognised.real"),
        ("diversity", "diversity"),
        ("nearest-image ratio", "memorisation.ratio"),
    )
    columns: list[Column] = [
        *_figures(results, [(f"to {results.score_on} images", results.decides)]),
        *_verdict_columns(results, name),
        *_figures(results, further),
        ("training FLOP", lambda row: _flop(row.training_flop)),
        ("experts a step", lambda row: _cell(row.experts_a_step, "{:.2f}".format)),
        ("MFLOP an image", lambda row: Cell(f"{row.sampling_flop / 1e6:,.1f}", row.sampling_flop)),
        ("images", lambda row: _cell(row.point.num_images, "{:,}".format)),
    ]
    return _table(name, results.tables[name], columns)


def domain_table(results: Results, name: str) -> Table:
    """What rows of a table make of each domain (`hddm.benchmark.domains`); empty without domains."""
    domains, on = results.settings.partition.classes or (), results.decides.replace("to_", "on_")
    of_each = (
        ("share", "share"),
        ("to training images", "to_training"),
        (f"to {results.score_on} images", results.decides),
        ("recall", f"{on}.recall"),
    )
    figures = [
        (f"{domain}: {title}", f"domains.{k}.{path}")
        for k, domain in enumerate(domains)
        for title, path in of_each
    ]
    columns = _figures(results, [*figures, ("label accuracy", "label_accuracy")])
    rows = results.tables[name] if domains else ()
    return _table(f"{name}, by domain", rows, [*columns, ("old model's samples", _unchanged)])


def _unchanged(row: Row) -> Cell:
    found = [one.scores["unchanged"] for one in row.scored if "unchanged" in one.scores]
    images, equal = (sum(one[key] for one in found) for key in ("images", "equal"))
    if not found:
        return Cell(_NONE)
    return Cell(f"bit-equal ({images})" if equal == images else f"{images - equal} of {images} differ")


def measures_table(results: Results) -> Table:
    """Memorisation, diversity, kernel distances, precision and recall of the first table's models."""
    split = results.decides.removeprefix("to_")
    figures = (
        ("nearest-image ratio", "memorisation.ratio"),
        ("share near", "memorisation.share_near"),
        ("diversity (1: as training images)", "diversity"),
        ("distance within a condition", "within_conditions.images"),
        ("of training images", "within_conditions.reference"),
        (f"precision, {results.score_on}", f"on_{split}.precision"),
        (f"recall, {results.score_on}", f"on_{split}.recall"),
        ("precision, training", "on_training.precision"),
        ("recall, training", "on_training.recall"),
        (f"kernel distance, {results.score_on}", f"kernel_to_{split}"),
        ("kernel distance, training", "kernel_to_training"),
    )
    return _table("measures", results.first, _figures(results, figures))


def all_comparisons(results: Results) -> Table:
    """Every comparison that was made, whatever it says."""
    rows = [
        (
            *map(Cell, (one.row, one.against, one.table)),
            _cell(one.verdict.gap, _signed),
            Cell(" … ".join(map(_signed, one.verdict.interval or ())) or _NONE),
            _cell(one.verdict.spread, number),
            _cell(one.ratio, "{:.3f}".format),
            Cell(one.verdict.judgement, judgement=one.verdict.judgement),
            Cell(one.verdict.why or _NONE),
        )
        for one in results.comparisons
    ]
    head = ("row", "against", "table", "gap", "interval", "s, paired", "ratio", "judgement", "why none")
    return Table("comparisons", head, tuple(rows))


def models_table(results: Results) -> Table:
    """Parts of every model and the cost of its training, of the first seed."""
    rows = [
        (
            Cell(one.model),
            Cell(_listed(one.objectives)),
            Cell(_listed(one.steps) or _NONE),
            Cell(_listed(one.batch_sizes) or _NONE),
            _cell(one.images_seen, "{:,}".format, "not known"),
            *map(_flop, (one.experts_flop, one.calibration_flop, one.router_flop, one.training_flop)),
            _cell(one.seconds, "{:,.0f}".format),
            Cell(one.hash[:12]),
        )
        for one in results.models
        if one.seed == results.seeds[0]
    ]
    flop = ("experts FLOP", "of it calibration", "router FLOP", "training FLOP")
    head = ("model", "objectives", "steps", "batch", "images seen", *flop, "seconds", "hash")
    return Table("parts of models", head, tuple(rows))


def about_figures(results: Results) -> str:
    """Explanation of the figures, so that a table may stand alone."""
    features, real = results.features, results.real["to_training"]
    half = "" if real["half_width"] is None else f" ± {number(real['half_width'])}"
    text = (
        f"Fréchet distances on {features['dimensions']} features ({features['name']}), lower is better. ± is "
        "the 95 % half-width over samples, s the standard deviation over training seeds. Real "
        f"{results.score_on} images are at {number(real['value'])}{half} from the training images."
    )
    if any(one.scores.get("recognised") for one in results.scored):
        text += (
            f" Recognised: share that the classifier gives a class with more than {RECOGNISED:.0%}; a model "
            f"below {LEARNED:g} times the real images' share did not learn, and is not compared."
        )
    fixed = [one.name for one in results.settings.models if one.name in results.one_model]
    if fixed and len(results.seeds) > 1:
        text += (
            f" {MARK} {_listed(fixed)}: one set of weights in every seed, so s is over other samples alone."
        )
    return text


def about_measures(results: Results) -> str:
    """Meaning of the figures of memorisation and diversity, as they were measured here."""
    scores = [one.scores for one in results.scored]
    memory = [one["memorisation"] for one in scores if one["memorisation"]]
    text = (
        f"Nearest-image ratio: distance to the nearest training image, over that of {results.score_on} "
        "images; 1 is as far as fresh images are, well below 1 means memorising, above 1 off the data. "
        f"Share near: of samples nearer to a training image than 95 % of {results.score_on} images are; 0.05 "
        "for fresh images. "
    )
    if any(one.get("mirrored") for one in memory):
        text += "Trained on mirrored images too: of a training image and its mirror image the nearer counts."
    else:
        text += "A mirrored copy of a training image is not seen."
    copies = max((one["copies"] for one in memory), default=0)
    if copies:
        text += f" {copies} {results.score_on} images are training images too, and flatter both."
    within = next((one["within_conditions"] for one in scores if one["within_conditions"]), None)
    if within:
        why = f" ({within['why_not_lpips']})" if within["why_not_lpips"] else ""
        text += f" Within a condition: mean distance of two images, by {within['distance']}{why}."
    return text


def about_domains(results: Results) -> str:
    """Meaning of the figures by domain; empty where there are no domains."""
    domains = results.settings.partition.classes
    if domains is None:
        return ""
    few = results.features["dimensions"]
    text = "; ".join(f"{name}: {_listed(classes)}" for name, classes in domains.items())
    return (
        f"By domain ({text}): a classifier of the training images, which is right about the domain of "
        f"{results.real['domain_accuracy']:.1%} and the class of {results.real['label_accuracy']:.1%} of "
        f"{results.score_on} images, says which samples are of a domain. Share: of all samples. To images: "
        f"Fréchet distance of these samples to the domain's images, {_NONE} where in some seed they are no "
        f"more than the {few} features. Recall: share of the domain's {results.score_on} images that as many "
        "samples come near to. Label accuracy: share of samples that show the class that was asked for. Old "
        f"model's samples: {CHECKED} samples of a grown model in each seed, of which those by its old expert "
        "are held against the old model's of the same seed, float for float."
    )


def limits(results: Results) -> list[str]:
    """List rows that do not compare, and costs that are not counted."""
    found = [*_limits_of_distances(results), *_limits_of_compute(results)]
    if not results.complete:
        found.append(
            f"Not finished: {len(results.seeds)} of {len(results.settings.seeds)} training seeds are in: "
            f"{_listed(results.seeds)}."
        )
    return found


def _limits_of_distances(results: Results) -> Iterator[str]:
    features, asked = results.features, results.settings.sampling.num_images
    if features.get("option") != "inception" or features.get("is_classifier"):
        yield (
            f"With published FID: distances are on features of {features['name']} "
            f"({features['dimensions']} dimensions; {features['choice']})."
        )
    elif asked != PUBLISHED:
        yield (
            f"With published FID of {PUBLISHED:,} samples: these are of {asked:,}, and distances fall with "
            "that number."
        )
    rows = [row for each in results.tables.values() for row in each]
    few = {row.name for row in rows if (found := row.figure(results.decides)) and found.few_images}
    if few:
        yield (
            f"Too few images for the features: {len(few)} rows have no more images than the features have "
            "dimensions, and compare with nothing, not even with each other."
        )
    counts = sorted({row.point.num_images for row in rows})
    if len(counts) > 1:
        yield f"Rows of different numbers of images ({_listed(counts)}): distances fall with that number."


def _limits_of_compute(results: Results) -> Iterator[str]:
    models = results.settings.models
    finished = [one.name for one in models if one.kind == "finished"]
    begun = [one.name for one in models if one.init is not None]
    if finished:
        yield f"Not trained here: {_listed(finished)}. Their data and compute are not known."
    if continued := [one.name for one in models if one.begins_with or one.of]:
        yield (
            f"The old model's own training: it is not counted in {_listed(continued)}, which begin with it "
            "or are made of it."
        )
    if begun:
        yield (
            f"Trained on from weights that were there (init): {_listed(begun)}. The data and compute of "
            "those weights are neither known nor counted."
        )
    costs = {row.model: row.training_flop for row in results.first if row.model not in begun}
    known = {name: flop for name, flop in costs.items() if flop is not None}
    if len(known) > 1:
        low, high = min(known, key=lambda name: known[name]), max(known, key=lambda name: known[name])
        percent = 100 * (known[high] / known[low] - 1)
        if percent > PERCENT_UNEQUAL:
            yield f"Training compute: {high} costs {percent:.2g} % more than {low}, router included."


def _verdict_columns(results: Results, table: str) -> Iterator[Column]:
    """A column a baseline, and one for changes of a setting."""
    model = {row.name: row.model for row in results.tables[table]}
    found: dict[str, dict[str, Comparison]] = {}
    for one in results.comparisons:
        if one.table == table:
            against = model[one.against] if one.kind == "model" else "the first row of its model"
            found.setdefault(f"against {against}", {})[one.row] = one
    for title, by_row in found.items():
        yield title, partial(_judged, by_row)


def _judged(by_row: Mapping[str, Comparison], row: Row) -> Cell:
    one = by_row.get(row.name)
    if one is None:
        return Cell(_NONE)
    judgement = one.verdict.judgement
    text = _signed(one.verdict.gap) + ("" if judgement == "no verdict" else f" {judgement}")
    return Cell(text, one.verdict.gap, judgement)


def _table(title: str, rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    """Make a table, without columns that have nothing to show."""
    cells = [(head, [cell(row) for row in rows]) for head, cell in columns]
    shown = [(head, each) for head, each in cells if any(one.text != _NONE for one in each)]
    names = [Cell(row.name) for row in rows]
    return Table(
        title,
        (title, *(head for head, _ in shown)),
        tuple(zip(names, *(each for _, each in shown), strict=True)),
    )


def _figures(results: Results, figures: Iterable[tuple[str, str]]) -> list[Column]:
    """Columns of scores, by their heads and their places in the results."""

    def cell(row: Row, path: str) -> Cell:
        found = row.figure(path)
        return Cell(results.shown(row, path), None if found is None else found.mean)

    return [(head, partial(cell, path=path)) for head, path in figures]


def _cell(value: float | None, text: Callable[[float], str], unknown: str = _NONE) -> Cell:
    return Cell(unknown) if value is None else Cell(text(value), value)


def _flop(value: float | None) -> Cell:
    return _cell(value, lambda known: f"{known:.2e}".replace("e+", "e"), "not known")


def _grids(folder: Path, results: Results) -> Iterator[tuple[str, str]]:
    """Name and data address of the grids of real images and of every model of the first seed."""
    paths = {f"real, {results.score_on}": grid_path(folder, REAL)}
    for one in results.scored:
        paths[one.model] = grid_path(folder / f"seed_{results.seeds[0]}", one.model)
    for name, path in paths.items():
        if address := _picture(path):
            yield name, address


def _picture(path: Path) -> str:
    """The data address of a PNG; empty where there is none."""
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}" if path.is_file() else ""


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


def _text(name: str) -> str:
    return (files("hddm.benchmark") / name).read_text()
