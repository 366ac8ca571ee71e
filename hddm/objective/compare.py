"""``hddm compare`` of scores by the objective: paired by image, or by training seed."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hddm.evaluation.compare import FEWEST_SEEDS, escaped, gap_over_seeds, holm, judged
from hddm.objective.records import (
    KIND,
    HeldOutScores,
    Mean,
    difference,
    read_scores,
    refuse_unlike,
    values_of,
)
from hddm.utils.errors import HddmError

_SIGNS = (
    "± is the half-width of the 95 % interval over images, s the standard deviation over training seeds. "
    "Gaps are paired: image by image for single results, which says nothing about other trainings; seed by "
    "seed, and corrected for the number of comparisons, for three seeds or more."
)


@dataclass(frozen=True)
class ScoresGroup:
    """Results of one model: one, or one per training seed, by the name of its file."""

    name: str
    results: dict[str, HeldOutScores]


def is_objective(path: Path) -> bool:
    """True for a result of ``hddm evaluate MODEL``, or a folder of them."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        return False
    try:
        content = json.loads(files[0].read_bytes())
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("kind") == KIND


def read_score_groups(paths: Sequence[Path]) -> list[ScoresGroup]:
    """Read a group per path; raises `HddmError` where one is a result of another kind."""
    groups = []
    for path in paths:
        if not is_objective(path):
            raise HddmError(
                f"{path}: is no result of hddm evaluate MODEL, and others are; compare results of one kind"
            )
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        groups.append(ScoresGroup(str(path), {one.stem: read_scores(one) for one in files}))
    return groups


Column = dict[str, dict[str, tuple[float, ...]]]
"""By figure and by training seed, a value per image."""


def compared(groups: Sequence[ScoresGroup]) -> list[str]:
    """A Markdown table of all groups and strategies, each judged against the first, and what its signs mean.

    Raises `HddmError` for results of unlike images or noise.
    """
    columns = _columns(groups)
    figures = list(dict.fromkeys(figure for column in columns.values() for figure in column))
    titles = list(columns)
    base = columns[titles[0]]
    over_seeds = _over_seeds(columns, figures)
    lines = ["| | " + " | ".join(map(escaped, titles)) + " |", "|---" + "|---:" * len(titles) + "|"]
    for figure in figures:
        cells = []
        for title in titles:
            own = columns[title].get(figure)
            if own is None:
                cells.append("–")
                continue
            cell = _shown(own)
            if title != titles[0] and figure in base:
                interval = over_seeds.get((title, figure))
                cell += f" ({_judged(own, base[figure], interval)})"
            cells.append(cell)
        lines.append(f"| {figure} | " + " | ".join(cells) + " |")
    return [*lines, "", _SIGNS]


def _columns(groups: Sequence[ScoresGroup]) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    everything = []
    for group in groups:
        everything += [(group.name, one) for one in group.results.values()]
    refuse_unlike(everything)
    for group in groups:
        for seed, one in group.results.items():
            for figure, by_title in values_of([(group.name, one)]).items():
                for title, by_image in by_title.items():
                    columns.setdefault(title, {}).setdefault(figure, {})[seed] = by_image
    return columns


def _means(by_seed: dict[str, tuple[float, ...]]) -> dict[str, float]:
    return {seed: statistics.fmean(by_image) for seed, by_image in by_seed.items()}


def _over_seeds(
    columns: dict[str, Column], figures: Sequence[str]
) -> dict[tuple[str, str], tuple[float, float]]:
    """Corrected intervals of the gaps to the first column, where both have seeds enough."""
    base, *others = columns.values()
    titles = list(columns)[1:]
    gaps = {}
    for title, column in zip(titles, others, strict=True):
        for figure in figures:
            if figure not in column or figure not in base:
                continue
            if min(len(column[figure]), len(base[figure])) >= FEWEST_SEEDS:
                gaps[title, figure] = gap_over_seeds(_means(column[figure]), _means(base[figure]))
    levels = holm(list(gaps.values()))
    intervals = {}
    for (key, gap), level in zip(gaps.items(), levels, strict=True):
        intervals[key] = gap.interval(level)
    return intervals


def _shown(by_seed: dict[str, tuple[float, ...]]) -> str:
    if len(by_seed) == 1:
        (by_image,) = by_seed.values()
        return str(Mean.of(by_image))
    means = list(_means(by_seed).values())
    return f"{statistics.fmean(means):.4g} (s {statistics.stdev(means):.2g})"


def _judged(
    ours: dict[str, tuple[float, ...]],
    base: dict[str, tuple[float, ...]],
    interval: tuple[float, float] | None,
) -> str:
    """The gap and the verdict; for single results by images."""
    if interval is None and len(ours) == len(base) == 1:
        (own,), (other,) = ours.values(), base.values()
        interval = difference(own, other).interval
    mean = statistics.fmean(_means(ours).values()) - statistics.fmean(_means(base).values())
    if interval is None:
        return f"{mean:+.3g}, no verdict: {FEWEST_SEEDS} training seeds give one"
    low, high = interval
    return f"{mean:+.3g}, {low:+.3g} … {high:+.3g}, {judged(interval)}"
