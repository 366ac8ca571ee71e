"""Models of one training seed: their trainings, their cost, and checks of what they can be sampled for."""

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from hddm.benchmark.compute import Cost, Costs, single_steps
from hddm.benchmark.data import PartitionedImages
from hddm.benchmark.jobs import Job, Store, named
from hddm.benchmark.results import ModelResult
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
from hddm.benchmark.trainings import MODEL, RouterTraining, Training
from hddm.checkpoints.inspect_models import inspect_model
from hddm.checkpoints.merging import merge_experts
from hddm.data.shard_records import read_manifest
from hddm.ensemble import Ensemble, Strategy
from hddm.evaluation.distances import are_few, too_few
from hddm.experts.assembly import assemble
from hddm.experts.ensemble_folders import ENSEMBLE_FILE, read_ensemble_facts
from hddm.experts.loading import load
from hddm.experts.records import EXPERT_FILE, FORMAT, ExpertRecord
from hddm.networks.wrappers import missing_from
from hddm.training.calibrate import recalibrate
from hddm.training.recipe import Start, resolve
from hddm.training.settings import ExpertRecipe, ExpertSettings
from hddm.utils.errors import HddmError
from hddm.utils.files import read_json, sha256_of
from hddm.utils.records import MANIFEST, read_record


def expert_records(folder: Path) -> list[ExpertRecord]:
    """Read the records of an expert folder, or of all experts of an ensemble folder."""
    is_expert = (folder / EXPERT_FILE).is_file()
    experts = [folder] if is_expert else [folder / one.folder for one in read_ensemble_facts(folder).experts]
    return [read_record(expert / EXPERT_FILE, ExpertRecord, FORMAT) for expert in experts]


def read_finished(folder: Path) -> list[ExpertRecord]:
    """Read the records of a finished model's experts; refuse other folders and models of latents."""
    found = inspect_model(folder)
    if found["kind"] not in ("expert", "ensemble"):
        raise HddmError(f"{folder}: is a {found['kind']}; a finished model is an expert or an ensemble")
    if "layout" in found:
        raise HddmError(f"{folder}: is not a model folder of hddm; convert a checkpoint with hddm convert")
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
    """One model of one training seed, ready to be sampled, and what the results say of it."""

    source: SampledModel
    result: ModelResult

    @cached_property
    def weights(self) -> str:
        """Weights that the records of its experts state: averaged, raw or unstated."""
        return " and ".join(sorted({record.weights for record in expert_records(self.source.folder)}))


class SeedModels:
    """Trainings and models of one seed, on the data in ``divided``; finished ones lie in ``store``."""

    def __init__(
        self, settings: BenchmarkSettings, seed: int, divided: PartitionedImages, store: Store
    ) -> None:
        self.settings, self.seed, self.divided, self.store = settings, seed, divided, store
        self.costs = Costs(store, divided.shards)
        self._all_images_hash = read_manifest(divided.all_images).hash

    @cached_property
    def router(self) -> RouterTraining | None:
        """The router of all ensembles, where one is made here."""
        if all(model.kind != "ensemble" for model in self.settings.models):
            return None
        every = self.settings.training.checkpoint_every
        settings = self.settings.router(self.seed)
        return RouterTraining(self.divided.shards, tuple(self.divided.hashes), settings, every)

    def trainings(self, model: ModelSettings) -> list[Training]:
        """Return a training per expert, or per model that it is made of; none for a finished model."""
        names = model.named_objectives(self.settings.partition.shards)
        if model.kind == "single":
            return [self._single(model)]
        if model.of is not None:
            return [one for name in model.of for one in self.trainings(self.settings.model(name))]
        return [self._expert(model, name, k) for k, name in enumerate(names)]

    def cost(self, training: Training) -> Cost:
        """Return the cost of a training by making one step; refuse one that cannot be made.

        An adapter is counted once the network is there that it adapts, and as that network before.
        """
        start, settings = training.start, training.settings
        if start is None or settings.lora_rank is None:
            return self.costs.expert(settings, training.init, training.init_hash)
        if self.store.has(start.job):
            return self.costs.expert(settings, self.store.path(start.job) / MODEL, start.job.hash)
        return self.costs.expert(settings.model_copy(update={"lora_rank": None, "lora_alpha": None}))

    def _counted(self, model: ModelSettings) -> list[Training]:
        """Trainings whose compute is the model's own: none of the old model that it begins with."""
        if model.of is not None:
            return [one for name in model.of[1:] for one in self._counted(self.settings.model(name))]
        trainings = self.trainings(model)
        return trainings if model.begins_with else [one for each in trainings for one in each.chain]

    def open(self, model: ModelSettings) -> Model:
        """``model``, whose trainings are done; an ensemble is assembled."""
        if model.path is not None:
            return self._finished(model, model.path)
        trainings = self.trainings(model)
        chain = self._counted(model)
        jobs, router_flop = [one.job for one in chain], 0
        if model.kind in ("single", "merged"):
            job = trainings[-1].job
            if model.kind == "merged":
                job = self._made("merged", trainings, self._merge)
            folder, place = self.store.path(job) / MODEL, ""
            source = SampledModel(folder, model_hash(folder), True)
        else:
            router = self.router if model.kind == "ensemble" else None
            last = None if router is None else self.store.path(router.job) / MODEL
            routed = {} if last is None else {"router": model_hash(last)}
            ensemble = self._made("ensemble", trainings, partial(assemble, router=last), **routed)
            folder, place = self.store.path(ensemble) / MODEL, ENSEMBLES
            source = SampledModel(folder, ensemble.hash, False, _trained_in(expert_records(folder)))
            if router is not None:
                jobs.append(router.job)
                router_flop = self.costs.router(router.settings).of_router(router.settings)
        fitting = sum(map(self._fitting_flop, chain))
        experts = fitting + sum(self.cost(one).steps(one.settings) for one in chain)
        result = ModelResult(
            **self._identity(model, source, place),
            objectives=tuple(one.settings.objective for one in trainings),
            experts=tuple(one.job.name for one in trainings),
            steps=tuple(sum(part.settings.steps for part in one.chain) for one in trainings),
            batch_sizes=tuple(one.settings.batch_size for one in trainings),
            images_seen=sum(one.units for one in chain),
            experts_flop=experts,
            calibration_flop=fitting,
            router_flop=router_flop,
            training_flop=experts + router_flop,
            seconds=round(sum(self.store.record(job)["seconds"] for job in jobs), 1),
        )
        return Model(source, result)

    def _finished(self, model: ModelSettings, path: Path) -> Model:
        records, is_single = read_finished(path), (path / EXPERT_FILE).is_file()
        source = SampledModel(path, model_hash(path), is_single, _trained_in(records))
        objectives = tuple(record.objective for record in records)
        unknown = dict.fromkeys(("images_seen", "experts_flop", "router_flop", "training_flop", "seconds"))
        lists = dict.fromkeys(("experts", "steps", "batch_sizes"), ())
        known = self._identity(model, source, FINISHED) | {"objectives": objectives}
        return Model(source, ModelResult.model_validate(known | lists | unknown))

    def _identity(self, model: ModelSettings, source: SampledModel, place: str) -> dict[str, Any]:
        """Name, seed, content, and where the model is shown to the user, below the benchmark's folder."""
        folder = Path(f"seed_{self.seed}") / place / slug(model.name)
        return {"model": model.name, "seed": self.seed, "hash": source.hash, "folder": str(folder)}

    def _made(
        self, kind: str, experts: Sequence[Training], make: Callable[[list[Path], Path], object], **of: str
    ) -> Job:
        """The model that ``make`` makes of these experts, unless it is there."""
        folders = [self.store.path(one.job) / MODEL for one in experts]
        job = Job(kind, {}, {"experts": [model_hash(folder) for folder in folders], **of})

        def fill(draft: Path) -> None:
            make(folders, draft / MODEL)

        self.store.once(job, fill)
        return job

    def _merge(self, experts: list[Path], out: Path) -> None:
        """Average the weights of experts, and calibrate what comes out."""
        merge_experts(experts, out)
        recalibrate(out, self.divided.all_images)

    def _expert(self, model: ModelSettings, objective: str, shard: int) -> Training:
        train = partial(
            Training,
            self.divided.shard_folders[shard],
            self.divided.hashes[shard],
            checkpoint_every=self.settings.training.checkpoint_every,
        )
        settings = self.settings.expert(objective, self.seed, **model.training)
        if objective == "flow" and model.init is not None:
            return train(settings, init=model.init, init_hash=model_hash(model.init))
        if objective == "ddpm" or model.converted is None:
            return train(settings)
        before = max(1, round(model.converted * settings.steps))
        first = self.settings.expert("ddpm", self.seed, **model.training | {"steps": before})
        rest = settings.model_copy(update={"steps": max(1, settings.steps - before)})
        return train(rest, start=train(first))

    def _single(self, model: ModelSettings) -> Training:
        steps = 1
        if not self.settings.steps_are_said(model):
            steps = single_steps(self.settings, model.objectives, self.costs, **model.training)
        settings = self.settings.single(model.objectives, self.seed, steps, **model.training)
        images, of = self.divided.all_images, self._all_images_hash
        if model.domain is not None:
            shard = [*(self.settings.partition.classes or ())].index(model.domain)
            images, of = self.divided.shard_folders[shard], self.divided.hashes[shard]
        start, replayed = None, 0
        if model.begins_with is not None:
            (start,) = self.trainings(self.settings.model(model.begins_with))
            replayed = len(read_manifest(start.shard).images) + start.replayed if model.replay else 0
        every = self.settings.training.checkpoint_every
        return Training(images, of, settings, start, replayed=replayed, checkpoint_every=every)

    def _fitting_flop(self, training: Training) -> int:
        """Operations of the calibration that followed a training."""
        (record,) = expert_records(self.store.path(training.job) / MODEL)
        # A calibration that was trained in was not fitted afterwards.
        return 0 if record.training_calibration else self.cost(training).calibration


def model_hash(folder: Path) -> str:
    """SHA-256 of what a model folder computes: weights and records, without how long they took to make."""
    if not (folder / "config.json").is_file() and not (folder / ENSEMBLE_FILE).is_file():
        raise HddmError(f"{folder}: is not a model folder of hddm; convert a checkpoint with hddm convert")
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


@dataclass(frozen=True)
class _Abilities:
    """Properties of a model that decide how it can be sampled; ``experts`` is 0 of a single model."""

    experts: int
    has_classes: bool
    has_router: bool = True
    has_weak: bool = True


def check_rows(settings: BenchmarkSettings) -> None:
    """Refuse rows that ask a model for what it cannot give, and finished models that cannot be opened."""
    found = {model.name: _abilities(settings, model) for model in settings.models}
    for table in settings.tables:
        for name, point in itertools.product(table.models or found, points_of(settings, table)):
            wrong = _misfit(f"model {name!r}", found[name], canonical(point, not found[name].experts))
            if wrong is not None:
                raise HddmError(f"table {table.name!r}: {wrong}")


def check_shapes(settings: BenchmarkSettings, shape: Sequence[int]) -> None:
    """Refuse finished models that make other images than the data's, of ``shape`` (C, H, W)."""
    for model in settings.models:
        if model.path is None:
            continue
        made = {record.sample_shape for record in read_finished(model.path)}
        if made != {tuple(shape)}:
            shapes = " and ".join(map(str, sorted(made)))
            raise HddmError(
                f"model {model.name!r}: {model.path} makes images (C, H, W) of {shapes}, but the data's "
                f"are {tuple(shape)}; use data of that shape"
            )


def check_counts(settings: BenchmarkSettings, counts: Mapping[str, int], dimensions: int) -> None:
    """Refuse ``counts`` of images, by side, below ``dimensions`` of a feature unless few are allowed."""
    side = min(counts, key=counts.__getitem__)
    if are_few(dimensions, [counts[side]]) and not settings.allow_few:
        with named(f"{side} {counts[side]}"):
            raise too_few(dimensions, [counts[side]], "allow_few: true in the settings")


def _misfit(model: str, able: _Abilities, point: SamplingPoint) -> str | None:
    """Explain why ``model`` cannot be sampled at ``point``, and what to do; None if it can."""
    strategy = Strategy.parse(point.strategy)
    if strategy.kind == "top" and strategy.value > able.experts > 0:
        return (
            f"strategy {point.strategy!r} needs more experts than the {able.experts} of {model}; use "
            f"top-{able.experts} at most"
        )
    if strategy.kind != "draw" and able.experts > 1 and not able.has_router:
        return f"strategy {point.strategy!r} needs a router, and {model} has none; use draw"
    if point.guidance_scale != 1 and point.guide_by == "condition" and not able.has_classes:
        return f"guidance_scale {point.guidance_scale:g} needs classes, and {model} has none; use 1"
    if point.guidance_scale != 1 and point.guide_by == "weak" and not able.has_weak:
        return f"guide_by weak needs a weak model, and {model} has none; set weak_at in its training"
    return None


def _abilities(settings: BenchmarkSettings, model: ModelSettings) -> _Abilities:
    if model.path is not None:
        with named(f"model {model.name!r}"):
            return _abilities_of_finished(model.path)
    if model.kind == "single":
        steps = settings.expert(model.objectives, 0, **model.training).steps
        single = settings.single(model.objectives, 0, steps, **model.training)
        weak = _keeps_weak(single, is_new=model.begins_with is None)
        return _Abilities(0, single.class_conditional, has_weak=weak)
    if model.of is not None:
        parts = [_abilities(settings, settings.model(name)) for name in model.of]
        is_grown = model.kind == "grown"
        has_weak = is_grown and all(part.has_weak for part in parts)
        return _Abilities(len(parts) * is_grown, any(part.has_classes for part in parts), False, has_weak)
    objectives = model.named_objectives(settings.partition.shards)
    experts = [settings.expert(name, 0, **model.training) for name in set(objectives)]
    has_classes = any(one.class_conditional for one in experts)
    is_new = model.converted is None and model.init is None
    return _Abilities(len(objectives), has_classes, has_weak=all(_keeps_weak(one, is_new) for one in experts))


def _keeps_weak(settings: ExpertSettings, is_new: bool) -> bool:
    return resolve(ExpertRecipe, settings, Start(is_new)).weak_step > 0


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
    weak = all(field.weak is not None for field in fields)
    if not isinstance(opened, Ensemble):
        return _Abilities(0, bool(opened.classes), False, weak)
    return _Abilities(opened.num_domains, bool(opened.classes), opened.router is not None, weak)
