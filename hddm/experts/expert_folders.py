"""Experts with their networks: opened from a folder, written into one, and as velocity fields."""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from diffusers import ModelMixin
from safetensors.torch import save_file
from torch import Tensor, nn

from hddm.calibration import Calibration
from hddm.calibration_records import FILE_NAME as CALIBRATION
from hddm.condition_names import LABELS
from hddm.experts.adapter_records import ADAPTER_FILES, base_of
from hddm.experts.expert import Expert, without_adapter
from hddm.experts.lora import Merged
from hddm.experts.record_folders import read_nulls, write_records
from hddm.experts.records import (
    EXPERT_FILE,
    FILES,
    WEAK_FILE,
    ExpertRecord,
    read_expert_record,
    remedy,
)
from hddm.networks.families import family_of, known_family
from hddm.networks.families.expert import EXPERT
from hddm.networks.folders import cast, of_experts, unread_network, write_config
from hddm.networks.offload import Shelf, StoredNetwork
from hddm.networks.unread import Unread
from hddm.networks.wrappers import NetworkWrapper, without_weights
from hddm.prompt_router import Topic
from hddm.schedules import from_config
from hddm.utils.copies import link_or_copy
from hddm.utils.errors import HddmError
from hddm.utils.records import WEIGHTS, damage, refuse_damaged
from hddm.velocity import Resizing, VelocityField


def unread_as(network: ModelMixin, tensors: Mapping[str, Tensor]) -> Unread[ModelMixin]:
    """A copy of ``network`` without weights, to be filled with ``tensors``, in memory, on demand."""
    return Unread(without_weights(network), functools.partial(cast, dict(tensors)))


def apart(expert: Expert) -> Expert:
    """An expert with weights to be read: those in memory by a copy, which leaves its network alone."""
    if isinstance(expert.opened, Unread):
        return expert
    return replace(expert, opened=unread_as(expert.network, expert.network.state_dict()))


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
