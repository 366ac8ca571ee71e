"""Descriptions of experts, routers, ensembles and checkpoints, without loading weights into memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hddm.calibration import FILE_NAME as CALIBRATION
from hddm.calibration import calibration_record
from hddm.checkpoints.conventions import Conventions, resolve_conventions, with_shift
from hddm.checkpoints.lora_files import LoraFile, is_lora, lora_file, read_lora
from hddm.checkpoints.plan import open_unstated
from hddm.checkpoints.sources import Checkpoint
from hddm.classes import join_classes
from hddm.experts.assembly import PIPELINE_FILE, foreign_pipeline
from hddm.experts.ensemble_folders import ENSEMBLE_FILE, read_ensemble_record, read_model_index
from hddm.experts.expert import experts_in
from hddm.experts.kept import kept_components
from hddm.experts.lora import ADAPTER_WEIGHTS, BASES
from hddm.experts.paris import expert_arguments, is_paris, paris_experts, paris_router
from hddm.experts.parts import parts_of
from hddm.experts.records import (
    EXPERT_FILE,
    FORMAT,
    ROUTER_FILE,
    RouterRecord,
    read_expert_record,
)
from hddm.networks.families.family import Interface
from hddm.networks.folders import WEIGHTS
from hddm.prompt_router import Topic
from hddm.schedules import DiscreteSchedule, Schedule, from_config
from hddm.settings import Reading
from hddm.utils.errors import HddmError, Unstated, counted
from hddm.utils.files import file_kind, read_json
from hddm.utils.pickles import read_any
from hddm.utils.records import has_manifest, read_folder_manifest, read_record
from hddm.utils.tensors import DTYPE_NAMES, read_header

_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "num_heads": ("num_heads", "num_attention_heads", "attention_head_dim"),
    "sample_size": ("sample_size",),
}
"""A network's arguments that an option states."""


def inspect_model(
    folder: Path, allow_pickle: bool = False, variant: str | None = None
) -> dict[str, Any]:
    """Describe an expert, router or ensemble folder, or a checkpoint of other tools.

    ``kind`` names which. For a checkpoint, ``unstated`` lists what it does not state; ``allow_pickle`` and
    the weights file's ``variant`` apply to checkpoints only. Raises `HddmError` for anything else and for
    unreadable records.
    """
    for record, described in _FOLDERS.items():
        if (folder / record).exists():
            return described(folder)
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


def _expert(folder: Path) -> dict[str, Any]:
    record = read_expert_record(folder)
    topic, path = Topic.load(folder), from_config(record.schedule)
    trained = {"flow": "trained by flow matching", "ddpm": "trained as DDPM"}[record.objective]
    began = ", as the checkpoint it began with" if "init" in record.training else ""
    written = record.model_dump(mode="json", exclude={"adapter": True, "shard": {"sketch"}})
    described_by = None if topic is None else topic.record
    described = {
        "kind": "expert",
        "summary": f"{trained}; its network predicts {record.prediction_type.value}{began}",
        **_numbers(folder / (WEIGHTS if record.adapter is None else ADAPTER_WEIGHTS)),
    }
    # These come first.
    for name in ("sample_shape", "space", "conditions", "classes", "licence"):
        described[name] = written[name]
    described |= {
        "components": list(kept_components(folder)),
        "calibrated": (folder / CALIBRATION).exists(),
        "manifest": _manifest(folder),
        **written,
        "schedule_range": list(path.range_of(record.units.scale * path.data_scale)),
        "calibrated_on": calibration_record(folder),
        "topic": None if described_by is None else described_by.model_dump(mode="json"),
    }
    if record.adapter is not None:
        described["adapter"] = record.adapter.model_dump(mode="json") | {
            "targets": len(record.adapter.targets)
        }
    return described | _architecture(folder)


def _router(folder: Path) -> dict[str, Any]:
    record = read_record(folder / ROUTER_FILE, RouterRecord, FORMAT).model_dump(mode="json")
    return {
        "kind": "router",
        **_numbers(folder / WEIGHTS),
        "manifest": _manifest(folder),
        **record,
        **_architecture(folder),
    }


def _manifest(folder: Path) -> str:
    """The number of files in the folder's manifest, as text; their hashes are not compared."""
    if not has_manifest(folder):
        return "missing, so the folder cannot be used"
    return f"of {counted(len(read_folder_manifest(folder).files), 'file')}"


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


def _ensemble(folder: Path) -> dict[str, Any]:
    record = read_ensemble_record(folder)
    members, folders = record.experts, [member.folder for member in record.experts]
    experts = [inspect_model(folder / name) for name in folders]
    known = experts_in(folder, record)
    parts = parts_of(known)
    total = sum(part.weight for part in parts)
    names = join_classes(tuple(one.classes for one in known)).names
    parameters, shards, ranges = 0, [], []
    for expert in experts:
        parameters += expert["parameters"]
        shards.append(expert["shard"] and expert["shard"]["index"])
        ranges.append("{:g}:{:g}".format(*expert["noise_range"]))
    # Shared weights count once.
    for path in (folder / BASES).glob(f"*/{WEIGHTS}"):
        parameters += _numbers(path)["parameters"]
    components, shares = {}, {}
    for name, kind in read_model_index(folder).items():
        if kind:
            components[name] = ".".join(kind)
    for one in members:
        if one.share is not None:
            shares[one.folder] = one.share
    pipeline: str | bool = (folder / PIPELINE_FILE).is_file()
    if foreign_pipeline(folder):
        pipeline = "another's, which hddm does not run"
    return {
        "kind": "ensemble",
        "experts": folders,
        "names": record.names,
        "objectives": [expert["objective"] for expert in experts],
        "prior": [part.weight / total for part in parts],
        "strategy": record.strategy,
        "router": record.router,
        "classes": list(names),
        "parameters": parameters,
        "manifest": _manifest(folder),
        "components": components,
        "format": record.format,
        "shares": shares,
        "domains": tuple(part.domain for part in parts),
        "shift": record.shift,
        "shards": shards,
        "noise_ranges": ranges,
        "pipeline_py": pipeline,
    }


def _architecture(folder: Path) -> dict[str, Any]:
    """The network's config."""
    config = read_json(folder / "config.json")
    return {"architecture": {k: v for k, v in config.items() if not k.startswith("_")}}


def _numbers(path: Path) -> dict[str, Any]:
    """The count of numbers in a weights file, and their dtypes."""
    tensors = read_header(path)[0].values()
    count, dtypes = 0, set()
    for one in tensors:
        count += math.prod(one.shape)
        dtypes.add(DTYPE_NAMES[one.dtype])
    return {"parameters": count, "dtypes": sorted(dtypes)}


_FOLDERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    EXPERT_FILE: _expert,
    ROUTER_FILE: _router,
    ENSEMBLE_FILE: _ensemble,
}
"""Descriptions of what hddm writes, by its record."""
