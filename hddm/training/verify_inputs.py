"""What is to be verified, and by which images: told by small records alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hddm.data.shard_records import LARGEST_MANIFEST, MANIFEST, PARTITION_FILE
from hddm.ensemble_folders import ENSEMBLE_FILE
from hddm.errors import HddmError, UsageError
from hddm.experts import EXPERT_FILE, ROUTER_FILE
from hddm.files import read_json
from hddm.training.run_records import RUN_FILE

_OTHERS = {
    ENSEMBLE_FILE: "an ensemble, and its experts are verified by hddm verify {folder}/experts",
    ROUTER_FILE: "a router, and experts alone are verified",
    PARTITION_FILE: "a partition; name an expert, and the images to judge it by with --data",
    MANIFEST: "a shard; name an expert, and the shard to judge it by with --data",
    RUN_FILE: "the record of a training; name the expert that it made",
}


def experts_in(folder: Path) -> list[Path]:
    """``folder`` where it is an expert, else the experts right below it, in the order of their numbers.

    Raises:
        UsageError: for anything else, with what it is.
    """
    if not folder.is_dir():
        raise UsageError(
            f"{folder}: {'is a file' if folder.exists() else 'no such folder'}; name an expert's folder"
        )
    if (folder / EXPERT_FILE).exists():
        return [folder]
    for record, what in _OTHERS.items():
        if (folder / record).exists():
            raise UsageError(f"{folder}: is {what.format(folder=folder)}")
    found = [path.parent for path in folder.glob(f"*/{EXPERT_FILE}")]
    if not found:
        raise UsageError(
            f"{folder}: holds no {EXPERT_FILE}, nor does a folder in it; name what hddm train expert or hddm "
            "convert wrote"
        )
    return sorted(found, key=lambda path: (len(path.name), path.name))


def images_for(experts: Sequence[Path], data: Path) -> list[Path]:
    """The shard folder that each of ``experts`` is to be judged by.

    Args:
        experts: expert folders.
        data: a shard folder, for all; or a folder of some, as ``held_out`` of a partition, of which each
            expert gets that of its own shard.

    Raises:
        UsageError: where there is none.
    """
    if not data.is_dir():
        raise UsageError(f"--data {data}: no such folder")
    below = sorted(p.parent for p in data.glob(f"*/{MANIFEST}") if not (p.parent / EXPERT_FILE).exists())
    if (data / MANIFEST).exists() or not below:
        return [data] * len(experts)
    shards: dict[str, Path] = {}
    for folder in below:
        record = _read(folder / MANIFEST)
        shards[str(record.get("held_out_of") or record.get("hash"))] = folder
    found = []
    for expert in experts:
        shard = _read(expert / EXPERT_FILE).get("shard")
        own = shard.get("hash") if isinstance(shard, dict) else None
        if own not in shards:
            of = "does not say what it was trained on" if own is None else f"is of shard {str(own)[:16]}…"
            raise UsageError(
                f"--data {data}: none of its {len(shards)} shards is that of {expert}, which {of}"
            )
        found.append(shards[own])
    return found


def _read(path: Path) -> dict[str, Any]:
    """A record as it is; who opens the folder says what is wrong with one that cannot be read."""
    try:
        return read_json(path, LARGEST_MANIFEST)
    except HddmError:
        return {}
