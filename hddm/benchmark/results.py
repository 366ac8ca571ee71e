"""What a quickstart found: rows, tables over training seeds, and their JSON."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hddm.benchmark.jobs import ExpertUse
from hddm.evaluation.frechet import Distance
from hddm.evaluation.scores import Scores

TABLES = ("models", "strategies", "conversions")


@dataclass(frozen=True)
class Row:
    """One line of a table, of one training seed."""

    name: str
    scores: Scores
    training_images: int
    evaluations: float
    """Expert evaluations a solver step and image."""
    mflop_per_step: float
    """Experts and router, an image."""


@dataclass(frozen=True)
class Run:
    """One training seed: its three tables by name, expert use by strategy, and losses."""

    seed: int
    tables: dict[str, list[Row]]
    expert_use: dict[str, list[ExpertUse]]
    losses: dict[str, list[float]]


@dataclass(frozen=True)
class Figure:
    """A number over training seeds.

    ``spread`` is the standard deviation over trainings, None for one; ``half_width`` the mean half-width
    of the bootstrap interval over samples, None where none was taken.
    """

    mean: float
    spread: float | None
    half_width: float | None = None

    def __str__(self) -> str:
        digits = 1 if abs(self.mean) >= 10 else 2
        text = f"{self.mean:.{digits}f}"
        if self.half_width is not None:
            text += f" ± {self.half_width:.{digits}f}"
        if self.spread is not None:
            text += f" (s {self.spread:.{digits}f})"
        return text


def figure(values: Sequence[float], half_widths: Sequence[float] | None = None) -> Figure:
    """Summary of one number over seeds."""
    return Figure(
        statistics.fmean(values),
        statistics.stdev(values) if len(values) > 1 else None,
        statistics.fmean(half_widths) if half_widths else None,
    )


def summarise(runs: Sequence[Run], table: str) -> list[dict[str, Any]]:
    """Rows of ``table`` over all ``runs``: name, four figures and the cost."""
    summary = []
    for rows in zip(*(run.tables[table] for run in runs), strict=True):
        scores = [row.scores for row in rows]
        summary.append(
            {
                "name": rows[0].name,
                "to_training": _distance([s.to_training for s in scores]),
                "to_held_out": _distance([s.to_held_out for s in scores]),
                "diversity": figure([s.diversity for s in scores]),
                "nearest_ratio": figure([s.nearest_ratio for s in scores if s.nearest_ratio is not None]),
                "training_images": rows[0].training_images,
                "evaluations": figure([row.evaluations for row in rows]),
                "mflop_per_step": figure([row.mflop_per_step for row in rows]),
            }
        )
    return summary


def _distance(distances: Sequence[Distance | None]) -> Figure:
    known = [d for d in distances if d is not None]
    return figure([d.value for d in known], [d.half_width for d in known])


def verdict(runs: Sequence[Run]) -> str:
    """One sentence: how the best mixed ensemble stands against the homogeneous flow ensemble.

    A gap counts where it exceeds twice the larger of the two spreads over trainings; with one training
    there is no spread and no verdict.
    """
    rows = {row["name"]: row["to_held_out"] for row in summarise(runs, "models")}
    flow = rows["homogeneous flow"]
    name, mixed = min(
        ((n, f) for n, f in rows.items() if n.startswith("mixed")), key=lambda pair: pair[1].mean
    )
    stand = f"{name}: {mixed.mean:.1f} to the held-out images; homogeneous flow: {flow.mean:.1f}"
    if flow.spread is None or mixed.spread is None:
        return f"{stand}. One training each: no spread, so no verdict (--seeds 3 gives one)."
    gap, noise = mixed.mean - flow.mean, 2 * max(flow.spread, mixed.spread)
    if abs(gap) <= noise:
        return f"{stand}. Within noise: the gap {gap:+.1f} is under twice the spread ({noise:.1f})."
    word = "better" if gap < 0 else "worse"
    return f"{stand}. The mix is {word}: the gap {gap:+.1f} exceeds twice the spread ({noise:.1f})."


def markdown_tables(runs: Sequence[Run]) -> str:
    """The three tables and the verdict, in Markdown; legible on a terminal too."""
    lines = []
    for table in TABLES:
        rows = [[cell(row) for _, cell in _COLUMNS] for row in summarise(runs, table)]
        names = [table, *(name for name, _ in _COLUMNS[1:])]
        widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
        lines.append(_line(names, widths))
        lines.append(
            "|"
            + "|".join("-" * (width + 1) + ("-" if k == 0 else ":") for k, width in enumerate(widths))
            + "|"
        )
        lines += [_line(row, widths) for row in rows]
        lines.append("")
    return "\n".join([*lines, verdict(runs)])


_COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("", lambda row: row["name"]),
    ("to training images", lambda row: str(row["to_training"])),
    ("to held-out images", lambda row: str(row["to_held_out"])),
    ("diversity", lambda row: str(row["diversity"])),
    ("nearest-image ratio", lambda row: str(row["nearest_ratio"])),
    ("training images seen", lambda row: f"{row['training_images']:,}"),
    ("experts a step", lambda row: f"{row['evaluations'].mean:.2f}"),
    ("MFLOP a step", lambda row: f"{row['mflop_per_step'].mean:.1f}"),
)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
    return "| " + " | ".join(padded) + " |"
