"""What a benchmark trains, samples and compares: the schema of presets and of a user's own file.

    name: mine
    data: {source: folder, training: train, held_out: test, validation_share: 0.1}
    partition: {shards: 4}
    training:
      expert: {steps: 4000, batch_size: 32, learning_rate: 1e-3, size: small}
      router: {steps: 2000, batch_size: 64, learning_rate: 1e-3, calibrate: true}
    models:
      - {name: single model, kind: single}
      - {name: homogeneous flow, objectives: flow}
      - {name: mixed 1:3, objectives: "1:3"}
    sampling: {strategy: draw, solver: euler, steps: 30, num_images: 2000}
    tables:
      - {name: models}
      - {name: strategies, models: [mixed 1:3], vary: {strategy: [top-1, top-2, full]}}

Every key is a field below, or of `hddm.benchmark.schema_of_models`. Settings are chosen on
`BenchmarkSettings.seeds` and validation images, which are cut off the training side; they are confirmed on
`BenchmarkSettings.confirmation_seeds` and held-out images, which nothing that chooses ever reads.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, field_validator, model_validator

from hddm.benchmark.conversions import CONVERSIONS
from hddm.benchmark.layered_settings import Layer, layered
from hddm.benchmark.naming import named
from hddm.benchmark.schema_of_models import BY_ERROR, ModelSettings, TrainingKeys, refuse_shared_folders
from hddm.benchmark.seeds import parse_seeds
from hddm.ensemble import Strategy
from hddm.sampling import solver_named
from hddm.training.island_jobs import OBJECTIVES
from hddm.training.settings import ExpertSettings, Positive, RouterSettings
from hddm.utils.records import Record


def _once(values: tuple[Any, ...]) -> tuple[Any, ...]:
    twice = next((value for k, value in enumerate(values) if value in values[:k]), None)
    if twice is not None:
        raise ValueError(f"{twice!r} is there twice; name each once")
    return values


Item = TypeVar("Item")
Each = Annotated[tuple[Item, ...], AfterValidator(_once)]
"""Values of which none comes twice, since what is counted twice would pass for a second measurement."""
Share = Annotated[float, Field(ge=0, lt=1)]
Split = Literal["validation", "held-out"]
Calibration = Literal["experts+router", "experts", "router", "none"]


class DataSettings(Record):
    """Which images, and how they are divided before anything is trained."""

    source: Literal["digits", "folder"] = "folder"
    """scikit-learn's digits, of which a fifth is held out; or images that the user names by ``--data``."""
    training: str = "."
    """Images to train on: a path, below ``--data`` where that is given (`hddm.data.sources`)."""
    held_out: str | None = None
    """Images that no choice is made by, likewise."""
    held_out_share: Share = 0.0
    """Of the training images, where there is no ``held_out``."""
    validation_share: Share = 0.0
    """Of the training images that are left, which settings are chosen by; no model is trained on them."""

    @model_validator(mode="after")
    def _holds_out_once(self) -> "DataSettings":
        if self.source == "digits" and (self.held_out is not None or self.held_out_share):
            raise ValueError("the digits have their held-out images already; drop held_out, held_out_share")
        if self.held_out is not None and self.held_out_share:
            raise ValueError("held_out names the images, so held_out_share has nothing to say; drop one")
        return self


class PartitionSettings(Record):
    """As `hddm.data.partition.partition`."""

    shards: Positive = 4
    features: str = "pixels"
    seed: int = 0


class TrainingSettings(Record):
    """How networks are trained; keys are those of `hddm.training.settings`, without ``seed``.

    What ``ddpm``, ``flow`` and ``single`` say goes before what ``expert`` says. The single model sees K
    batches of an expert a step where it says nothing of its own; its ``steps`` follow from the compute of the
    homogeneous ensemble (`hddm.benchmark.compute`).
    """

    expert: TrainingKeys
    ddpm: TrainingKeys = Field(default_factory=dict)
    flow: TrainingKeys = Field(default_factory=dict)
    single: TrainingKeys = Field(default_factory=dict)
    router: TrainingKeys
    checkpoint_every: Positive = 500


class Point(Record):
    """One way to sample."""

    strategy: str = "draw"
    """See `hddm.ensemble`; a single model has none."""
    calibration: Calibration = "experts+router"
    """Whose calibration is used: the experts' near t = 1 (`hddm.calibration`), the router's temperatures
    (`hddm.training.router_calibration`), both or none."""
    conversion: str = CONVERSIONS[0]
    """Of experts that predict noise; see `hddm.benchmark.conversions.CONVERSIONS`."""
    router_temperature: Annotated[float, Field(gt=0)] = 1.0
    """Factor on all temperatures of the router."""
    solver: str = "euler"
    steps: Positive = 30
    guidance_scale: float = 1.0
    num_images: Positive = 1000

    @field_validator("strategy")
    @classmethod
    def _is_a_strategy(cls, value: str) -> str:
        Strategy.parse(value)
        return value

    @field_validator("solver")
    @classmethod
    def _is_a_solver(cls, value: str) -> str:
        solver_named(value)
        return value

    @field_validator("conversion")
    @classmethod
    def _is_a_conversion(cls, value: str) -> str:
        if value not in CONVERSIONS:
            raise ValueError(f"choose one of {', '.join(CONVERSIONS)}")
        return value


class TableSettings(Record):
    """A table: models at a base point, and one setting after the other varied from there."""

    name: str
    models: Each[str] = ()
    """By name; empty for all."""
    base: dict[str, Any] = Field(default_factory=dict)
    """Before what `BenchmarkSettings.sampling` says."""
    vary: dict[str, Each[Any]] = Field(default_factory=dict)
    """Values of a field of `Point` to try, by its name. Where one field varies, its values are all the rows;
    else the base point is one too."""
    product: bool = False
    """All combinations instead of one change at a time."""

    @field_validator("vary", "base")
    @classmethod
    def _varies_what_there_is(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in value:
            if key not in Point.model_fields:
                raise ValueError(f"no setting of sampling is called {key!r}; {', '.join(Point.model_fields)}")
        return value


class CompareSettings(Record):
    """Which models are held against which; a distance to images that were not trained on decides."""

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
    sampling: Point = Point()
    tables: Annotated[tuple[TableSettings, ...], Field(min_length=1)] = (TableSettings(name="models"),)
    compare: CompareSettings = CompareSettings()
    score_on: Split = "validation"
    seeds: Annotated[Each[int], Field(min_length=1)] = (0, 1, 2, 3, 4)
    """Of trainings and of their samples; also as ``0-4``."""
    confirmation_seeds: Each[int] = ()
    """Fresh ones, for held-out images."""
    resamples: Annotated[int, Field(ge=2)] = 100
    """Of the bootstrap over samples."""
    features: Literal["auto", "inception", "clip", "classifier"] = "auto"
    """That distances are measured on (`hddm.evaluation.features.open_extractor`)."""
    complete: bool = True
    """Whether the measures that take longer are made too (`hddm.evaluation.scores.Scores`)."""
    allow_few: bool = False
    """Fewer images than features are measured all the same, and marked as not comparable."""
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
        for what, all_names in (("model", names), ("table", [table.name for table in self.tables])):
            twice = next((name for name in all_names if all_names.count(name) > 1), None)
            if twice is not None:
                raise ValueError(f"two {what}s are called {twice!r}")
        refuse_shared_folders(self.models)
        asked = {name for table in self.tables for name in table.models}
        unknown = sorted((asked | {*self.compare.candidates, *self.compare.baselines}) - set(names))
        if unknown:
            raise ValueError(f"there is no model {unknown[0]!r}; models are {', '.join(names)}")
        if self.score_on == "validation" and not self.data.validation_share:
            raise ValueError("score_on: validation needs a data.validation_share; or write held-out")
        if not self.data.validation_share and any(model.chooses for model in self.models):
            raise ValueError(
                f"objectives: {BY_ERROR} and blended: need validation images; give a data.validation_share"
            )
        if self.partition.shards < 2 and any(model.kind == "ensemble" for model in self.models):
            raise ValueError("an ensemble needs partition.shards of 2 or more")
        for model in self.models:
            if model.kind == "ensemble":
                model.named_objectives(self.partition.shards)
                model.refuse_unused_start(self.partition.shards)
        for table in self.tables:
            table_points(self, table)
        self.expert("flow", 0), self.expert("ddpm", 0), self.router(0)
        for model in self.models:
            with named(f"model {model.name!r}"):
                self._try_trainings(model)
        return self

    def expert(self, objective: str, seed: int, **changes: Any) -> ExpertSettings:
        """How one expert is trained; ``changes``, of a model's ``training``, go before the file.

        Raises:
            HddmError: for settings that cannot be, with their place in the file.
        """
        return self._expert(objective, seed, ("training", changes))

    def single(self, objective: str, seed: int, steps: int, /, **changes: Any) -> ExpertSettings:
        """How the model on all images is trained, for ``steps`` unless the file says how many.

        Raises:
            HddmError: as `expert`.
        """
        batch = self.expert(objective, seed).batch_size * self.partition.shards
        follows = {"batch_size": batch, "steps": steps} | self.training.single
        return self._expert(objective, seed, ("training.single", follows), ("training", changes))

    def router(self, seed: int) -> RouterSettings:
        """How the router of all ensembles is trained.

        Raises:
            HddmError: as `expert`.
        """
        said = self._common() | self.training.router | {"seed": seed}
        return layered(RouterSettings, [("training.router", said)])

    def _expert(self, objective: str, seed: int, *own: Layer) -> ExpertSettings:
        said = self._common() | self.training.expert | {"objective": objective, "seed": seed}
        of_objective = self.training.ddpm if objective == "ddpm" else self.training.flow
        layers: list[Layer] = [("training.expert", said), (f"training.{objective}", of_objective), *own]
        return layered(ExpertSettings, layers)

    def _try_trainings(self, model: ModelSettings) -> None:
        """Make the settings of all trainings of ``model``, to see that they can be."""
        if model.kind == "single":
            self.single(model.objectives, 0, 1, **model.training)
        elif model.kind == "ensemble":
            # Experts of both are trained where errors choose, and DDPM ones before they are converted.
            both = model.chooses or model.converted is not None
            objectives = OBJECTIVES if both else model.named_objectives(self.partition.shards)
            for objective in dict.fromkeys(objectives):
                self.expert(objective, 0, **model.training)

    def _common(self) -> dict[str, Any]:
        # A worker has one thread, and results are to be the same in any number of workers.
        return {"device": self.device, "threads": 1}


def table_points(settings: BenchmarkSettings, table: TableSettings) -> list[Point]:
    """The points of a table, without doubles, in the order of the file."""
    base = settings.sampling.model_dump() | table.base
    changes: list[dict[str, Any]] = [{}]
    if table.product:
        for key, values in table.vary.items():
            changes = [change | {key: value} for change in changes for value in values]
    else:
        varied = [{key: value} for key, values in table.vary.items() for value in values]
        changes = varied if len(table.vary) == 1 else [{}, *varied]
    points = [Point.model_validate(base | change) for change in changes]
    return list(dict.fromkeys(points))
