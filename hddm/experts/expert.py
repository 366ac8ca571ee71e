"""An expert: its record, and its network, whose weights are in memory or yet to be read.

`open_expert` opens a folder, `save_expert` writes one, and `field_of` makes an expert a velocity field.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from safetensors.torch import save_file
from torch import Tensor, nn

from hddm.calibration import FILE_NAME as CALIBRATION
from hddm.calibration import Calibration
from hddm.condition_names import LABELS
from hddm.experts.ensemble_folders import EnsembleRecord, Member
from hddm.experts.lora import ADAPTER_FILES, Merged, base_of
from hddm.experts.records import (
    EXPERT_FILE,
    FILES,
    WEAK_FILE,
    ExpertRecord,
    read_expert_record,
    read_nulls,
    remedy,
    write_records,
)
from hddm.networks.families import family_of, known_family
from hddm.networks.families.expert import EXPERT
from hddm.networks.folders import WEIGHTS, Unread, cast, of_experts, unread_network, write_config
from hddm.networks.offload import Shelf, StoredNetwork
from hddm.networks.wrappers import NetworkWrapper, without_weights
from hddm.prompt_router import Topic
from hddm.schedules import from_config
from hddm.utils.errors import HddmError
from hddm.utils.files import link_or_copy
from hddm.utils.records import damage, refuse_damaged
from hddm.velocity import Resizing, VelocityField

UNDECIDED = Member(folder="")
"""Nothing was decided on an expert."""


@dataclass(frozen=True)
class Expert:
    """An expert: its record, what was decided on it in an ensemble, and its network, once that is opened.

    Args:
        opened: its network with its weights in memory, or one whose weights are read on demand, with any
            adapter merged; None where the record alone was read (`read_experts`).
        record: what the weights mean.
        calibration: moments and weights that improve on the network near t = 1.
        nulls: the value of no condition by network keyword, without batch dimension; that of
            ``class_labels`` is in the record.
        weak: the network with the weights to guide by.
        folder: its folder; None in memory.
        base: folder of the weights that its adapter changes.
        topic: what its captions are about, where that was read.
        member: what was decided on it in its ensemble.
    """

    opened: ModelMixin | Unread[ModelMixin] | None
    record: ExpertRecord
    calibration: Calibration | None = None
    nulls: Mapping[str, Tensor] = field(default_factory=dict)
    weak: Unread[ModelMixin] | None = None
    folder: Path | None = None
    base: Path | None = None
    topic: Topic | None = None
    member: Member = UNDECIDED

    @property
    def name(self) -> str:
        """The expert's name in messages."""
        return "an expert in memory" if self.folder is None else str(self.folder)

    @property
    def place(self) -> Path:
        """The folder of an expert that has one."""
        assert self.folder is not None
        return self.folder

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of its classes, in its own numbering."""
        return self.member.classes or self.record.classes

    @property
    def takes_prompts(self) -> bool:
        """True if it reads text, or has classes, which a prompt may name."""
        return self.record.takes_text or self.record.takes_classes

    @property
    def network(self) -> ModelMixin:
        """Its network, with or without weights."""
        assert self.opened is not None
        return self.opened.network if isinstance(self.opened, Unread) else self.opened

    @property
    def unread(self) -> Unread[ModelMixin]:
        """Its network, to be filled with its weights."""
        assert isinstance(self.opened, Unread)
        return self.opened

    def apart(self) -> "Expert":
        """The expert with weights to be read: those in memory by a copy, which leaves its network alone."""
        if isinstance(self.opened, Unread):
            return self
        return replace(self, opened=unread_as(self.network, self.network.state_dict()))

    def read(self, dtype: torch.dtype = torch.float32) -> "Expert":
        """The expert with its weights in memory, which then belong to no folder."""
        network, record = self.unread.load(dtype), without_adapter(self.record)
        return replace(self, opened=network, record=record, folder=None, base=None)


def read_experts(folders: Sequence[Path], members: Sequence[Member]) -> list[Expert]:
    """Read the records alone of expert folders; ``members`` are what was decided on them."""
    experts = []
    for folder, member in zip(folders, members, strict=True):
        experts.append(Expert(None, read_expert_record(folder), folder=folder, member=member))
    return experts


def experts_in(ensemble: Path, record: EnsembleRecord) -> list[Expert]:
    """Read the records alone of the experts in an ensemble folder."""
    return read_experts([ensemble / member.folder for member in record.experts], record.experts)


def decided(experts: Sequence[Expert], members: Sequence[Member]) -> list[Expert]:
    """``experts`` with what was decided on each, its ``members``."""
    return [replace(one, member=member) for one, member in zip(experts, members, strict=True)]


def with_decisions(experts: Sequence[Expert], **decisions: Sequence[Any]) -> list[Expert]:
    """``experts`` with these fields of their `Member` replaced, each by one value per expert."""
    updated = []
    for k, one in enumerate(experts):
        own = {name: values[k] for name, values in decisions.items()}
        updated.append(replace(one, member=one.member.model_copy(update=own)))
    return updated


def unread_as(network: ModelMixin, tensors: Mapping[str, Tensor]) -> Unread[ModelMixin]:
    """A copy of ``network`` without weights, to be filled with ``tensors``, in memory, on demand."""
    return Unread(without_weights(network), functools.partial(cast, dict(tensors)))


def null_conditions(null_class: int | None) -> dict[str, Tensor]:
    """Value of no class, by network keyword."""
    return {} if null_class is None else {LABELS: torch.tensor(null_class)}


def save_expert(
    folder: Path, expert: Expert, dtype: torch.dtype = torch.float32, keeps_adapter: bool = False
) -> None:
    """Write an expert into an existing empty ``folder``.

    Weights that are not in memory are read in ``dtype``, and its weak model's in bfloat16. With
    ``keeps_adapter`` the files of its adapter are taken as they are; else its weights are merged.
    """
    write_config(expert.network, folder)
    record, tensors = expert.record, expert.network.state_dict()
    if keeps_adapter and record.adapter and expert.folder:
        for name in ADAPTER_FILES:
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


def as_field(
    expert: Expert, network: Callable[..., Tensor], weak: Callable[..., Tensor] | None = None
) -> VelocityField:
    """An expert as a velocity field that uses ``network``, with any adapter merged, and ``weak`` to guide by.

    Raises `HddmError` for a schedule that is unknown or does not fit the prediction type.
    """
    record = expert.record
    nulls = null_conditions(record.null_class) | dict(expert.nulls)
    try:
        field = VelocityField(
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
            inner_guidance=record.training.get("guidance_scale", 1.0)
            if record.sampling_steps
            else 1.0,
            data_scale=record.units.scale,
            data_shift=record.units.shift,
        )
    except HddmError as error:
        raise HddmError(f"{expert.name}: {error}") from error
    field.resizing = _resizing_of(expert)
    return field


def _resizing_of(expert: Expert) -> Resizing | None:
    """What the expert's family says of other sizes; None for a network of no family."""
    family = family_of(expert.network)
    if family is None:
        return None
    config, names = expert.network.config, expert.record.conditions
    return Resizing(family.sizes(config), functools.partial(family.defaults, names))


def field_of(expert: Expert, device: torch.device | str = "cpu") -> VelocityField:
    """An expert as a velocity field that shares its network; raises as `as_field`."""
    network = wrapped(expert.network, expert.record).to(device)
    weak = None
    if expert.weak is not None:
        weak = stored(expert.weak, expert.record, WEAK_FILE, expert.network.dtype, device, Shelf())
    return as_field(expert, network, weak)


def own_network(
    expert: Expert, dtype: torch.dtype, device: torch.device | str, shelf: Shelf
) -> StoredNetwork:
    """The network of an expert with weights of its own, read on demand, and any adapter merged."""
    return stored(expert.unread, expert.record, expert.name, dtype, device, shelf)


def stored(
    unread: Unread[ModelMixin],
    record: ExpertRecord,
    origin: str,
    dtype: torch.dtype,
    device: torch.device | str,
    shelf: Shelf,
) -> StoredNetwork:
    """A network in the call that experts share, its weights read on demand; ``origin`` names it in errors."""
    common, prefix = wrapped(unread.network, record), prefix_of(unread.network, record)

    def read(dtype: torch.dtype) -> dict[str, Tensor]:
        return {prefix + name: value for name, value in unread.read(dtype).items()}

    return StoredNetwork(common, read, origin, dtype, device, shelf)


def wrapped(network: ModelMixin, record: ExpertRecord) -> nn.Module:
    """``network`` in a `NetworkWrapper`; unchanged where its call already fits."""
    is_common = family_of(network) is EXPERT and not record.variance_head and not record.negated
    return network if is_common else NetworkWrapper(network, record.negated)


def prefix_of(network: ModelMixin, record: ExpertRecord) -> str:
    """What comes before the names of its weights in `wrapped`."""
    return "model." if isinstance(wrapped(network, record), NetworkWrapper) else ""


def without_adapter(record: ExpertRecord) -> ExpertRecord:
    """The record of an expert in memory, whose weights include its adapter."""
    return record.model_copy(update={"adapter": None})


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
    _refuse_other_config(folder, record, unread.network)
    calibration, skipped = None, set(unheld)
    if with_calibration:
        calibration = Calibration.load(folder)
    else:
        skipped.add(CALIBRATION)
    nulls = read_nulls(folder)
    known = [name for name in FILES if name not in skipped]
    changed = damage(folder, EXPERT_FILE, known, chosen=lambda name: name not in skipped)
    refuse_damaged(folder, changed, remedy(folder))
    weak = None
    if (folder / WEAK_FILE).exists():
        weak = unread_network(folder, of_experts(), folder / WEAK_FILE)
    topic = Topic.load(folder)
    return Expert(unread, record, calibration, nulls, weak, folder, base, topic)


def _refuse_other_config(folder: Path, record: ExpertRecord, network: ModelMixin) -> None:
    """Raise an `HddmError` that lists where the record and the network's config contradict each other."""
    interface = known_family(network).interface(network.config, record.sample_shape[1:])
    stated: dict[str, object] = {
        "sample_shape": record.sample_shape,
        "variance_head": record.variance_head,
        "conditions": record.conditions,
    }
    found = {key: getattr(interface, key) for key in stated}
    classes = interface.num_classes
    if classes is not None:
        if record.null_class is not None:
            # A UNet may have been trained with its last class for none; its config does not say.
            null = classes - 1 if interface.null_class is None else interface.null_class
            stated["null_class"], found["null_class"] = record.null_class, null
        stated["classes"], found["classes"] = len(record.classes), min(len(record.classes), classes)
    differing = []
    for key, one in stated.items():
        if one != found[key]:
            differing.append(f"{key} {one}, not {found[key]}")
    if differing:
        raise HddmError(
            f"{folder}: expert.json says {'; '.join(differing)}, which config.json says by the family of "
            f"{type(network).__name__}"
        )
