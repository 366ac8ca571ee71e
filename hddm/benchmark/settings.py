"""Schema of a benchmark: data, trainings, models, tables and seeds of a preset or a user's file.

Every key is a field below. Settings are chosen on `BenchmarkSettings.seeds` and validation images, cut off
the training images; they are confirmed on `BenchmarkSettings.confirmation_seeds` and held-out images, which
nothing that chooses ever reads.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from hddm.benchmark.jobs import named
from hddm.sampling import KnownSolver, KnownStrategy, SamplingSettings
from hddm.solvers import DEFAULT_SOLVER, DEFAULT_STEPS
from hddm.training.island_jobs import OBJECTIVES, parse_objectives
from hddm.training.settings import ExpertSettings, Positive, RouterSettings
from hddm.utils.errors import HddmError, choose, did_you_mean, words
from hddm.utils.records import Record, first_problem

Layer = tuple[str, Mapping[str, Any]]
"""A place in a file, as errors name it, and its values."""

AnySettings = TypeVar("AnySettings", bound=BaseModel)


def layered(kind: type[AnySettings], layers: Sequence[Layer]) -> AnySettings:
    """Merge layers to settings; later layers override earlier ones.

    An unknown key or a wrong value raises `HddmError` with the last place that has it, a missing key with the
    first place, and values that do not go together with all places.
    """
    merged: dict[str, Any] = {}
    for _, values in layers:
        merged |= values
    try:
        return kind.model_validate(merged)
    except ValidationError as error:
        problem = first_problem(error)
        if not problem["loc"]:
            places = " and ".join(place for place, values in layers if values)
            raise HddmError(f"{places}: {words(problem)}") from error
        key = str(problem["loc"][0])
        place = next((place for place, values in reversed(layers) if key in values), layers[0][0])
        if problem["type"] == "extra_forbidden":
            message = f"unknown key '{place}.{key}'{did_you_mean(key, kind.model_fields)}"
        else:
            value = f" (is {merged[key]!r})" if key in merged else ""
            message = f"key '{place}.{key}'{value}: {words(problem)}"
        raise HddmError(message) from error


ENSEMBLES, FINISHED, SAMPLES = "ensembles", "finished", "samples"


def slug(name: str) -> str:
    """A model's name as part of a path."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def parse_seeds(text: str, option: str = "") -> tuple[int, ...]:
    """Parse distinct seeds from ``0-4``, ``5,6`` or ``0-2,7``, in order; errors begin with ``option``."""
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise HddmError(f"{option}{text}: {part.strip()!r} is not a seed; write 0-4 or 5,6")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    if len(set(found)) < len(found):
        raise HddmError(f"{option}{text}: a seed is listed twice; list each once")
    return tuple(found)


_RATIO = re.compile(r"(\d+):(\d+)")


def _leaves_seed_and_objective(values: dict[str, Any]) -> dict[str, Any]:
    for key in ("seed", "objective"):
        if key in values:
            raise ValueError(f"{key} is set by the benchmark; remove it")
    return values


TrainingKeys = Annotated[dict[str, Any], AfterValidator(_leaves_seed_and_objective)]
"""Keys of `hddm.training.settings`, without those that differ within one benchmark."""


def _once(values: tuple[Any, ...]) -> tuple[Any, ...]:
    twice = next((value for k, value in enumerate(values) if value in values[:k]), None)
    if twice is not None:
        raise ValueError(f"{twice!r} is listed twice; list each once")
    return values


Item = TypeVar("Item")
Each = Annotated[tuple[Item, ...], AfterValidator(_once)]
"""Values without doubles, since what is counted twice would pass for a second measurement."""


class ModelSettings(Record):
    """One model of the comparison."""

    name: str
    kind: Literal["single", "ensemble", "finished", "merged", "grown"] = "ensemble"
    """One network; an expert per shard with a router; the model in ``path``; or the single models in ``of``,
    their weights averaged or as experts of one ensemble, drawn by the sizes of their shards."""
    domain: str | None = None
    """Domain (`PartitionSettings.classes`) that a single model is trained on; None for all images."""
    begins_with: str | None = None
    """A single model further up that a single model continues; its own compute is not counted."""
    replay: bool = False
    """Train on samples of the model in ``begins_with`` too, as many as that was trained on images (generative
    replay); their compute is not counted."""
    of: Each[str] | None = None
    """Single models further up; the first is the old model, whose compute is not counted."""
    objectives: str = "flow"
    """``flow`` or ``ddpm``; of an ensemble also ``1:3`` (DDPM on the first shard, flow on three) or
    ``0=ddpm,*=flow``."""
    converted: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of their steps that flow experts train as DDPM experts, then continued by exact conversion."""
    init: Path | None = None
    """An expert folder that flow experts continue; its own compute is not counted."""
    path: Path | None = None
    """Folder of a finished model: an expert or ensemble that makes images in pixels."""
    training: TrainingKeys = Field(default_factory=dict)
    """Overrides of `TrainingSettings` for this model's experts."""

    @field_validator("objectives", mode="before")
    @classmethod
    def _is_a_word(cls, value: object) -> object:
        # YAML reads a bare 1:3 as a number of minutes.
        if isinstance(value, int):
            raise ValueError('write it in quotes, as "1:3"')
        return value

    def named_objectives(self, shards: int) -> list[str]:
        """Return the objective of each expert to train; refuse unknown ones, or not one per shard."""
        if self.kind != "ensemble":
            return [self.objectives] if self.kind == "single" else []
        ratio = _RATIO.fullmatch(self.objectives)
        if ratio is None:
            return parse_objectives(self.objectives, shards, f"{self.name}: objectives")
        ddpm, flow = int(ratio[1]), int(ratio[2])
        if ddpm + flow != shards:
            raise HddmError(
                f"{self.name}: objectives {self.objectives!r} are of {ddpm + flow} experts, and "
                f"partition.shards is {shards}"
            )
        return ["ddpm"] * ddpm + ["flow"] * flow

    @model_validator(mode="after")
    def _says_what_it_is(self) -> "ModelSettings":
        is_finished, starts = self.kind == "finished", (self.converted is not None, self.init is not None)
        is_made = self.kind in ("merged", "grown")
        if is_finished != (self.path is not None):
            wrong = "path and kind: finished must be given together"
        # Settings written out in full say flow of every model, so that it passes.
        elif is_finished and (self.training or self.objectives != "flow"):
            wrong = "is finished, so training and objectives do not apply; remove them"
        elif is_made != (len(self.of or ()) > 1):
            wrong = "kinds merged and grown go together with the names of two or more models in of"
        elif is_made and (self.training or self.objectives != "flow"):
            wrong = "is made of others, so training and objectives do not apply; remove them"
        elif self.kind != "single" and (self.domain is not None or self.begins_with is not None):
            wrong = "domain and begins_with are for single models; remove them, or set kind: single"
        elif self.replay and self.begins_with is None:
            wrong = "replay needs the model that makes the samples; name it by begins_with"
        elif all(starts):
            wrong = "starts from converted experts or from init, not both; remove one"
        elif any(starts) and self.kind != "ensemble":
            wrong = "converted and init are for ensembles; remove them, or remove kind"
        elif self.kind == "single" and self.objectives not in OBJECTIVES:
            wrong = "a single model has one objective, flow or ddpm"
        else:
            return self
        raise ValueError(f"{self.name}: {wrong}")


def refuse_shared_folders(models: Sequence[ModelSettings]) -> None:
    """Refuse names that give a model no folder of its own below ``seed_<n>/``."""
    folders: dict[str, str] = {}
    for model in models:
        name, folder = model.name, slug(model.name)
        if not folder:
            raise ValueError(f"model {name!r} has no letter a-z or digit for its folder; add one")
        if model.kind in ("single", "merged") and folder in (ENSEMBLES, FINISHED, SAMPLES):
            raise ValueError(f"model {name!r} would use the folder {folder!r}, which is reserved; rename it")
        first = folders.setdefault(folder, name)
        if first != name:
            raise ValueError(f"models {first!r} and {name!r} would share the folder {folder!r}; rename one")


Share = Annotated[float, Field(ge=0, lt=1)]
Split = Literal["validation", "held-out"]
Calibration = Literal["experts+router", "experts", "router", "none"]


class DataSettings(Record):
    """Images, and how they are divided before any training."""

    source: Literal["digits", "folder"] = "folder"
    """scikit-learn's digits, of which a fifth is held out; or images that the user names by ``--data``."""
    training: str = "."
    """Images to train on: a path, below ``--data`` where that is given (`hddm.data.sources`)."""
    held_out: str | None = None
    """Images that no choice is made by, likewise."""
    held_out_share: Share = 0.0
    """Share of the training images to hold out, where there is no ``held_out``."""
    classes: Each[str] = ()
    """Class folders to take, on both sides; empty for all."""
    resolution: Positive | None = None
    """Side in pixels that images are cropped and resized to; None leaves them as they are."""
    validation_share: Share = 0.0
    """Share of the remaining training images to choose settings by; no model is trained on them."""

    @model_validator(mode="after")
    def _holds_out_once(self) -> "DataSettings":
        if self.source == "digits" and (self.held_out is not None or self.held_out_share):
            raise ValueError("the digits already have held-out images; remove held_out and held_out_share")
        if self.held_out is not None and self.held_out_share:
            raise ValueError("held_out and held_out_share are both set; remove one")
        if (self.classes or self.resolution) and (self.source == "digits" or self.held_out is None):
            raise ValueError(
                "classes and resolution are for a folder of images beside one that held_out names"
            )
        return self


class PartitionSettings(Record):
    """Arguments of `hddm.data.partition.partition`."""

    shards: Annotated[int, Field(ge=1, le=4096)] = 4
    features: str = "pixels"
    seed: int = 0
    classes: dict[str, tuple[str, ...]] | None = None
    """Names of domains, which are the shards, with their classes, to divide by class and not by features."""

    @model_validator(mode="after")
    def _has_a_shard_for_each(self) -> "PartitionSettings":
        if self.classes is not None and len(self.classes) != self.shards:
            raise ValueError(f"classes has {len(self.classes)} domains, but shards is {self.shards}")
        return self


class TrainingSettings(Record):
    """Settings of trainings; keys are those of `hddm.training.settings`, without ``seed``.

    ``ddpm``, ``flow`` and ``single`` override ``expert``. By default the single model takes K batches of an
    expert per step; its ``steps`` follow from the compute of the homogeneous ensemble
    (`hddm.benchmark.compute`).
    """

    expert: TrainingKeys
    ddpm: TrainingKeys = Field(default_factory=dict)
    flow: TrainingKeys = Field(default_factory=dict)
    single: TrainingKeys = Field(default_factory=dict)
    router: TrainingKeys = Field(default_factory=dict)
    """Needed for ensembles, and for a single model whose steps follow from theirs."""
    checkpoint_every: Positive = 500


class SamplingPoint(SamplingSettings):
    """One way to sample."""

    strategy: KnownStrategy = "draw"
    """See `hddm.ensemble`; a single model has none."""
    solver: KnownSolver = DEFAULT_SOLVER
    steps: Positive = DEFAULT_STEPS
    calibration: Calibration = "experts+router"
    """Whose calibration is used: the experts' near t = 1 (`hddm.calibration`), the router's temperatures
    (`hddm.training.router`), both or none."""
    router_temperature: Annotated[float, Field(gt=0)] = 1.0
    """Factor on all temperatures of the router."""
    num_images: Positive = 1000


class TableSettings(Record):
    """A table: models at a base point, and one setting after the other varied from there."""

    name: str
    models: Each[str] = ()
    """By name; empty for all."""
    base: dict[str, Any] = Field(default_factory=dict)
    """Overrides of `BenchmarkSettings.sampling`."""
    vary: dict[str, Each[Any]] = Field(default_factory=dict)
    """Values to try by field of `SamplingPoint`; the base point is a row too unless one field varies."""
    product: bool = False
    """Combine all values instead of changing one at a time."""

    @field_validator("vary", "base")
    @classmethod
    def _varies_what_there_is(cls, value: dict[str, Any]) -> dict[str, Any]:
        known = SamplingPoint.model_fields
        for key in value:
            if key not in known:
                raise ValueError(f"unknown sampling setting {key!r}: {choose(key, list(known))}")
        return value


class CompareSettings(Record):
    """Models to compare; the distance to images that were not trained on decides."""

    candidates: Each[str] = ()
    """By name; empty for all models that are no baseline."""
    baselines: Each[str] = ()


class BenchmarkSettings(Record):
    """A whole benchmark."""

    name: str
    data: DataSettings
    partition: PartitionSettings = PartitionSettings()
    training: TrainingSettings
    models: Annotated[tuple[ModelSettings, ...], Field(min_length=1)]
    sampling: SamplingPoint = SamplingPoint()
    tables: Annotated[tuple[TableSettings, ...], Field(min_length=1)] = (TableSettings(name="models"),)
    compare: CompareSettings = CompareSettings()
    score_on: Split = "validation"
    seeds: Annotated[Each[int], Field(min_length=1)] = (0, 1, 2, 3, 4)
    """Of trainings and of their samples; also as ``0-4``."""
    confirmation_seeds: Each[int] = ()
    """Fresh ones, for held-out images."""
    resamples: Annotated[int, Field(ge=2)] = 100
    """Resamples of the bootstrap over samples."""
    features: Literal["auto", "inception", "clip", "classifier"] = "auto"
    """Features that distances are measured on (`hddm.evaluation.features.open_extractor`)."""
    complete: bool = True
    """Add the measures that take longer (`hddm.evaluation.scores.Scores`)."""
    allow_few: bool = False
    """Measure fewer images than features too, marked as not comparable."""
    workers: Positive = 2
    """Jobs at a time, each with one CPU thread; the answer does not depend on it."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "cpu"

    @field_validator("seeds", "confirmation_seeds", mode="before")
    @classmethod
    def _may_be_ranges(cls, value: object) -> object:
        return parse_seeds(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits_together(self) -> "BenchmarkSettings":
        names = [model.name for model in self.models]
        for what, each in (("models", names), ("tables", [table.name for table in self.tables])):
            for name in each:
                if each.count(name) > 1:
                    raise ValueError(f"two {what} are called {name!r}")
        refuse_shared_folders(self.models)
        asked = {name for table in self.tables for name in table.models}
        unknown = sorted((asked | {*self.compare.candidates, *self.compare.baselines}) - set(names))
        if unknown:
            raise ValueError(f"there is no model {unknown[0]!r}; models are {', '.join(names)}")
        if self.score_on == "validation" and not self.data.validation_share:
            raise ValueError("score_on: validation needs data.validation_share; set it, or use held-out")
        if self.partition.shards < 2 and any(model.kind == "ensemble" for model in self.models):
            raise ValueError("an ensemble needs partition.shards of 2 or more")
        if self.partition.classes is not None and self.features != "classifier":
            raise ValueError("partition.classes needs a classifier; set features: classifier")
        for table in self.tables:
            points_of(self, table)
        self.expert("flow", 0), self.expert("ddpm", 0), self.single("flow", 0, 1)
        for place, model in enumerate(self.models):
            self._find_parts(model, self.models[:place])
            self._try_trainings(model)
        return self

    def model(self, name: str) -> ModelSettings:
        """The model with this name."""
        return next(model for model in self.models if model.name == name)

    def _find_parts(self, model: ModelSettings, before: Sequence[ModelSettings]) -> None:
        """Check that the models and the domain that ``model`` names are there."""
        known = [None, *(one.name for one in before if one.kind == "single")]
        for name in (*(model.of or ()), model.begins_with):
            if name not in known:
                raise ValueError(f"{model.name}: there is no single model {name!r} before it")
        domains = [*(self.partition.classes or ())]
        if model.domain not in (None, *domains):
            which = ", ".join(domains) or "none, without partition.classes"
            raise ValueError(f"{model.name}: there is no domain {model.domain!r}; domains are {which}")

    def expert(self, objective: str, seed: int, **changes: Any) -> ExpertSettings:
        """Return one expert's settings with a model's ``changes``; errors name the place in the file."""
        return self._expert(objective, seed, ("training", changes))

    def single(self, objective: str, seed: int, steps: int, /, **changes: Any) -> ExpertSettings:
        """Settings of the model on all images, for ``steps`` unless the file says how many; as `expert`."""
        batch = self.expert(objective, seed).batch_size * self.partition.shards
        follows = {"batch_size": batch, "steps": steps} | self.training.single
        return self._expert(objective, seed, ("training.single", follows), ("training", changes))

    def router(self, seed: int) -> RouterSettings:
        """Settings of the router of all ensembles; raises as `expert`."""
        said = self._on_one_thread() | self.training.router | {"seed": seed}
        return layered(RouterSettings, [("training.router", said)])

    def _expert(self, objective: str, seed: int, *own: Layer) -> ExpertSettings:
        said = self._on_one_thread() | self.training.expert | {"objective": objective, "seed": seed}
        of_objective = self.training.ddpm if objective == "ddpm" else self.training.flow
        layers: list[Layer] = [("training.expert", said), (f"training.{objective}", of_objective), *own]
        return layered(ExpertSettings, layers)

    def _try_trainings(self, model: ModelSettings) -> None:
        """Check the settings of all trainings of ``model`` by making them."""
        objectives = model.named_objectives(self.partition.shards)
        for key in ("converted", "init"):
            if getattr(model, key) is not None and "flow" not in objectives:
                raise HddmError(
                    f"{model.name}: {key} is for flow experts, and objectives {model.objectives!r} have "
                    "none; drop one"
                )
        with named(f"model {model.name!r}"):
            if model.kind == "single":
                self.single(model.objectives, 0, 1, **model.training)
            if model.kind == "ensemble" or (model.kind == "single" and not self.steps_are_said(model)):
                self.router(0)
            if model.kind != "ensemble":
                return
            # Converted experts are DDPM experts first.
            for objective in dict.fromkeys(objectives if model.converted is None else OBJECTIVES):
                self.expert(objective, 0, **model.training)

    def steps_are_said(self, model: ModelSettings) -> bool:
        """True unless the steps of a single model follow from the compute of the ensemble."""
        return "steps" in self.training.single | model.training

    def _on_one_thread(self) -> dict[str, Any]:
        # Results are to be the same in any number of workers, of which each has one thread.
        return {"device": self.device, "threads": 1}


def points_of(settings: BenchmarkSettings, table: TableSettings) -> list[SamplingPoint]:
    """The points of a table, without doubles, in the order of the file."""
    base = settings.sampling.model_dump() | table.base
    changes: list[dict[str, Any]] = [{}]
    if table.product:
        for key, values in table.vary.items():
            changes = [change | {key: value} for change in changes for value in values]
    else:
        varied = [{key: value} for key, values in table.vary.items() for value in values]
        changes = varied if len(table.vary) == 1 else [{}, *varied]
    points = [SamplingPoint.model_validate(base | change) for change in changes]
    return list(dict.fromkeys(points))
