"""One training seed of a benchmark: its jobs, in the order in which they depend on each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hddm.benchmark.data import Division
from hddm.benchmark.jobs import Job, Store, named, named_call
from hddm.benchmark.measures import errors_call, errors_job_of, reliability_call, reliability_job_of
from hddm.benchmark.models import Errors, Model, SeedModels, expert_records, model_hash
from hddm.benchmark.samples import canonical, piece_call, pieces
from hddm.benchmark.scores import score_call, score_job_of
from hddm.benchmark.settings import BenchmarkSettings, ModelSettings, SamplingPoint, points_of
from hddm.benchmark.trainings import MODEL, Training, router_call
from hddm.data.shard_records import HELD_OUT, read_manifest
from hddm.utils.processes import Call, Workers
from hddm.utils.progress import Progress

_ALWAYS_TOLD = ("strategy", "solver", "steps")


@dataclass(frozen=True)
class SharedInputs:
    """What all seeds share: the data, what samples are scored against, and what real images score."""

    divided: Division
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
    """What one seed left: all of it in the store.

    ``errors`` and ``reliability`` are jobs, the former by the expert's training; empty and None where there
    are no validation images.
    """

    seed: int
    models: dict[str, Model]
    trainings: tuple[tuple[str, Training], ...]
    router: Job | None
    errors: dict[str, Job]
    reliability: Job | None
    rows: tuple[SampledRow, ...]


@dataclass
class SeedRun:
    """Does all jobs of one seed.

    Args:
        settings: of the benchmark.
        seed: the training seed, and that of the samples.
        ground: what all seeds share.
        store: where jobs lie.
        workers: who does them.
    """

    settings: BenchmarkSettings
    seed: int
    ground: SharedInputs
    store: Store
    workers: Workers
    zoo: SeedModels = field(init=False)

    def __post_init__(self) -> None:
        self.zoo = SeedModels(self.settings, self.seed, self.ground.divided, self.store)

    def run(self) -> SeedJobs:
        """Train, measure, sample, score; what is done already is not done again."""
        trainings = self._train()
        errors = self._measure(trainings)
        models = {one.name: self.zoo.open(one, self._decisive(one, errors)) for one in self.settings.models}
        reliability = self._judge_router()
        rows = self._rows(models)
        self._sample(models, rows)
        self._score(rows)
        router = self.zoo.router_job if self.zoo.needs_router else None
        return SeedJobs(self.seed, models, tuple(trainings.values()), router, errors, reliability, rows)

    def _train(self) -> dict[str, tuple[str, Training]]:
        """All experts, by the hash of their job, with the kind of model that they are for; and the router."""
        found: dict[str, tuple[str, Training]] = {}
        for model in self.settings.models:
            with named(f"model {model.name!r}"):
                for training in self.zoo.trainings(model):
                    # What cannot be trained says so here, before hours of what can.
                    self.zoo.cost(training)
                    found.setdefault(training.job.hash, (model.kind, training))
        every = self.settings.training.checkpoint_every
        waves: list[dict[Job, Call]] = [{}, {}]
        # The longest first, so that no worker is idle at the end.
        for _, training in sorted(found.values(), key=lambda one: -_work(one[1])):
            waves[training.start is not None][training.job] = training.call(self.store, every)
        if self.zoo.needs_router:
            job, settings = self.zoo.router_job, self.zoo.router_settings
            waves[0][job] = router_call(self.store, job, self.ground.divided.shards, settings, every)
        for wave in waves:
            self._do(wave, "train")
        return found

    def _measure(self, trainings: Mapping[str, tuple[str, Training]]) -> dict[str, Job]:
        """Errors by noise level of all experts, by the hash of their job."""
        jobs, calls = {}, {}
        for key, (_, training) in trainings.items():
            validation = training.shard.parent / HELD_OUT / training.shard.name
            if not validation.is_dir():
                continue
            folder = self.store.path(training.job) / MODEL
            (record,) = expert_records(folder)
            images = read_manifest(validation).hash
            jobs[key] = errors_job_of(model_hash(folder), images, record.training_calibration)
            calls[jobs[key]] = errors_call(self.store.folder, jobs[key], folder, validation)
        self._do(calls, "measure")
        return jobs

    def _decisive(self, model: ModelSettings, errors: Mapping[str, Job]) -> Errors | None:
        if not model.chooses:
            return None
        return {
            name: [self.store.result(errors[one.job.hash])["calibrated"] for one in experts]
            for name, experts in self.zoo.compared(model).items()
        }

    def _judge_router(self) -> Job | None:
        folders = [self.ground.divided.validation(k) for k in range(self.zoo.num_shards)]
        validation = [folder for folder in folders if folder is not None]
        if not self.zoo.needs_router or len(validation) < len(folders):
            return None
        router = self.store.path(self.zoo.router_job) / MODEL
        job = reliability_job_of(model_hash(router), [read_manifest(one).hash for one in validation])
        self._do({job: reliability_call(self.store.folder, job, router, validation)}, "judge router")
        return job

    def _rows(self, models: Mapping[str, Model]) -> tuple[SampledRow, ...]:
        rows, ground = [], self.ground
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
                    scores = score_job_of(self.settings, samples, ground.reference, ground.features)
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
        ground = self.ground
        calls = {}
        for row in rows:
            call = score_call(self.store, row.scores, row.samples, ground.reference, ground.features)
            calls[row.scores] = named_call(self._name(row), call)
        self._do(calls, "score")

    def _name(self, row: SampledRow) -> str:
        """A row in errors: its model, the seed, and how it is sampled."""
        usual = SamplingPoint().model_dump()
        told = [
            f"{key} {value}"
            for key, value in row.point.model_dump().items()
            if key in _ALWAYS_TOLD or value != usual[key]
        ]
        return ", ".join([f"model {row.model!r}", f"seed {self.seed}", *told])

    def _do(self, calls: Mapping[Job, Call], label: str) -> None:
        """Those of the jobs that are not done, with a bar."""
        todo = [call for job, call in calls.items() if not self.store.has(job)]
        if not todo:
            return
        with Progress(sum(call.units for call in todo), f"seed {self.seed}: {label}") as progress:
            self.workers.run(todo, progress)


def row_name(model: str, name_model: bool, point: SamplingPoint, points: Sequence[SamplingPoint]) -> str:
    """What to call a row: its model where there are several, and what it does not share with all points."""
    own = point.model_dump()
    varied = [key for key in own if len({one.model_dump()[key] for one in points}) > 1]
    values = [f"{own[key]} steps" if key == "steps" else str(own[key]) for key in varied]
    return ", ".join([*([model] if name_model or not values else []), *values])


def _work(training: Training) -> int:
    return training.settings.steps * training.settings.batch_size
