"""One training seed of a benchmark: its jobs, in the order in which they depend on each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hddm.benchmark.data import PartitionedImages
from hddm.benchmark.jobs import Job, Store, named, named_call
from hddm.benchmark.models import Model, SeedModels
from hddm.benchmark.samples import canonical, piece_call, pieces
from hddm.benchmark.scores import score_call, score_job_of
from hddm.benchmark.settings import BenchmarkSettings, SamplingPoint, points_of
from hddm.benchmark.trainings import Training, router_call
from hddm.utils.processes import Call, Workers
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
    """One row of a table: which model at which point, and the jobs that drew and scored it."""

    table: str
    row: str
    model: str
    point: SamplingPoint
    samples: tuple[Job, ...]
    scores: Job


@dataclass(frozen=True)
class SeedJobs:
    """The finished jobs of one seed, all in the store."""

    seed: int
    models: dict[str, Model]
    trainings: tuple[Training, ...]
    router: Job | None
    rows: tuple[SampledRow, ...]


@dataclass
class SeedRun:
    """Does all jobs of one seed.

    Args:
        settings: of the benchmark.
        seed: the training seed, and that of the samples.
        shared: what all seeds share.
        store: where jobs lie.
        workers: who does them.
    """

    settings: BenchmarkSettings
    seed: int
    shared: SharedInputs
    store: Store
    workers: Workers
    models: SeedModels = field(init=False)

    def __post_init__(self) -> None:
        self.models = SeedModels(self.settings, self.seed, self.shared.divided, self.store)

    def run(self) -> SeedJobs:
        """Train, sample, score; what is done already is not done again."""
        trainings = self._train()
        models = {one.name: self.models.open(one) for one in self.settings.models}
        rows = self._rows(models)
        self._sample(models, rows)
        self._score(rows)
        router = self.models.router_job if self.models.needs_router else None
        return SeedJobs(self.seed, models, tuple(trainings), router, rows)

    def _train(self) -> list[Training]:
        """All experts, each once, and the router."""
        found: dict[str, Training] = {}
        for model in self.settings.models:
            with named(f"model {model.name!r}"):
                for training in self.models.trainings(model):
                    # What cannot be trained says so here, before hours of what can.
                    self.models.cost(training)
                    found.setdefault(training.job.hash, training)
        every = self.settings.training.checkpoint_every
        waves: list[dict[Job, Call]] = [{}, {}]
        # The longest first, so that no worker is idle at the end.
        for training in sorted(found.values(), key=lambda one: -_work(one)):
            waves[training.start is not None][training.job] = training.call(self.store, every)
        if self.models.needs_router:
            job, settings = self.models.router_job, self.models.router_settings
            waves[0][job] = router_call(self.store, job, self.shared.divided.shards, settings, every)
        for wave in waves:
            self._do(wave, "train")
        return list(found.values())

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
                    samples = tuple(pieces(source, point, self.seed))
                    scores = score_job_of(self.settings, samples, shared.reference, shared.features)
                    label = row_name(name, len(names) > 1, point, points)
                    rows.append(SampledRow(table.name, label, name, point, samples, scores))
        return tuple(rows)

    def _sample(self, models: Mapping[str, Model], rows: Sequence[SampledRow]) -> None:
        calls = {}
        for row in rows:
            for job in row.samples:
                call = piece_call(self.store, job, models[row.model].source, self.settings.device)
                calls[job] = named_call(self._name(row), call)
        self._do(calls, "sample")

    def _score(self, rows: Sequence[SampledRow]) -> None:
        calls = {}
        for row in rows:
            call = score_call(
                self.store, row.scores, row.samples, self.shared.reference, self.shared.features
            )
            calls[row.scores] = named_call(self._name(row), call)
        self._do(calls, "score")

    def _name(self, row: SampledRow) -> str:
        """A row in errors: its model, the seed, and how it is sampled."""
        usual = SamplingPoint().model_dump()
        named = [
            f"{key} {value}"
            for key, value in row.point.model_dump().items()
            if key in _ALWAYS_NAMED or value != usual[key]
        ]
        return ", ".join([f"model {row.model!r}", f"seed {self.seed}", *named])

    def _do(self, calls: Mapping[Job, Call], label: str) -> None:
        """Those of the jobs that are not done, with a bar."""
        todo = [call for job, call in calls.items() if not self.store.has(job)]
        if not todo:
            return
        with Progress(sum(call.units for call in todo), f"seed {self.seed}: {label}") as progress:
            self.workers.run(todo, progress)


def row_name(model: str, name_model: bool, point: SamplingPoint, points: Sequence[SamplingPoint]) -> str:
    """Name a row: its model where there are several, and what it does not share with all points."""
    own = point.model_dump()
    varied = [key for key in own if len({one.model_dump()[key] for one in points}) > 1]
    values = [f"{own[key]} steps" if key == "steps" else str(own[key]) for key in varied]
    return ", ".join([*([model] if name_model or not values else []), *values])


def _work(training: Training) -> int:
    return training.settings.steps * training.settings.batch_size
