"""What a folder is, in plain values, without loading its weights into memory."""

import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from hddm.calibration import FILE_NAME as CALIBRATION
from hddm.calibration import calibration_record
from hddm.checkpoints.recognise import describe_source
from hddm.data.shard_records import FORMAT as SHARD_FORMAT
from hddm.data.shard_records import (
    LARGEST_MANIFEST,
    MANIFEST,
    PARTITION_FILE,
    Manifest,
    PartitionRecord,
    find_shards,
    is_encoded,
    read_encoded_manifest,
)
from hddm.experts.ensembles import ENSEMBLE_FILE, MODEL_INDEX, read_ensemble_facts, read_model_index
from hddm.experts.lora import ADAPTER_WEIGHTS, AdapterRecord
from hddm.experts.paris import is_paris, paris_experts, paris_router
from hddm.experts.records import EXPERT_FILE, FORMAT, ROUTER_FILE, ExpertRecord, RouterRecord
from hddm.networks.folders import WEIGHTS
from hddm.schedules import from_config
from hddm.utils.errors import HddmError, counted
from hddm.utils.files import read_json
from hddm.utils.records import has_manifest, read_manifest, read_record
from hddm.utils.weights import read_header
from hddm.velocity import PredictionType


def describe(folder: Path, allow_pickle: bool = False, variant: str | None = None) -> dict[str, Any]:
    """Facts of an expert, router, ensemble, partition or shard folder, or of a checkpoint.

    ``kind`` says which. ``allow_pickle`` and ``variant`` are for checkpoints; see `describe_source`.

    Raises:
        HddmError: for anything else, or records that cannot be read.
    """
    if (folder / EXPERT_FILE).exists():
        facts = read_record(folder / EXPERT_FILE, ExpertRecord, FORMAT)
        low, high = from_config(facts.schedule).range
        return {
            "kind": "expert",
            **_with_changes(facts.model_dump(mode="json", exclude={"adapter"})),
            "noise_range": [low, high],
            "manifest": _manifest(folder),
            "calibrated": (folder / CALIBRATION).exists(),
            "calibrated_on": calibration_record(folder),
            "velocity_near_t_1": _near_noise(folder, facts),
            **(_network(folder) if facts.adapter is None else _adapter(folder, facts.adapter)),
        }
    if (folder / ROUTER_FILE).exists():
        router = read_record(folder / ROUTER_FILE, RouterRecord, FORMAT)
        told = _with_changes(router.model_dump(mode="json"))
        return {"kind": "router", **told, "manifest": _manifest(folder), **_network(folder)}
    if (folder / ENSEMBLE_FILE).exists():
        return _ensemble(folder)
    if (folder / PARTITION_FILE).exists():
        return _partition(folder)
    if (folder / MANIFEST).exists() and is_encoded(folder):
        encoded = read_encoded_manifest(folder)
        return {
            "kind": "encoded shard",
            **encoded.model_dump(mode="json", exclude={"images", "data", "null"}),
            "images": encoded.num_rows,
            "files": len(encoded.data),
        }
    if (folder / MANIFEST).exists():
        shard = read_record(folder / MANIFEST, Manifest, SHARD_FORMAT, LARGEST_MANIFEST)
        return {
            "kind": "shard",
            **shard.model_dump(mode="json", exclude={"images"}),
            "images": len(shard.images),
        }
    if folder.is_dir() and is_paris(folder):
        return _paris(folder)
    return describe_source(folder, allow_pickle, variant)


def _manifest(folder: Path) -> str:
    """How far the folder can be held against what was written."""
    if not has_manifest(folder):
        return "none: written by an older version"
    return f"of {counted(len(read_manifest(folder).files), 'file')}"


def _near_noise(folder: Path, facts: ExpertRecord) -> str:
    if (folder / CALIBRATION).exists() or facts.prediction_type is not PredictionType.EPSILON:
        return "bounded"
    return "not bounded: grows as 1/(1 - t) up to the end of its noise range; hddm calibrate bounds it"


def _with_changes(facts: dict[str, Any]) -> dict[str, Any]:
    """``facts`` with what was changed in the course of the training, if anything was, by its own name."""
    training = dict(facts["training"])
    changes = training.pop("changes", None)
    return facts | {"training": training} | ({"changes": changes} if changes else {})


def _partition(folder: Path) -> dict[str, Any]:
    """Its own record, which `hddm encode` takes over, and of an encoded one how its shards are encoded."""
    facts = read_record(folder / PARTITION_FILE, PartitionRecord, SHARD_FORMAT).model_dump()
    there = (shard for shard in find_shards(folder) if (shard / MANIFEST).is_file())
    shard = next(there, None)
    if shard is None or not is_encoded(shard):
        return {"kind": "partition", **facts}
    encoded = read_encoded_manifest(shard).model_dump(mode="json")
    how = {key: encoded[key] for key in ("classes", "encoding", "vae", "text_encoder")}
    return {"kind": "encoded partition", **how, **facts}


def _paris(folder: Path) -> dict[str, Any]:
    experts = paris_experts(folder)
    part, facts = experts[0]
    router, _ = paris_router(folder)
    headers = [read_header(one.weights)[0] for one in (*[part for part, _ in experts], router)]
    sizes = [sum(math.prod(tensor.shape) for tensor in header.values()) for header in headers]
    return {
        "kind": "ensemble",
        "layout": "paris",
        "experts": [one.weights.parent.name for one, _ in experts],
        **facts.model_dump(mode="json"),
        "parameters": sum(sizes[:-1]),
        "parameters_of_an_expert": sizes[0],
        "parameters_of_the_router": sizes[-1],
        "architecture": part.arguments,
    }


def _ensemble(folder: Path) -> dict[str, Any]:
    facts = read_ensemble_facts(folder)
    experts = [describe(folder / name) for name in facts.experts]
    classes = read_model_index(folder) if (folder / MODEL_INDEX).exists() else {}
    told = {
        "kind": "ensemble",
        **facts.model_dump(mode="json"),
        "classes": next((expert["classes"] for expert in experts if expert["classes"]), []),
        "objectives": [expert["objective"] for expert in experts],
        "shards": [expert["shard"] and expert["shard"]["index"] for expert in experts],
        "manifest": _manifest(folder),
        "components": {name: ".".join(kind) for name, kind in classes.items() if kind},
        # Each weight that is there counts once.
        "parameters": sum(expert["parameters"] for expert in experts)
        + sum(_numbers(folder / name)[0] for name in facts.bases.values() if name not in facts.experts),
    }
    if facts.router is not None:
        router = read_record(folder / facts.router / ROUTER_FILE, RouterRecord, FORMAT)
        told["router_outputs"] = list(facts.router_outputs or range(len(experts)))
        told["router_shards"] = len(router.shard_hashes)
        told["router_calibrated"] = bool(router.calibration)
    return told


def _adapter(folder: Path, adapter: AdapterRecord) -> dict[str, Any]:
    """Of an adapter its own numbers, wherever the base may be."""
    total, dtypes = _numbers(folder, ADAPTER_WEIGHTS)
    told = adapter.model_dump(mode="json") | {"targets": len(adapter.targets)}
    return {"adapter": told, "parameters": total, "dtypes": dtypes, "architecture": _config(folder)}


def _network(folder: Path) -> dict[str, Any]:
    total, dtypes = _numbers(folder)
    return {"parameters": total, "dtypes": dtypes, "architecture": _config(folder)}


def _config(folder: Path) -> dict[str, Any]:
    return {k: v for k, v in read_json(folder / "config.json").items() if not k.startswith("_")}


def _numbers(folder: Path, name: str = WEIGHTS) -> tuple[int, list[str]]:
    """How many numbers a file of weights holds, and their dtypes."""
    path = folder / name
    try:
        with safe_open(path, "pt") as weights:
            slices = [weights.get_slice(key) for key in weights.keys()]  # noqa: SIM118
            sizes = [math.prod(part.get_shape()) for part in slices]
            dtypes = sorted({part.get_dtype() for part in slices})
    except (FileNotFoundError, SafetensorError) as error:
        raise HddmError(f"{path}: cannot be read ({error})") from error
    return sum(sizes), dtypes
