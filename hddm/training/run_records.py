"""What a run says of itself in ``OUT.run/run.json``, and whether another start of it says the same."""

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from hddm.errors import HddmError
from hddm.files import read_json
from hddm.training.changes import NOT_RECORDED, differences, told
from hddm.training.settings import LoopSettings, RunOptions

Settings = TypeVar("Settings", bound=LoopSettings)

RUN_FILE = "run.json"
CHECKPOINTS = "checkpoints"
# What may change between two starts of a run without changing what it computes.
FREE = {f"environment.{key}" for key in ("hddm", "torch", "hostname", "device", "processes")}
# What makes it another expert, so that its record would be untrue if one run went on as the other.
FIXED = {
    f"settings.{key}"
    for key in (
        "objective",
        "size",
        "class_conditional",
        "text_conditional",
        "lora_rank",
        "lora_alpha",
        "teacher",
    )
}

log = logging.getLogger(__name__)


def run_folder_of(out: Path) -> Path:
    """Where the run that makes ``out`` is kept."""
    return out.with_name(f"{out.name}.run")


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints that a folder holds, whole or damaged, newest first."""
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
    """Refuse to go on with the run of ``out`` if it was started with another ``record``.

    ``options.allow_config_change`` allows other settings, but no other data, objective or network.

    Returns:
        What was and is, by dotted key, where that differs and may.

    Raises:
        HddmError: with every difference that stands in the way: those that never may, where there are any.
    """
    folder, allowed = run_folder_of(out), options.allow_config_change
    differing = differences(recorded(out), json.loads(json.dumps(dict(record))))
    lines = {key: told(key, *values) for key, values in differing.items()}
    # What an older version did not record cannot be held against a run.
    known = {key for key, (was, _) in differing.items() if was is not NOT_RECORDED}
    fixed = [lines[key] for key in lines if key in known and (key in FIXED or key.startswith("data."))]
    if fixed:
        raise HddmError(
            f"{folder}: the run is of other data, another objective or network, and cannot go on with "
            "these; choose another --out",
            fixed,
        )
    refused = [line for key, line in lines.items() if key not in FREE]
    if refused and not allowed:
        raise HddmError(
            f"{folder}: the run was started otherwise; take the same again, or pass --allow-config-change",
            refused,
        )
    for line in lines.values():
        log.warning("%s: %s", folder, line)
    return differing
