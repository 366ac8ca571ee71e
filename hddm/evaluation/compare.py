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

from scipy.stats import t as student

from hddm.evaluation.measures import Distance, KernelDistance, Memorisation, PrecisionRecall
from hddm.evaluation.results import Evaluation, Result, ResultGroup
from hddm.evaluation.scores import Split
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
        return 2 * float(student.sf(abs(self.mean) / self.error, self.freedom))

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Confidence interval of the mean at 1 - ``level``."""
        half = float(student.ppf(1 - level / 2, self.freedom)) * self.error
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
        return self.why or (
            "too few images" if self.ours.few_images or self.base.few_images else None
        )

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
    # Variance of each mean, and its degrees of freedom (Welch and Satterthwaite).
    terms = [(statistics.variance(one.values()) / len(one), len(one) - 1) for one in (ours, base)]
    variance = sum(term for term, _ in terms)
    below = sum(term**2 / freedom for term, freedom in terms)
    freedom = variance**2 / below if below else sum(freedom for _, freedom in terms)
    mean = statistics.fmean(ours.values()) - statistics.fmean(base.values())
    return Gap(mean, None, math.sqrt(variance), freedom)


def holm(gaps: Sequence[Gap]) -> list[float]:
    """Level of each gap's interval, so that it excludes 0 exactly if Holm's procedure rejects."""
    order = sorted(range(len(gaps)), key=lambda k: gaps[k].p_value)
    levels, divisor = [LEVEL] * len(gaps), len(gaps)
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
    over_seeds = {
        k: gap_over_seeds(one.ours.values, one.base.values)
        for k, one in enumerate(contrasts)
        if one.why_not is None and one.trainings >= FEWEST_SEEDS
    }
    levels = dict(zip(over_seeds, holm(list(over_seeds.values())), strict=True))
    found = []
    for k, one in enumerate(contrasts):
        gap, spread, interval, why = one.ours.mean - one.base.mean, None, None, one.why_not
        if k in over_seeds:
            spread, interval = over_seeds[k].spread, over_seeds[k].interval(levels[k])
        elif why is None and not by_images:
            why = f"{counted(one.trainings, 'training seed')}, and {FEWEST_SEEDS} or more give a verdict"
        elif why is None and None in (one.ours.half_width, one.base.half_width):
            why = "no interval"
        elif why is None:
            half = math.hypot(one.ours.half_width or 0, one.base.half_width or 0)
            interval = gap - half, gap + half
        found.append(
            GapVerdict(
                gap=gap, spread=spread, interval=interval, judgement=_judged(one, interval), why=why
            )
        )
    return found


def _judged(one: Contrast, interval: tuple[float, float] | None) -> Judgement:
    if interval is None:
        return "no verdict"
    low, high = interval
    if low <= 0 <= high:
        return "within noise"
    return "better" if (high < 0) == (one.better == "lower") else "worse"


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
    found = []
    for line in _empty_rows([result.content for group in groups for result in group.results]):
        figures = [one for group in groups if (one := figure_at(group, line.path)) is not None]
        if len(figures) == len(groups):
            found.append(replace(line, figures=tuple(figures)))
    contrasts = [
        Contrast(ours, line.figures[0], line.better)
        for line in found
        if line.better
        for ours in line.figures[1:]
    ]
    judged = iter(verdicts(contrasts, by_images=True))
    return [
        replace(
            line, verdicts=tuple(next(judged) if line.better else None for _ in line.figures[1:])
        )
        for line in found
    ]


def figure_at(group: ResultGroup, path: str) -> Figure | None:
    """A figure over all results of a group; None if one of them lacks it.

    ``path`` has dots between the names of fields; entries of a list are named by their split or domain, as in
    ``splits.held_out.distance``.
    """
    known = [one for result in group.results if (one := _figure_of(result, path)) is not None]
    if len(known) < len(group.results):
        return None
    widths = [one.half_width for one in known if one.half_width is not None]
    return Figure(
        {seed: value for one in known for seed, value in one.values.items()},
        statistics.fmean(widths) if len(widths) == len(known) else None,
        group.is_one_model,
        any(one.few_images for one in known),
    )


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
    named = (
        one for one in items if key in (getattr(one, "split", None), getattr(one, "domain", None))
    )
    return next(named, None)


def table(groups: Sequence[ResultGroup]) -> str:
    """Markdown table of `figure_rows`, with notes on how verdicts are judged."""
    names = [group.name for group in groups]
    heads = ["", *names, *(f"{name} against {names[0]}" for name in names[1:])]
    found = figure_rows(groups)
    rows = [
        [_title(line), *map(_shown, line.figures), *map(_said, line.verdicts)] for line in found
    ]
    judged = sum(
        one is not None
        and min(base.trainings, ours.trainings) >= FEWEST_SEEDS
        and one.interval is not None
        for line in found
        for base in line.figures[:1]
        for ours, one in zip(line.figures[1:], line.verdicts, strict=True)
    )
    return "\n".join(
        [*markdown_table(heads, rows, "left"), "", *map(escaped, _notes(groups, judged))]
    )


def summary(group: ResultGroup) -> str:
    """Markdown table of one model's figures and what they say, with notes on what they depend on."""
    found = figure_rows([group])
    rows = [[one.name, _shown(one.figures[0]), one.says] for one in found]
    content = group.results[0].content
    data, how = content.data, content.features
    sides = {"samples": data.images, "training": data.reference}
    sides |= {"validation": data.validation, "held-out": data.held_out}
    counts = ", ".join(f"{one.images} {name}" for name, one in sides.items() if one)
    notes = [_SIGNS, f"Images: {counts}. Features: {how.name} ({how.choice})."]
    notes += [f"Not comparable: {one}." for one in content.reasons]
    heads = ["", group.name, "what it says"]
    return "\n".join([*markdown_table(heads, rows, "left"), "", *map(escaped, notes)])


def escaped(text: str) -> str:
    """A text as part of one line of Markdown, since names come from files: no HTML, no cell that ends."""
    return " ".join(text.splitlines()).replace("<", "&lt;").replace("|", "\\|")


def markdown_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], align: str = "right"
) -> list[str]:
    """Lines of a Markdown table, aligned for terminals; the first column is left-aligned."""
    heads, rows = (
        [escaped(head) for head in heads],
        [[escaped(cell) for cell in row] for row in rows],
    )
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if k == 0 or align == "left" else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    end = ["-" if k == 0 or align == "left" else ":" for k in range(len(widths))]
    rule = "|".join("-" * (width + 1) + last for width, last in zip(widths, end, strict=True))
    return [line(heads), f"|{rule}|", *map(line, rows)]


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
        paired = len({frozenset(result.seed for result in group.results) for group in groups}) == 1
        how = (
            "paired by the names of files or seeds" if paired else "not paired, as the names differ"
        )
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
    splits = dict.fromkeys(one.split for content in contents for one in content.splits)
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
    found = [
        FigureRow(f"{title} {SPLITS[split]} images", f"splits.{split}.{end}", better, says)
        for title, end, better, says in scores
        for split in splits
    ]
    found.append(
        FigureRow(
            "diversity against training images", "diversity", says="1 is as varied as they are"
        )
    )
    says = "between two images of a class or prompt"
    found.append(FigureRow("distance within conditions", "within_conditions.images", says=says))
    if len({bool(one.memorisation and one.memorisation.mirrored) for one in contents}) == 1:
        says = "about 1 is right, well below 1 repeats training images"
        found.append(FigureRow("nearest-image ratio", "memorisation.ratio", says=says))
    for domain in (one.domain for one in contents[0].domains):
        found.append(FigureRow(f"share of {domain}", f"domains.{domain}.share"))
        for split in splits:
            title, path = (
                f"{SPLITS[split]} images of {domain}",
                f"domains.{domain}.splits.{split}.distance",
            )
            found.append(
                FigureRow(f"Fréchet distance to {title}", path, "lower", "lower is better")
            )
    return [*found, FigureRow("training, 1e12 operations", "training_tflop")]
