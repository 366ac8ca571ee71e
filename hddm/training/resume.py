"""Resuming a run: may it go on, what differs from its record, and is it complete already?

Answers come from records alone, ``OUT.run/run.json`` and the manifests of shards; neither torch nor a network
is imported. `compare_records` refuses a start that differs, `is_complete` finds one with nothing left to do,
and `expert_data` and `data_of` are what a run records of its data.

A change of settings on the way is kept in the record as

    {"step": 1000, "key": "learning_rate", "was": 0.0015, "is": 0.0003}

and holds for the steps after ``step``, up to the next change of ``key``. `hddm.training.state` keeps the run.
"""

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hddm.data.shard_records import (
    MANIFEST,
    EncodedManifest,
    is_encoded,
    read_encoded_manifest,
    read_manifest,
)
from hddm.training.settings import ExpertSettings, LoopSettings, RunOptions
from hddm.utils.errors import HddmError
from hddm.utils.files import check_absent, read_json, sha256_of
from hddm.utils.records import refuse_damaged

Change = dict[str, Any]
"""A record of one change, as plain values of JSON."""
NOT_RECORDED = "not recorded"
"""Stands for values that an older version did not write down."""


def with_changes(before: Sequence[Change], new: Sequence[Change], step: int) -> list[Change]:
    """The changes of a run that is resumed at the checkpoint of ``step``, with those that are ``new`` there.

    ``before`` are the changes so far, in the order in which they were made. Steps beyond ``step`` are
    computed again: changes that were made there count from ``step`` on. A change that is undone before a step
    was made is none, nor is one before the first step.
    """
    merged: dict[tuple[str, int], Change] = {}
    for one in (*before, *new):
        place = one["key"], min(one["step"], step)
        was = merged.get(place, one)["was"]
        merged[place] = {"step": place[1], "key": one["key"], "was": was, "is": one["is"]}
    return [one for one in merged.values() if one["step"] > 0 and one["was"] != one["is"]]


def value_at(step: int, key: str, today: Any, changes: Sequence[Change]) -> Any:
    """The value in ``step``, from 1, of setting ``key``, which is ``today`` now."""
    return next((one["was"] for one in changes if one["key"] == key and step <= one["step"]), today)


Settings = TypeVar("Settings", bound=LoopSettings)

RUN_FILE = "run.json"
CHECKPOINTS = "checkpoints"
# What says what is computed; the rest of a run's record is how it is kept, and its history.
_COMPARED = ("settings", "data", "environment")
# What may change between two starts of a run without changing what it computes.
FREE = {f"environment.{key}" for key in ("hddm", "torch", "hostname", "device", "processes")}
# What makes it another expert, so that its record would be untrue if one run went on as the other.
_IDENTITY = "objective size class_conditional text_conditional lora_rank lora_alpha teacher"
FIXED = {f"settings.{key}" for key in _IDENTITY.split()}

log = logging.getLogger(__name__)


def run_folder_of(out: Path) -> Path:
    """The folder of the run that writes ``out``."""
    return out.with_name(f"{out.name}.run")


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints that a folder holds, damaged ones too, newest first."""
    found = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d{8,}", path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """Steps done at the checkpoint in a folder."""
    return int(path.name.removeprefix("step_"))


def recorded(out: Path) -> dict[str, Any]:
    """The record of the run of ``out``, empty where there is none."""
    path = run_folder_of(out) / RUN_FILE
    return read_json(path) if path.exists() else {}


def as_recorded(settings: Settings, out: Path) -> Settings:
    """``settings`` with the threads and the warm-up that they leave open and the run of ``out`` has."""
    before = recorded(out).get("settings", {})
    left_open = [name for name in ("threads", "warmup") if getattr(settings, name) is None]
    return settings.model_copy(update={name: before[name] for name in left_open if name in before})


def compare_records(out: Path, record: Mapping[str, Any], options: RunOptions) -> dict[str, tuple[Any, Any]]:
    """Refuse to resume the run of ``out`` if it was started with another ``record``.

    ``options.allow_config_change`` allows other settings, but no other data, objective or network.

    Returns:
        What was and is, by dotted key, where that differs and may.

    Raises:
        HddmError: with every difference that stands in the way: those that never may, where there are any.
    """
    folder = run_folder_of(out)
    given = json.loads(json.dumps(dict(record)))
    old, new = (_flat({key: one.get(key, {}) for key in _COMPARED}) for one in (recorded(out), given))
    differing, lines, fixed = {}, {}, []
    for key in dict.fromkeys([*old, *new]):
        if old.get(key) == new.get(key):
            continue
        differing[key] = old.get(key, NOT_RECORDED), new.get(key, NOT_RECORDED)
        was, now = (value if value is NOT_RECORDED else repr(value) for value in differing[key])
        lines[key] = f"{key}: was {was}, is {now}"
        # What an older version did not record cannot be held against a run.
        if key in old and (key in FIXED or key.startswith("data.")):
            fixed.append(lines[key])
    if fixed:
        raise HddmError(
            f"{folder}: the run is of other data, another objective or network; choose another --out", fixed
        )
    refused = [line for key, line in lines.items() if key not in FREE]
    if refused and not options.allow_config_change:
        raise HddmError(
            f"{folder}: the run was started otherwise; take the same again, or pass --allow-config-change",
            refused,
        )
    for line in lines.values():
        log.warning("%s: %s", folder, line)
    return differing


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def expert_data(shard: Path, schedule: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Plain values for the record of an expert on the shard in a folder, with `Schedule.config` if given."""
    data = {"shard": _hash_of(shard), **encoding_of([shard])}
    return data if schedule is None else data | {"schedule": dict(schedule)}


def data_of(shards: Sequence[Path]) -> dict[str, Any]:
    """Plain values for the record of a run on the shards in all these folders."""
    return {"shards": [_hash_of(shard) for shard in shards], **encoding_of(shards)}


def _hash_of(shard: Path) -> str:
    """The hash by which experts and routers know the shard in a folder."""
    if (shard / MANIFEST).is_file() and is_encoded(shard):
        return read_encoded_manifest(shard).hash
    return read_manifest(shard).hash


def encoding_of(shards: Sequence[Path]) -> dict[str, Any]:
    """Plain values for the record of a run on encoded shards, whose hash is that of the images alone.

    ``encoding``, ``vae`` and ``text_encoder`` say how the first was made, ``rows`` counts the samples of all,
    and ``files`` is a SHA-256 of all that their data files hold.
    """
    manifests = [read_encoded_manifest(shard) for shard in shards if is_encoded(shard)]
    if not manifests:
        return {}
    return {
        **manifests[0].model_dump(mode="json", include={"encoding", "vae", "text_encoder"}),
        "rows": sum(one.num_rows for one in manifests),
        "files": hashlib.sha256("\n".join(map(_content, manifests)).encode()).hexdigest(),
    }


def _content(manifest: EncodedManifest) -> str:
    files = [*manifest.data, *([manifest.null] if manifest.null else [])]
    return " ".join([*(one.sha256 for one in files), *(one.file for one in manifest.skipped)])


# `Schedule.config` of each objective's own schedule.
_SCHEDULES = {"ddpm": {"name": "cosine"}, "flow": {"name": "linear"}}


def fresh_data(shard: Path, settings: ExpertSettings) -> dict[str, Any]:
    """`expert_data` of an expert that begins with random weights, on its objective's own schedule."""
    return expert_data(shard, _SCHEDULES[settings.objective])


def is_kept(out: Path, record: str, run: RunOptions | None, overwrite: bool = False) -> bool:
    """Tell whether a model lies in ``out`` already and this start, a resumed one, leaves it there."""
    return run is not None and run.resume and not overwrite and (out / record).exists()


def is_complete(
    out: Path,
    record: str,
    run: RunOptions | None,
    overwrite: bool = False,
    settings: LoopSettings | None = None,
    data: Mapping[str, Any] | None = None,
) -> bool:
    """Tell from records alone whether a resumed training has written ``out`` and nothing is left to do.

    ``record`` is the JSON file that marks the kind of folder. ``settings`` and ``data``, as of `expert_data`,
    are those of this start; without them the answer is no where there is a run that they must equal.

    Raises:
        HddmError: for another folder in the way, a run that was started otherwise (`compare_records`), or
            files that are not those that were written, a line each.
    """
    if not is_kept(out, record, run, overwrite):
        check_absent(out, record, overwrite)
        return False
    if run is not None and (before := recorded(out)):
        if settings is None or data is None:
            return False
        now = {"settings": as_recorded(settings, out).model_dump(mode="json"), "data": dict(data)}
        # Nothing is computed any more, wherever this is.
        compare_records(out, {**now, "environment": before.get("environment", {})}, run)
    refuse_damaged(out, record, sha256=sha256_of, remedy="--overwrite trains it anew")
    log.info("%s: is finished; there is nothing to go on with", out)
    return True
