"""Models of one training seed: their trainings, their cost, and checks of what they can be sampled for."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hddm.benchmark.compute import Cost, Costs, single_steps
from hddm.benchmark.data import PartitionedImages
from hddm.benchmark.jobs import Job, Store, making, named
from hddm.benchmark.samples import SampledModel, canonical
from hddm.benchmark.settings import (
    ENSEMBLES,
    FINISHED,
    BenchmarkSettings,
    ModelSettings,
    SamplingPoint,
    points_of,
    slug,
)
from hddm.benchmark.trainings import MODEL, Training, router_training
from hddm.checkpoints.describe import describe
from hddm.data.shard_records import read_manifest
from hddm.ensemble import Ensemble, Strategy
from hddm.evaluation.distances import are_few, too_few
from hddm.experts.assembly import assemble
from hddm.experts.ensembles import ENSEMBLE_FILE, read_ensemble_facts
from hddm.experts.loading import load
from hddm.experts.records import EXPERT_FILE, FORMAT, ExpertRecord
from hddm.training.settings import RouterSettings
from hddm.utils.errors import HddmError
from hddm.utils.files import read_json, sha256_of
from hddm.utils.records import MANIFEST, read_record
from hddm.velocity import missing_from


def expert_records(folder: Path) -> list[ExpertRecord]:
    """The records of an expert folder, or of all experts of an ensemble folder.

    Raises:
        HddmError: for a record that cannot be read.
    """
    is_expert = (folder / EXPERT_FILE).is_file()
    experts = [folder] if is_expert else [folder / name for name in read_ensemble_facts(folder).experts]
    return [read_record(expert / EXPERT_FILE, ExpertRecord, FORMAT) for expert in experts]


def read_finished(folder: Path) -> list[ExpertRecord]:
    """The records of the experts of a finished model.

    Raises:
        HddmError: for a folder that holds no model of hddm's, or one that makes no pixels.
    """
    facts = describe(folder)
    if facts["kind"] not in ("expert", "ensemble"):
        raise HddmError(f"{folder}: is a {facts['kind']}; a finished model is an expert or an ensemble")
    if "layout" in facts:
        raise HddmError(f"{folder}: is no model folder of hddm; a checkpoint becomes one by hddm convert")
    records = expert_records(folder)
    if any(record.space == "latents" for record in records):
        raise HddmError(
            f"{folder}: makes latents; sample it with hddm sample, and compare the images with hddm evaluate"
        )
    return records


# Keys of records that say how long something took, not what it is.
_HISTORY = {"training", "calibration"}


@dataclass(frozen=True)
class Model:
    """One model of one training seed, ready to be sampled.

    ``training_flop`` and ``images_seen`` are None where they are not known: of models that were not trained
    here. ``objectives`` are its experts'.
    """

    name: str
    source: SampledModel
    objectives: tuple[str, ...]
    trainings: tuple[Training, ...]
    training_flop: dict[str, int] | None
    images_seen: int | None
    link: Path
    """Where it is shown to the user, below the benchmark's folder."""
    calibration_flop: int | None = None
    """Of that of its experts, what their calibration took."""

    @cached_property
    def weights(self) -> str:
        """Weights that the records of its experts state: averaged, raw or unstated."""
        return " and ".join(sorted({record.weights for record in expert_records(self.source.folder)}))


class SeedModels:
    """Trainings and models of one seed.

    Args:
        settings: of the benchmark.
        seed: of every training.
        divided: the data.
        store: where finished ones lie.
    """

    def __init__(
        self, settings: BenchmarkSettings, seed: int, divided: PartitionedImages, store: Store
    ) -> None:
        self.settings, self.seed, self.divided, self.store = settings, seed, divided, store
        self.costs = Costs(store, divided.shards)
        self._all_images_hash = read_manifest(divided.all_images).hash

    @property
    def num_shards(self) -> int:
        """K."""
        return self.settings.partition.shards

    @property
    def router_settings(self) -> RouterSettings:
        """Of the router of all ensembles."""
        return self.settings.router(self.seed)

    @property
    def router_job(self) -> Job:
        """Of the router of all ensembles."""
        return router_training(self.divided.hashes, self.router_settings)

    @property
    def needs_router(self) -> bool:
        """True where an ensemble is made here."""
        return any(model.kind == "ensemble" for model in self.settings.models)

    def trainings(self, model: ModelSettings) -> list[Training]:
        """All trainings that ``model`` may need, those that others start from first."""
        if model.kind == "finished":
            return []
        if model.kind == "single":
            wanted = [self._single(model)]
        else:
            wanted = [
                self._expert(model, name, k) for k, name in enumerate(model.named_objectives(self.num_shards))
            ]
        return [one for training in wanted for one in _with_start(training)]

    def cost(self, training: Training) -> Cost:
        """Of a training, of which one step is made to count it.

        Raises:
            HddmError: for one that cannot be.
        """
        return self.costs.expert(training.settings, training.init, training.init_hash)

    def open(self, model: ModelSettings) -> Model:
        """``model``, whose trainings are done; an ensemble is assembled."""
        if model.kind == "finished":
            return self._finished(model)
        if model.kind == "single":
            training = self._single(model)
            trainings: tuple[Training, ...] = (training,)
            folder = self.store.path(training.job) / MODEL
            source = SampledModel(folder, model_hash(folder), True)
            objectives: tuple[str, ...] = (model.objectives,)
            router, place = 0, Path()
        else:
            objectives = tuple(model.named_objectives(self.num_shards))
            trainings = tuple(self._expert(model, name, k) for k, name in enumerate(objectives))
            job = self._assembled(trainings)
            folder = self.store.path(job) / MODEL
            source = SampledModel(folder, job.hash, False, _trained_in(expert_records(folder)))
            router = self.costs.router(self.router_settings).of_router(self.router_settings)
            place = Path(ENSEMBLES)
        return Model(
            model.name,
            source,
            objectives,
            trainings,
            {"experts": sum(self._flop(one) for one in trainings), "router": router},
            sum(_seen(one) for one in trainings),
            Path(f"seed_{self.seed}") / place / slug(model.name),
            sum(self._calibration_flop(one) for one in trainings),
        )

    def _assembled(self, experts: Sequence[Training]) -> Job:
        """The ensemble of an expert a shard, which is made unless it is there."""
        folders = [self.store.path(one.job) / MODEL for one in experts]
        router = self.store.path(self.router_job) / MODEL
        hashes = [model_hash(folder) for folder in (*folders, router)]
        job = Job("ensemble", {}, {"experts": hashes[:-1], "router": hashes[-1]})
        if not self.store.has(job):
            with making(self.store.folder, job) as (draft, _):
                assemble(folders, draft / MODEL, router)
        return job

    def _expert(self, model: ModelSettings, objective: str, shard: int) -> Training:
        folder, content = self.divided.shard_folders[shard], self.divided.hashes[shard]
        changes = dict(model.training)
        settings = self.settings.expert(objective, self.seed, **changes)
        if objective == "ddpm" or (model.converted is None and model.init is None):
            return Training(folder, content, settings)
        if model.init is not None:
            return Training(folder, content, settings, init=model.init, init_hash=model_hash(model.init))
        assert model.converted is not None
        before = max(1, round(model.converted * settings.steps))
        first = self.settings.expert("ddpm", self.seed, **changes | {"steps": before})
        rest = settings.model_copy(update={"steps": max(1, settings.steps - before)})
        return Training(folder, content, rest, Training(folder, content, first))

    def _single(self, model: ModelSettings) -> Training:
        steps = single_steps(self.settings, model.objectives, self.costs, **model.training)
        settings = self.settings.single(model.objectives, self.seed, steps, **model.training)
        return Training(self.divided.all_images, self._all_images_hash, settings)

    def _flop(self, training: Training) -> int:
        steps = sum(self.cost(one).of_expert(one.settings, calibrated=False) for one in _with_start(training))
        return steps + self._calibration_flop(training)

    def _calibration_flop(self, training: Training) -> int:
        return sum(map(self._fitting_flop, _with_start(training)))

    def _fitting_flop(self, training: Training) -> int:
        (record,) = expert_records(self.store.path(training.job) / MODEL)
        # A calibration that was trained in was not fitted afterwards.
        return 0 if record.training_calibration else self.cost(training).calibration

    def _finished(self, model: ModelSettings) -> Model:
        assert model.path is not None
        records = read_finished(model.path)
        is_single = (model.path / EXPERT_FILE).is_file()
        content = model_hash(model.path)
        source = SampledModel(model.path, content, is_single, trained_in=_trained_in(records))
        objectives = tuple(record.objective for record in records)
        link = Path(f"seed_{self.seed}") / FINISHED / slug(model.name)
        return Model(model.name, source, objectives, (), None, None, link)


def model_hash(folder: Path) -> str:
    """SHA-256 of what a model folder computes: weights and records, without how long they took to make."""
    if not (folder / "config.json").is_file() and not (folder / ENSEMBLE_FILE).is_file():
        raise HddmError(f"{folder}: is no model folder of hddm; a checkpoint becomes one by hddm convert")
    lines = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        # Hidden files remember what was hashed, and manifests are hashes of the same files, history and all.
        if path.name.startswith("."):
            continue
        if path.suffix == ".json" and path.name != MANIFEST:
            content = {key: value for key, value in read_json(path).items() if key not in _HISTORY}
            lines.append(f"{name} {json.dumps(content, sort_keys=True)}")
        elif path.suffix == ".safetensors":
            lines.append(f"{name} {sha256_of(path)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _trained_in(records: Sequence[ExpertRecord]) -> tuple[bool, ...]:
    return tuple(record.training_calibration for record in records)


def _with_start(training: Training) -> Iterator[Training]:
    if training.start is not None:
        yield from _with_start(training.start)
    yield training


def _seen(training: Training) -> int:
    return sum(one.settings.steps * one.settings.batch_size for one in _with_start(training))


@dataclass(frozen=True)
class _Abilities:
    """Properties of a model that decide how it can be sampled."""

    experts: int
    """0 of a single model."""
    has_classes: bool
    has_router: bool = True


def check_rows(settings: BenchmarkSettings) -> None:
    """Refuse what could not be sampled, from the settings and the finished models that they name.

    Raises:
        HddmError: for a row that asks a model for what it cannot give, and for a finished model that cannot
            be opened or compared.
    """
    kinds = {model.name: _abilities(settings, model) for model in settings.models}
    for table in settings.tables:
        for name, point in itertools.product(table.models or kinds, points_of(settings, table)):
            kind = kinds[name]
            wrong = next(_misfits(f"model {name!r}", kind, canonical(point, not kind.experts)), None)
            if wrong is not None:
                raise HddmError(f"table {table.name!r}: {wrong}")


def check_shapes(settings: BenchmarkSettings, shape: Sequence[int]) -> None:
    """Refuse finished models that make other images than the data's, of ``shape`` (C, H, W).

    Raises:
        HddmError: as `read_finished`, and for another shape.
    """
    for model in settings.models:
        if model.path is None:
            continue
        made = {record.sample_shape for record in read_finished(model.path)}
        if made != {tuple(shape)}:
            told = " and ".join(map(str, sorted(made)))
            raise HddmError(
                f"model {model.name!r}: {model.path} makes images (C, H, W) of {told}, and the data's are "
                f"{tuple(shape)}; take data of that shape"
            )


def check_counts(settings: BenchmarkSettings, counts: Mapping[str, int], dimensions: int) -> None:
    """Refuse sides of no more images than features, unless the settings allow few.

    Args:
        settings: of the benchmark.
        counts: images of every side that a distance is measured on, by what the side is called.
        dimensions: features of an image.

    Raises:
        HddmError: for the smallest side, where it has too few.
    """
    side = min(counts, key=counts.__getitem__)
    if are_few(dimensions, [counts[side]]) and not settings.allow_few:
        with named(f"{side} {counts[side]}"):
            raise too_few(dimensions, [counts[side]], "allow_few: true in the settings")


def _misfits(model: str, kind: _Abilities, point: SamplingPoint) -> Iterator[str]:
    """Why ``model`` cannot be sampled at ``point``, and what to do."""
    strategy = Strategy.parse(point.strategy)
    if strategy.kind == "top" and strategy.value > kind.experts > 0:
        yield (
            f"strategy {point.strategy!r} asks for more experts than the {kind.experts} of {model}; take "
            f"top-{kind.experts} at most"
        )
    if strategy.kind != "draw" and kind.experts > 1 and not kind.has_router:
        yield f"strategy {point.strategy!r} needs a router, and {model} has none; take draw"
    if point.guidance_scale != 1 and not kind.has_classes:
        yield f"guidance_scale {point.guidance_scale:g} needs classes, and {model} has none; take 1"


def _abilities(settings: BenchmarkSettings, model: ModelSettings) -> _Abilities:
    if model.path is not None:
        with named(f"model {model.name!r}"):
            return _abilities_of_finished(model.path)
    if model.kind == "single":
        trained = settings.single(model.objectives, 0, 1, **model.training)
        return _Abilities(0, trained.class_conditional)
    objectives = model.named_objectives(settings.partition.shards)
    labelled = (settings.expert(name, 0, **model.training).class_conditional for name in set(objectives))
    return _Abilities(len(objectives), any(labelled))


def _abilities_of_finished(path: Path) -> _Abilities:
    read_finished(path)
    opened = load(path)
    fields = opened.experts if isinstance(opened, Ensemble) else [opened]
    for field in fields:
        given = {*field.null_conditions, *(["class_labels"] if opened.classes else [])}
        missing = missing_from(given, field.conditions or ())
        if missing:
            raise HddmError(
                f"{path}: needs {' and '.join(missing)}, which a benchmark does not give; sample it with "
                "hddm sample, and compare the images with hddm evaluate"
            )
    experts = len(fields) if isinstance(opened, Ensemble) else 0
    has_router = isinstance(opened, Ensemble) and opened.router is not None
    return _Abilities(experts, bool(opened.classes), has_router)
