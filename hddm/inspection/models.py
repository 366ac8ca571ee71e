"""Descriptions of experts, routers and ensembles, from their records and the headers of their weights."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hddm.calibration_records import FILE_NAME as CALIBRATION
from hddm.calibration_records import calibration_record
from hddm.experts.adapter_records import ADAPTER_WEIGHTS, BASES
from hddm.experts.ensemble_records import (
    PIPELINE_FILE,
    foreign_pipeline,
    kept_components,
    read_ensemble_record,
    read_model_index,
)
from hddm.experts.expert import experts_in
from hddm.experts.records import FORMAT, ExpertRecord, RouterRecord, read_expert_record
from hddm.experts.shares import domains_of, weights_of
from hddm.fit import Findings
from hddm.schedule_records import stated_range
from hddm.topic_records import read_topic_record
from hddm.utils.errors import counted
from hddm.utils.files import read_json
from hddm.utils.records import (
    ENSEMBLE_FILE,
    EXPERT_FILE,
    ROUTER_FILE,
    WEIGHTS,
    has_manifest,
    joint_names,
    read_folder_manifest,
    read_record,
)
from hddm.utils.weights_headers import stated_tensors


def _expert(folder: Path) -> dict[str, Any]:
    record = read_expert_record(folder)
    topic = read_topic_record(folder)
    trained = {"flow": "trained by flow matching", "ddpm": "trained as DDPM"}[record.objective]
    began = ", as the checkpoint it began with" if "init" in record.training else ""
    written = record.model_dump(mode="json", exclude={"adapter": True, "shard": {"sketch"}})
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
        "schedule_range": _schedule_range(record),
        "calibrated_on": calibration_record(folder),
        "topic": None if topic is None else topic.model_dump(mode="json"),
    }
    if record.adapter is not None:
        described["adapter"] = record.adapter.model_dump(mode="json") | {
            "targets": len(record.adapter.targets)
        }
    return described | _architecture(folder)


def _schedule_range(record: ExpertRecord) -> list[float]:
    """The noise levels that an expert's schedule covers, on the common path."""
    stated = stated_range(record.schedule, record.units.scale)
    if stated is not None:
        return list(stated)
    # Imported here: it imports torch.
    from hddm.schedules import from_config

    path = from_config(record.schedule)
    return list(path.range_of(record.units.scale * path.data_scale))


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


def _ensemble(folder: Path) -> dict[str, Any]:
    record = read_ensemble_record(folder)
    members, folders = record.experts, [member.folder for member in record.experts]
    experts = [_expert(folder / name) for name in folders]
    known = experts_in(folder, record)
    domains = domains_of(known)
    weights = weights_of(known, domains, Findings())
    total = sum(weights)
    names = joint_names(one.classes for one in known)
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
        "prior": [weight / total for weight in weights],
        "strategy": record.strategy,
        "router": record.router,
        "classes": list(names),
        "parameters": parameters,
        "manifest": _manifest(folder),
        "components": components,
        "format": record.format,
        "shares": shares,
        "domains": domains,
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
    tensors = stated_tensors(path)[0].values()
    count, dtypes = 0, set()
    for one in tensors:
        count += math.prod(one.shape)
        dtypes.add(one.dtype)
    return {"parameters": count, "dtypes": sorted(dtypes)}


FOLDERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    EXPERT_FILE: _expert,
    ROUTER_FILE: _router,
    ENSEMBLE_FILE: _ensemble,
}
"""Descriptions of what hddm writes, by its record."""
