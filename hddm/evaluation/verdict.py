"""Verdicts on comparisons: better, worse, or within noise.

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
from dataclasses import dataclass
from typing import Literal

from scipy.stats import t as student

from hddm.utils.errors import counted
from hddm.utils.records import Record

FEWEST = 3
"""Fewest training seeds for a verdict."""
LEVEL = 0.05
Better = Literal["lower", "higher"]
Judgement = Literal["better", "worse", "within noise", "no verdict"]


@dataclass(frozen=True)
class Figure:
    """One number of one model over its results: ``values`` by training seed.

    ``half_width`` is the mean half-width of the 95 % intervals over images, if known. ``is_one_model``: all
    results are of one set of weights, so they tell nothing about other trainings. ``few_images``: measured on
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
        """Reason why no number of seeds would give a verdict."""
        return self.why or ("too few images" if self.ours.few_images or self.base.few_images else None)

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
    (h_a² + h_b²)^½ with half-widths h, which tells nothing about other trainings.
    """
    over_seeds = {
        k: gap_over_seeds(one.ours.values, one.base.values)
        for k, one in enumerate(contrasts)
        if one.why_not is None and one.trainings >= FEWEST
    }
    levels = dict(zip(over_seeds, holm(list(over_seeds.values())), strict=True))
    found = []
    for k, one in enumerate(contrasts):
        gap, spread, interval, why = one.ours.mean - one.base.mean, None, None, one.why_not
        if k in over_seeds:
            spread, interval = over_seeds[k].spread, over_seeds[k].interval(levels[k])
        elif why is None and not by_images:
            why = f"{counted(one.trainings, 'training seed')}, and {FEWEST} or more give a verdict"
        elif why is None and None in (one.ours.half_width, one.base.half_width):
            why = "no interval"
        elif why is None:
            half = math.hypot(one.ours.half_width or 0, one.base.half_width or 0)
            interval = gap - half, gap + half
        found.append(
            GapVerdict(gap=gap, spread=spread, interval=interval, judgement=_judged(one, interval), why=why)
        )
    return found


def _judged(one: Contrast, interval: tuple[float, float] | None) -> Judgement:
    if interval is None:
        return "no verdict"
    low, high = interval
    if low <= 0 <= high:
        return "within noise"
    return "better" if (high < 0) == (one.better == "lower") else "worse"
