"""The draft of a long encoding, which a later run continues.

.NAME.encoding/draft.json        source and options; a run with other options is refused
.NAME.encoding/lock              held by the one process that writes
.NAME.encoding/done/…/NAME.json  record of a data file, written after it
.NAME.encoding/whole/…           becomes ``NAME`` at the end
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hddm.data.shard_records import Computed, FileRecord, Skipped
from hddm.utils.errors import HddmError
from hddm.utils.files import (
    check_absent,
    locked,
    put_in_place,
    read_json,
    sha256_of,
    write_json,
    write_whole,
    writing,
)
from hddm.utils.records import Record

_IDENTITY, _LOCK = "draft.json", "lock"


class Done(Record):
    """A data file, the images skipped in it, those with cut captions, and how networks ran, if any."""

    facts: FileRecord
    skipped: tuple[Skipped, ...] = ()
    cut: tuple[str, ...] = ()
    computed: Computed | None = None


@dataclass(frozen=True)
class Draft:
    """``root`` as above; every file in ``folder`` that `done` returns is complete."""

    root: Path

    @property
    def folder(self) -> Path:
        """The folder that becomes the output."""
        return self.root / "whole"

    def done(self, name: str) -> Done | None:
        """Record of ``folder/name``; None if the file is incomplete, as after a power failure."""
        try:
            done = Done.model_validate(read_json(self._record(name)))
            return done if sha256_of(self.folder / name) == done.facts.sha256 else None
        except (HddmError, ValidationError):
            return None

    def add(self, name: str, write: Callable[[Path], None], rows: int, **known: Any) -> Done:
        """Write the file ``folder/name`` with ``write`` and record it; a failure leaves neither."""
        path, record = self.folder / name, self._record(name)
        for folder in (path.parent, record.parent):
            folder.mkdir(parents=True, exist_ok=True)
        record.unlink(missing_ok=True)
        write_whole(path, write)
        done = Done(facts=FileRecord(file=path.name, sha256=sha256_of(path), rows=rows), **known)
        write_whole(record, lambda part: write_json(part, done.model_dump()))
        return done

    def _record(self, name: str) -> Path:
        return self.root / "done" / f"{name}.json"


@contextlib.contextmanager
def open_draft(
    target: Path, record: str, identity: dict[str, Any], overwrite: bool = False
) -> Iterator[Draft]:
    """Open the draft of ``target``, which becomes ``target`` when the block ends.

    After a failure or a kill the draft stays for a later run if it has a complete data file. ``record`` is
    the JSON file that marks the target's kind; ``identity`` holds the plain values that decide the content.
    ``overwrite`` replaces ``target`` and discards a draft of another identity. Raises `HddmError` as
    `check_absent`, if another process is writing, and for a draft of another identity.
    """
    check_absent(target, record, overwrite)
    root = target.parent / f".{target.name}.encoding"
    with locked(
        root / _LOCK,
        lambda holder: (
            f"{target}: another process is encoding to it ({holder}); wait for it, or choose another --out"
        ),
    ):
        try:
            check_absent(target, record, overwrite)
            _take_up(root, target, json.loads(json.dumps(identity)), overwrite)
            draft = Draft(root)
            draft.folder.mkdir(exist_ok=True)
            # Partial files of a killed process would end up in the output.
            for left in root.rglob(".*.part-*"):
                left.unlink()
            yield draft
            with writing(target):
                put_in_place(draft.folder, target, overwrite)
        except BaseException:
            if not any((root / "done").rglob("*.json")):
                _discard(root)
            raise
        _discard(root)


def _discard(root: Path) -> None:
    """Remove a draft, its lock last, since the next holder of the lock may already write here."""
    for path in root.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != _LOCK:
            path.unlink()
    (root / _LOCK).unlink()
    with contextlib.suppress(OSError):
        root.rmdir()


def _take_up(root: Path, target: Path, identity: dict[str, Any], overwrite: bool) -> None:
    """Continue the draft in ``root`` if it has this ``identity``, else begin it."""
    path = root / _IDENTITY
    found = read_json(path) if path.is_file() else None
    if found == identity:
        return
    if found is not None and not overwrite:
        differing = sorted(k for k in found.keys() | identity.keys() if found.get(k) != identity.get(k))
        raise HddmError(
            f"{target}: {root} holds an unfinished encoding of other options; repeat those to go on, or pass "
            "--overwrite to discard it",
            [f"{key}: {_short(found.get(key))} there, {_short(identity.get(key))} now" for key in differing],
        )
    for name in ("done", "whole"):
        shutil.rmtree(root / name, ignore_errors=True)
    write_whole(path, lambda part: write_json(part, identity))


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 300 else text[:299] + "…"
