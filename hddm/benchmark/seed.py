"""One training seed of a benchmark: its jobs, in order of dependence."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hddm.benchmark.data import PartitionedImages
from hddm.benchmark.jobs import Job, Runnable, Store, call_of, named
from hddm.benchmark.models import Model, SeedModels
from hddm.benchmark.samples import Piece, canonical, pieces
from hddm.benchmark.scores import Scoring
from hddm.benchmark.settings import BenchmarkSettings, SamplingPoint, points_of
from hddm.benchmark.trainings import RouterTraining, Training
from hddm.utils.processes import Workers
from hddm.utils.progress import Progress

_ALWAYS_NAMED = ("strategy", "solver", "steps")


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
        return drawn | {row.scores.job for row in self.rows} | {one.job for one in self.trainings}


@dataclass
class SeedRun:
    """Run of all jobs of one ``seed``, of trainings and of samples."""

    settings: BenchmarkSettings
    seed: int
    shared: SharedInputs
    store: Store
    workers: Workers

    def run(self) -> SeedJobs:
        """Train, sample, score; what is done already is not done again."""
        opener = SeedModels(self.settings, self.seed, self.shared.divided, self.store)
        trainings = self._train(opener)
        models = {one.name: opener.open(one) for one in self.settings.models}
        rows = self._rows(models)
        self._do([(self._name(row), piece) for row in rows for piece in row.samples], "sample")
        self._do([(self._name(row), row.scores) for row in rows], "score")
        return SeedJobs(self.seed, models, trainings, rows)

    def _train(self, opener: SeedModels) -> tuple[Training | RouterTraining, ...]:
        """All experts, each once, and the router."""
        found: dict[Job, Training] = {}
        for model in self.settings.models:
            with named(f"model {model.name!r}"):
                for one in (one for training in opener.trainings(model) for one in training.chain):
                    # Fails here for what cannot be trained, before hours of other trainings.
                    opener.cost(one)
                    found.setdefault(one.job, one)
        # The longest first, so that no worker is idle at the end.
        experts = sorted(found.values(), key=lambda one: -one.units)
        routers = [opener.router] if opener.router is not None else []
        first: list[Runnable] = [*(one for one in experts if one.start is None), *routers]
        second: list[Runnable] = [one for one in experts if one.start is not None]
        for wave in (first, second):
            self._do([(f"seed {self.seed}", task) for task in wave], "train")
        return (*experts, *routers)

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
                    rows.append(SampledRow(table.name, label, name, point, samples, scores))
        return tuple(rows)

    def _name(self, row: SampledRow) -> str:
        """A row in errors: its model, the seed, and how it is sampled."""
        usual = SamplingPoint().model_dump()
        chosen = [
            f"{key} {value}"
            for key, value in row.point.model_dump().items()
            if key in _ALWAYS_NAMED or value != usual[key]
        ]
        return ", ".join([f"model {row.model!r}", f"seed {self.seed}", *chosen])

    def _do(self, tasks: Iterable[tuple[str, Runnable]], label: str) -> None:
        """Do the tasks that are not done, each once, with a progress bar."""
        todo = {task.job: (what, task) for what, task in tasks if not self.store.has(task.job)}
        calls = [call_of(self.store, task, what) for what, task in todo.values()]
        if calls:
            with Progress(sum(call.units for call in calls), f"seed {self.seed}: {label}") as progress:
                self.workers.run(calls, progress)


def row_name(model: str, name_model: bool, point: SamplingPoint, points: Sequence[SamplingPoint]) -> str:
    """Name a row: its model where there are several, and what it does not share with all points."""
    own = point.model_dump()
    varied = [key for key in own if len({one.model_dump()[key] for one in points}) > 1]
    values = [f"{own[key]} steps" if key == "steps" else str(own[key]) for key in varied]
    return ", ".join([*([model] if name_model or not values else []), *values])
