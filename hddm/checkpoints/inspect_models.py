"""Descriptions of a folder or a checkpoint in plain values, without loading weights into memory."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hddm.calibration import FILE_NAME as CALIBRATION
from hddm.calibration import calibration_record
from hddm.checkpoints.lora import is_lora, read_lora
from hddm.checkpoints.plan import open_unstated
from hddm.checkpoints.sources import resolve_conventions, with_shift
from hddm.conditions import join_classes
from hddm.experts.assembly import PIPELINE_FILE, foreign_pipeline
from hddm.experts.compatibility import read_entries
from hddm.experts.ensemble_folders import (
    ENSEMBLE_FILE,
    kept_components,
    read_ensemble_facts,
    read_model_index,
)
from hddm.experts.lora import ADAPTER_WEIGHTS, BASES
from hddm.experts.paris import expert_arguments, is_paris, paris_experts, paris_router
from hddm.experts.parts import parts_of
from hddm.experts.records import EXPERT_FILE, FORMAT, ROUTER_FILE, ExpertRecord, RouterRecord
from hddm.networks.folders import WEIGHTS, empty_network
from hddm.networks.wrappers import interface_of
from hddm.routers import Topic
from hddm.schedules import from_config
from hddm.settings import Reading
from hddm.utils.errors import HddmError, counted
from hddm.utils.files import file_kind, read_json
from hddm.utils.records import has_manifest, read_folder_manifest, read_record
from hddm.utils.tensors import DTYPE_NAMES, read_header

_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "num_heads": ("num_heads", "num_attention_heads", "attention_head_dim"),
    "sample_size": ("sample_size",),
}
"""A network's arguments that an option states."""


def inspect_model(folder: Path, allow_pickle: bool = False, variant: str | None = None) -> dict[str, Any]:
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
    if folder.is_file() and file_kind(folder) == "safetensors" and is_lora(read_header(folder)[0]):
        return _lora(folder)
    return _checkpoint(folder, allow_pickle, variant)


def _lora(path: Path) -> dict[str, Any]:
    lora = read_lora(path)
    return {
        "kind": "LoRA",
        "names_of": lora.naming,
        "licence": lora.licence,
        "layers": len(lora.layers),
        "layers_by_rank": lora.ranks,
        "text_encoder_tensors": len(lora.text),
        **_numbers(path),
        "base": "not in the file: an expert of the network that it was trained on",
        "read_by": "hddm convert --base",
    }


def _checkpoint(path: Path, allow_pickle: bool, variant: str | None) -> dict[str, Any]:
    reading = Reading(allow_pickle=allow_pickle, variant=variant)
    source, missing = open_unstated(path, reading)
    network, unstated = source.network.__name__, [str(one) for one in missing]
    arguments = dict(source.arguments)
    for one in missing:
        for key in _ARGUMENTS[one.option]:
            arguments.pop(key, None)
    empty = empty_network(source.network, source.arguments, len(source.weights), str(path))
    shape: list[int] | None = None
    try:
        interface = interface_of(network, empty.config)
        if "sample_size" not in [one.option for one in missing]:
            shape = list(interface.sample_shape)
    except HddmError as error:
        # Any height and width will do here: they are not part of the result.
        interface = interface_of(network, empty.config, (64, 64))
        unstated.append(str(error))
    described: dict[str, Any] = {
        "kind": "checkpoint",
        "layout": source.layout,
        "files": [file.name for file in source.files],
        "weights": list(source.sets),
        **dict.fromkeys(("prediction_type", "prediction_source", "schedule", "schedule_source")),
        **dict.fromkeys(("schedule_range", "shift")),
    }
    notes = list(source.declared.notes)
    try:
        found = resolve_conventions(source, None, None)
        if shape or not found.scheduler.get("use_dynamic_shifting"):
            found = with_shift(found, source, interface)
            described["shift"] = found.shift
        described |= {
            "prediction_type": found.prediction_type.value,
            "schedule": found.schedule.config,
            "schedule_source": found.schedule_source,
            "prediction_source": found.prediction_source,
            "schedule_range": list(found.schedule.range),
        }
        notes += found.notes
    except HddmError as error:
        unstated.append(str(error))
    return described | {
        "sample_shape": shape,
        "space": "latents" if source.declared.is_latent else "pixels",
        "latent_scale": source.declared.latent_scale,
        "variance_head": interface.variance_head,
        "conditions": list(interface.conditions),
        "null_class": interface.null_class,
        "licence": source.licence,
        "parameters": sum(tensor.numel() for tensor in source.weights.values()),
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in source.weights.values()}),
        "network": network,
        "architecture": arguments,
        "notes": notes,
        "unstated": unstated,
    }


def _expert(folder: Path) -> dict[str, Any]:
    record = read_record(folder / EXPERT_FILE, ExpertRecord, FORMAT)
    topic = Topic.load(folder)
    trained = {"flow": "trained by flow matching", "ddpm": "trained as DDPM"}[record.objective]
    began = ", as the checkpoint it began with" if "init" in record.training else ""
    described = {
        "kind": "expert",
        "summary": f"{trained}; its network predicts {record.prediction_type.value}{began}",
        **record.model_dump(mode="json", exclude={"adapter": True, "shard": {"sketch"}}),
        "schedule_range": list(from_config(record.schedule).range),
        "manifest": _manifest(folder),
        "components": list(kept_components(folder)),
        "calibrated": (folder / CALIBRATION).exists(),
        "calibrated_on": calibration_record(folder),
        "topic": None if topic is None or topic.record is None else topic.record.model_dump(mode="json"),
    }
    if record.adapter is None:
        return described | _network(folder)
    adapter = record.adapter.model_dump(mode="json") | {"targets": len(record.adapter.targets)}
    return described | {"adapter": adapter} | _network(folder, ADAPTER_WEIGHTS)


def _router(folder: Path) -> dict[str, Any]:
    record = read_record(folder / ROUTER_FILE, RouterRecord, FORMAT).model_dump(mode="json")
    return {"kind": "router", **record, "manifest": _manifest(folder), **_network(folder)}


def _manifest(folder: Path) -> str:
    """The number of files in the folder's manifest, as text; their hashes are not compared."""
    if not has_manifest(folder):
        return "missing, so the folder cannot be used"
    return f"of {counted(len(read_folder_manifest(folder).files), 'file')}"


def _paris(folder: Path) -> dict[str, Any]:
    experts = paris_experts(folder)
    router, _ = paris_router(folder, experts)
    own, routing = (
        sum(tensor.numel() for tensor in network.state_dict().values())
        for network in (experts[0].network, router.network)
    )
    return {
        "kind": "ensemble",
        "layout": "paris",
        "experts": [Path(one.name).name for one in experts],
        **experts[0].facts.model_dump(mode="json"),
        "parameters": own * len(experts),
        "parameters_of_an_expert": own,
        "parameters_of_the_router": routing,
        "architecture": expert_arguments(experts[0].network.state_dict(), folder),
    }


def _ensemble(folder: Path) -> dict[str, Any]:
    record = read_ensemble_facts(folder)
    members, folders = record.experts, [member.folder for member in record.experts]
    experts = [inspect_model(folder / name) for name in folders]
    entries = read_entries([folder / name for name in folders], members)
    parts = parts_of(entries)
    total, domains = sum(part.weight for part in parts), tuple(part.domain for part in parts)
    return {
        "kind": "ensemble",
        "format": record.format,
        "experts": folders,
        "names": record.names,
        "prior": [part.weight / total for part in parts],
        "shares": {one.folder: one.share for one in members if one.share is not None},
        "classes": list(join_classes(tuple(one.classes for one in entries)).names),
        "domains": domains,
        "router": record.router,
        "strategy": record.strategy,
        "shift": record.shift,
        "objectives": [expert["objective"] for expert in experts],
        "shards": [expert["shard"] and expert["shard"]["index"] for expert in experts],
        "noise_ranges": ["{:g}:{:g}".format(*expert["noise_range"]) for expert in experts],
        "manifest": _manifest(folder),
        "pipeline_py": "another's, which hddm does not run"
        if foreign_pipeline(folder)
        else (folder / PIPELINE_FILE).is_file(),
        "components": {name: ".".join(kind) for name, kind in read_model_index(folder).items() if kind},
        # Shared weights count once.
        "parameters": sum(expert["parameters"] for expert in experts)
        + sum(_numbers(path)["parameters"] for path in (folder / BASES).glob(f"*/{WEIGHTS}")),
    }


def _network(folder: Path, name: str = WEIGHTS) -> dict[str, Any]:
    """The network's size, dtypes and config from the folder alone; of an adapter, only its own numbers."""
    config = {k: v for k, v in read_json(folder / "config.json").items() if not k.startswith("_")}
    return _numbers(folder / name) | {"architecture": config}


def _numbers(path: Path) -> dict[str, Any]:
    """The count of numbers in a weights file, and their dtypes."""
    tensors = read_header(path)[0].values()
    count = sum(math.prod(one.shape) for one in tensors)
    return {"parameters": count, "dtypes": sorted({DTYPE_NAMES[one.dtype] for one in tensors})}


_FOLDERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    EXPERT_FILE: _expert,
    ROUTER_FILE: _router,
    ENSEMBLE_FILE: _ensemble,
}
"""Descriptions of what hddm writes, by its record."""
