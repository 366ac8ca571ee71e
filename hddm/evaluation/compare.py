"""Results of evaluations: one alone (`summary`), or side by side, every model judged against the first.

Two models are compared by the gap of a figure over training seeds: seed by seed if both have the same seeds,
else between their means (Welch). With n paired gaps of mean g and standard deviation s the interval is

    g ± t s/n^½,    t the quantile 1 - a/2 of Student's distribution with n - 1 degrees of freedom,

and a gap is within noise if the interval contains 0. All comparisons of one table are corrected by Holm: of
m, ordered by their p-values, the k-th has a = 0.05/(m - k + 1) as long as the intervals before it exclude 0,
and those after the first that does not share its a. So in 95 of 100 tables of equal models no gap is called a
difference. Source: S. Holm, A Simple Sequentially Rejective Multiple Test Procedure, Scand. J. Statist. 6
(1979), 65-70.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from scipy.special import stdtr, stdtrit

from hddm.evaluation.results import Evaluation, Result, ResultGroup
from hddm.evaluation.score_records import (
    Distance,
    KernelDistance,
    Memorisation,
    PrecisionRecall,
    Split,
)
from hddm.utils.errors import counted
from hddm.utils.records import Record

FEWEST_SEEDS = 3
"""Fewest training seeds for a verdict."""
LEVEL = 0.05
Better = Literal["lower", "higher"]
Judgement = Literal["better", "worse", "within noise", "no verdict"]


@dataclass(frozen=True)
class Figure:
    """One number of one model over its results: ``values`` by training seed.

    ``half_width`` is the mean half-width of the 95 % intervals over images, if known. ``is_one_model``: all
    results are of one set of weights, so they say nothing about other trainings. ``few_images``: measured on
    no more images than features.
    """

    values: Mapping[str, float]
    half_width: float | None = None
    is_one_model: bool = False
    few_images: bool = False

    @property
    def mean(self) -> float:
        """Mean over all results."""
        return statistics.fmean(self.values.values())

    @property
    def spread(self) -> float | None:
        """Standard deviation over results, None for one result."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None

    @property
    def trainings(self) -> int:
        """Number of trainings behind the results."""
        return 1 if self.is_one_model else len(self.values)


@dataclass(frozen=True)
class Gap:
    """A mean gap with its standard ``error``.

    ``spread`` is the standard deviation over seeds, None for seeds that do not pair.
    """

    mean: float
    spread: float | None
    error: float
    freedom: float

    @property
    def p_value(self) -> float:
        """Two-sided p-value of the hypothesis that the mean is 0."""
        if self.error == 0:
            return float(self.mean == 0)
        return 2 * float(stdtr(self.freedom, -abs(self.mean) / self.error))

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Confidence interval of the mean at 1 - ``level``."""
        half = float(stdtrit(self.freedom, 1 - level / 2)) * self.error
        return self.mean - half, self.mean + half


class GapVerdict(Record):
    """Comparison of one model with another by one figure."""

    gap: float
    """Gap of the means."""
    spread: float | None = None
    """Standard deviation of paired gaps."""
    interval: tuple[float, float] | None = None
    """Of the gap; over training seeds, corrected for the number of comparisons in the table."""
    judgement: Judgement
    why: str | None = None
    """Reason why there is no verdict."""


@dataclass(frozen=True)
class Contrast:
    """Comparison of ``ours`` with ``base``; ``why`` is the reason for no verdict, if known."""

    ours: Figure
    base: Figure
    better: Better = "lower"
    why: str | None = None

    @property
    def why_not(self) -> str | None:
        """Reason why there is no verdict with any number of seeds."""
        if self.why:
            return self.why
        return "too few images" if self.ours.few_images or self.base.few_images else None

    @property
    def trainings(self) -> int:
        """Trainings of the one that has fewer."""
        return min(self.ours.trainings, self.base.trainings)


def gap_over_seeds(ours: Mapping[str, float], base: Mapping[str, float]) -> Gap:
    """Gap of values by seed, at least two of each; paired if the seeds are the same."""
    if ours.keys() == base.keys():
        gaps = [ours[seed] - base[seed] for seed in ours]
        spread = statistics.stdev(gaps)
        return Gap(statistics.fmean(gaps), spread, spread / len(gaps) ** 0.5, len(gaps) - 1)
    # Variance of the difference, and its degrees of freedom (Welch and Satterthwaite).
    variance = below = 0.0
    freedom: float = 0
    for one in (ours, base):
        of_mean = statistics.variance(one.values()) / len(one)
        variance += of_mean
        below += of_mean**2 / (len(one) - 1)
        freedom += len(one) - 1
    if below:
        freedom = variance**2 / below
    mean = statistics.fmean(ours.values()) - statistics.fmean(base.values())
    return Gap(mean, None, math.sqrt(variance), freedom)


def holm(gaps: Sequence[Gap]) -> list[float]:
    """Level of each gap's interval, so that it excludes 0 exactly if Holm's procedure rejects."""
    order = sorted(range(len(gaps)), key=lambda k: gaps[k].p_value)
    levels = [LEVEL] * len(gaps)
    divisor = len(gaps)
    for k in order:
        levels[k] = LEVEL / divisor
        if gaps[k].p_value < levels[k]:
            divisor -= 1
    return levels


def verdicts(contrasts: Sequence[Contrast], by_images: bool = False) -> list[GapVerdict]:
    """Judge all ``contrasts`` of one table.

    ``by_images`` also judges single results, by their intervals over images: a gap is significant beyond
    (h_a² + h_b²)^½ with half-widths h, which says nothing about other trainings.
    """
    over_seeds = {}
    for k, one in enumerate(contrasts):
        if one.why_not is None and one.trainings >= FEWEST_SEEDS:
            over_seeds[k] = gap_over_seeds(one.ours.values, one.base.values)
    levels = holm(list(over_seeds.values()))
    intervals = {}
    for (k, over), level in zip(over_seeds.items(), levels, strict=True):
        intervals[k] = over.interval(level)
    found = []
    for k, one in enumerate(contrasts):
        gap = one.ours.mean - one.base.mean
        spread = interval = None
        why = one.why_not
        if k in over_seeds:
            spread = over_seeds[k].spread
            interval = intervals[k]
        elif why is None and not by_images:
            why = f"{counted(one.trainings, 'training seed')}, and {FEWEST_SEEDS} or more give a verdict"
        elif why is None and None in (one.ours.half_width, one.base.half_width):
            why = "no interval"
        elif why is None:
            half = math.hypot(one.ours.half_width or 0, one.base.half_width or 0)
            interval = gap - half, gap + half
        found.append(
            GapVerdict(
                gap=gap,
                spread=spread,
                interval=interval,
                judgement=judged(interval, one.better),
                why=why,
            )
        )
    return found


def judged(interval: tuple[float, float] | None, better: Better = "lower") -> Judgement:
    """What the interval of a gap says, where values of this direction are better."""
    if interval is None:
        return "no verdict"
    low, high = interval
    if low <= 0 <= high:
        return "within noise"
    return "better" if (high < 0) == (better == "lower") else "worse"


_SIGNS = (
    "± is the half-width of the 95 % interval over images, s the standard deviation over results."
)

SPLITS: dict[Split, str] = {
    "training": "training",
    "validation": "validation",
    "held_out": "held-out",
}
"""Names of splits in texts."""


@dataclass(frozen=True)
class FigureRow:
    """One figure of every group, a row of `table` and `summary`.

    ``path`` is its place in a result (`figure_at`), ``better`` the direction that is better, if any, and
    ``says`` explains it in words. ``verdicts`` judge each group after the first against the first.
    """

    name: str
    path: str
    better: Better | None = None
    says: str = ""
    figures: tuple[Figure, ...] = ()
    verdicts: tuple[GapVerdict | None, ...] = ()


def figure_rows(groups: Sequence[ResultGroup]) -> list[FigureRow]:
    """The figures that all results have, with verdicts that are corrected as one table's."""
    contents: list[Evaluation] = []
    for group in groups:
        contents += [result.content for result in group.results]
    found = []
    contrasts = []
    for line in _empty_rows(contents):
        figures = _figures_of_all(groups, line.path)
        if figures is None:
            continue
        found.append(replace(line, figures=figures))
        if line.better:
            base, *others = figures
            contrasts += [Contrast(ours, base, line.better) for ours in others]
    # In the order of the contrasts: those of one row are next to each other.
    judged = iter(verdicts(contrasts, by_images=True))
    rows = []
    for line in found:
        of_line: list[GapVerdict | None] = []
        for _ in line.figures[1:]:
            of_line.append(next(judged) if line.better else None)
        rows.append(replace(line, verdicts=tuple(of_line)))
    return rows


def _figures_of_all(groups: Sequence[ResultGroup], path: str) -> tuple[Figure, ...] | None:
    """The figure of every group; None if one of them lacks it."""
    figures = []
    for group in groups:
        figure = figure_at(group, path)
        if figure is None:
            return None
        figures.append(figure)
    return tuple(figures)


def figure_at(group: ResultGroup, path: str) -> Figure | None:
    """A figure over all results of a group; None if one of them lacks it.

    ``path`` has dots between the names of fields; entries of a list are named by their split or domain, as in
    ``splits.held_out.distance``.
    """
    values: dict[str, float] = {}
    widths = []
    few_images = False
    for result in group.results:
        one = _figure_of(result, path)
        if one is None:
            return None
        values |= one.values
        if one.half_width is not None:
            widths.append(one.half_width)
        few_images = few_images or one.few_images
    half_width = statistics.fmean(widths) if len(widths) == len(group.results) else None
    return Figure(values, half_width, group.is_one_model, few_images)


def _figure_of(result: Result, path: str) -> Figure | None:
    """Figure at a path in a result, with its interval over images; None if absent."""
    *above, last = path.split(".")
    part: Any = result.content
    for key in above:
        part = _entry(part, key) if isinstance(part, tuple) else getattr(part, key, None)
    found = getattr(part, last, None)
    match found:
        case Distance():
            return Figure({result.seed: found.value}, found.half_width, few_images=found.few_images)
        case KernelDistance():
            return Figure({result.seed: found.value}, 1.96 * found.standard_error)
        case float() if isinstance(part, Memorisation):
            return Figure({result.seed: found}, part.half_width if last == "ratio" else None)
        case float() if isinstance(part, PrecisionRecall):
            return Figure({result.seed: found}, _wilson(found, part.images))
        case float():
            return Figure({result.seed: found})
    return None


def _entry(items: tuple[Any, ...], key: str) -> Any:
    """The entry of a split or of a domain."""
    for one in items:
        if key in (getattr(one, "split", None), getattr(one, "domain", None)):
            return one
    return None


def table(groups: Sequence[ResultGroup]) -> str:
    """Markdown table of `figure_rows`, with notes on how verdicts are judged."""
    names = [group.name for group in groups]
    heads = ["", *names]
    for name in names[1:]:
        heads.append(f"{name} against {names[0]}")
    rows = []
    judged = 0
    for line in figure_rows(groups):
        rows.append([_title(line), *map(_shown, line.figures), *map(_said, line.verdicts)])
        judged += _judged_over_seeds(line)
    lines = markdown_table(heads, rows, "left")
    notes = map(escaped, _notes(groups, judged))
    return "\n".join([*lines, "", *notes])


def _judged_over_seeds(line: FigureRow) -> int:
    """Number of the row's verdicts that were judged by the noise over training seeds."""
    number = 0
    for ours, verdict in zip(line.figures[1:], line.verdicts, strict=True):
        trainings = min(line.figures[0].trainings, ours.trainings)
        if verdict is not None and verdict.interval is not None and trainings >= FEWEST_SEEDS:
            number += 1
    return number


def summary(group: ResultGroup) -> str:
    """Markdown table of one model's figures and what they say, with notes on what they depend on."""
    rows = []
    for one in figure_rows([group]):
        rows.append([one.name, _shown(one.figures[0]), one.says])
    content = group.results[0].content
    data, features = content.data, content.features
    sides = {
        "samples": data.images,
        "training": data.reference,
        "validation": data.validation,
        "held-out": data.held_out,
    }
    counts = ", ".join(f"{one.images} {name}" for name, one in sides.items() if one)
    notes = [_SIGNS, f"Images: {counts}. Features: {features.name} ({features.choice})."]
    for reason in content.reasons:
        notes.append(f"Not comparable: {reason}.")
    lines = markdown_table(["", group.name, "what it says"], rows, "left")
    return "\n".join([*lines, "", *map(escaped, notes)])


def escaped(text: str) -> str:
    """A text as part of one line of Markdown, since names come from files: no HTML, no cell that ends."""
    return " ".join(text.splitlines()).replace("<", "&lt;").replace("|", "\\|")


def markdown_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], align: str = "right"
) -> list[str]:
    """Lines of a Markdown table, aligned for terminals; the first column is left-aligned."""
    table = [list(map(escaped, row)) for row in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    is_left = [k == 0 or align == "left" for k in range(len(widths))]

    def line(cells: Sequence[str]) -> str:
        padded = []
        for cell, width, left in zip(cells, widths, is_left, strict=True):
            padded.append(cell.ljust(width) if left else cell.rjust(width))
        return "| " + " | ".join(padded) + " |"

    rule = []
    for width, left in zip(widths, is_left, strict=True):
        rule.append("-" * (width + 1) + ("-" if left else ":"))
    return [line(table[0]), f"|{'|'.join(rule)}|", *map(line, table[1:])]


def _title(line: FigureRow) -> str:
    return line.name if line.better is None else f"{line.name} ({line.better} is better)"


def _shown(figure: Figure) -> str:
    text = _number(figure.mean, 4)
    if figure.half_width is not None:
        text += f" ± {_number(figure.half_width, 2)}"
    return text + ("" if figure.spread is None else f" (s {_number(figure.spread, 2)})")


def _said(one: GapVerdict | None) -> str:
    if one is None:
        return ""
    if one.judgement == "no verdict":
        return one.why if one.why == "no interval" else f"no verdict: {one.why}"
    return f"{one.judgement} ({'+' if one.gap >= 0 else ''}{_number(one.gap, 2)})"


def _notes(groups: Sequence[ResultGroup], judged: int) -> list[str]:
    notes = [_SIGNS]
    if judged:
        if _have_the_same_seeds(groups):
            how = "paired by the names of files or seeds"
        else:
            how = "not paired, as the names differ"
        notes.append(
            f"Noise: the 95 % interval of the gap over trainings (Student's t), {how}, corrected for "
            f"{judged} comparisons (Holm)."
        )
    else:
        notes.append(
            "Noise: the intervals over images. They say nothing about another training; "
            f"{FEWEST_SEEDS} results of each, one per training seed, give a spread that does."
        )
    for group in groups:
        if group.is_one_model:
            notes.append(
                f"All results of {group.name} are of one model: s is over sampling seeds alone."
            )
        if None in group.sources:
            notes.append(f"How the images of {group.name} were sampled is not recorded.")
    return notes


def _have_the_same_seeds(groups: Sequence[ResultGroup]) -> bool:
    seeds = set()
    for group in groups:
        seeds.add(frozenset(result.seed for result in group.results))
    return len(seeds) == 1


def _number(value: float, significant: int) -> str:
    """Format with at least ``significant`` digits, without an exponent."""
    decimals = significant - 1 - (math.floor(math.log10(abs(value))) if value else 0)
    return f"{value:.{max(decimals, 0)}f}"


def _wilson(share: float, images: int) -> float:
    """Half-width of Wilson's interval, which stays positive at shares of 0 and 1."""
    width = 1.96 * (share * (1 - share) / images + (1.96 / (2 * images)) ** 2) ** 0.5
    return float(width / (1 + 1.96**2 / images))


def _empty_rows(contents: Sequence[Evaluation]) -> list[FigureRow]:
    """The rows of a table before values are filled in: add a new score here."""
    # A dictionary, since the order counts.
    splits: dict[Split, None] = {}
    for content in contents:
        splits |= dict.fromkeys(one.split for one in content.splits)
    scores: tuple[tuple[str, str, Better, str], ...] = (
        (
            "Fréchet distance to",
            "distance",
            "lower",
            "difference of the distributions; lower is better",
        ),
        ("kernel distance to", "kernel", "lower", "the same, fair for few images; lower is better"),
        (
            "precision on",
            "overlap.precision",
            "higher",
            "share of samples that look like these images",
        ),
        ("recall on", "overlap.recall", "higher", "share of these images with a sample close by"),
    )
    found = []
    for title, end, better, says in scores:
        for split in splits:
            name = f"{title} {SPLITS[split]} images"
            found.append(FigureRow(name, f"splits.{split}.{end}", better, says))
    says = "1 is as varied as they are"
    found.append(FigureRow("diversity against training images", "diversity", says=says))
    says = "between two images of a class or prompt"
    found.append(FigureRow("distance within conditions", "within_conditions.images", says=says))
    if len({bool(one.memorisation and one.memorisation.mirrored) for one in contents}) == 1:
        says = "about 1 is right, well below 1 repeats training images"
        found.append(FigureRow("nearest-image ratio", "memorisation.ratio", says=says))
    for one in contents[0].domains:
        within = f"domains.{one.domain}"
        found.append(FigureRow(f"share of {one.domain}", f"{within}.share"))
        for split in splits:
            name = f"Fréchet distance to {SPLITS[split]} images of {one.domain}"
            path = f"{within}.splits.{split}.distance"
            found.append(FigureRow(name, path, "lower", "lower is better"))
    return [*found, FigureRow("training, 1e12 operations", "training_tflop")]
