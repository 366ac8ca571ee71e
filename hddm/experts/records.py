"""Experts and routers on disk: a network folder, and the record that defines what its weights mean.

`ExpertRecord` is ``expert.json``, `RouterRecord` is ``router.json``; `field_of` makes an expert a velocity
field.
"""

import copy
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from diffusers import ModelMixin
from pydantic import AfterValidator, Field
from safetensors.torch import save_file
from torch import Tensor, nn

from hddm.calibration import FILE_NAME as CALIBRATION
from hddm.calibration import Calibration
from hddm.experts.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdapterRecord, Merged, base_of
from hddm.networks.families import family_of, known_family
from hddm.networks.families.expert import EXPERT
from hddm.networks.folders import WEIGHTS, Unread, cast, of_experts, unread_network
from hddm.networks.identity import TextEncoderRecord, UnreadVae, VaeRecord
from hddm.networks.offload import Shelf, StoredNetwork
from hddm.networks.transformers import RouterTransformer
from hddm.networks.wrappers import NetworkWrapper
from hddm.routers import TOPIC, Topic
from hddm.schedules import from_config
from hddm.utils.errors import HddmError, UsageError
from hddm.utils.files import link_or_copy, write_json
from hddm.utils.records import (
    ENSEMBLE_FILE,
    MANIFEST,
    WHOLE,
    AboveZero,
    ComposedName,
    Count,
    NoiseRange,
    PositiveNumber,
    Record,
    damage,
    read_record,
    refuse_damaged,
    write_manifest,
)
from hddm.utils.records import EXPERT_FILE as EXPERT_FILE
from hddm.utils.records import ROUTER_FILE as ROUTER_FILE
from hddm.utils.tensors import read_safetensors, refuse_non_finite
from hddm.velocity import PredictionType, VelocityField

FORMAT = "1.6"
NULL_FILE = "null_conditions.safetensors"
EXTRAS_FILE = "source_extras.safetensors"
"""Tensors of a source that its expert does not need, kept for write-back."""
WEAK_FILE = "weak.safetensors"
"""Weights of an early step of the training, in bfloat16, to guide by (`hddm.velocity.Guidance`)."""
_ADAPTER = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
FILES = (NULL_FILE, EXTRAS_FILE, CALIBRATION, TOPIC, WEIGHTS, WEAK_FILE, *_ADAPTER, "config.json")
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
    def first(self) -> "SourceRecord":
        """The checkpoint at the beginning of the chain."""
        return self if self.before is None else self.before.first


def _without_interval(conditions: tuple[str, ...]) -> tuple[str, ...]:
    """Students of few steps once recorded the length of a step as a condition."""
    return tuple(name for name in conditions if name != "interval")


class ExpertRecord(Record):
    """``expert.json``: conventions that define what the weights beside it mean."""

    oldest = "1.5"
    remedy = "convert or train the expert anew"

    format: str = FORMAT
    objective: Literal["ddpm", "flow"]
    prediction_type: PredictionType
    schedule: dict[str, Any]
    schedule_source: str
    time_scale: AboveZero
    sample_shape: tuple[int, int, int]
    space: Literal["pixels", "latents"] = "pixels"
    latent_scale: AboveZero | None = 1.0
    """Samples are data × this factor; 1 for pixels in [-1, 1], None where the source does not say."""
    vae: VaeRecord | None = None
    """None for pixels, and where the source does not hold its VAE."""
    unread_vae: UnreadVae | None = None
    """The VAE that the source holds, where hddm cannot read it; none in records before format 1.6."""
    text_encoder: TextEncoderRecord | None = None
    shift: AboveZero = 1.0
    """Shift of the time grid that its samples want (`hddm.sampling.time_grid`)."""
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

    @property
    def latent_space(self) -> VaeRecord | UnreadVae | None:
        """The VAE whose latents its samples are, read or not; None where that is not recorded."""
        return self.vae or self.unread_vae

    @property
    def makes_pictures(self) -> bool:
        """True where samples are pixels, gray or in colour, and no VAE is needed to see them."""
        return self.space == "pixels" and self.sample_shape[0] in (1, 3)


class RouterRecord(Record):
    """``router.json``: the shards that a router distinguishes, and its time scale."""

    oldest = "1.5"
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
    training: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class Expert:
    """An expert: its record, and a network whose weights are in memory or yet to be read.

    ``weights`` reads them in a dtype, with any adapter merged; without it the network has them. ``nulls`` has
    the value of no condition by network keyword, without batch dimension; that of ``class_labels`` is in the
    record. ``weak`` is the network with the weights to guide by. ``folder`` is the expert's, None in memory;
    ``base`` that of the weights that its adapter changes.
    """

    network: ModelMixin
    record: ExpertRecord
    calibration: Calibration | None = None
    nulls: Mapping[str, Tensor] = field(default_factory=dict)
    weak: Unread[ModelMixin] | None = None
    weights: Callable[[torch.dtype], dict[str, Tensor]] | None = None
    folder: Path | None = None
    base: Path | None = None
    topic: Topic | None = None

    @property
    def name(self) -> str:
        """The expert's name in messages."""
        return "an expert in memory" if self.folder is None else str(self.folder)

    @property
    def unread(self) -> Unread[ModelMixin]:
        """Its network, to be filled with its weights."""
        assert self.weights is not None
        return Unread(self.network, self.weights)

    def apart(self) -> "Expert":
        """The expert with weights to be read: those in memory by a copy, which leaves its network alone."""
        if self.weights is not None:
            return self
        unread = unread_as(self.network, self.network.state_dict())
        return replace(self, network=unread.network, weights=unread.read)

    def read(self, dtype: torch.dtype = torch.float32) -> "Expert":
        """The expert with its weights in memory, which then belong to no folder."""
        network, record = self.unread.load(dtype), without_adapter(self.record)
        return replace(self, network=network, record=record, weights=None, folder=None, base=None)


def unread_as(network: ModelMixin, tensors: Mapping[str, Tensor]) -> Unread[ModelMixin]:
    """A copy of ``network`` without weights, to be filled with ``tensors``, in memory, on demand."""
    held = network.state_dict()
    owned = [*network.parameters(), *(b for n, b in network.named_buffers() if n in held)]
    # A copy that stands where its weights would be: whoever places weights must not touch this network.
    memo = {id(one): type(one)(torch.empty_like(one, device="meta")) for one in owned}
    empty: ModelMixin = copy.deepcopy(network, memo).requires_grad_(False)
    return Unread(empty, functools.partial(cast, dict(tensors)))


def null_conditions(null_class: int | None) -> dict[str, Tensor]:
    """Value of no class, by network keyword."""
    return {} if null_class is None else {"class_labels": torch.tensor(null_class)}


def save_expert(
    folder: Path, expert: Expert, dtype: torch.dtype = torch.float32, keeps_adapter: bool = False
) -> None:
    """Write an expert into an existing empty ``folder``.

    Weights that are not in memory are read in ``dtype``, and its weak model's in bfloat16. With
    ``keeps_adapter`` the files of its adapter are taken as they are; else its weights are merged.
    """
    expert.network.save_config(folder)
    record, tensors = expert.record, expert.network.state_dict()
    if keeps_adapter and record.adapter and expert.folder:
        for name in _ADAPTER:
            link_or_copy(expert.folder / name, folder / name)
    else:
        record = without_adapter(record)
        if any(value.is_meta for value in tensors.values()):
            tensors = expert.unread.read(dtype)
        here = {name: value.cpu().contiguous() for name, value in tensors.items()}
        save_file(here, folder / WEIGHTS, {"format": "pt"})
    if expert.calibration is not None:
        expert.calibration.save(folder)
    if expert.topic is not None:
        expert.topic.save(folder)
    if expert.weak is not None:
        save_file(expert.weak.read(torch.bfloat16), folder / WEAK_FILE, {"format": "pt"})
    write_records(folder, record, expert.nulls)


def joint_licence(licences: Iterable[str | None]) -> str | None:
    """State that all of these licences hold at once; None where none is stated."""
    return " AND ".join(sorted(set(filter(None, licences)))) or None


def write_records(folder: Path, record: ExpertRecord, nulls: Mapping[str, Tensor]) -> None:
    """Write the record beside the network in ``folder``, and a manifest of all files."""
    if nulls:
        save_file({name: null.contiguous() for name, null in nulls.items()}, folder / NULL_FILE)
    write_json(folder / EXPERT_FILE, record.model_dump(mode="json") | {"format": FORMAT})
    write_manifest(folder, read=(EXPERT_FILE, *FILES))


def weights_in(folder: Path) -> Path | None:
    """The file with the weights, or the adapter, of an expert folder."""
    return next((folder / name for name in (WEIGHTS, ADAPTER_WEIGHTS) if (folder / name).is_file()), None)


def read_nulls(folder: Path) -> dict[str, Tensor]:
    """Null conditions of an expert folder, by network keyword."""
    path = folder / NULL_FILE
    nulls = read_safetensors(path) if path.exists() else {}
    refuse_non_finite(path, nulls)
    return nulls


def as_field(
    expert: Expert, network: Callable[..., Tensor], weak: Callable[..., Tensor] | None = None
) -> VelocityField:
    """An expert as a velocity field that uses ``network``, with any adapter merged, and ``weak`` to guide by.

    Raises `HddmError` for a schedule that is unknown or does not fit the prediction type.
    """
    record = expert.record
    nulls = null_conditions(record.null_class) | dict(expert.nulls)
    try:
        return VelocityField(
            network,
            from_config(record.schedule),
            record.prediction_type,
            record.time_scale,
            expert.calibration,
            conditions=record.conditions,
            null_conditions=nulls,
            sample_shape=record.sample_shape,
            classes=record.classes,
            shift=record.shift,
            weak=None if weak is None else as_field(expert, weak),
            noise_range=record.noise_range,
            sampling_steps=record.sampling_steps,
            inner_guidance=record.training.get("guidance_scale", 1.0) if record.sampling_steps else 1.0,
        )
    except HddmError as error:
        raise HddmError(f"{expert.name}: {error}") from error


def field_of(expert: Expert, device: torch.device | str = "cpu") -> VelocityField:
    """An expert as a velocity field that shares its network; raises as `as_field`."""
    network = wrapped(expert.network, expert.record).to(device)
    weak = None
    if expert.weak is not None:
        weak = stored(expert.weak, expert.record, WEAK_FILE, expert.network.dtype, device, Shelf())
    return as_field(expert, network, weak)


def stored(
    unread: Unread[ModelMixin],
    record: ExpertRecord,
    origin: str,
    dtype: torch.dtype,
    device: torch.device | str,
    shelf: Shelf,
) -> StoredNetwork:
    """A network in the call that experts share, its weights read on demand; ``origin`` names it in errors."""
    common = wrapped(unread.network, record)
    prefix = "model." if isinstance(common, NetworkWrapper) else ""

    def read(dtype: torch.dtype) -> dict[str, Tensor]:
        return {prefix + name: value for name, value in unread.read(dtype).items()}

    return StoredNetwork(common, read, origin, dtype, device, shelf)


def wrapped(network: ModelMixin, record: ExpertRecord) -> nn.Module:
    """``network`` in a `NetworkWrapper`; unchanged where its call already fits."""
    is_common = family_of(network) is EXPERT and not record.variance_head
    return network if is_common else NetworkWrapper(network)


def without_adapter(record: ExpertRecord) -> ExpertRecord:
    """The record of an expert in memory, whose weights include its adapter."""
    return record.model_copy(update={"adapter": None})


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


def _remedy_for_file(path: Path) -> str:
    """What to name in place of a file: the model's folder that it belongs to, or an expert made of it."""
    if any((path.parent / record).exists() for record in (EXPERT_FILE, ENSEMBLE_FILE)):
        return f"name {path.parent}"
    return f"hddm convert {path} --out EXPERT makes an expert of a checkpoint"


def read_expert_record(folder: Path) -> ExpertRecord:
    """The record of an expert folder; raises as `read_record`, and `not_a_model`."""
    if not (folder / EXPERT_FILE).exists():
        raise not_a_model(folder, f"no expert folder ({EXPERT_FILE})")
    return read_record(folder / EXPERT_FILE, ExpertRecord, FORMAT)


def open_expert(
    folder: Path,
    bases: Mapping[str, Path] | None = None,
    with_calibration: bool = True,
    unheld: Collection[str] = (),
) -> Expert:
    """Read an expert folder except for its weights.

    ``bases`` is as for `base_of`. ``with_calibration=False`` skips the calibration, whatever is wrong with
    it. ``unheld`` are files that the caller checks against the manifest. Raises `HddmError` for a record,
    network or weights that are unreadable or do not fit each other, an adapter without its base, and files
    that differ from the manifest; NaN, Inf and another base are found when weights are read.
    """
    record = read_expert_record(folder)
    base = None if record.adapter is None else base_of(folder, record.adapter, bases)
    unread = unread_network(folder, of_experts(), base and base / WEIGHTS)
    if record.adapter is not None and base is not None:
        unread = Unread(unread.network, Merged(folder, record.adapter, base))
    family = known_family(unread.network)
    interface = family.interface(unread.network.config, record.sample_shape[1:])
    stated = {key: getattr(record, key) for key in ("sample_shape", "variance_head", "conditions")}
    found = {key: getattr(interface, key) for key in stated}
    if (classes := interface.num_classes) is not None:
        # A UNet may have been trained with its last class for none; its config does not say.
        null = classes - 1 if interface.null_class is None else interface.null_class
        if record.null_class is not None:
            stated["null_class"], found["null_class"] = record.null_class, null
        stated["classes"], found["classes"] = len(record.classes), min(len(record.classes), classes)
    if differing := [f"{key} {one}, not {found[key]}" for key, one in stated.items() if one != found[key]]:
        raise HddmError(f"{folder}: expert.json says {'; '.join(differing)}, which config.json says")
    calibration = Calibration.load(folder) if with_calibration else None
    nulls = read_nulls(folder)
    skipped = {*unheld, *(() if with_calibration else (CALIBRATION,))}
    known = [name for name in FILES if name not in skipped]
    changed = damage(folder, EXPERT_FILE, known, chosen=lambda name: name not in skipped)
    refuse_damaged(folder, changed, remedy(folder))
    weak = None
    if (folder / WEAK_FILE).exists():
        weak = unread_network(folder, of_experts(), folder / WEAK_FILE)
    topic = Topic.load(folder)
    return Expert(unread.network, record, calibration, nulls, weak, unread.read, folder, base, topic)


def remedy(folder: Path) -> str:
    """Advice for a folder whose files have changed since they were written."""
    return (
        "copy it again, whole, from where it was made, or train it anew; a calibration alone is mended by "
        f"hddm calibrate {folder}"
    )


def save_router(folder: Path, network: RouterTransformer, record: RouterRecord) -> None:
    """Write a router into an existing empty ``folder``."""
    network.save_pretrained(folder)
    write_json(folder / ROUTER_FILE, record.model_dump(mode="json") | {"format": FORMAT})
    write_manifest(folder, read=(ROUTER_FILE, WEIGHTS, "config.json"))


def open_router(folder: Path) -> tuple[Unread[RouterTransformer], RouterRecord]:
    """Read a router folder except for its weights; raises as `open_expert`."""
    record = read_record(folder / ROUTER_FILE, RouterRecord, FORMAT)
    unread = unread_network(folder, {RouterTransformer.__name__: lambda: RouterTransformer})
    return unread, record


def read_router(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[RouterTransformer, RouterRecord]:
    """Read a router folder; raises as `open_expert`."""
    unread, record = open_router(folder)
    network = unread.load(dtype)
    refuse_damaged(folder, damage(folder, ROUTER_FILE))
    network.record = record
    return network, record


def foreign_files(folder: Path, sha256: Callable[[Path], str]) -> tuple[str, ...]:
    """List files that differ from those written with the expert, by its manifest."""
    found = damage(folder, EXPERT_FILE, FILES, sha256)
    return (*found, f"by its {MANIFEST}; {remedy(folder)}") if found else ()
