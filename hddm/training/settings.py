"""Settings of trainings: what is requested, what a recipe holds, and run files in YAML.

    size: S/2
    batch_size: 256
    mixed_precision: bf16
    checkpoint_every: 1000

Settings are what a caller requests; a value of None is left open. `resolve` fills in the defaults and returns
the recipe, in which no value is open. Settings and recipe of a training share the declaration of their fields
(`LoopFields` and the classes derived from it). The text below a field is the help of its option on the
command line. Unknown keys of a run file are errors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Never, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from hddm.condition_names import LABELS, TEXT
from hddm.networks.sizes import size_config
from hddm.predictions import PredictionType
from hddm.settings import READ, Described, Positive, PredictionName, Shown, StrategyName
from hddm.strategies import Strategy
from hddm.utils.errors import HddmError, UsageError, did_you_mean
from hddm.utils.files import read_yaml
from hddm.utils.records import (
    OPTIONS,
    WHOLE,
    NoiseRange,
    PositiveNumber,
    Record,
    Seed,
    Share,
    parse_record,
)

Weighting = Literal["prediction", "velocity"]
RouterConditionName = Literal["class", "text"]
TimeSampling = Literal["uniform", "logit-normal"]
Size = Annotated[str, AfterValidator(lambda name: size_config(name) and name)]
# Options of the command line are words.
SamplingSteps = Annotated[
    Literal[1, 2, 4],
    BeforeValidator(lambda value: int(value) if value in ("1", "2", "4") else value),
]

TRACKERS = ("trackio", "wandb")


def parse_tracker(text: str) -> tuple[str, str]:
    """Read ``trackio:PROJECT`` as a tracker and its project; `HddmError` for another one, or none."""
    name, _, project = text.partition(":")
    if name not in TRACKERS or not project:
        raise HddmError("must be trackio:PROJECT or wandb:PROJECT, as trackio:birds")
    return name, project


TrackerProject = Annotated[str, AfterValidator(lambda text: parse_tracker(text) and text)]

Open = TypeVar("Open")
"""None in settings, where a value may be left open; Never in a recipe, so that None is no valid value."""
OPEN: Any = None


class LoopFields(Described, Generic[Open]):
    """The optimisation: linear warm-up with cosine decay to zero, and a float32 moving average."""

    # A recipe does not allow the None that leaves a value open.
    model_config = ConfigDict(validate_default=True)

    steps: Positive
    """Training steps. Required, here or in `config`."""
    batch_size: Annotated[Positive, Shown(topic="Training")] = 128
    """Images per step, over all devices."""
    size: Size = "small"
    """Network size: tiny, mini, small, S/2 to XL/8, or DEPTHxWIDTH/PATCH as 6x192/2."""
    optimizer: Literal["adamw", "muon"] | Open = OPEN
    """Optimizer for weight matrices; AdamW trains the rest. Default: muon; adamw with `init`."""
    learning_rate: PositiveNumber | Open = OPEN
    """Peak learning rate of AdamW. Default: 0.2/width with Muon, 0.5/width without (router: 0.125/width),
    1e-4 with `init`."""
    muon_learning_rate: PositiveNumber | None = None
    """Learning rate of the matrices that Muon trains. Default: 0.02."""
    warmup: Annotated[int, Field(ge=0)] | Open = OPEN
    """Steps of warm-up. Default: a tenth of `steps`, at most 100."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Weight decay of both optimizers."""
    max_grad_norm: PositiveNumber = 1.0
    """Norm that gradients are clipped to."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the weights' moving average."""
    seed: Seed = 0
    """Seed of all random numbers."""
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    """Precision of the network; weights stay in float32. auto is bf16 on GPUs that have it, else no."""
    gradient_accumulation_steps: Positive = 1
    """Parts that each batch is split into to save memory."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    compile: bool = False
    """Compile the network's blocks with torch.compile."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device to train on."""
    threads: Positive | Open = OPEN
    """CPU threads; they affect rounding. Default: PyTorch's."""
    max_non_finite: Positive = 10
    """Steps in a row with a non-finite loss or gradient after which the training fails."""


class DenoiserFields(LoopFields[Open], Generic[Open]):
    """Fields of experts and students."""

    prediction: PredictionName | Open = OPEN
    """Quantity that the network predicts. Default: epsilon (DDPM), sample (flow)."""
    rotary: bool | Open = OPEN
    """Rotary position embeddings. Default: on."""
    time_sampling: TimeSampling | Open = OPEN
    """Distribution of noise levels. Default: logit-normal; uniform for DDPM, unless `prediction` is
    sample."""
    condition_dropout: Share = 0.1
    """Share of images that are trained without conditions."""
    random_flip: bool = False
    """Mirror half of the images at random."""
    shard_weights: bool = False
    """Split weights, their average and the optimizer's state over the processes of torchrun."""

    @model_validator(mode="after")
    def _can_be_split(self) -> "DenoiserFields[Open]":
        if self.shard_weights and self.compile:
            raise ValueError("`compile` does not work with `shard_weights`; drop one of the two")
        if self.shard_weights and self.mixed_precision == "fp16":
            raise ValueError("`mixed_precision` fp16 does not work with `shard_weights`; use bf16")
        return self


class ExpertFields(DenoiserFields[Open], Generic[Open]):
    """Fields of experts."""

    objective: Literal["ddpm", "flow"]
    """Training objective. Required, here or in `config`."""
    weighting: Weighting | Open = OPEN
    """Quantity that the loss compares. Default: velocity if `prediction` is sample, else prediction."""
    noise_range: NoiseRange | Open = OPEN
    """Noise levels t (0 data, 1 noise) that the expert covers, such as 0.5:1. Default: all; with `init` those
    of the init."""
    snr_gamma: PositiveNumber | None = None
    """Gamma of min-SNR loss weights (DDPM only), such as 5. Default: no weights."""
    class_conditional: bool = False
    """Train on the labels of class folders."""
    text_conditional: bool = False
    """Train on captions, as saved by hddm encode."""
    weak_at: Annotated[float, Field(ge=0, lt=1)] | Open = OPEN
    """Share of `steps` after which a weak model for autoguidance is saved; 0 for none. Default: 0.25; 0 with
    `init`."""
    lora_rank: Positive | None = None
    """Rank of a LoRA adapter of `init` to train; `out` holds only it."""
    lora_alpha: PositiveNumber | None = None
    """Scale of the adapter, as ALPHA/RANK. Default: the rank."""

    @property
    def conditions(self) -> tuple[str, ...]:
        """Keywords of the conditions that the network is trained with."""
        labels = (LABELS,) if self.class_conditional else ()
        return (*labels, TEXT) if self.text_conditional else labels

    @model_validator(mode="after")
    def _can_be_an_adapter(self) -> "ExpertFields[Open]":
        if self.lora_rank is not None and self.compile:
            raise ValueError("`compile` does not work with `lora_rank`; drop one of the two")
        return self


class RouterFields(LoopFields[Open], Generic[Open]):
    """Fields of routers."""

    size: Size = "tiny"
    """Network size: tiny, mini, small, S/2 to XL/8, or DEPTHxWIDTH/PATCH as 6x192/2."""
    random_flip: bool = False
    """Mirror half of the images at random."""
    calibrate: bool = False
    """Hold out 15 % of every shard and fit temperatures on it."""
    condition: RouterConditionName | None = None
    """Condition that the router sees: the class, or the text of captions. Default: none."""


class DistillFields(DenoiserFields[Open], Generic[Open]):
    """Fields of students."""

    teacher: Literal["shard", "routed"] = "shard"
    """Teacher: the expert of each image's shard (shard) or the mixture (routed)."""
    strategy: StrategyName | None = None
    """Strategy of the routed teacher. Default: the ensemble's; full for draw and commit-X."""
    sampling_steps: SamplingSteps | None = None
    """Number of sampling steps to train for; needs `init`. Default: any."""
    trajectories: Positive = 8192
    """Teacher trajectories that a student of few steps learns from."""
    guidance_scale: Annotated[
        float, Field(allow_inf_nan=False), Shown(topic="Students of few steps")
    ] = 1.0
    """Guidance scale of the teacher of a student of few steps; 1 is none."""

    @model_validator(mode="after")
    def _fits_its_teacher(self) -> "DistillFields[Open]":
        if self.strategy is not None and self.teacher == "shard":
            raise ValueError(
                f"`strategy` {self.strategy}: is for `teacher` routed; choose that, or drop it"
            )
        if self.strategy is not None and Strategy.parse(self.strategy).keeps_one:
            raise ValueError(f"`strategy` {self.strategy}: keeps one expert per sample; use full")
        if self.sampling_steps is None and self.guidance_scale != 1:
            text = f"`guidance_scale` {self.guidance_scale:g} is for a student of few steps"
            raise ValueError(f"{text}; pass `sampling_steps` too")
        return self


Recipe = LoopFields[Never]


class ExpertSettings(ExpertFields[None]):
    """Settings of the training of an expert."""


class AllSettings(ExpertFields[None]):
    """Settings of the trainings of the experts of all shards."""

    objective: str  # type: ignore[assignment]
    """Objective: ddpm or flow, or one per shard, such as 0=ddpm,3=ddpm,*=flow."""

    @model_validator(mode="after")
    def _has_one_process_each(self) -> "AllSettings":
        if self.shard_weights:
            text = (
                "each of these experts has one process; train it by `hddm train expert` in torchrun"
            )
            raise ValueError(f"`shard_weights`: {text}")
        return self

    def with_objective(self, name: str) -> ExpertSettings:
        """Settings of an expert with this objective."""
        return ExpertSettings.model_validate(
            self.model_dump(exclude_unset=True) | {"objective": name}
        )


def refuse_fixed(settings: Record, schedule: Path | None = None) -> None:
    """Refuse what ``init`` fixes: a network that goes on keeps its size, prediction and schedule.

    Raises:
        UsageError: for the first that was requested.
    """
    fixed = [name for name in _FIXED_BY_INIT if name in settings.model_fields_set]
    if schedule is not None:
        fixed.append("schedule")
    if fixed:
        raise UsageError(f"`{fixed[0]}`: `init` fixes it; leave it out")


def refuse_without_init(settings: Record) -> None:
    """Refuse what begins with an expert, where there is no ``init``.

    Raises:
        UsageError: for an adapter, and for a student of few steps.
    """
    if getattr(settings, "lora_rank", None) is not None:
        raise UsageError("`lora_rank` adapts an existing expert; pass `init`")
    if getattr(settings, "sampling_steps", None) is not None:
        raise UsageError(
            "`sampling_steps`: a student of few steps begins with an expert; pass `init`"
        )


def check_init(settings: Record, init: Path | None, schedule: Path | None = None) -> None:
    """Refuse settings that do not go with ``init``, or that need one, as the two above."""
    if init is None:
        refuse_without_init(settings)
    else:
        refuse_fixed(settings, schedule)


_FIXED_BY_INIT = ("size", "prediction", "weighting", "rotary")


class ExpertRecipe(ExpertFields[Never]):
    """The recipe of an expert."""

    @model_validator(mode="after")
    def _uses_all_values(self) -> "ExpertRecipe":
        if self.lora_alpha is not None and self.lora_rank is None:
            raise ValueError("`lora_alpha` is the scale of an adapter; pass `lora_rank` too")
        if self.lora_rank is not None and self.weak_at:
            raise ValueError(
                "`weak_at`: an adapter (`lora_rank`) has no weak model; drop one of the two"
            )
        return self

    @property
    def weak_step(self) -> int:
        """Step after which the averages are kept as the weak model, before the last step; 0 for none."""
        return min(round(self.weak_at * self.steps), self.steps - 1)


class RouterSettings(RouterFields[None]):
    """Settings of the training of a router."""


class RouterRecipe(RouterFields[Never]):
    """The recipe of a router."""


class DistillSettings(DistillFields[None]):
    """Settings of the training of a student."""


class DistillRecipe(DistillFields[Never]):
    """The recipe of a student."""


WEAK_AT = 0.25
MUON_RATE = 0.02
LONGEST_WARMUP = 100

RecipeKind = TypeVar("RecipeKind", bound=LoopFields[Never])


@dataclass(frozen=True)
class Start:
    """What the defaults of a training depend on, besides the settings."""

    is_new: bool = True
    """True for random weights; False for an init, whose prediction and rotary positions stay."""
    prediction: str | None = None
    """The init's, or of a new network the one that its scheduler file states."""
    rotary: bool = True
    noise_range: NoiseRange = WHOLE
    strategy: str | None = None
    """The strategy of a routed teacher."""

    @classmethod
    def of(cls, network: object, prediction: str, noise_range: NoiseRange = WHOLE) -> "Start":
        """Return the start of a training that continues ``network``."""
        return cls(
            False,
            prediction,
            bool(getattr(network, "config", {}).get("rotary", False)),
            noise_range,
        )


NEW = Start()


def resolve(
    kind: type[RecipeKind],
    requested: Record,
    start: Start = NEW,
    before: Mapping[str, Any] | None = None,
) -> RecipeKind:
    """Return the recipe of a training.

    Args:
        kind: of recipe, which goes with the kind of ``requested`` settings.
        requested: settings; what they leave open is filled in.
        start: what the training begins with.
        before: the recipe of the run that is resumed. It comes before defaults, which may have changed.
    """
    # Imported here, since the command line reads these settings before it imports torch.
    from torch import get_num_threads

    from hddm.utils.tensors import AUTO

    values = requested.model_dump()
    if not start.is_new:
        decided = {"prediction": start.prediction, "weighting": None, "rotary": start.rotary}
        for name, value in decided.items():
            if name in values:
                values[name] = value
    is_ddpm = values.get("objective") == "ddpm"
    # A run of another kind is refused once the recipes are compared, with all differences.
    of_kind = ("objective", "teacher", "lora_rank")
    recorded = before or {}
    if any(values.get(name) != recorded.get(name) for name in of_kind):
        recorded = {}
    optimizer = (
        values["optimizer"] or recorded.get("optimizer") or ("muon" if start.is_new else "adamw")
    )
    has_muon = optimizer == "muon"
    by_width = 0.5
    if has_muon:
        by_width = 0.2
    elif issubclass(kind, RouterRecipe):
        by_width = 0.125
    prediction = (
        values.get("prediction") or start.prediction or ("epsilon" if is_ddpm else "sample")
    )
    with_velocity_loss = [kind for kind in PredictionType if kind.prediction.has_velocity_loss]
    has_velocity_loss = prediction in with_velocity_loss
    draws_as_flow = not is_ddpm or (start.is_new and has_velocity_loss)
    defaults = {
        "optimizer": optimizer,
        "learning_rate": by_width / size_config(values["size"])["hidden_size"]
        if start.is_new
        else 1e-4,
        "muon_learning_rate": MUON_RATE if has_muon else None,
        "warmup": min(LONGEST_WARMUP, values["steps"] // 10),
        "threads": get_num_threads(),
        "prediction": prediction,
        "weighting": "velocity" if has_velocity_loss else "prediction",
        "rotary": start.rotary,
        "time_sampling": "logit-normal" if draws_as_flow else "uniform",
        "noise_range": start.noise_range,
        "weak_at": WEAK_AT if start.is_new else 0.0,
        "lora_alpha": values.get("lora_rank"),
        "strategy": start.strategy,
    }
    for name, default in defaults.items():
        if name in values and values[name] is None:
            known = recorded.get(name)
            values[name] = default if known is None else known
    if not has_muon:
        values["muon_learning_rate"] = None
    if values["mixed_precision"] == AUTO:
        known = recorded.get("mixed_precision")
        values["mixed_precision"] = _precision_on(values["device"], known)
    return parse_record(values, kind, OPTIONS)


def _precision_on(device: str, known: str | None) -> str:
    """The precision that a run is ``known`` to have, or the best on a device, which is logged.

    A device that is missing is refused when it is used.
    """
    import torch

    from hddm.utils.tensors import available_device, best_dtype, report_choice

    try:
        there = available_device(device)
    except HddmError:
        return known or "no"
    chosen = known or ("bf16" if best_dtype(there) is torch.bfloat16 else "no")
    report_choice("mixed_precision", chosen, there)
    return chosen


class Keeping(Described):
    """How often a run is saved, logged and sampled."""

    checkpoint_every: Positive = 500
    """Steps between checkpoints; one is also saved every two minutes."""
    keep: Positive = 2
    """Complete checkpoints to keep."""
    log_every: Positive = 10
    """Steps between entries of the log."""
    sample_every: Annotated[int, Field(ge=0)] = 0
    """Steps between sample grids; 0 for none."""
    tracker: TrackerProject | None = None
    """Tracker and project to log to as well: trackio:PROJECT, or wandb:PROJECT (Weights & Biases)."""


class RunOptions(Keeping):
    """How a run is saved, and how it is started or resumed."""

    resume: bool = False
    """Resume the run in OUT.run."""
    allow_config_change: bool = False
    """Resume even if settings have changed."""
    held_out: Annotated[Path, READ, Shown("FOLDER")] | None = None
    """Images not trained on, or their partition folder; the error on them is logged by noise level."""
    validate_every: Positive = 500
    """Steps between measurements on `held_out`."""
    run_name: str | None = None
    """Name of the run in `tracker`. Default: the name of OUT."""

    @model_validator(mode="after")
    def _names_a_run(self) -> "RunOptions":
        if self.run_name is not None and self.tracker is None:
            raise ValueError("`run_name` names a run of a `tracker`; pass that too, or drop it")
        return self


def splits_weights(recipe: Recipe) -> bool:
    """Return True for a recipe by which several processes each hold their part of the weights."""
    return isinstance(recipe, DenoiserFields) and recipe.shard_weights


def refuse_watched(run: RunOptions) -> None:
    """Refuse what the first process does alone, for which it would need split weights whole.

    Raises:
        UsageError: for the first that was requested.
    """
    for name in ("sample_every", "held_out"):
        if getattr(run, name):
            text = "no process has the whole network with `shard_weights`; drop one of the two"
            raise UsageError(f"`{name}`: {text}")


Settings = TypeVar("Settings", bound=Record)
# A file may serve several verbs, so keys of any kind of settings are allowed.
SETTINGS_IN_FILES: tuple[type[Record], ...] = (
    Keeping,
    ExpertSettings,
    RouterSettings,
    DistillSettings,
)


_VALID = {"steps": 1, "objective": "flow"}
"""Values of what is required, beside which those of a file are checked alone."""


def settings_of(record: type[Settings], path: Path | None, given: Mapping[str, Any]) -> Settings:
    """Make settings of a kind from a run file, if any, and options by name, which override the file.

    Raises:
        HddmError: for a file that is unreadable or not a mapping, an unknown key, a value out of range, or a
            required value that neither has.
    """
    content: dict[str, Any] = {}
    if path is not None:
        known = set(record.model_fields)
        for kind in SETTINGS_IN_FILES:
            known.update(kind.model_fields)
        known -= RunOptions.__annotations__.keys()
        for key, value in read_yaml(path).items():
            if key not in known:
                raise HddmError(f"{path}: unknown key {key!r}{did_you_mean(key, known)}")
            if key in record.model_fields:
                content[key] = value
        # Alone, so that a bad value is reported as the file's.
        required = {name: one for name, one in _VALID.items() if name in record.model_fields}
        parse_record(required | content, record, str(path))
    return parse_record(content | dict(given), record, OPTIONS)


def parse_objectives(text: str, shards: int) -> list[str]:
    """Parse one objective per shard from ``0=ddpm,3=ddpm,*=flow``; a name alone, as ``flow``, is for all.

    Raises `HddmError` for a shard that does not exist, comes twice or has no objective, or an unknown
    objective.
    """
    parts = [part.strip().rpartition("=") for part in text.split(",")]
    chosen = {key.strip() or "*": objective.strip() for key, _, objective in parts}
    found = [chosen.get(str(k), chosen.get("*")) for k in range(shards)]
    is_known = chosen.keys() <= {"*", *map(str, range(shards))} and len(chosen) == len(parts)
    if not is_known or not {*found, *chosen.values()} <= {"ddpm", "flow"}:
        shape = f"name ddpm or flow once for each of shards 0 to {shards - 1}, as 0=ddpm,*=flow"
        raise HddmError(f"`objective` {text}: {shape}")
    return [str(one) for one in found]
