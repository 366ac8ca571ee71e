"""Results of a benchmark: ``results.json``, models and evaluations, from which all tables are made.

Two uncertainties are kept apart: the 95 % interval over samples of one model (bootstrap), and the standard
deviation over training seeds. All figures of one file are of one split: validation images in a benchmark that
chooses settings, held-out images in one that confirms them.
"""

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from hddm.benchmark.file import BenchmarkFile, DecidingSplit
from hddm.evaluation.compare import SPLITS, Figure, GapVerdict, figure_at
from hddm.evaluation.results import (
    Evaluation,
    Result,
    ResultGroup,
    read_groups,
)
from hddm.evaluation.score_records import LEARNED
from hddm.objective.records import HeldOutScores, Mean, values_of
from hddm.utils.errors import HddmError
from hddm.utils.records import RESULTS_FILE, Record, read_record

FORMAT = "5.3"
LARGEST = 2**29
MARK = "†"
"""Mark of a spread over seeds that is one of samples alone (`ResultGroup.is_one_model`)."""
PERCENT_UNEQUAL = 2.0
_DRAWN = "each sample has one expert to the end, so a state has no velocity of its own"
SECOND = "second."
"""Beginning of the paths of scores by the second features (`Row.figure`)."""
_LACKING = {
    "recognised": "a classifier recognises too few of its samples",
    "precision": "too few of its samples look like real images",
    "recall": "its samples look like too few of the real images",
}
"""What the samples of a model that did not learn lack, by the figure that shows it (`Scores.beside_real`)."""


class ObjectiveScores(Record):
    """Scores of a row's model on held-out images, by its training objective and its likelihood."""

    step: str = ""
    """The step that measured them: its result is this file in the benchmark's folder, with ``.json``."""
    images: int = 0
    likelihood_images: int = 0
    figures: dict[str, Mean] = Field(default_factory=dict)
    """Means over images, by the names of `hddm.objective.records.values_of`."""
    why_none: str = ""
    """Why it has no errors, and where it has no figure at all, no bits either."""

    @classmethod
    def of(cls, step: str, scores: HeldOutScores) -> "ObjectiveScores":
        """What a result under one strategy says."""
        (own,) = scores.strategies
        figures = {}
        for name, by_title in values_of([("", scores)]).items():
            (by_image,) = by_title.values()
            figures[name] = Mean.of(by_image)
        return cls(
            step=step,
            images=len(scores.data.rows),
            likelihood_images=len(scores.data.likelihood_rows),
            figures=figures,
            why_none="" if own.levels else _DRAWN,
        )


class ScoredRow(Record):
    """One row of a table, of one training seed."""

    table: str
    row: str
    of: str
    """The row of the file that it is a variation of."""
    varied: dict[str, str]
    """Options of the table that it differs by."""
    model: str
    """The step or the folder that is sampled."""
    model_hash: str
    """Its identity, since a step and a folder may have one name."""
    seed: int
    command: str
    samples: str
    """Folder of the images, below the jobs."""
    evaluation: Evaluation
    experts_a_step: float
    """Experts that ran for an image and call, on average."""
    sampling_flop: int
    """Counted operations per image."""
    is_alone: bool = False
    """No strategy chose among its experts, since there is one, or one for each noise level."""
    objective: ObjectiveScores | None = None
    """None in a benchmark without scores by the objective."""
    second: Evaluation | None = None
    """By the second features; None in a benchmark without them."""


class ModelResult(Record):
    """What one model of one seed took, in counted operations; None where unknown."""

    model: str
    seed: int
    hash: str
    folder: str
    parts: tuple[str, ...]
    """Steps that are counted."""
    steps: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    calibration_flop: int | None
    """The part of all operations that calibration took."""
    router_flop: int | None
    training_flop: int | None
    seconds: float


class Comparison(Record):
    """One row against another by the score that decides; lower is better."""

    table: str
    kind: Literal["model", "setting"]
    """Two models sampled alike, or two settings of one model."""
    row: str
    against: str
    gaps: dict[int, float]
    """By training seed."""
    ratio: float | None
    """Ratio of the means."""
    verdict: GapVerdict

    @property
    def sentence(self) -> str:
        """The verdict with its numbers."""
        one = self.verdict
        text = f"{self.row} against {self.against}: {number(one.gap, signed=True)}, {one.judgement}"
        if one.why is not None:
            return f"{text} ({one.why})"
        low, high = one.interval or (0.0, 0.0)
        return f"{text} (95 % interval {number(low, signed=True)} … {number(high, signed=True)})"


class ObjectiveComparison(Comparison):
    """One row against another by a figure of their objective."""

    figure: str
    over: Literal["seeds", "images"] = "seeds"
    """What its interval is over; that over images says nothing about other trainings."""


class SameImages(Record):
    """How many ``images`` two folders both have, over all seeds, and how many of them are equal."""

    title: str
    images: int
    equal: int


class StepRecord(Record):
    """A step as it was run."""

    name: str
    command: str
    seconds: float


@dataclass(frozen=True)
class Row:
    """One row of a table over all training seeds."""

    scored: tuple[ScoredRow, ...]
    models: tuple[ModelResult, ...]
    """Its models, one of each seed."""

    @property
    def one(self) -> ScoredRow:
        """The row of the first seed, for what is the same in all."""
        return self.scored[0]

    @property
    def name(self) -> str:
        return self.one.row

    @cached_property
    def group(self) -> ResultGroup:
        """Its evaluations, as `hddm compare` takes them."""
        return self._grouped([one.evaluation for one in self.scored])

    @cached_property
    def second(self) -> ResultGroup | None:
        """Its evaluations by the second features; None unless every seed has one."""
        found = [one.second for one in self.scored if one.second is not None]
        return self._grouped(found) if len(found) == len(self.scored) else None

    def _grouped(self, evaluations: Sequence[Evaluation]) -> ResultGroup:
        results = []
        for one, evaluation in zip(self.scored, evaluations, strict=True):
            results.append(Result(Path(one.samples), evaluation, str(one.seed)))
        return ResultGroup(self.name, tuple(results))

    def figure(self, path: str) -> Figure | None:
        """A score by its path (`figure_at`), behind `SECOND` by the second features; None if not measured."""
        if not path.startswith(SECOND):
            return figure_at(self.group, path)
        return None if self.second is None else figure_at(self.second, path.removeprefix(SECOND))

    def measured(self, path: str) -> Figure:
        """A score that every row of its benchmark has."""
        found = self.figure(path)
        assert found is not None
        return found

    def objective(self, name: str) -> Figure | None:
        """A figure of the objective by its name; None where a seed has none."""
        values: dict[str, float] = {}
        widths = []
        for one in self.scored:
            if one.objective is None or name not in one.objective.figures:
                return None
            found = one.objective.figures[name]
            values[str(one.seed)] = found.value
            widths.append(found.half_width)
        return Figure(values, statistics.fmean(widths), self.group.is_one_model)

    @property
    def has_learned(self) -> bool:
        """False for a model that did not learn, by `why_not_learned`."""
        return self.why_not_learned is None

    @property
    def why_not_learned(self) -> str | None:
        """What its samples lack: figures below `LEARNED` times those of real images; None if it has learned.

        One figure alone would not show it. A classifier may recognise noise with certainty, precision is high
        for noise that lies among the real images, and recall for noise that lies around them.
        """
        each = [one.evaluation.beside_real for one in self.scored]
        lacking = []
        for name, words in _LACKING.items():
            pairs = [figures[name] for figures in each if name in figures]
            if not pairs:
                continue
            of_samples, of_real = zip(*pairs, strict=True)
            own = statistics.fmean(of_samples)
            real = statistics.fmean(of_real)
            if own < LEARNED * real:
                lacking.append(f"{words} ({name} {number(own)}, real images {number(real)})")
        return " and ".join(lacking) or None

    @property
    def experts_a_step(self) -> float:
        return statistics.fmean(one.experts_a_step for one in self.scored)

    @property
    def sampling_flop(self) -> float:
        """Operations per image."""
        return statistics.fmean(one.sampling_flop for one in self.scored)

    @property
    def training_flop(self) -> float | None:
        """Operations per seed, router included; None where that of a seed is unknown."""
        each = [one.training_flop for one in self.models]
        known = [one for one in each if one is not None]
        return statistics.fmean(known) if known and len(known) == len(each) else None

    @property
    def is_alone(self) -> bool:
        """True for a network that is sampled alone, to which no option of `ROUTING` applies."""
        return self.one.is_alone or self.setting("expert") is not None

    def setting(self, name: str) -> Any:
        """A setting that all its images were sampled with, as recorded beside them."""
        return getattr(self.one.evaluation.sampling, name, None)


class Results(Record):
    """``results.json``."""

    oldest: ClassVar[str | None] = "5.0"
    remedy: ClassVar[str] = "repeat the benchmark"

    format: str = FORMAT
    kind: Literal["benchmark"] = "benchmark"
    name: str
    split: DecidingSplit
    seeds: tuple[int, ...]
    """The seeds with results, of all seeds in the file."""
    date: str
    settings: BenchmarkFile
    machines: tuple[dict[str, Any], ...]
    """The machines that did the steps and their versions of packages, the one of most steps first."""
    real: Evaluation
    """Real images of the split, against the training images."""
    second_real: Evaluation | None = None
    """The same by the second features."""
    models: tuple[ModelResult, ...]
    scored: Annotated[tuple[ScoredRow, ...], Field(min_length=1)]
    same: tuple[SameImages, ...] = ()
    steps: tuple[StepRecord, ...]
    comparisons: tuple[Comparison, ...]
    by_objective: tuple[ObjectiveComparison, ...] = ()
    """Rows against others by errors and by bits."""
    by_second: tuple[Comparison, ...] = ()
    """Rows against others by the distance on the second features, which decides nothing."""
    seconds: float
    """Of all steps together, whenever and by however many workers they were done."""

    @property
    def images_of(self) -> str:
        """The split's name in texts."""
        return SPLITS[self.split]

    @property
    def decides(self) -> str:
        """Path of the score that verdicts are about."""
        return f"splits.{self.split}.distance"

    @property
    def tables(self) -> dict[str, list[Row]]:
        """Rows over all seeds, by table."""
        scored: dict[str, dict[str, list[ScoredRow]]] = {}
        for one in self.scored:
            scored.setdefault(one.table, {}).setdefault(one.row, []).append(one)
        found: dict[str, list[Row]] = {}
        for table, rows in scored.items():
            found[table] = []
            for each in rows.values():
                keys = {(one.model_hash, one.seed) for one in each}
                models = [model for model in self.models if (model.hash, model.seed) in keys]
                found[table].append(Row(tuple(each), tuple(models)))
        return found

    @property
    def first(self) -> list[Row]:
        """The first table, which has the answer."""
        return next(iter(self.tables.values()))

    @property
    def rows(self) -> list[Row]:
        """Rows of all tables."""
        return list(itertools.chain.from_iterable(self.tables.values()))

    @property
    def answers(self) -> list[Comparison]:
        """Rows against baselines, of the first table."""
        table = next(iter(self.tables))
        return [one for one in self.comparisons if one.table == table and one.kind == "model"]

    @property
    def few(self) -> list[str]:
        """Rows of no more images than features, in the order of their tables."""
        return self._few(self.decides)

    @property
    def few_by_second(self) -> list[str]:
        """Rows of no more images than second features, in the order of their tables."""
        return self._few(f"{SECOND}{self.decides}")

    def _few(self, path: str) -> list[str]:
        found = []
        for row in self.rows:
            distance = row.figure(path)
            if distance is not None and distance.few_images and row.name not in found:
                found.append(row.name)
        return found

    @property
    def unequal(self) -> Iterator[tuple[str, str, str, float]]:
        """Budgets that are not equal: the row that costs the most and the least, and its percent more."""
        flop = {row.one.of: row.training_flop for row in self.rows if row.training_flop}
        for budget, names in self.settings.budgets.items():
            known = sorted((flop[name], name) for name in names if name in flop)
            if not known:
                continue
            least, cheapest = known[0]
            most, dearest = known[-1]
            percent = 100 * (most / least - 1)
            if percent > PERCENT_UNEQUAL:
                yield budget, dearest, cheapest, percent

    @property
    def unscored(self) -> dict[tuple[str, str], list[str]]:
        """Rows that lack figures of the objective, by what they lack and the reason."""
        found: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            objective = row.one.objective
            if objective is not None and objective.why_none:
                lacking = "errors" if objective.step else "errors and bits"
                names = found.setdefault((lacking, objective.why_none), [])
                if row.name not in names:
                    names.append(row.name)
        return found

    def decisive(self, row: Row) -> Figure:
        """The score of a row that verdicts are about."""
        return row.measured(self.decides)

    def shown(self, row: Row, path: str) -> str:
        """Mean, half-width over samples and spread over trainings of a score, – where it was not measured."""
        found = row.figure(path)
        if found is None:
            return "–"
        half = "" if found.half_width is None else f" ± {number(found.half_width)}"
        mark = MARK if row.group.is_one_model else ""
        spread = "" if found.spread is None else f" (s {number(found.spread)}{mark})"
        return f"{number(found.mean)}{half}{spread}"


def number(value: float, signed: bool = False) -> str:
    """A figure, rounded by its size."""
    size = abs(value)
    if size >= 10:
        decimals = 1
    elif size >= 0.1 or size == 0:
        decimals = 2
    elif size >= 0.01:
        decimals = 3
    else:
        decimals = 4
    sign = "+" if signed else ""
    return f"{value:{sign}.{decimals}f}".replace("-", "−")


def read_results(folder: Path) -> Results:
    """Read the results in a benchmark's folder; raises `HddmError` as `read_record`."""
    return read_record(folder / RESULTS_FILE, Results, FORMAT, LARGEST)


def read_compared(paths: Sequence[Path]) -> dict[str, list[ResultGroup] | str]:
    """Read what ``hddm compare`` compares: evaluations under "", or benchmarks by row.

    Where all benchmarks have second features, and the same, a row is followed by its evaluations on them. In
    place of evaluations that do not compare there is the reason, if others of the row do.

    Rows are those in the first table of every benchmark, in the first one's order. Benchmarks without a
    common row raise `HddmError`.
    """
    files = [path / RESULTS_FILE if path.is_dir() else path for path in paths]
    if not any(file.name == RESULTS_FILE and file.is_file() for file in files):
        return {"": read_groups(paths)}
    found: dict[Path, dict[str, Row]] = {}
    second_features: dict[str, None] = {}
    for file in files:
        results = read_results(file.parent)
        found[file] = {row.name: row for row in results.first}
        second_features[str(results.settings.evaluate.second_features)] = None
    shared: dict[str, list[ResultGroup] | str] = {}
    for name in found[files[0]]:
        if all(name in rows for rows in found.values()):
            title = f"{name}, by {' and '.join(second_features)}"
            shared |= _of_row(name, title, {file: rows[name] for file, rows in found.items()})
    if not shared:
        lines = [f"{file}: {', '.join(rows)}" for file, rows in found.items()]
        raise HddmError("these benchmarks have no row of their first tables in common", lines)
    return shared


def _of_row(name: str, title: str, rows: Mapping[Path, Row]) -> dict[str, list[ResultGroup] | str]:
    """The evaluations of a row that benchmarks share, and under ``title`` those by the second features."""
    groups = []
    second = []
    for file, row in rows.items():
        groups.append(_group(file, row.group))
        if row.second is not None:
            second.append(_group(file, row.second))
    if len(second) < len(groups) or len(_features(second)) > 1:
        return {name: groups}
    # A dictionary, since the order counts.
    reasons: dict[str, None] = {}
    for group in second:
        for result in group.results:
            reasons |= dict.fromkeys(result.content.reasons)
    if reasons:
        return {name: groups, title: f"Not compared: {'; '.join(reasons)}."}
    if len(_features(groups)) > 1:
        own = groups[0].results[0].content.features.name
        why = f"Not compared by the features that decide: each benchmark has its own ({own})."
        return {name: why, title: second}
    return {name: groups, title: second}


def _features(groups: Sequence[ResultGroup]) -> set[str]:
    """Hashes of the networks that evaluations are by."""
    found = set()
    for group in groups:
        found |= {result.content.features.hash for result in group.results}
    return found


def _group(file: Path, group: ResultGroup) -> ResultGroup:
    """Evaluations of a row, named by the benchmark that they are from."""
    results = [replace(one, path=file) for one in group.results]
    return ResultGroup(str(file.parent), tuple(results))
