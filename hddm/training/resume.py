"""Resuming a run, decided by records alone: ``OUT.run/run.json`` and the manifests of shards.

A change of settings on the way is recorded as

    {"step": 1000, "key": "learning_rate", "was": 0.0015, "is": 0.0003}

and holds for the steps after ``step``, up to the next change of ``key``.
"""

import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from hddm.data.shard_records import ShardManifest, read_manifest
from hddm.training.settings import RunOptions
from hddm.utils.errors import HddmError
from hddm.utils.files import check_absent, read_json, recover, sha256_of
from hddm.utils.records import OpenRecord, damage, read_record, refuse_damaged
from hddm.utils.work import ABSENT, differences

SettingsChange = dict[str, Any]
"""Record of one change, as plain values of JSON."""


def with_changes(
    before: Sequence[SettingsChange], new: Sequence[SettingsChange], step: int
) -> list[SettingsChange]:
    """Return changes ``before``, in order, and those ``new`` at the resumed checkpoint of ``step``.

    Steps beyond ``step`` are computed again, so changes that were made there count from ``step`` on. Changes
    before the first step are dropped.
    """
    changes: list[SettingsChange] = []
    for one in (*before, *new):
        change = {"step": step} | one
        change["step"] = min(change["step"], step)
        if change["step"] > 0:
            changes.append(change)
    return changes


def value_at(step: int, key: str, today: Any, changes: Sequence[SettingsChange]) -> Any:
    """Return the value of setting ``key`` in ``step``, from 1; ``today`` is its value now."""
    for one in changes:
        if one["key"] == key and step <= one["step"]:
            return one["was"]
    return today


RUN_FILE = "run.json"
RUN_FORMAT = "3.0"
CHECKPOINTS = "checkpoints"
# Settings that no resumed run may change, even if changes are allowed: the record would then be untrue for
# its first steps.
_IDENTITY = (
    "objective",
    "prediction",
    "size",
    "rotary",
    "class_conditional",
    "text_conditional",
    "condition",
    "lora_rank",
    "lora_alpha",
    "teacher",
    "strategy",
    "optimizer",
    "weak_at",
    "noise_range",
    "sampling_steps",
    "trajectories",
    "guidance_scale",
)
FIXED = {f"settings.{key}" for key in _IDENTITY}

log = logging.getLogger(__name__)


def run_folder_of(out: Path) -> Path:
    """Return the folder of the run that writes ``out``."""
    return out.with_name(f"{out.name}.run")


def checkpoints_in(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, damaged ones too, newest first."""
    found = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d{8,}", path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """Return the number of steps done at a checkpoint."""
    return int(path.name.removeprefix("step_"))


class RecordedChange(OpenRecord):
    """A `SettingsChange`."""

    step: int
    key: str
    was: Any
    now: Any = Field(alias="is")


class RunRecord(OpenRecord):
    """``run.json``, as `hddm.training.state.open_run` writes it; ``settings`` are the recipe."""

    oldest = RUN_FORMAT
    remedy = "use the version of hddm that wrote it, or another `out`"

    format: str
    settings: dict[str, Any] = Field(default_factory=dict)
    data: dict[str, Any] = Field(default_factory=dict)
    environment: dict[str, Any] = Field(default_factory=dict)
    changes: tuple[RecordedChange, ...] = ()


def read_run(path: Path) -> dict[str, Any]:
    """Read ``run.json`` as plain values; raises as `hddm.utils.records.read_record`."""
    read_record(path, RunRecord, RUN_FORMAT)
    return read_json(path)


def has_run(out: Path) -> bool:
    """Return whether ``out`` has a run already."""
    return (run_folder_of(out) / RUN_FILE).exists()


def recorded(out: Path) -> dict[str, Any]:
    """Read the record of the run of ``out``, {} without one; raises as `read_run`."""
    return read_run(run_folder_of(out) / RUN_FILE) if has_run(out) else {}


def refuse_run(out: Path) -> None:
    """Refuse an ``out`` that has a run already; raises `HddmError`."""
    if has_run(out):
        text = f"already holds a run of {out}; `resume=True` continues it, `overwrite=True` starts again"
        raise HddmError(f"{run_folder_of(out)}: {text}")


def is_kept(out: Path, record: str, run: RunOptions | None, overwrite: bool = False) -> bool:
    """Return whether ``out`` holds a model already and this start, a resumed one, leaves it there."""
    if run is None or not run.resume or overwrite:
        return False
    recover(out)
    return (out / record).exists()


def recipe_before(
    out: Path, record: str, run: RunOptions | None, overwrite: bool = False
) -> dict[str, Any]:
    """Return the recipe of the run that is resumed, {} if none is; refuse another folder in the way.

    ``record`` is the JSON file that marks the kind of folder. Raises `HddmError`.
    """
    if not is_kept(out, record, run, overwrite):
        check_absent(out, record, overwrite)
    return recipe_of_resumed(out, run)


def recipe_of_resumed(out: Path, run: RunOptions | None) -> dict[str, Any]:
    """Return the recipe of the run that is resumed, {} if none is."""
    if run is None or not run.resume:
        return {}
    settings: dict[str, Any] = recorded(out).get("settings", {})
    return settings


def is_finished(
    out: Path,
    record: str,
    content: Mapping[str, Any],
    run: RunOptions | None,
    overwrite: bool = False,
) -> bool:
    """Return whether a resumed training has written ``out``, and nothing is left to do.

    Raises `HddmError` for a run of another ``content``, as `compare_records`, and for damaged files.
    """
    if run is None or not is_kept(out, record, run, overwrite):
        return False
    before = recorded(out)
    if before:
        compare_records(out, before, content, run)
    refuse_damaged(out, damage(out, record, sha256=sha256_of), "`overwrite=True` trains it again")
    log.info("%s: is finished; there is nothing to resume", out)
    return True


def compare_records(
    out: Path, before: Mapping[str, Any], record: Mapping[str, Any], options: RunOptions
) -> list[SettingsChange]:
    """Refuse to resume a run of record ``before`` with another; return changes of settings, without steps.

    ``options.allow_config_change`` allows other settings, but no other data, objective or network. The
    `HddmError` lists differences that are never allowed, or else all that were refused.
    """
    folder = run_folder_of(out)
    found = differences(_compared(before), _compared(record))
    # A value that the run did not record is no reason to refuse it for good.
    known = [one for one in found if one.was != ABSENT]
    fixed = [one for one in known if one.key in FIXED or one.key.startswith("data.")]
    refused = fixed
    if not fixed and not options.allow_config_change:
        refused = found
    if refused:
        text = "the run was started with different settings; repeat them, or pass `allow_config_change=True`"
        if fixed:
            text = "the run used other data, another objective or network; choose another `out`"
        raise HddmError(f"{folder}: {text}", map(str, refused))
    changes: list[SettingsChange] = []
    for one in found:
        log.warning("%s: %s", folder, one)
        if one.key.startswith("settings."):
            key = one.key.removeprefix("settings.")
            changes.append({"key": key, "was": one.was, "is": one.now})
    return changes


def _compared(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a run's record that decide whether the run can be resumed."""
    return {"settings": record.get("settings", {}), "data": record.get("data", {})}


def encoding_of(shards: Sequence[Path]) -> dict[str, Any]:
    """Describe encoded shards for a run's record, since their hash is that of the images alone.

    ``encoding``, ``vae`` and ``text_encoder`` are the first shard's, ``rows`` counts the samples of all, and
    ``files`` is a SHA-256 over all their data files.
    """
    manifests = [one for one in map(read_manifest, shards) if one.encoding is not None]
    if not manifests:
        return {}
    return {
        **manifests[0].model_dump(mode="json", include={"encoding", "vae", "text_encoder"}),
        "rows": sum(one.num_rows for one in manifests),
        "files": hashlib.sha256("\n".join(map(_content, manifests)).encode()).hexdigest(),
    }


def _content(manifest: ShardManifest) -> str:
    """Return one line of the hashes of a shard's data files and the names of its skipped images."""
    words = [one.sha256 for one in manifest.data]
    if manifest.null:
        words.append(manifest.null.sha256)
    words += [one.file for one in manifest.skipped]
    return " ".join(words)
