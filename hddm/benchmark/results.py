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
    real: Distance
    """Of the held-out images to the training images: what a perfect model could reach with as few."""


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


def verdict(runs: Sequence[Run]) -> list[str]:
    """How each mixture stands against the homogeneous flow ensemble and the single model, a line each.

    Gaps are those of the distance to held-out images, paired by training seed, since mixtures share
    experts with the homogeneous ensembles. One counts where its mean exceeds twice its standard deviation
    over seeds; with one seed there is no spread and no verdict.
    """
    scores = {
        name: [_held_out(run, name) for run in runs]
        for name in (row.name for row in runs[0].tables["models"])
    }
    lines = []
    for name in (name for name in scores if name.startswith("mixed")):
        for other in ("homogeneous flow", "single model"):
            gap = figure([a - b for a, b in zip(scores[name], scores[other], strict=True)])
            if gap.spread is None:
                judged = "one training each, so no verdict (--seeds 3 gives one)"
            elif abs(gap.mean) <= 2 * gap.spread:
                judged = f"within noise (s {gap.spread:.1f})"
            else:
                judged = f"{'better' if gap.mean < 0 else 'worse'} (s {gap.spread:.1f})"
            lines.append(f"{name} against {other}: {gap.mean:+.1f}, {judged}")
    return lines


def _held_out(run: Run, name: str) -> float:
    row = next(row for row in run.tables["models"] if row.name == name)
    assert row.scores.to_held_out is not None
    return row.scores.to_held_out.value


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
        if table == "models":
            floor = runs[0].real
            lines += [f"Real held-out images are at {floor.value:.1f} from the training images.", ""]
    return "\n".join([*lines, *(f"- {line}" for line in verdict(runs))])


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
