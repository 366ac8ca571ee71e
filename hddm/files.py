"""Writing folders whole or not at all, and reading JSON with errors that name the file."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hddm.errors import HddmError

RECORDS = (
    "expert.json",
    "router.json",
    "ensemble.json",
    "partition.json",
    "sampling.json",
    "results.json",
)


@contextlib.contextmanager
def new_folder(target: Path, overwrite: bool = False) -> Iterator[Path]:
    """A folder to fill that becomes ``target`` when the block ends, and vanishes if it fails.

    It lies beside ``target``, since a rename is atomic only within one file system. Files are synced
    to disk before the rename.

    Raises:
        HddmError: as `check_absent`.
    """
    check_absent(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.parent / f".{target.name}.part-{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        yield draft
        for path in [*draft.rglob("*"), draft]:
            _sync(path)
        _replace(draft, target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def check_absent(target: Path, overwrite: bool = False) -> None:
    """Refuse an existing ``target``; called again before work of hours, to fail early.

    With ``overwrite`` only an empty folder or one with a record of hddm's may go, so that a slip of the
    keyboard does not delete somebody's images.
    """
    if not target.exists():
        return
    if not overwrite:
        raise HddmError(f"{target} exists: choose another folder, or pass --overwrite to replace it")
    ours = target.is_dir() and (not any(target.iterdir()) or any((target / r).exists() for r in RECORDS))
    if not ours:
        raise HddmError(
            f"{target}: --overwrite replaces only what hddm wrote, and this holds none of its records"
        )


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON with a final newline."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        HddmError: for a missing file, broken JSON or anything but an object.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise HddmError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise HddmError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise HddmError(f"{path}: holds no JSON object")
    return content


def _replace(draft: Path, target: Path) -> None:
    if not target.exists():
        draft.rename(target)
        return
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    target.rename(old)
    try:
        draft.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
