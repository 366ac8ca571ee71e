"""Settings of trainings, and run files that hold them in YAML, with every key checked.

    size: S/2
    batch_size: 256
    mixed_precision: bf16
    checkpoint_every: 1000

Keys are those of `Keeping` and of the settings of what is trained.
"""

import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from hddm.utils.errors import HddmError, UsageError, did_you_mean
from hddm.utils.files import read_yaml
from hddm.utils.records import OPTIONS, NoiseRange, Record, parse_record

Positive = Annotated[int, Field(ge=1)]


# Depth, width and heads.
_WIDTHS = {"S": (12, 384, 6), "B": (12, 768, 12), "L": (24, 1024, 16), "XL": (28, 1152, 16)}

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 2},
    "mini": {"depth": 4, "hidden_size": 64, "num_heads": 4, "patch_size": 4},
    "small": {"depth": 4, "hidden_size": 128, "num_heads": 4, "patch_size": 4},
} | {
    f"{name}/{patch}": {"depth": depth, "hidden_size": width, "num_heads": heads, "patch_size": patch}
    for name, (depth, width, heads) in _WIDTHS.items()
    for patch in (2, 4, 8)
}
"""Arguments of the transformers by named size; the first three are for images of a few hundred pixels.

The others are those of Peebles & Xie 2022 (arXiv:2212.09748, table 1), with the patch size after the slash.
"""


def size_config(name: str) -> dict[str, int]:
    """Return the constructor arguments of a size: a named one, or depth, width and patch, as ``6x192/2``.

    Of the latter a head has 64 numbers, or all where the width is less. Anything else raises `HddmError`.
    """
    if name in SIZES:
        return dict(SIZES[name])
    found = re.fullmatch(r"(\d{1,3})x(\d{1,5})/(\d{1,3})", name)
    depth, width, patch = (int(part) for part in found.groups()) if found else (0, 0, 0)
    if not (depth and patch and width % 8 == 0 and (0 < width < 64 or (width and width % 64 == 0))):
        raise HddmError(
            f"unknown model size {name!r}: choose one of {', '.join(SIZES)}, or depth x width / patch, as "
            "6x192/2, the width a multiple of 64, or of 8 below 64"
        )
    return {"depth": depth, "hidden_size": width, "num_heads": max(1, width // 64), "patch_size": patch}


def _known_size(name: str) -> str:
    size_config(name)
    return name


Weighting = Literal["prediction", "velocity"]
TimeSampling = Literal["uniform", "logit-normal"]
Prediction = Literal["epsilon", "sample", "v_prediction", "flow_prediction"]
Size = Annotated[str, AfterValidator(_known_size)]
WEAK_AT = 0.25
"""Share of the steps after which a weak model is kept, unless another one is asked for."""
MUON_RATE = 0.02
"""Of Muon, unless another one is asked for."""
LONGEST_WARMUP = 100
"""Most steps of warm-up, unless another number is asked for."""
TEXT = "encoder_hidden_states"
"""Keyword of a network for the tokens of captions."""


def default_weighting(prediction: str) -> Weighting:
    """Velocity for the prediction of x_0, else the prediction itself."""
    return "velocity" if prediction == "sample" else "prediction"


class LoopSettings(Record):
    """Settings of the optimisation: linear warm-up with cosine decay to zero, and a float32 EMA.

    ``batch_size`` is that of one step, over all devices and all ``gradient_accumulation_steps``.
    """

    steps: Positive
    batch_size: Positive = 128
    size: Size = "small"
    optimizer: Literal["adamw", "muon"] | None = None
    """None is Muon for a network with random weights and AdamW for one that goes on."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Of AdamW; None is 1e-4 for a network that goes on, else 0.2/width beside Muon and, alone, 0.5/width, or
    0.125/width of a router."""
    muon_learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Of the matrices that Muon trains; None is 0.02 where it trains any."""
    warmup: Annotated[int, Field(ge=0)] | None = None
    """Steps to the peak rate; None is `warmup_steps`, which is then recorded. 0 and 1 are no warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.999
    seed: int = 0
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    gradient_accumulation_steps: Positive = 1
    gradient_checkpointing: bool = False
    compile: bool = False
    fsdp: bool = False
    """Split weights, gradients and the optimiser's state over the processes; one alone splits nothing."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    threads: Positive | None = None
    """CPU threads, which affect rounding; None is torch's default, which is then recorded."""
    max_non_finite: Positive = 10
    """Steps in a row with a non-finite loss or gradient after which the training fails."""

    def with_defaults(self, is_new: bool) -> Self:
        """Fill in optimiser, learning rates and warm-up, for a network with random weights or another one.

        Raises `UsageError` for a rate of Muon where all is AdamW's.
        """
        optimizer = self.optimizer or ("muon" if is_new else "adamw")
        has_muon = optimizer == "muon"
        if self.muon_learning_rate is not None and not has_muon:
            raise UsageError(
                f"--muon-learning-rate {self.muon_learning_rate:g}: this training uses AdamW only; "
                f"leave it out, or use --optimizer muon"
            )
        alone = 0.125 if isinstance(self, RouterSettings) else 0.5
        rate = (0.2 if has_muon else alone) / size_config(self.size)["hidden_size"] if is_new else 1e-4
        found = {
            "optimizer": optimizer,
            "learning_rate": self.learning_rate or rate,
            "muon_learning_rate": self.muon_learning_rate or (MUON_RATE if has_muon else None),
            "warmup": self.warmup_steps,
        }
        return self.model_copy(update=found)

    @property
    def warmup_steps(self) -> int:
        """``warmup``, by default a tenth of the steps, at most `LONGEST_WARMUP`."""
        return min(LONGEST_WARMUP, self.steps // 10) if self.warmup is None else self.warmup

    @model_validator(mode="after")
    def _split_weights_have_their_range(self) -> "LoopSettings":
        if self.fsdp and self.mixed_precision == "fp16":
            raise ValueError("fsdp needs mixed_precision bf16 or no, not fp16")
        return self

    @model_validator(mode="after")
    def _accumulates_whole_batches(self) -> "LoopSettings":
        if self.batch_size % self.gradient_accumulation_steps:
            raise ValueError(
                f"batch_size {self.batch_size} does not divide into "
                f"{self.gradient_accumulation_steps} gradient_accumulation_steps"
            )
        return self


class DenoiserSettings(LoopSettings):
    """What the settings of experts and students have in common."""

    prediction: Prediction | None = None
    """Of a new network; None is epsilon for ddpm, else sample."""
    rotary: bool | None = None
    """Rotary positions of a new network; None is True."""
    time_sampling: TimeSampling | None = None
    """None is uniform for ddpm, unless it asks for the prediction of x_0, else logit-normal."""
    condition_dropout: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of samples that are learned without their conditions."""
    random_flip: bool = False
    """Mirror half the images of a step, at random, left to right."""

    def with_defaults(self, is_new: bool) -> Self:
        """Fill in times too, and a new network's prediction and positions."""
        is_ddpm = isinstance(self, ExpertSettings) and self.objective == "ddpm"
        times = "uniform" if is_ddpm and self.prediction != "sample" else "logit-normal"
        found: dict[str, Any] = {"time_sampling": self.time_sampling or times}
        if is_new:
            prediction = self.prediction or ("epsilon" if is_ddpm else "sample")
            found |= {"prediction": prediction, "rotary": self.rotary is not False}
        return super().with_defaults(is_new).model_copy(update=found)


class ExpertSettings(DenoiserSettings):
    """Settings of an expert."""

    objective: Literal["ddpm", "flow"]
    weighting: Weighting | None = None
    """Of the loss (`hddm.training.objectives`); None is velocity for sample, else prediction."""
    noise_range: NoiseRange | None = None
    """Part of t to train for; None is all of it, or that of the init."""
    snr_gamma: Annotated[float, Field(gt=0)] | None = None
    """DDPM: weight losses by min(SNR, gamma)/SNR (`hddm.training.objectives`)."""
    class_conditional: bool = False
    text_conditional: bool = False
    weak_at: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of the steps after which the averages are kept as a weak model to guide by; 0 for none, None is
    `WEAK_AT` for a new network, and 0 for one that goes on."""
    lora_rank: Positive | None = None
    """Rank of an adapter trained in place of all weights (`hddm.training.lora`); needs an init."""
    lora_alpha: Annotated[float, Field(gt=0)] | None = None
    """Scale of the adapter's product, as alpha/rank; None is the rank."""

    def with_defaults(self, is_new: bool) -> Self:
        """Fill in the weak model too, and a new network's weighting."""
        filled = super().with_defaults(is_new)
        found: dict[str, Any] = {}
        if self.weak_at is None:
            found["weak_at"] = WEAK_AT if is_new else 0.0
        if is_new and filled.prediction is not None:
            found["weighting"] = self.weighting or default_weighting(filled.prediction)
        return filled.model_copy(update=found)

    @property
    def weak_step(self) -> int:
        """Step whose averages are kept, before the last one; 0 for none, as for an adapter."""
        share = 0.0 if self.lora_rank is not None else self.weak_at or 0.0
        return min(round(share * self.steps), self.steps - 1)

    @property
    def conditions(self) -> tuple[str, ...]:
        """Keywords of the conditions that the network is trained with."""
        asked = {"class_labels": self.class_conditional, TEXT: self.text_conditional}
        return tuple(name for name, is_asked in asked.items() if is_asked)

    @model_validator(mode="after")
    def _adapter_can_be(self) -> "ExpertSettings":
        if self.lora_alpha is not None and self.lora_rank is None:
            raise ValueError(f"lora_alpha {self.lora_alpha} scales an adapter; give a lora_rank too")
        if self.lora_rank is not None and self.weak_at:
            raise ValueError(f"weak_at {self.weak_at} keeps a weak model, and an adapter has none; drop it")
        if self.lora_rank is not None and self.compile:
            raise ValueError("compile does not work with lora_rank; drop one of the two")
        return self


class RouterSettings(LoopSettings):
    """Settings of a router, and of the calibration of its probabilities."""

    size: Size = "tiny"
    random_flip: bool = False
    calibrate: bool = False


class DistillSettings(DenoiserSettings):
    """Settings of a student."""

    teacher: Literal["shard", "routed"] = "shard"
    strategy: str | None = None
    """Of a routed teacher; None for the ensemble's, or ``full`` where that is ``draw`` or ``commit-x``."""
    sampling_steps: Literal[1, 2, 4] | None = None
    """Steps of a student of few steps (`hddm.training.mean_flow`); None is a student of velocities."""
    trajectories: Positive = 8192
    """Of the teacher, that a student of few steps learns from."""
    guidance_scale: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Of the teacher of a student of few steps, which has it inside; 1 for none."""

    def as_expert(self, class_conditional: bool) -> ExpertSettings:
        """Return the settings of the flow expert that the student is."""
        same = self.model_dump(exclude=set(DistillSettings.model_fields) - set(DenoiserSettings.model_fields))
        return ExpertSettings(objective="flow", class_conditional=class_conditional, **same)

    @model_serializer(mode="wrap")
    def _without_few_steps(self, values: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Values; runs of students of velocities say nothing of few steps, as those of older versions."""
        few = ("sampling_steps", "trajectories", "guidance_scale") if self.sampling_steps is None else ()
        absent = (*few, *(("strategy",) if self.strategy is None else ()))
        return {key: value for key, value in values(self).items() if key not in absent}

    @model_validator(mode="after")
    def _strategy_mixes(self) -> "DistillSettings":
        if self.strategy is not None and self.teacher == "shard":
            raise ValueError(f"strategy {self.strategy}: is for teacher routed; choose that, or drop it")
        if self.strategy is not None and self.strategy.partition("-")[0] in ("draw", "commit"):
            raise ValueError(
                f"strategy {self.strategy}: keeps one expert per sample and is not a mixture; use full"
            )
        return self

    @model_validator(mode="after")
    def _few_steps_are_said(self) -> "DistillSettings":
        if self.sampling_steps == 1 and self.fsdp:
            raise ValueError("fsdp splits the weights whose derivative a student of one step needs; drop it")
        for name in ("trajectories", "guidance_scale") if self.sampling_steps is None else ():
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(f"{name} {value:g} is for a student of few steps; give sampling_steps too")
        return self


class Keeping(Record):
    """Intervals at which a run is saved, logged and pictured."""

    checkpoint_every: Positive = 500
    """Steps between checkpoints; one is due after two minutes too."""
    keep: Positive = 2
    """Complete checkpoints to keep."""
    log_every: Positive = 10
    """Steps between entries of the log."""
    sample_every: Annotated[int, Field(ge=0)] = 0
    """Steps between pictures; 0 for none."""
    wandb: str | None = None
    """Project of Weights & Biases to log figures to as well."""


class RunOptions(Keeping):
    """Settings of keeping a run, and of one start of it."""

    resume: bool = False
    """Resume the run in the folder, or start one where there is none."""
    allow_config_change: bool = False
    """Resume although settings differ."""


Settings = TypeVar("Settings", bound=Record)
# A file may serve several verbs, so keys of any kind of settings are allowed.
KINDS: tuple[type[Record], ...] = (Keeping, ExpertSettings, RouterSettings, DistillSettings)


def settings_of(
    record: type[Settings], path: Path | None, values: Mapping[str, Any], explicit: Set[str]
) -> Settings:
    """Make settings of a kind from options and a run file.

    ``values`` are all options by name, defaults included; those in ``explicit`` override the file in
    ``path``. An unreadable file or one that is no mapping, an unknown key, or a value out of range raises
    `HddmError`.
    """
    if path is None:
        return parse_record(dict(values), record, OPTIONS)
    content = {key: value for key, value in read_run_file(path, record).items() if key in record.model_fields}
    # Validated with required values that the file may lack, so that a bad value is reported as the file's.
    required = {name for name, one in record.model_fields.items() if one.is_required()} & set(values)
    parse_record({name: values[name] for name in required} | content, record, str(path))
    stronger = {name: values[name] for name in explicit}
    return parse_record(dict(values) | content | stronger, record, OPTIONS)


def read_run_file(path: Path, record: type[Record]) -> dict[str, Any]:
    """Read a run file, whose keys must be known to some kind of settings; raises as `settings_of`."""
    content = read_yaml(path)
    once = set(RunOptions.model_fields) - set(Keeping.model_fields)
    known = {name for kind in (record, *KINDS) for name in kind.model_fields} - once
    for key in content:
        if key in once:
            raise HddmError(
                f"{path}: {key} applies to one start only; remove it and pass --{str(key).replace('_', '-')}"
            )
        if key not in known:
            raise HddmError(f"{path}: unknown key {key!r}{did_you_mean(str(key), known)}")
    return content
