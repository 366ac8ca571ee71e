"""The models of a benchmark: which trainings each is made of, what it cost, and where it lies."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hddm.benchmark.blending import Blend, choice
from hddm.benchmark.compute import Cost, Costs, single_steps
from hddm.benchmark.data import Divided
from hddm.benchmark.finished import expert_records, read_finished
from hddm.benchmark.samples import Source
from hddm.benchmark.schema import BenchmarkSettings
from hddm.benchmark.schema_of_models import BY_ERROR, RATIO, ModelSettings
from hddm.benchmark.slugs import ENSEMBLES, FINISHED, slug
from hddm.benchmark.store import Job, Store, making
from hddm.benchmark.trainings import MODEL, Training, router_training
from hddm.data.shard_records import read_manifest
from hddm.experts.assembly import assemble
from hddm.experts.ensembles import ENSEMBLE_FILE
from hddm.experts.records import EXPERT_FILE, ExpertRecord
from hddm.training.island_jobs import OBJECTIVES
from hddm.training.settings import RouterSettings
from hddm.utils.errors import HddmError
from hddm.utils.files import read_json, sha256_of
from hddm.utils.records import MANIFEST

# Keys of records that say how long something took, not what it is.
_HISTORY = {"training", "calibration"}

Errors = Mapping[str, list[dict[str, Any]]]
"""Velocity errors of the experts of each objective, one a shard: their ``mean``, and by ``levels``."""


@dataclass(frozen=True)
class Model:
    """One model of one training seed, ready to be sampled.

    ``training_flop`` and ``images_seen`` are None where they are not known: of models that were not trained
    here. ``objectives`` are its experts'.
    """

    name: str
    source: Source
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
        """What the records of its experts say of their weights: averaged, raw or unstated."""
        return " and ".join(sorted({record.weights for record in expert_records(self.source.folder)}))

    @property
    def links(self) -> dict[str, Path]:
        """Folders by the names that they are shown under."""
        if self.source.blend is None:
            return {str(self.link): self.source.folder}
        return {
            str(self.link / "flow"): self.source.folder,
            str(self.link / "ddpm"): self.source.blend.folder,
        }


class Zoo:
    """Trainings and models of one seed.

    Args:
        settings: of the benchmark.
        seed: of every training.
        divided: the data.
        store: where finished ones lie.
    """

    def __init__(self, settings: BenchmarkSettings, seed: int, divided: Divided, store: Store) -> None:
        self.settings, self.seed, self.divided, self.store = settings, seed, divided, store
        self.costs = Costs(store, divided.shards)
        self._whole_hash = read_manifest(divided.all_images).hash

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
        """Whether there is an ensemble that is made here."""
        return any(model.kind == "ensemble" for model in self.settings.models)

    def trainings(self, model: ModelSettings) -> list[Training]:
        """All trainings that ``model`` may need, those that others start from first."""
        if model.kind == "finished":
            return []
        if model.kind == "single":
            wanted = [self._single(model)]
        elif model.chooses:
            wanted = [one for experts in self.compared(model).values() for one in experts]
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

    def compared(self, model: ModelSettings) -> dict[str, list[Training]]:
        """For a model that errors choose among experts for, those of each objective."""
        shards = range(self.num_shards)
        return {name: [self._expert(model, name, k) for k in shards] for name in OBJECTIVES}

    def assigned(self, model: ModelSettings, errors: Errors | None) -> list[str]:
        """The objective of each shard of an ensemble; ``errors`` of `compared` where they decide."""
        if BY_ERROR not in model.objectives:
            return model.named_objectives(self.num_shards)
        assert errors is not None
        both = zip(errors["ddpm"], errors["flow"], strict=True)
        gaps = [ddpm["mean"] - flow["mean"] for ddpm, flow in both]
        ratio = RATIO.fullmatch(model.objectives)
        if ratio is None:
            return ["ddpm" if gap < 0 else "flow" for gap in gaps]
        chosen = sorted(range(self.num_shards), key=lambda k: gaps[k])[: int(ratio[1])]
        return ["ddpm" if k in chosen else "flow" for k in range(self.num_shards)]

    def open(self, model: ModelSettings, errors: Errors | None) -> Model:
        """``model``, of finished trainings; an ensemble is assembled."""
        if model.kind == "finished":
            return self._finished(model)
        if model.kind == "single":
            training = self._single(model)
            folder = self.store.path(training.job) / MODEL
            source = Source(folder, model_hash(folder), True, (training.shard,), (training.shard_hash,))
            flop = {"experts": self._flop(training), "router": 0}
            link = Path(f"seed_{self.seed}") / slug(model.name)
            seen = _seen(training)
            calibration = self._calibration_flop(training)
            return Model(model.name, source, (model.objectives,), (training,), flop, seen, link, calibration)
        if model.blended is not None:
            return self._blended(model, errors)
        objectives = self.assigned(model, errors)
        experts = [self._expert(model, name, k) for k, name in enumerate(objectives)]
        return self._ensemble(model, objectives, experts, self._source(self._assembled(experts)))

    def _blended(self, model: ModelSettings, errors: Errors | None) -> Model:
        assert errors is not None
        experts = self.compared(model)
        flow, ddpm = (self._assembled(experts[name]) for name in ("flow", "ddpm"))
        choices = tuple(choice(*both) for both in zip(errors["ddpm"], errors["flow"], strict=True))
        made = Job("blend", {"choices": choices}, {"flow": flow.hash, "ddpm": ddpm.hash})
        source = replace(self._source(flow), hash=made.hash, blend=Blend(self._source(ddpm).folder, choices))
        names = [name for name in experts for _ in experts[name]]
        return self._ensemble(model, names, [one for each in experts.values() for one in each], source)

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

    def _source(self, job: Job) -> Source:
        folder, shards = self.store.path(job) / MODEL, tuple(self.divided.shard_folders)
        hashes = tuple(self.divided.hashes)
        return Source(folder, job.hash, False, shards, hashes, trained_in=_trained_in(expert_records(folder)))

    def _ensemble(
        self, model: ModelSettings, objectives: Sequence[str], experts: Sequence[Training], source: Source
    ) -> Model:
        router_flop = self.costs.router(self.router_settings).of_router(self.router_settings)
        flop = {"experts": sum(self._flop(one) for one in experts), "router": router_flop}
        link = Path(f"seed_{self.seed}") / ENSEMBLES / slug(model.name)
        seen = sum(_seen(one) for one in experts)
        calibration = sum(self._calibration_flop(one) for one in experts)
        return Model(model.name, source, tuple(objectives), tuple(experts), flop, seen, link, calibration)

    def _expert(self, model: ModelSettings, objective: str, shard: int) -> Training:
        folder, content = self.divided.shard_folders[shard], self.divided.hashes[shard]
        changes = dict(model.training)
        settings = self.settings.expert(objective, self.seed, **changes)
        if model.blended is not None:
            share = model.blended if objective == "ddpm" else 1 - model.blended
            settings = settings.model_copy(update={"steps": max(1, round(share * settings.steps))})
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
        return Training(self.divided.all_images, self._whole_hash, settings)

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
        source = Source(model.path, content, is_single, trained_in=_trained_in(records))
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
        # Manifests are hashes of the same files, history and all.
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
