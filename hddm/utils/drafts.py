"""The draft of long work on a folder, which a later run continues.

.NAME.WORK/draft.json        what decides the content; a run with another is refused
.NAME.WORK/lock              belongs to the one process that writes
.NAME.WORK/done/…/PART.json  record of a part, written after its files
.NAME.WORK/whole/…           becomes ``NAME`` at the end
.NAME.WORK/parts/…           files that are needed on the way only

``WORK`` is "encoding" or "sampling". A process that is killed at any moment leaves whole parts, and perhaps
files without a record, which are made again.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from hddm.utils.errors import HddmError
from hddm.utils.files import (
    check_absent,
    is_draft,
    locked,
    nothing,
    put_in_place,
    read_json,
    remove,
    sha256_of,
    write_json,
    write_whole,
    writing,
)
from hddm.utils.processes import Interrupted, Stopped
from hddm.utils.records import Record

_IDENTITY, _LOCK = "draft.json", "lock"


class Done(Record):
    """Record of a part that is complete."""

    def hashes(self, name: str) -> Mapping[str, str]:
        """SHA-256 of the files of the part ``name``, by their paths in `Draft.root`."""
        raise NotImplementedError


AnyDone = TypeVar("AnyDone", bound=Done)


@dataclass(frozen=True)
class Draft:
    """``root`` as above; all files of a part that `done` returns are complete."""

    root: Path

    @property
    def folder(self) -> Path:
        """The folder that becomes the output."""
        return self.root / "whole"

    @property
    def parts(self) -> Path:
        """The folder of what is needed on the way only."""
        return self.root / "parts"

    def done(self, name: str, kind: type[AnyDone]) -> AnyDone | None:
        """Record of the part ``name``; None if it is incomplete, as after a power failure."""
        try:
            done = kind.model_validate(read_json(self._record(name)))
            is_whole = all(sha256_of(self.root / path) == sha for path, sha in done.hashes(name).items())
        except (HddmError, ValidationError):
            return None
        return done if is_whole else None

    def add(self, name: str, done: AnyDone) -> AnyDone:
        """Record the part ``name``, whose files are written."""
        record = self._record(name)
        record.parent.mkdir(parents=True, exist_ok=True)
        write_whole(record, lambda part: write_json(part, done.model_dump()))
        return done

    def drop(self, name: str) -> None:
        """Remove the record of the part ``name``, before its files are written anew or removed."""
        self._record(name).unlink(missing_ok=True)

    def _record(self, name: str) -> Path:
        return self.root / "done" / f"{name}.json"


@contextlib.contextmanager
def open_draft(
    target: Path,
    record: str,
    identity: dict[str, Any],
    work: str,
    kept: Callable[[], str],
    overwrite: bool = False,
    resume: bool | None = None,
) -> Iterator[Draft]:
    """Open the draft of ``target``, which becomes ``target`` when the block ends.

    After a failure or a kill the draft stays for a later run if it has a complete part. ``record`` is the
    JSON file that marks the target's kind; ``identity`` holds the plain values that decide the content.
    ``overwrite`` replaces ``target`` and discards a draft of another identity. Where ``resume`` is None, a
    draft of the same identity is always continued; otherwise only if True, and without ``overwrite`` it is
    refused otherwise. ``kept`` says what stays, and how to go on, after a signal and on a full disk.

    Raises `HddmError` as `check_absent` and `writing`, if another process is writing, and for a draft of
    another identity; `Stopped` for `Interrupted`.
    """
    root = _root(target, work)

    def remains() -> str:
        return kept() if any((root / "done").rglob("*.json")) else nothing()

    discard_finished(target, work)
    check_absent(target, record, overwrite)
    with writing(target, remains, below=root), _held(target, work):
        try:
            check_absent(target, record, overwrite)
            _take_up(root, target, json.loads(json.dumps(identity)), work, overwrite, resume)
            draft = Draft(root)
            for folder in (draft.folder, draft.parts):
                folder.mkdir(exist_ok=True)
            # Partial files of a killed process would end up in the output.
            for path in [path for path in root.rglob(".*") if is_draft(path.name)]:
                remove(path)
            yield draft
            put_in_place(draft.folder, target, overwrite)
        except BaseException as error:
            if not any((root / "done").rglob("*.json")):
                _discard(root)
            if isinstance(error, Interrupted) and not target.exists():
                raise Stopped(f"{target}: stopped; {remains()}", error.number) from error
            raise
        _discard(root)


def discard_finished(target: Path, work: str) -> None:
    """Remove the draft of a process that was killed after it had put ``target`` in place."""
    root = _root(target, work)
    if target.exists() and root.is_dir() and not (root / "whole").exists():
        with contextlib.suppress(HddmError), _held(target, work):
            _discard(root)


def _root(target: Path, work: str) -> Path:
    return target.parent / f".{target.name}.{work}"


def _held(target: Path, work: str) -> contextlib.AbstractContextManager[None]:
    said = f"another process is {work} to it ({{}}); wait for it, or choose another --out"
    return locked(_root(target, work) / _LOCK, lambda holder: f"{target}: {said.format(holder)}")


def _discard(root: Path) -> None:
    """Remove a draft, its lock last, since the next holder of the lock may already write here."""
    for path in root.iterdir():
        if path.name != _LOCK:
            with contextlib.suppress(OSError):
                remove(path)
    (root / _LOCK).unlink()
    with contextlib.suppress(OSError):
        root.rmdir()


def _take_up(
    root: Path, target: Path, identity: dict[str, Any], work: str, overwrite: bool, resume: bool | None
) -> None:
    """Continue the draft in ``root`` if it has this ``identity``, else begin it."""
    path = root / _IDENTITY
    found = read_json(path) if path.is_file() else None
    if found is not None and resume is False and not overwrite:
        raise HddmError(
            f"{target}: {root} holds an unfinished {work}; --resume continues it, --overwrite starts again"
        )
    if found == identity and resume is not False:
        return
    if found is not None and not overwrite:
        again = "repeat those to continue, or pass --overwrite to discard it"
        raise HddmError(
            f"{target}: {root} holds an unfinished {work} of other options; {again}",
            differences(found, identity),
        )
    for name in ("done", "whole", "parts"):
        shutil.rmtree(root / name, ignore_errors=True)
    write_whole(path, lambda part: write_json(part, identity))


def differences(found: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Lines for the keys in which two records of plain values differ."""
    differing = sorted(key for key in found.keys() | now.keys() if found.get(key) != now.get(key))
    return [f"{key}: {_short(found.get(key))} there, {_short(now.get(key))} now" for key in differing]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 300 else text[:299] + "…"
