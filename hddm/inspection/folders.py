"""Descriptions of anything that hddm writes or reads, from records alone where they suffice."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hddm.data.shard_records import (
    FORMAT,
    PARTITION_FILE,
    SHARD_FILE,
    PartitionRecord,
    find_shards,
    read_manifest,
)
from hddm.data.sources.base import PARQUET, TAR, find_files
from hddm.inspection.models import FOLDERS
from hddm.training.resume import CHECKPOINTS, RUN_FILE, checkpoints_in, read_run, step_of
from hddm.utils.files import refuse_pickle
from hddm.utils.records import (
    BENCHMARK_FILE,
    EXPERT_FILE,
    FEATURES_FILE,
    MODEL_INDEX,
    RESULTS_FILE,
    ROUTER_FILE,
    SAMPLING_FILE,
    OlderFormat,
    read_record,
)

Describe = Callable[[Path], dict[str, Any]]
_CHECKPOINTS = (MODEL_INDEX, "config.json")


def inspected(path: Path, allow_pickle: bool = False, variant: str | None = None) -> dict[str, Any]:
    """Describe anything that hddm writes, images, or a checkpoint; ``kind`` says what it is.

    ``read_by`` names the command that reads it, where it is another one. ``allow_pickle`` and ``variant`` are
    for checkpoints. Raises `HddmError` as `hddm.inspection.checkpoints.inspect_checkpoint`.
    """
    for record, describe in FOLDERS.items():
        if (path / record).exists():
            return describe(path)
    if not any((path / record).exists() for record in _CHECKPOINTS):
        found = _description_for(path)
        if found is None and _holds_images(path):
            found = _read_by("images", "hddm data check, hddm partition")
        if found is not None:
            return found(path)
    if path.is_file():
        refuse_pickle(path, allow_pickle)
    # Imported here: it imports torch.
    from hddm.inspection.checkpoints import inspect_checkpoint

    return inspect_checkpoint(path, allow_pickle, variant)


def _description_for(path: Path) -> Describe | None:
    for record, describe in _RECORDS.items():
        if any(path.glob(record)):
            return describe
    return None


def _run(folder: Path) -> dict[str, Any]:
    """A training run, in progress, killed or finished, and its latest checkpoint."""
    record: dict[str, Any]
    try:
        record = read_run(folder / RUN_FILE)
    except OlderFormat as error:
        record = {"problem": error.message}
    kept = checkpoints_in(folder / CHECKPOINTS)
    out = folder.with_name(folder.name.removesuffix(".run"))
    settings = record.get("settings", {})
    of = None
    if "teacher" in settings:
        of = "student"
    elif "objective" in settings:
        of = "expert"
    elif settings:
        of = "router"
    has_record = (out / EXPERT_FILE).exists() or (out / ROUTER_FILE).exists()
    described = {
        "kind": "run",
        "of": of,
        "finished": out != folder and has_record,
        "step": step_of(kept[0]) if kept else 0,
        "steps": settings.get("steps"),
        "last_checkpoint": str(kept[0].relative_to(folder)) if kept else None,
    }
    for key, value in record.items():
        if key not in ("format", "changes"):
            described[key] = value
    if record.get("changes"):
        described["changes"] = record["changes"]
    return described


def _shard(folder: Path) -> dict[str, Any]:
    shard = read_manifest(folder)
    own = {"images", "table", "data", "null"}
    if shard.encoding is None:
        own |= {"encoding", "vae", "text_encoder", "skipped"}
    record = shard.model_dump(mode="json", exclude=own) | {"images": shard.num_rows}
    return {"kind": "shard" if shard.encoding is None else "encoded shard"} | record


def _partition(folder: Path) -> dict[str, Any]:
    """The partition's record, which `hddm encode` takes over, and the encoding of an encoded one's shards."""
    record = read_record(folder / PARTITION_FILE, PartitionRecord, FORMAT).model_dump()
    shard = next((shard for shard in find_shards(folder) if (shard / SHARD_FILE).is_file()), None)
    manifest = None if shard is None else read_manifest(shard)
    if manifest is None or manifest.encoding is None:
        return {"kind": "partition", **record}
    how = manifest.model_dump(mode="json", include={"classes", "encoding", "vae", "text_encoder"})
    return {"kind": "encoded partition", **how, **record}


def _read_by(kind: str, verbs: str) -> Describe:
    return lambda path: {"kind": kind, "read_by": verbs}


def _holds_images(path: Path) -> bool:
    if path.is_file():
        return path.suffix in (TAR, PARQUET)
    found = find_files(path)
    return bool(found.images or found.tars or found.parquets) and not any(
        path.glob("*.safetensors")
    )


_RECORDS: dict[str, Describe] = {
    PARTITION_FILE: _partition,
    SHARD_FILE: _shard,
    RUN_FILE: _run,
    f"*/{EXPERT_FILE}": _read_by("experts", "hddm assemble, hddm verify"),
    f"shard_*/{SHARD_FILE}": _read_by(
        "shards", "hddm verify EXPERT --data, hddm evaluate --held-out"
    ),
    FEATURES_FILE: _read_by("features", "hddm partition --cache"),
    SAMPLING_FILE: _read_by("samples", "hddm evaluate"),
    RESULTS_FILE: _read_by("benchmark", "hddm compare"),
    BENCHMARK_FILE: _read_by("unfinished benchmark", "hddm benchmark"),
}
"""Descriptions by the record, which may lie a folder below; the first that is there counts."""
