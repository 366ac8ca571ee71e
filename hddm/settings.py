"""Options of all commands except trainings, as records.

A field is declared once, with its bounds and choices; the text below it describes it in Python and on the
command line. The settings of trainings are in `hddm.training.settings`. Nothing here imports torch.
"""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BeforeValidator, ByteSize, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from hddm.guidance import OPTIONS as GUIDANCE_OPTIONS
from hddm.guidance import Guidance, GuidanceNorm, GuideBy, Interval, refuse_two_sizes
from hddm.predictions import PredictionType
from hddm.strategies import Strategy
from hddm.utils.addresses import as_path
from hddm.utils.errors import HddmError, UsageError, choose, did_you_mean
from hddm.utils.records import (
    OPTIONS,
    Count,
    DataRange,
    Memory,
    NoiseRange,
    Record,
    Seed,
    Share,
    parse_record,
)

Returned = TypeVar("Returned")
Report = Callable[[str], object]
"""Takes lines about what is done, as the command line prints them."""

Positive = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class Shown:
    """How a field is shown in help: the word for its value, and the topic that it stands under."""

    word: str | None = None
    topic: str | None = None


READ = "read"
"""Marks a path that must exist, which the command line checks before it imports anything."""
InputPath = Annotated[Path, READ]
MODEL = "model"
"""Marks a path of a model or a part of one, or its name on a hub (`hddm.utils.hub`)."""
ModelPath = Annotated[Path, MODEL]


def silent(line: str) -> None:
    """Report nothing."""


class Described(Record):
    """A record whose fields are described by the texts below them."""

    model_config = ConfigDict(use_attribute_docstrings=True, defer_build=True)


def keywords(function: Callable[..., Returned]) -> Callable[..., Returned]:
    """Let callers pass the fields of a function's settings as keywords, and paths as text.

    A parameter whose type is a record of settings may be passed whole, by its name, as well. Keywords are
    checked as the options of the command line are; an unknown or a wrong one raises `HddmError`.
    """
    signature = inspect.signature(function)
    kinds = {name: one.annotation for name, one in signature.parameters.items()}
    records: dict[str, type[Record]] = {}
    for name, kind in kinds.items():
        if isinstance(kind, type) and issubclass(kind, Record):
            records[name] = kind

    @functools.wraps(function)
    def called(*arguments: Any, **values: Any) -> Returned:
        # Before anything that is missing: a misspelt keyword is missing too.
        _refuse_unknown(function, values, {*called.__signature__.parameters, *records})  # type: ignore[attr-defined]
        passed = signature.bind_partial(*arguments).arguments
        for name, record in records.items():
            own = {key: values.pop(key) for key in record.model_fields if key in values}
            if name not in values and name not in passed:
                values[name] = parse_record(own, record, OPTIONS)
            elif own:
                raise UsageError(
                    f"`{next(iter(own))}`: is one of `{name}`, which was passed whole; use one of the two"
                )
        bound = signature.bind(*arguments, **values)
        for name, value in bound.arguments.items():
            types = (kinds[name], *get_args(kinds[name]))
            if (isinstance(value, str) and Path in types and str not in types) or isinstance(
                value, Path
            ):
                bound.arguments[name] = as_path(value)
            elif isinstance(value, list | tuple) and Sequence[Path] in types:
                bound.arguments[name] = list(map(as_path, value))
        return function(*bound.args, **bound.kwargs)

    given = [one for name, one in signature.parameters.items() if name not in records]
    fields: dict[str, FieldInfo] = {}
    for record in records.values():
        fields |= record.model_fields
    for key, field in fields.items():
        default = inspect.Parameter.empty if field.is_required() else field.default
        one = inspect.Parameter(
            key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=field.annotation
        )
        given.append(one)
    called.__signature__ = signature.replace(parameters=given)  # type: ignore[attr-defined]
    return called


def _refuse_unknown(
    function: Callable[..., object], keywords: Collection[str], known: Collection[str]
) -> None:
    """Refuse the first of ``keywords`` that ``function`` does not take."""
    for name in keywords:
        if name not in known:
            raise UsageError(
                f"{function.__name__} takes no argument {name!r}{did_you_mean(name, known)}"
            )


def _checked(parse: Callable[[Any], object]) -> AfterValidator:
    return AfterValidator(lambda value: (parse(value), value)[1])


StrategyName = Annotated[str, _checked(Strategy.parse)]
"""Name of a strategy, such as ``nucleus-0.9``; see `hddm.strategies`."""


NativeName = Literal["ddim", "dpmsolver++", "unipc", "flow-euler"]
"""Samplers of `hddm.native`."""


def _check_device(name: str) -> None:
    if re.fullmatch(r"(auto|cpu|cuda|mps|xpu)(:\d+)?", name) is None:
        raise HddmError(choose(name, ("auto", "cpu", "cuda", "cuda:1", "mps")))


DeviceName = Annotated[str, _checked(_check_device)]
DtypeName = Literal["auto", "float32", "bfloat16", "float16", "float64"]
SolverName = Literal["euler", "heun", "adams-moulton"]
"""Keys of `hddm.solvers.SOLVERS`."""
if TYPE_CHECKING:
    # Type checkers do not read choices that are computed.
    PredictionName = str
else:
    PredictionName = Literal[tuple(kind.value for kind in PredictionType)]


PresetName = Literal[
    "sd1", "sd2", "sd2-v", "sdxl", "sdxl-v", "sdxl-flow", "playground-2.5", "cosxl"
]
"""Keys of `hddm.checkpoints.presets.PRESETS`."""


INT8_IN_FLOAT64 = "`quantize` int8: does not run in `dtype` float64; choose float32 or bfloat16"
"""torchao computes in all dtypes of floats but this one."""


class Computing(Described):
    """Where networks run, and in which numbers."""

    device: DeviceName = "auto"
    """Device: auto, cpu, cuda, cuda:1 or mps."""
    dtype: DtypeName = "auto"
    """Number format that the networks compute in; auto is bfloat16 on GPUs that have it, else float32."""
    compile: bool = False
    """Compile the experts' blocks with torch.compile, at the first step."""
    quantize: Literal["int8"] | None = None
    """Hold the weights of the experts' linear layers in int8, by torchao."""

    @model_validator(mode="after")
    def _can_be_quantized(self) -> "Computing":
        if self.quantize == "int8" and self.dtype == "float64":
            raise ValueError(INT8_IN_FLOAT64)
        return self


class SamplingMethod(Described):
    """How samples are drawn from a model: what ``hddm sample`` and requests to a service have in common."""

    steps: Positive | None = None
    """Solver steps. Default: 25, or a distilled student's own."""
    strategy: StrategyName | None = None
    """Strategy: draw, commit-X, full, top-K, threshold-X or nucleus-X. Default: the ensemble's."""
    solver: SolverName | None = None
    """ODE solver. Default: adams-moulton; euler for a distilled student, `mask` and `edit_from`."""
    shift: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Shift of the time grid; 1 is even. Default: the model's own."""
    router_every: Positive = 1
    """Network calls per call of the router."""
    guidance_scale: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Guidance scale; 1 is no guidance."""
    guide_by: GuideBy = "condition"
    """Guide away from the unconditional prediction or from each expert's weak model."""
    cfg_channels: Positive | None = None
    """Number of channels to guide, such as 3 for DiT. Default: all."""
    guidance_interval: Annotated[Interval, Shown("LOW HIGH")] = (0.0, 1.0)
    """Noise levels t that are guided."""
    guidance_rescale: Share = 0.0
    """Strength of rescaling to the unguided standard deviation, 0 to 1."""
    guidance_norm: GuidanceNorm | None = None
    """Numbers whose unguided norm is kept: rows, as the pipeline of Lumina 2 does."""

    @model_validator(mode="after")
    def _has_one_size(self) -> "SamplingMethod":
        refuse_two_sizes(self.guidance_rescale, self.guidance_norm)
        return self

    @property
    def guidance(self) -> Guidance:
        """The options of guidance as one."""
        options = {name: getattr(self, option) for name, option in GUIDANCE_OPTIONS.items()}
        return Guidance(**options)

    @property
    def arguments(self) -> dict[str, Any]:
        """The same as arguments of `hddm.sampling.plan`."""
        names = ("steps", "strategy", "solver", "shift", "router_every", "guidance")
        return {name: getattr(self, name) for name in names}


class SampleSettings(Computing, SamplingMethod):
    """Options of ``hddm sample``, as recorded beside the images.

    Image i, counted from ``start``, depends on ``seed`` and i alone, not on the batch size.
    """

    num_images: Positive = 16
    """Number of images."""
    seed: Seed = 0
    """Seed of all random numbers."""
    start: Seed = 0
    """Number of the first image, to continue or to split work."""
    prompts: tuple[str, ...] = ()
    """Text prompt; several are cycled over the images."""
    negative_prompt: str | None = None
    """Text that guidance moves away from. Default: no text."""
    long_prompt: bool = False
    """Read prompts of more than 77 tokens in chunks, instead of cutting them."""
    clip_skip: Count = 0
    """Number of CLIP's last layers to leave out."""
    class_labels: str | None = None
    """Class names or numbers, separated by commas and cycled over the images."""
    conditions: InputPath | None = None
    """Safetensors file of conditions by name or negative_NAME, cycled over the images."""
    native: NativeName | None = None
    """Sampler of each expert's own kind in place of `solver`, to compare with: see the guide."""
    height: Positive | None = None
    """Height of the images in pixels, with `width`. Default: the experts' own."""
    width: Positive | None = None
    """Width of the images in pixels, with `height`. Default: the experts' own."""
    init_image: InputPath | None = None
    """Image to edit; it is cropped and resized to the output size."""
    strength: Share | None = None
    """Amount of change to `init_image`. Default: 0.8; 1 with `mask`."""
    mask: InputPath | None = None
    """Mask image, white where `init_image` is replaced."""
    resampling_steps: Positive | None = None
    """Repeats of each step with `mask`. Default: 10."""
    edit_from: str | None = None
    """Text that describes `init_image`, to edit it to `prompt`."""
    expert: Annotated[int, Field(ge=0)] | None = None
    """Index of an expert to use alone, without the router."""
    batch_size: Positive = 64
    """Images computed together; it affects rounding only."""
    offload: Literal["none", "ram", "disk"] = "none"
    """Place of idle experts: on the device (none), in memory or on disk."""
    max_memory: Memory | None = None
    """Limit of weights on the device with `offload`, such as 6GB. Default: room for one expert."""
    output_type: Literal["png", "latent"] = "png"
    """PNG images, or the experts' output as latents."""
    metadata: bool = True
    """Write into each PNG file how it was made: prompt, seed, steps, model, and more."""

    @property
    def labels(self) -> list[str]:
        """Class names or numbers, one by one."""
        if self.class_labels is None:
            return []
        return [one.strip() for one in self.class_labels.split(",")]

    @property
    def numbers(self) -> range:
        """Numbers of the images."""
        return range(self.start, self.start + self.num_images)


def _lists(value: Any) -> Any:
    """Split each of several texts ``a,b`` into its names."""
    return [one.split(",") if isinstance(one, str) else one for one in value]


def _without_names(value: Any) -> Any:
    """Split each of several texts ``NAME=a,b`` or ``a,b`` into the names a and b."""
    found = []
    for one in value:
        if isinstance(one, str):
            _, _, names = one.rpartition("=")
            found.append(names.split(","))
        else:
            found.append(one)
    return found


def _domains(value: Any) -> Any:
    """Read texts ``NAME=a,b`` as lists of names, by the name of their domain."""
    if isinstance(value, Mapping):
        return value
    found = {}
    for one in value:
        name, _, names = one.partition("=")
        found[name] = names.split(",")
    return found


def _shares(value: Any) -> Any:
    """Shares by expert, of texts ``EXPERT=0.3``; `HddmError` for one without."""
    if isinstance(value, Mapping):
        return value
    shares: dict[str, float] = {}
    for one in value:
        name, _, share = one.rpartition("=")
        try:
            shares[name] = float(share)
        except ValueError:
            name = ""
        if not name:
            raise HddmError("write EXPERT=0.3, the folder of an expert and its part")
    return shares


class SourceSettings(Described):
    """How images are read."""

    max_bad: Count = 0
    """Number of broken images to accept; they are listed by name."""
    caption_column: str | None = None
    """Column of captions. Default: text or caption."""
    label_column: str | None = None
    """Column of class labels. Default: label."""


class PartitionSettings(SourceSettings):
    """How images are divided into shards."""

    classes: Annotated[
        tuple[tuple[str, ...], ...], BeforeValidator(_without_names), Shown("NAME=CLASS,CLASS")
    ] = ()
    """Classes of one shard, to split by class and not by content; one per shard."""
    only: Annotated[str | None, Shown("CLASS,CLASS")] = None
    """Classes to take. Default: all."""
    seed: Seed = 0
    """Seed of all random numbers."""
    features: str = "pixels"
    """Features: pixels, efficientnet-lite0, dinov2, clip, a model folder or OWNER/NAME on the hub."""
    cache: Path | None = None
    """Folder for features. Default: OUT.features."""
    held_out: Annotated[float, Field(ge=0, lt=1), Shown("SHARE")] = 0.0
    """Average share of each shard to keep from training."""


class EncodingSettings(Described):
    """How images are resized and stored; networks run in float32."""

    vae: ModelPath | None = None
    """Folder of an AutoencoderKL or AutoencoderTiny. Default: store pixels."""
    text_encoder: ModelPath | None = None
    """Folder of a CLIP text encoder. Default: store no text tokens."""
    tokenizer: ModelPath | None = None
    """Folder of the text encoder's tokenizer."""
    resolution: Positive | None = None
    """Side to resize and crop images to. Default: keep their size."""
    random_flip: bool = False
    """Also encode mirrored images, for `random_flip=True` in training."""
    batch_size: Positive = 16
    """Images encoded together."""
    device: DeviceName = "auto"
    """Device: auto, cpu, cuda, cuda:1 or mps."""
    dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    """Number format of stored latents and text tokens."""
    max_bad: Count = 0
    """Number of broken images to accept; they are listed by name."""


class Reading(Described):
    """How a checkpoint is read."""

    allow_pickle: bool = False
    """Read weights from pickle files, without running their code."""
    num_heads: Positive | None = None
    """Number of attention heads, for networks of unusual size."""
    sample_size: Positive | None = None
    """Side of a sample; in latents, 128 for pictures of 1024 pixels. Default: as in the source."""
    weights: Literal["ema", "raw"] | None = None
    """Set of weights. Default: ema if the source has it."""
    variant: str | None = None
    """Variant of the weights file, such as fp16."""
    preset: PresetName | None = None
    """Published convention of a single file: schedule, prediction, latent scale, size and heads."""
    tokenizer: ModelPath | None = None
    """Folder of CLIP's tokenizer, for a single file. Default: the package open-clip-torch."""


class Conversion(Reading):
    """How a checkpoint is converted."""

    schedule: InputPath | None = None
    """Noise schedule, a scheduler_config.json. Default: as in the source."""
    prediction_type: PredictionName | None = None
    """Quantity that the network predicts. Default: as in the source."""
    noise_range: NoiseRange | None = None
    """Noise levels t (0 data, 1 noise) that the expert covers, such as 0.5:1. Default: all."""
    data_range: DataRange | None = None
    """Pixels of black and white as it was trained on them, such as 0,1. Default: -1,1."""
    text_dim: Positive | None = None
    """Width of text tokens, to add attention to them."""
    licence: str | None = None
    """Licence of the weights. Default: as in the source."""
    device: DeviceName = "auto"
    """Device that the expert is compared with its source on."""


class AssemblySettings(Described):
    """Decisions on the experts of an ensemble, and its other components."""

    strategy: StrategyName | None = None
    """Recommended strategy. Default: draw, and full where weights by noise level mix experts."""
    vae: ModelPath | None = None
    """Folder of this component. Default: the experts' own."""
    text_encoder: ModelPath | None = None
    """Folder of this component. Default: the experts' own."""
    tokenizer: ModelPath | None = None
    """Folder of this component. Default: the experts' own."""
    trust_components: bool = False
    """Accept a VAE or text encoder for experts that do not record theirs."""
    base: Annotated[tuple[Path, ...], MODEL] = ()
    """Base of LoRA experts, if it was moved since training."""
    share: Annotated[dict[str, Share], BeforeValidator(_shares), Shown("EXPERT=SHARE")] | None = (
        None
    )
    """An expert's share of all data. Default: by size of its shard."""
    domain: Annotated[
        tuple[tuple[str, ...], ...], BeforeValidator(_lists), Shown("EXPERT,EXPERT")
    ] = ()
    """Experts for different noise levels of the same data. Default: those of one shard."""
    classes: InputPath | dict[str, tuple[str, ...] | dict[int | str, str]] | None = None
    """YAML file with class names for experts whose classes are numbers."""
    diffusers_pipeline: bool = False
    """Add a pipeline.py, so that diffusers opens it."""


class EvaluationSettings(Described):
    """Images to compare with, and the measures to take."""

    held_out: Annotated[Path, READ, Shown("FOLDER")] | None = None
    """Images that no model was trained on, or their partition folder."""
    validation: Annotated[Path, READ, Shown("FOLDER")] | None = None
    """Images to choose settings by, in place of `held_out`; no model was trained on them."""
    features: str = "auto"
    """Features: auto, inception, efficientnet-lite0, digits-classifier, classifier (trained on `reference`)
    or a file."""
    save_classifier: Path | None = None
    """File to save the trained classifier to, for other evaluations."""
    domain: (
        Annotated[dict[str, tuple[str, ...]], BeforeValidator(_domains), Shown("NAME=CLASS,CLASS")]
        | None
    ) = None
    """Classes of a domain, for results by domain; needs a classifier and class folders."""
    mirrored: bool = False
    """Count a mirrored training image as a copy, after `random_flip=True`."""
    brief: bool = False
    """Measure only what is fast: no kernel distances, no diversity within conditions."""
    allow_few: bool = False
    """Accept fewer images than features, marked as not comparable."""
    max_bad: Count = 0
    """Number of broken images to accept; they are listed by name."""


def _check_strategies(names: tuple[str, ...]) -> None:
    for name in names:
        Strategy.parse(name)


class ObjectiveSettings(Described):
    """How a model is scored on held-out images by its objective (`hddm.objective`)."""

    strategies: Annotated[tuple[str, ...], _checked(_check_strategies)] = ()
    """Strategy to score; may be repeated. Default: the ensemble's own."""
    num_images: Positive = 512
    """Most images whose errors are measured, spread evenly over all."""
    noise_draws: Positive = 1
    """Noise per image and level, over which errors are averaged."""
    likelihood_images: Count = 64
    """Most images whose likelihood is measured, spread evenly over all; 0 for none."""
    smallest_noise: Annotated[float, Field(gt=0, lt=0.5)] = 0.02
    """Noise level t down to which the likelihood is integrated."""
    seed: Seed = 0
    """Seed of all random numbers."""
    batch_size: Positive = 128
    """Images that are computed together."""
    device: DeviceName = "auto"
    """Device: auto, cpu, cuda, cuda:1 or mps."""


class CalibrationSettings(Described):
    """Samples to calibrate an expert on, without a shard."""

    num_images: Annotated[int, Field(ge=16)] = 512
    """Samples to draw, without `data`."""
    steps: Positive = 50
    """Sampling steps, without `data`."""
    seed: Seed = 0
    """Seed of all random numbers."""


class Limits(Described):
    """Limits of a service: of its requests, and of the images that it computes together."""

    batch_size: Positive = 16
    """Maximum number of images that an expert computes together."""
    batching: bool = True
    """Batch images of several requests. Default: on."""
    max_images: Positive = 10
    """Maximum number of images per request."""
    max_steps: Positive = 250
    """Maximum number of steps per request."""
    max_pixels: Positive | None = None
    """Maximum number of pixels of an image. Default: twice those of the experts' own size."""
    max_upload: Memory = ByteSize(16_000_000)
    """Maximum size of an upload with its images, such as 16MB."""
    max_queue: Positive = 64
    """Maximum number of unfinished requests; further ones get status 429."""
    timeout: Annotated[float, Field(ge=0.1), Shown("SECONDS")] = 600.0
    """Time limit of a request, including its wait."""


class ServeSettings(Limits, Computing):
    """Where the networks of a service run, and its limits."""

    allow_program: bool = False
    """Open experts whose networks are programs, as you would run their authors' code."""
