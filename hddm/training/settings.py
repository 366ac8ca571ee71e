"""Settings of trainings: how to optimise, on what hardware, how to keep the run; and run files.

A run file holds settings in YAML, checked key by key, for what stays the same between runs:

    size: S/2
    batch_size: 256
    mixed_precision: bf16
    checkpoint_every: 1000

Keys are those of the settings of what is trained and of `Keeping`.
"""

from collections.abc import Hashable, Mapping, Set
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import AfterValidator, Field, field_validator, model_validator

from hddm.utils.errors import HddmError, did_you_mean
from hddm.utils.records import OPTIONS, Record, parse_record

Positive = Annotated[int, Field(ge=1)]


# Depth, width and heads.
_WIDTHS = {"S": (12, 384, 6), "B": (12, 768, 12), "L": (24, 1024, 16), "XL": (28, 1152, 16)}

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 2},
    "small": {"depth": 4, "hidden_size": 128, "num_heads": 4, "patch_size": 4},
} | {
    f"{name}/{patch}": {"depth": depth, "hidden_size": width, "num_heads": heads, "patch_size": patch}
    for name, (depth, width, heads) in _WIDTHS.items()
    for patch in (2, 4, 8)
}
"""Arguments of the transformers by named size; ``tiny`` and ``small`` are for images of a few hundred pixels.

The other sizes are those of Peebles & Xie 2022 (arXiv:2212.09748, table 1); the number after the slash is the
patch size.
"""


def size_config(name: str) -> dict[str, int]:
    """The constructor arguments of a named size.

    Raises:
        HddmError: for an unknown name; the message lists the known ones.
    """
    if name not in SIZES:
        raise HddmError(f"unknown model size {name!r}: choose one of {', '.join(SIZES)}")
    return dict(SIZES[name])


def _known_size(name: str) -> str:
    size_config(name)
    return name


TimeSampling = Literal["uniform", "logit-normal"]
Size = Annotated[str, AfterValidator(_known_size)]
LONGEST_WARMUP = 100
"""Unless another is asked for."""
TEXT = "encoder_hidden_states"
"""The keyword of a network for the tokens of captions."""


class LoopSettings(Record):
    """Settings of the optimisation: AdamW, cosine decay to zero under a linear warm-up, and a float32 EMA.

    ``batch_size`` is that of one step, over all devices and all ``gradient_accumulation_steps``.
    """

    steps: Positive
    batch_size: Positive = 128
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    warmup: Annotated[int, Field(ge=0)] | None = None
    """Steps to the peak rate; None is `warmup_steps`, and that is recorded. 0 and 1 are no warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.999
    seed: int = 0
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    gradient_accumulation_steps: Positive = 1
    gradient_checkpointing: bool = False
    compile: bool = False
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    threads: Positive | None = None
    """CPU threads, on which rounding depends; None is what torch would take, and is recorded."""
    max_non_finite: Positive = 10
    """Steps in a row whose loss or gradient is not finite, after which the training gives up."""

    @property
    def warmup_steps(self) -> int:
        """``warmup``, or a tenth of the steps and `LONGEST_WARMUP` at most."""
        return min(LONGEST_WARMUP, self.steps // 10) if self.warmup is None else self.warmup

    @field_validator("mixed_precision", mode="before")
    @classmethod
    def _no_is_a_word(cls, value: object) -> object:
        # YAML reads a bare no as false.
        return "no" if value is False else value

    @model_validator(mode="after")
    def _accumulates_whole_batches(self) -> "LoopSettings":
        if self.batch_size % self.gradient_accumulation_steps:
            raise ValueError(
                f"batch_size {self.batch_size} does not divide into "
                f"{self.gradient_accumulation_steps} gradient_accumulation_steps"
            )
        return self


class ExpertSettings(LoopSettings):
    """Settings of an expert: its objective, its size and its optimisation."""

    objective: Literal["ddpm", "flow"]
    time_sampling: TimeSampling = "uniform"
    snr_gamma: Annotated[float, Field(gt=0)] | None = None
    """DDPM: losses are weighted by min(SNR, gamma)/SNR (`hddm.training.objectives`)."""
    size: Size = "small"
    class_conditional: bool = False
    text_conditional: bool = False
    condition_dropout: Annotated[float, Field(ge=0, le=1)] = 0.1
    random_flip: bool = False
    """Half the images of a step, at random, are mirrored left to right."""
    lora_rank: Positive | None = None
    """Of an adapter that is trained in place of all weights (`hddm.training.lora`); needs an init."""
    lora_alpha: Annotated[float, Field(gt=0)] | None = None
    """The adapter's product is scaled by alpha/rank; None is the rank."""

    @property
    def conditions(self) -> tuple[str, ...]:
        """Keywords of the network for the conditions that it is trained with."""
        asked = {"class_labels": self.class_conditional, TEXT: self.text_conditional}
        return tuple(name for name, is_asked in asked.items() if is_asked)

    @model_validator(mode="after")
    def _adapter_can_be(self) -> "ExpertSettings":
        if self.lora_alpha is not None and self.lora_rank is None:
            raise ValueError(f"lora_alpha {self.lora_alpha} scales an adapter; give a lora_rank too")
        if self.lora_rank is not None and self.compile:
            raise ValueError(
                "compile does not get through peft's adapters of packed matrices; drop it beside lora_rank"
            )
        return self


class RouterSettings(LoopSettings):
    """Settings of a router: its size, its optimisation, and the calibration of its probabilities."""

    size: Size = "tiny"
    random_flip: bool = False
    calibrate: bool = False


class DistillSettings(LoopSettings):
    """Settings of a student: its kind of teacher, its size and its optimisation.

    It takes class labels where its teacher does, and learns ``condition_dropout`` of its samples without.
    """

    teacher: Literal["shard", "routed"] = "shard"
    size: Size = "small"
    time_sampling: TimeSampling = "uniform"
    condition_dropout: Annotated[float, Field(ge=0, le=1)] = 0.1
    random_flip: bool = False

    def as_expert(self, class_conditional: bool) -> ExpertSettings:
        """Return the settings of the flow expert that the student is."""
        same = self.model_dump(exclude={"teacher"})
        return ExpertSettings(objective="flow", class_conditional=class_conditional, **same)


class Keeping(Record):
    """Intervals at which a run is saved, logged and pictured."""

    checkpoint_every: Positive = 500
    """Steps between checkpoints."""
    keep: Positive = 2
    """Complete checkpoints that stay."""
    log_every: Positive = 10
    """Steps between entries of the log."""
    sample_every: Annotated[int, Field(ge=0)] = 0
    """Steps between pictures; 0 for none."""
    wandb: str | None = None
    """Project of Weights & Biases that figures go to as well."""


class RunOptions(Keeping):
    """Settings of keeping a run, and of this start of it."""

    resume: bool = False
    """Go on where the run in the folder stopped; where there is none, one is started."""
    allow_config_change: bool = False
    """Go on although settings or data differ."""


Settings = TypeVar("Settings", bound=Record)
LARGEST = 2**20
# A file may serve several verbs: what one of them knows is no mistake.
KINDS: tuple[type[Record], ...] = (Keeping, ExpertSettings, RouterSettings, DistillSettings)


def settings_of(
    record: type[Settings], path: Path | None, values: Mapping[str, Any], explicit: Set[str]
) -> Settings:
    """Settings of a kind, from options and a run file.

    ``values`` are options by name, defaults and all; those that are ``explicit`` override the file in
    ``path``.

    Raises:
        HddmError: for a file that cannot be read or is no mapping, a key that no kind has, or a value that is
            out of range.
    """
    if path is None:
        return parse_record(dict(values), record, OPTIONS)
    content = {key: value for key, value in read_run_file(path, record).items() if key in record.model_fields}
    # With what a file need not say, so that a bad value is reported as the file's.
    required = {name for name, one in record.model_fields.items() if one.is_required()} & set(values)
    parse_record({name: values[name] for name in required} | content, record, str(path))
    stronger = {name: values[name] for name in explicit}
    return parse_record(dict(values) | content | stronger, record, OPTIONS)


def read_run_file(path: Path, record: type[Record]) -> dict[str, Any]:
    """The keys of a run file, all of them known to a kind of settings; raises as `settings_of`."""
    content = read_yaml(path)
    once = set(RunOptions.model_fields) - set(Keeping.model_fields)
    known = {name for kind in (record, *KINDS) for name in kind.model_fields} - once
    for key in content:
        if key in once:
            raise HddmError(
                f"{path}: {key} is said for one start, as --{str(key).replace('_', '-')}; remove it"
            )
        if key not in known:
            raise HddmError(f"{path}: unknown key {key!r}{did_you_mean(str(key), known)}")
    return content


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file of settings, each key once; an empty file is an empty one."""
    try:
        text = path.read_bytes()
        if len(text) > LARGEST:
            raise HddmError(f"{path}: has {len(text)} bytes; a run file has a few lines")
        content = yaml.load(text.decode(), Loader=_Loader)
    except OSError as error:
        raise HddmError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise HddmError(f"{path}: is no YAML ({_reason(error)})") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise HddmError(f"{path}: holds no settings; write them as 'key: value', a line each")
    return content


def _reason(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """What is wrong with a text and where, without the name that YAML makes up for it."""
    mark = getattr(error, "problem_mark", None)
    if isinstance(error, yaml.MarkedYAMLError) and mark is not None:
        what = ", ".join(filter(None, (error.context, error.problem)))
        return f"line {mark.line + 1}, column {mark.column + 1}: {what}"
    return str(getattr(error, "reason", error))


class _Loader(yaml.SafeLoader):
    """Plain values only; a key that comes twice is refused, where YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} twice", node.start_mark)
        return super().construct_mapping(node, deep)
