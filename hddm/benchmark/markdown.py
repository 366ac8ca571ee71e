"""Results as Markdown tables that are legible on a terminal too."""

from collections.abc import Callable, Sequence

from hddm.benchmark.numbers import scientific
from hddm.benchmark.report_comparable import comparable
from hddm.benchmark.report_words import about_mark, real_distance
from hddm.benchmark.results import Results, Row

Cell = Callable[[Row], str]


def tables_text(results: Results) -> str:
    """All tables, and how the models of the first stand against the baselines."""
    split = results.score_on
    lines = _heading(results)
    if not results.complete:
        lines += [
            f"{len(results.seeds)} of {len(results.settings.seeds)} training seeds are in: "
            f"{', '.join(map(str, results.seeds))}.",
            "",
        ]
    for place, (table, rows) in enumerate(results.tables.items()):
        columns = _columns(results)
        cells = [[cell(row) for _, cell in columns] for row in rows]
        lines += [*_table([table, *(name for name, _ in columns[1:])], cells), ""]
        if place == 0:
            lines += [f"Real {split} images are at {real_distance(results)} from the training images.", ""]
    told = about_mark(results)
    if told:
        lines += [told, ""]
    lines += [f"- {line}" for line in results.verdict]
    limits = [f"- {line}" for compares, line in comparable(results) if not compares]
    if limits:
        lines += ["", "What does not compare, or is not counted:", "", *limits]
    return "\n".join(lines)


def _heading(results: Results) -> list[str]:
    """What the figures are, so that the tables may stand alone."""
    features, seeds = results.features, ", ".join(map(str, results.seeds))
    return [
        f"{results.name}, {results.date}: training seeds {seeds}, scored on {results.images['fresh']:,} "
        f"{results.score_on} images.",
        "",
        f"Fréchet distances on {features['dimensions']} features ({features['name']}), lower is better. ± is "
        "the 95 % half-width over samples, s the standard deviation over training seeds.",
        "",
    ]


def _columns(results: Results) -> Sequence[tuple[str, Cell]]:
    def figure(name: str) -> Cell:
        return lambda row: row.figures[name].told(results.mark(row.model)) if name in row.figures else "–"

    def training(row: Row) -> str:
        return "not known" if row.training_flop is None else scientific(row.training_flop.mean)

    return (
        ("", lambda row: row.name),
        ("to training images", figure("to_training")),
        (f"to {results.score_on} images", figure(results.decides)),
        ("diversity", figure("diversity")),
        ("nearest-image ratio", figure("nearest_ratio")),
        ("training FLOP", training),
        (
            "training images seen",
            lambda row: "not known" if row.images_seen is None else f"{row.images_seen:,}",
        ),
        ("experts a step", lambda row: f"{row.evaluations.mean:.2f}"),
        ("MFLOP a step", lambda row: f"{row.sampling_flop.mean / row.point.steps / 1e6:.1f}"),
        ("MFLOP an image", lambda row: f"{row.sampling_flop.mean / 1e6:,.0f}"),
    )


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    rule = "|".join("-" * (width + 1) + ("-" if k == 0 else ":") for k, width in enumerate(widths))
    return [_line(names, widths), f"|{rule}|", *(_line(row, widths) for row in rows)]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
    return "| " + " | ".join(padded) + " |"
