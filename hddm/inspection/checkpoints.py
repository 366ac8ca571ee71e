"""Descriptions of checkpoints of other tools, without loading weights into memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hddm.checkpoints.conventions import Conventions, resolve_conventions, with_shift
from hddm.checkpoints.lora_files import LoraFile, is_lora, lora_file, read_lora
from hddm.checkpoints.plan import open_unstated
from hddm.checkpoints.sources import Checkpoint
from hddm.experts.paris import expert_arguments, is_paris, paris_experts, paris_router
from hddm.networks.families.family import Interface
from hddm.schedules import DiscreteSchedule, Schedule
from hddm.settings import Reading
from hddm.utils.errors import HddmError, Unstated
from hddm.utils.files import file_kind
from hddm.utils.pickles import read_any
from hddm.utils.tensors import DTYPE_NAMES, read_header

_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "num_heads": ("num_heads", "num_attention_heads", "attention_head_dim"),
    "sample_size": ("sample_size",),
}
"""A network's arguments that an option states."""


def inspect_checkpoint(
    folder: Path, allow_pickle: bool = False, variant: str | None = None
) -> dict[str, Any]:
    """Describe what hddm did not write: a LoRA, the Paris release, or a checkpoint of other tools.

    For a checkpoint, ``unstated`` lists what it does not state; ``allow_pickle`` and
    the weights file's ``variant`` apply to checkpoints only. Raises `HddmError` for anything else and for
    unreadable records.
    """
    if folder.is_dir() and is_paris(folder):
        return _paris(folder)
    lora = _lora_in(folder, allow_pickle)
    if lora is not None:
        return _lora(lora)
    return _checkpoint(folder, allow_pickle, variant)


def _lora_in(path: Path, allow_pickle: bool) -> LoraFile | None:
    """The LoRA in a file, or in a folder of peft or diffusers; None where it is none."""
    path = lora_file(path)
    if not path.is_file() or path.suffix == ".json":
        return None
    kind = file_kind(path)
    if kind == "safetensors":
        return read_lora(path) if is_lora(read_header(path)[0]) else None
    if kind == "gguf" or not allow_pickle:
        return None
    content = read_any(path, allow_pickle)
    return read_lora(path, allow_pickle) if isinstance(content, list) or is_lora(content) else None


def _lora(lora: LoraFile) -> dict[str, Any]:
    count, dtypes = 0, set()
    for one in lora.tensors.values():
        count += one.numel()
        dtypes.add(DTYPE_NAMES.get(one.dtype, str(one.dtype)))
    becomes = "an adapter"
    if not all(lora.change(parts).has_factors for parts in lora.layers.values()):
        becomes = "full weights: the base's with the changes merged"
    elif len(lora.ranks) > 1:
        becomes = (
            "an adapter, or full weights where the largest rank makes it larger than the layers"
        )
    found: dict[str, Any] = {
        "kind": "LoRA",
        "names_of": lora.naming,
        "licence": lora.licence,
        "layers": len(lora.layers),
        "layers_by_kind": lora.kinds,
        "layers_by_rank": lora.ranks,
        "text_encoder_tensors": len(lora.text_tensors),
        "learned_tokens": sorted(lora.tokens),
        "parameters": count,
        "dtypes": sorted(dtypes),
        "becomes": becomes,
        "base": "not in the file: an expert of the network that it was trained on",
        "read_by": "hddm convert --base",
    }
    if lora.texts or lora.tokens:
        needed = "drop" if lora.tokens else "apply|drop"
        found["read_by"] += f" --text-encoder-lora {needed}"
    return found


def _checkpoint(path: Path, allow_pickle: bool, variant: str | None) -> dict[str, Any]:
    source, missing = open_unstated(path, Reading(allow_pickle=allow_pickle, variant=variant))
    unstated = [str(one) for one in missing]
    interface, shape = _interface(source, missing, unstated)
    conventions = _conventions(source, interface, shape is not None, unstated)
    summary = "what its network predicts, and on which schedule, is not stated"
    stated: dict[str, Any] = {}
    notes = list(source.declared.notes)
    if conventions is not None:
        predicted = conventions.prediction_type.value
        summary = f"its network predicts {predicted}, on {_named(conventions.schedule)}"
        notes += conventions.notes
        stated = {
            "prediction_type": predicted,
            "schedule": conventions.schedule.config,
            **({"negated": True} if conventions.negated else {}),
            "schedule_source": conventions.schedule_source,
            "prediction_source": conventions.prediction_source,
            "schedule_range": list(conventions.range),
        }
        if _has_shift(conventions, shape is not None):
            stated["shift"] = conventions.shift
    dtypes = set()
    for tensor in source.weights.values():
        dtypes.add(str(tensor.dtype).removeprefix("torch."))
    return {
        "kind": "checkpoint",
        "summary": summary,
        "layout": source.layout,
        "network": source.class_name,
        "parameters": _count(source.weights),
        "sample_shape": shape,
        "space": "latents" if source.declared.is_latent else "pixels",
        "conditions": list(interface.conditions),
        "licence": source.licence,
        "unstated": unstated,
        "notes": notes,
        "components": [*source.components, *source.text.held],
        "files": [file.name for file in source.files],
        "weights": list(source.sets),
        "dtypes": sorted(dtypes),
        "prediction_type": None,
        "prediction_source": None,
        "schedule_source": None,
        "schedule_range": None,
        "shift": None,
        "latent_scale": source.declared.latent_scale,
        "variance_head": interface.variance_head,
        "null_class": interface.null_class,
        "schedule": None,
        **stated,
        "architecture": _stated_arguments(source, missing),
    }


def _stated_arguments(source: Checkpoint, missing: Sequence[Unstated]) -> dict[str, Any]:
    """The arguments of a checkpoint's network, without those that it does not state."""
    arguments = dict(source.arguments)
    for one in missing:
        for key in _ARGUMENTS.get(one.option, ()):
            arguments.pop(key, None)
    return arguments


def _interface(
    source: Checkpoint, missing: Sequence[Unstated], unstated: list[str]
) -> tuple[Interface, list[int] | None]:
    """What a checkpoint's network takes, and the shape of a sample, None if ``unstated``, which says why."""
    config = source.network.config
    try:
        interface = source.family.interface(config)
    except HddmError as error:
        unstated.append(str(error))
        # Any height and width will do here: they are not part of the result.
        return source.family.interface(config, (64, 64)), None
    if "sample_size" in [one.option for one in missing]:
        return interface, None
    return interface, list(interface.sample_shape)


def _conventions(
    source: Checkpoint, interface: Interface, has_shape: bool, unstated: list[str]
) -> Conventions | None:
    """Schedule and prediction type of a checkpoint; None if ``unstated``, which says why."""
    try:
        found = resolve_conventions(source, None, None)
        return with_shift(found, source, interface) if _has_shift(found, has_shape) else found
    except HddmError as error:
        unstated.append(str(error))
        return None


def _has_shift(conventions: Conventions, has_shape: bool) -> bool:
    """False where the shift depends on the size of a sample, which is not known."""
    return has_shape or not conventions.scheduler.get("use_dynamic_shifting")


def _named(schedule: Schedule) -> str:
    """A schedule in a few words."""
    if isinstance(schedule, DiscreteSchedule):
        return f"{len(schedule.betas)} steps of {schedule.source.get('beta_schedule', 'own')} betas"
    return f"the {schedule.config['name']} schedule"


def _count(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def _paris(folder: Path) -> dict[str, Any]:
    experts = paris_experts(folder)
    router, _ = paris_router(folder, experts)
    own = _count(experts[0].network.state_dict())
    routing = _count(router.network.state_dict())
    return {
        "kind": "ensemble",
        "layout": "paris",
        "experts": [Path(one.name).name for one in experts],
        "parameters": own * len(experts),
        "parameters_of_an_expert": own,
        "parameters_of_the_router": routing,
        **experts[0].record.model_dump(mode="json"),
        "architecture": expert_arguments(experts[0].network.state_dict(), folder),
    }
