"""Records of experts and routers on disk, which define what the weights beside them mean.

`ExpertRecord` is ``expert.json``, `RouterRecord` is ``router.json``. They are read without torch.
`hddm.experts.record_folders` has the tensors beside them, `hddm.experts.expert` the expert.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from hddm.calibration_records import FILE_NAME as CALIBRATION
from hddm.condition_names import LABELS, TEXT
from hddm.experts.adapter_records import ADAPTER_FILES, ADAPTER_WEIGHTS, AdapterRecord
from hddm.networks.identity import TextEncoderRecord, UnreadTextEncoder, UnreadVae, VaeRecord
from hddm.networks.programs.archive import PROGRAM
from hddm.predictions import PredictionType
from hddm.topic_records import TOPIC
from hddm.units import Units
from hddm.utils.errors import HddmError, UsageError
from hddm.utils.records import (
    ENSEMBLE_FILE,
    MANIFEST,
    WEIGHTS,
    WHOLE,
    AboveZero,
    ComposedName,
    Count,
    NoiseRange,
    PositiveNumber,
    Record,
    SparseRecord,
    damage,
    read_record,
)
from hddm.utils.records import EXPERT_FILE as EXPERT_FILE
from hddm.utils.records import ROUTER_FILE as ROUTER_FILE

FORMAT = "1.6"
OWN_UNITS_FORMAT = "2.0"
"""Of experts that earlier releases would read without an error, and wrongly: they have data of their own."""
PARIS_EXPERT = "expert_"
"""Beginning of the names of the experts' folders in the Paris release (`hddm.experts.paris`)."""
NULL_FILE = "null_conditions.safetensors"
EXTRAS_FILE = "source_extras.safetensors"
"""Tensors of a source that its expert does not need, kept for write-back."""
SOURCE_NAMES = "source_names.json"
"""Names of tensors in the single file that an expert comes from, kept for write-back."""
WEAK_FILE = "weak.safetensors"
"""Weights of an early step of the training, in bfloat16, to guide by (`hddm.guidance.Guidance`)."""
FILES = (
    NULL_FILE,
    EXTRAS_FILE,
    SOURCE_NAMES,
    CALIBRATION,
    TOPIC,
    WEIGHTS,
    WEAK_FILE,
    *ADAPTER_FILES,
    PROGRAM,
    "config.json",
)
"""Files of an expert folder that are read, besides its record."""


class ShardRecord(Record):
    """Shard that an expert was trained on."""

    index: Count
    num_shards: Count
    hash: str
    images: Annotated[Count, Field(ge=1)]
    class_images: tuple[Count, ...] = ()
    """Images of each class, in the order of the expert's ``classes``; empty where images have no labels."""
    partition: str | None = None
    """The hash that all shards of one partition share."""
    sketch: tuple[str, ...] = ()
    """Hashes of some images (`hddm.data.shard_records.sketch_of`), to estimate how far shards overlap."""


class SourceRecord(Record):
    """Checkpoint that an expert was converted from."""

    layout: str
    files: dict[str, str]
    """SHA-256 by file name."""
    scheduler: dict[str, Any] | None = None
    """The scheduler config beside the weights, with the keys of sampling."""
    prediction_source: str = ""
    """What says what the network predicts; empty in records before format 1.6."""
    prefix: str = ""
    """Stripped from every key, as a data-parallel or compiled module leaves it."""
    options: dict[str, Any] = Field(default_factory=dict)
    hddm: str
    """Version that converted it."""
    before: "SourceRecord | None" = None
    """If an expert folder was converted again: its own source."""

    @property
    def chain(self) -> tuple["SourceRecord", ...]:
        """This one and those before it."""
        return (self, *(self.before.chain if self.before is not None else ()))

    @property
    def first(self) -> "SourceRecord":
        """The checkpoint at the beginning of the chain."""
        return self.chain[-1]


def _without_interval(conditions: tuple[str, ...]) -> tuple[str, ...]:
    """Students of few steps once recorded the length of a step as a condition."""
    return tuple(name for name in conditions if name != "interval")


class ExpertRecord(SparseRecord):
    """``expert.json``: conventions that define what the weights beside it mean."""

    oldest = "1.5"
    sparse = ("data_scale", "data_shift", "negated", "unread_text_encoder")
    remedy = "convert or train the expert anew"

    format: str = FORMAT
    objective: Literal["ddpm", "flow"]
    prediction_type: PredictionType
    schedule: dict[str, Any]
    schedule_source: str
    time_scale: AboveZero
    sample_shape: tuple[int, int, int]
    data_scale: float = 1.0
    """Its own data are this times its samples, plus ``data_shift`` (`hddm.units`)."""
    data_shift: tuple[float, ...] = ()
    """None for 0, one number, or one for each channel."""
    negated: bool = False
    """The network gives the negative of what it predicts, as EDM's own do for v."""
    space: Literal["pixels", "latents"] = "pixels"
    latent_scale: AboveZero | None = 1.0
    """Samples are data × this factor; 1 for pixels in [-1, 1], None where the source does not say."""
    vae: VaeRecord | None = None
    """None for pixels, and where the source does not hold its VAE."""
    unread_vae: UnreadVae | None = None
    """The VAE that the source holds, where hddm cannot read it; none in records before format 1.6."""
    text_encoder: TextEncoderRecord | None = None
    unread_text_encoder: UnreadTextEncoder | None = None
    """The text encoder that the source holds, where hddm cannot read it."""
    shift: AboveZero = 1.0
    """Shift of the time grid that its samples want (`hddm.times.time_grid`)."""
    sampling_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps of a student of few steps, whose network predicts mean velocities (`hddm.training.mean_flow`)."""
    noise_range: NoiseRange = WHOLE
    """The part of t that it was trained for (`hddm.velocity`)."""
    variance_head: bool = False
    """The network also outputs a learned variance, which is dropped."""
    conditions: Annotated[tuple[str, ...], AfterValidator(_without_interval)] = ()
    classes: tuple[ComposedName, ...] = ()
    null_class: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    weights: Literal["ema", "raw", "unstated"] = "ema"
    """Averaged or as the optimiser left them; a source with one set may not say."""
    weights_sha256: None = Field(default=None, exclude=True)
    calibration_sha256: None = Field(default=None, exclude=True)
    round_time: Literal[False] = Field(default=False, exclude=True)
    """Of no use, and null and false in folders of format 1.5; their manifests have all hashes."""
    shard: ShardRecord | None = None
    training: dict[str, Any] = Field(default_factory=dict)
    training_calibration: bool = False
    """The calibration is part of the parametrisation that it was trained in; it must not be fitted anew."""
    source: SourceRecord | None = None
    licence: str | None = None
    adapter: AdapterRecord | None = None
    """Where the weights are those of a base, changed (`hddm.experts.lora`); None where they are here."""

    def refuse_student(self, name: str, why: str) -> None:
        """Raise an `HddmError` that says ``why`` ``name``, if it is a student of few steps, is refused."""
        if self.sampling_steps is not None:
            raise HddmError(f"{name}: is a student of few steps; {why}")

    @model_validator(mode="after")
    def _has_sound_units(self) -> "ExpertRecord":
        self.units.check_channels(self.sample_shape)
        return self

    @property
    def units(self) -> Units:
        """Units of its own data, beside those of its schedule."""
        return Units.of_channels(self.data_scale, self.data_shift)

    @property
    def needed_format(self) -> str:
        """The format of its folder: a new major version only where earlier releases would read it wrongly."""
        is_edm = self.schedule.get("name") == "edm"
        has_own = is_edm or self.negated or not self.units.is_common
        has_statistics = self.vae is not None and bool(self.vae.mean)
        return OWN_UNITS_FORMAT if has_own or has_statistics else FORMAT

    @property
    def takes_text(self) -> bool:
        """True for an expert of prompts."""
        return TEXT in self.conditions

    @property
    def takes_classes(self) -> bool:
        """True for an expert of classes."""
        return LABELS in self.conditions

    @property
    def latent_space(self) -> VaeRecord | UnreadVae | None:
        """The VAE whose latents its samples are, read or not; None where that is not recorded."""
        return self.vae or self.unread_vae

    @property
    def makes_pictures(self) -> bool:
        """True where samples are pixels, gray or in colour, and no VAE is needed to see them."""
        return self.space == "pixels" and self.sample_shape[0] in (1, 3)


MOST_BY_LUCK = 2.0
"""Standard deviations above chance up to which a router's accuracy shows nothing."""


def is_at_chance(found: Any) -> bool:
    """True if a router's ``accuracy`` is known to be no better than always naming the largest shard.

    ``found`` is what `hddm.training.router_accuracy.accuracy_of` measured; one shard needs no telling apart.
    """
    match found:
        case {"accuracy": float(accuracy), "chance": float(chance), "deviation": float(deviation)}:
            return chance < 1 and accuracy <= chance + MOST_BY_LUCK * deviation
    return False


class RouterRecord(SparseRecord):
    """``router.json``: the shards that a router distinguishes, its time scale, and the condition it sees."""

    oldest = "1.5"
    sparse = ("condition", "classes", "text_encoder")
    remedy = "train the router anew"

    format: str = FORMAT
    time_scale: AboveZero
    sample_shape: tuple[int, int, int]
    shard_hashes: tuple[str, ...]
    """One per shard, in the order of the router's outputs; none where the shards are not known."""
    shard_images: tuple[Count, ...]
    temperatures: Annotated[tuple[PositiveNumber, ...], Field(min_length=1)] = (1.0,)
    """Logits are divided by these, at times spread evenly over [0, 1] and linearly between."""
    calibration: dict[str, Any] = Field(default_factory=dict)
    """The fit of the temperatures, with the expected calibration error before and after."""
    condition: Literal["class", "text"] | None = None
    """What it sees of a sample's conditions."""
    classes: tuple[ComposedName, ...] = ()
    """Names of the classes that it sees; their number is the label for none."""
    text_encoder: TextEncoderRecord | None = None
    """The text encoder whose tokens it sees; those of the empty prompt are in `NULL_FILE`."""
    training: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _says_what_it_sees(self) -> "RouterRecord":
        has = {"class": bool(self.classes), "text": self.text_encoder is not None}
        for name, is_there in has.items():
            if is_there != (self.condition == name):
                raise ValueError(
                    "a router has classes if its condition is class, and a text_encoder if it is text"
                )
        return self


def joint_licence(licences: Iterable[str | None]) -> str | None:
    """State that all of these licences hold at once; None where none is stated."""
    return " AND ".join(sorted(set(filter(None, licences)))) or None


def weights_in(folder: Path) -> Path | None:
    """The file with the weights, or the adapter, of an expert folder."""
    return next(
        (folder / name for name in (WEIGHTS, ADAPTER_WEIGHTS) if (folder / name).is_file()), None
    )


def not_a_model(folder: Path, found: str) -> UsageError:
    """The error for a folder that a model was expected in, with a remedy; ``found`` says what is missing."""
    if folder.is_file():
        remedy = "it is a file, and a model is a folder; " + _remedy_for_file(folder)
    elif not folder.is_dir():
        remedy = "there is no such folder"
    elif folder.suffix == ".run":
        remedy = f"it is the run of a training, and its expert is {folder.with_suffix('')}"
    elif (folder / ENSEMBLE_FILE).exists():
        remedy = "it is an ensemble; name one of its experts"
    else:
        remedy = "hddm convert makes an expert of a checkpoint"
    return UsageError(f"{folder}: {found}; {remedy}")


def refuse_no_model(folder: Path) -> None:
    """Raise `not_a_model` where ``folder`` holds no expert, no ensemble and no part of the Paris release.

    Names of files decide, so that a slip is found before libraries are imported to open a model.
    """
    is_model = any((folder / record).exists() for record in (EXPERT_FILE, ENSEMBLE_FILE))
    if not is_model and not any(folder.glob(f"{PARIS_EXPERT}*")):
        raise no_model(folder)


def no_model(folder: Path) -> UsageError:
    """The error for a folder that holds neither an expert nor an ensemble."""
    found = f"neither an expert folder ({EXPERT_FILE}) nor an ensemble ({ENSEMBLE_FILE})"
    return not_a_model(folder, found)


def refuse_no_expert(folder: Path) -> None:
    """Raise `not_a_model` where ``folder`` is no expert folder."""
    if not (folder / EXPERT_FILE).exists():
        raise not_a_model(folder, f"no expert folder ({EXPERT_FILE})")


def _remedy_for_file(path: Path) -> str:
    """What to name in place of a file: the model's folder that it belongs to, or an expert made of it."""
    if any((path.parent / record).exists() for record in (EXPERT_FILE, ENSEMBLE_FILE)):
        return f"name {path.parent}"
    return f"hddm convert {path} --out EXPERT makes an expert of a checkpoint"


def read_expert_record(folder: Path) -> ExpertRecord:
    """The record of an expert folder; raises as `read_record`, and `not_a_model`."""
    refuse_no_expert(folder)
    return read_record(folder / EXPERT_FILE, ExpertRecord, OWN_UNITS_FORMAT)


def remedy(folder: Path) -> str:
    """Advice for a folder whose files have changed since they were written."""
    return (
        "copy it again, whole, from where it was made, or train it anew; a calibration alone is mended by "
        f"hddm calibrate {folder}"
    )


def foreign_files(folder: Path, sha256: Callable[[Path], str]) -> tuple[str, ...]:
    """List files that differ from those written with the expert, by its manifest."""
    found = damage(folder, EXPERT_FILE, FILES, sha256)
    return (*found, f"by its {MANIFEST}; {remedy(folder)}") if found else ()
