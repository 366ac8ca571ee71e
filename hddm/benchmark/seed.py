"""One training seed of a benchmark: its jobs, in order of dependence."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hddm.benchmark.data import PartitionedImages
from hddm.benchmark.domains import Unchanged
from hddm.benchmark.jobs import Job, Runnable, Store, call_of, named
from hddm.benchmark.models import Model, SeedModels
from hddm.benchmark.samples import Piece, canonical, pieces
from hddm.benchmark.scores import Scoring
from hddm.benchmark.settings import BenchmarkSettings, SamplingPoint, points_of
from hddm.benchmark.trainings import RouterTraining, Training
from hddm.ensemble import Strategy
from hddm.utils.processes import Workers
from hddm.utils.progress import Progress

_ALWAYS_NAMED = ("strategy", "solver", "steps")
_SCORE = 10**11
"""Operations that the score of a row counts as in the progress: some seconds of a CPU core."""
_CALLS = {"heun": 2}
"""Calls of the velocity in a step, by solver; of others 1."""


def evaluations(point: SamplingPoint, experts: int) -> int:
    """Networks that run for one image at ``point``, of a model of so many ``experts``, at most."""
    strategy = Strategy.parse(point.strategy)
    at_once = {"draw": 1, "top": int(strategy.value)}.get(strategy.kind, experts)
    guided = 1 if point.guidance_scale == 1 else 2
    return point.steps * _CALLS.get(point.solver, 1) * min(at_once, max(1, experts)) * guided


@dataclass(frozen=True)
class SharedInputs:
    """Data of all seeds, the images that samples are scored against, and the scores of real images."""

    divided: PartitionedImages
    reference: Job
    features: Job
    real: dict[str, Any]


@dataclass(frozen=True)
class SampledRow:
    """One row of a table: which model at which point, and what draws and scores it."""

    table: str
    row: str
    model: str
    point: SamplingPoint
    samples: tuple[Piece, ...]
    scores: Scoring
    unchanged: Unchanged | None = None

    @property
    def scorings(self) -> list[Scoring | Unchanged]:
        """All that is to be done once the samples are there."""
        return [self.scores, *([] if self.unchanged is None else [self.unchanged])]


@dataclass(frozen=True)
class SeedJobs:
    """What was done for one seed; all of it is in the store."""

    seed: int
    models: dict[str, Model]
    trainings: tuple[Training | RouterTraining, ...]
    rows: tuple[SampledRow, ...]

    @property
    def jobs(self) -> set[Job]:
        """All that training, sampling and scoring took."""
        drawn = {piece.job for row in self.rows for piece in row.samples}
        scored = {one.job for row in self.rows for one in row.scorings}
        return drawn | scored | {one.job for one in self.trainings}


@dataclass(frozen=True)
class _Task:
    """A piece of work, its names in errors and in progress, and the operations of one of its units."""

    name: str
    shown: str
    work: Runnable
    weight: int = 1

    @property
    def units(self) -> int:
        return self.work.units * self.weight


@dataclass
class SeedRun:
    """Run of all jobs of one ``seed``, of trainings and of samples."""

    settings: BenchmarkSettings
    seed: int
    shared: SharedInputs
    store: Store

    @cached_property
    def _models(self) -> SeedModels:
        return SeedModels(self.settings, self.seed, self.shared.divided, self.store)

    @cached_property
    def _trainings(self) -> list[_Task]:
        """All experts, each once, and the router; raises `HddmError` for what cannot be trained."""
        found: dict[Job, _Task] = {}
        for model in self.settings.models:
            with named(f"model {model.name!r}"):
                for shard, last in enumerate(self._models.trainings(model)):
                    of = "" if model.kind == "single" else f" shard {shard}"
                    for one in last.chain:
                        batch, shown = one.settings.batch_size, f"{model.name}{of}"
                        weight = self._models.cost(one).of_step(batch) // batch
                        task = _Task(f"{shown}, seed {self.seed}", shown, one, weight)
                        found.setdefault(one.job, task)
        # The longest first, so that no worker is idle at the end.
        tasks = sorted(found.values(), key=lambda task: -task.work.units)
        if (router := self._models.router) is not None:
            step = self._models.costs.router(router.settings).step
            tasks.append(_Task(f"router, seed {self.seed}", "router", router, step))
        return tasks

    def planned(self) -> int:
        """Operations of all trainings, samples and scores, about; done or not."""
        # First, since errors of trainings name the model.
        found = sum(task.units for task in self._trainings)
        for table in self.settings.tables:
            points = points_of(self.settings, table)
            # A single model has one row of all points that are alike for it.
            alike = list(dict.fromkeys(canonical(point, True) for point in points))
            for name in table.models or [model.name for model in self.settings.models]:
                is_single = self.settings.model(name).kind in ("single", "merged")
                for point in alike if is_single else points:
                    found += point.num_images * self._flop(name, point) + _SCORE
        return found

    def to_train(self) -> int:
        """Operations of the trainings that are not done."""
        return sum(task.units for task in self._todo(self._trainings))

    @cached_property
    def _forward(self) -> dict[str, tuple[int, int]]:
        """Operations of a network, and the number of networks, by model; 0 and 0 if unknown."""
        trainings = {model.name: self._models.trainings(model) for model in self.settings.models}
        return {
            name: (max((self._models.cost(one).forward for one in experts), default=0), len(experts))
            for name, experts in trainings.items()
        }

    def _flop(self, model: str, point: SamplingPoint) -> int:
        """Operations of one image, about; 1 where the networks are not known before they are read."""
        forward, experts = self._forward[model]
        return max(1, forward * evaluations(point, experts))

    def run(self, workers: Workers, progress: Progress) -> SeedJobs:
        """Train, sample, score; what is done already is not done again."""
        waves: tuple[list[_Task], list[_Task]] = [], []
        for task in self._trainings:
            waves[isinstance(task.work, Training) and task.work.start is not None].append(task)
        for wave in waves:
            self._do(wave, workers, progress)
        models = {one.name: self._models.open(one) for one in self.settings.models}
        rows = self._rows(models)
        pieces = [
            _Task(self._name(row), row.row, piece, self._flop(row.model, row.point))
            for row in rows
            for piece in row.samples
        ]
        self._do(pieces, workers, progress)
        scorings = [
            _Task(self._name(row), row.row, one, _SCORE * (one is row.scores))
            for row in rows
            for one in row.scorings
        ]
        self._do(scorings, workers, progress)
        made = [task.work for task in self._trainings]
        trainings = tuple(one for one in made if isinstance(one, Training | RouterTraining))
        return SeedJobs(self.seed, models, trainings, rows)

    def _rows(self, models: Mapping[str, Model]) -> tuple[SampledRow, ...]:
        rows, shared = [], self.shared
        for table in self.settings.tables:
            points = points_of(self.settings, table)
            names = table.models or tuple(models)
            for name in names:
                source, seen = models[name].source, set()
                for point in points:
                    if source.is_single and canonical(point, True) in seen:
                        continue
                    seen.add(canonical(point, True))
                    samples = pieces(source, point, self.seed, self.settings.device)
                    drawn = tuple(piece.job for piece in samples)
                    scores = Scoring(self.settings, drawn, shared.reference, shared.features)
                    label = row_name(name, len(names) > 1, point, points)
                    unchanged = self._unchanged(name, models, point)
                    rows.append(SampledRow(table.name, label, name, point, samples, scores, unchanged))
        return tuple(rows)

    def _unchanged(self, name: str, models: Mapping[str, Model], point: SamplingPoint) -> Unchanged | None:
        """The check of a grown model against the old one that it is made of."""
        of = self.settings.model(name).of
        if of is None or models[name].source.is_single:
            return None
        return Unchanged(models[of[0]].source, models[name].source, point, self.seed)

    def _name(self, row: SampledRow) -> str:
        """A row in errors: its model, the seed, and how it is sampled."""
        usual = SamplingPoint().model_dump()
        chosen = [
            f"{key} {value}"
            for key, value in row.point.model_dump().items()
            if key in _ALWAYS_NAMED or value != usual[key]
        ]
        return ", ".join([f"model {row.model!r}", f"seed {self.seed}", *chosen])

    def _todo(self, tasks: Iterable[_Task]) -> list[_Task]:
        """Tasks that are not done, each once."""
        return list({task.work.job: task for task in tasks if not self.store.has(task.work.job)}.values())

    def _do(self, tasks: Sequence[_Task], workers: Workers, progress: Progress) -> None:
        """Do the tasks that are not done, each once."""
        todo = self._todo(tasks)
        progress.skip(sum(task.units for task in tasks) - sum(task.units for task in todo))
        calls = [call_of(self.store, task.work, task.name, task.weight, task.shown) for task in todo]
        workers.run(calls, progress)


def row_name(model: str, name_model: bool, point: SamplingPoint, points: Sequence[SamplingPoint]) -> str:
    """Name a row: its model where there are several, and what it does not share with all points."""
    own = point.model_dump()
    varied = [key for key in own if len({one.model_dump()[key] for one in points}) > 1]
    values = [f"{own[key]} steps" if key == "steps" else str(own[key]) for key in varied]
    return ", ".join([*([model] if name_model or not values else []), *values])
