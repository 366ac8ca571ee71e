"""Long work that may be killed at any moment: what is done is found again, and only the rest is made.

FOLDER/IDENTITY         what decides the work, a JSON file such as ``run.json`` of a training
FOLDER/lock             held by the one process that works here
FOLDER/PART…            what a part wrote
FOLDER/PART.done.json   its record, written last; a part without one is made again

A record is sealed by its own hash and may hold the hashes of files, so damage is recognised. Folders of
trainings, features and benchmarks stay. Work on a folder that must be complete or absent (`open_draft`) is
hidden beside it:

.NAME.WORK/draft.json   its identity; ``WORK`` is "encoding" or "sampling"
.NAME.WORK/whole/…      becomes ``NAME`` at the end
.NAME.WORK/parts/…      records of parts, and files that are needed on the way only
"""

import contextlib
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from hddm.utils.accelerators import gpu_name
from hddm.utils.errors import HddmError, Stopped, one_line
from hddm.utils.files import (
    PATIENCE,
    alone,
    below,
    check_absent,
    is_draft,
    locked,
    nothing,
    put_in_place,
    read_json,
    recover,
    remove,
    sha256_of,
    write_json,
    write_whole,
    writing,
)
from hddm.utils.processes import Interrupted

PACKAGES = ("hddm-diffusion", "torch", "diffusers", "numpy", "scipy", "scikit-learn")
LARGEST = 2**28
_SHORT = 16
_LOCK = "lock"
DONE = ".done.json"
"""Ending of the record of a part that is done."""


def hash_of(content: Any) -> str:
    """SHA-256 of plain values, whatever the order of their keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


ABSENT = "not recorded"
"""Value of a key that one of two identities does not have."""


class Difference(NamedTuple):
    """A key with another value than before; of nested keys as ``settings.steps``."""

    key: str
    was: Any
    now: Any

    def __str__(self) -> str:
        return (
            f"{self.key}: was {one_line(repr(self.was), 300)}, is {one_line(repr(self.now), 300)}"
        )


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Compare two identities; a key that one of them does not have is equal to one of no value."""
    old, new = _flat(before), _flat(json.loads(json.dumps(dict(now))))
    found = []
    for key in dict.fromkeys([*old, *new]):
        if old.get(key) != new.get(key):
            found.append(Difference(key, old.get(key, ABSENT), new.get(key, ABSENT)))
    return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= _flat(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def machine() -> dict[str, Any]:
    """What work is done on: platform, cores, accelerator and versions of packages."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "platform": platform.platform(),
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "accelerator": gpu_name(),
        "packages": {name: version(name) for name in PACKAGES},
    }


class Work:
    """The work in ``folder``, which the JSON file ``identity`` marks, if any; paths name its parts.

    ``busy`` and ``other`` are texts for a second process: what the first one does, and what to choose.
    """

    def __init__(
        self, folder: Path, identity: str = "", busy: str = "", other: str = "another"
    ) -> None:
        self.folder, self._identity = folder, folder / identity
        self._busy, self._other = busy or f"{folder}: another process works in it", other

    @contextlib.contextmanager
    def held(self, patience: float = PATIENCE) -> Iterator[None]:
        """Keep other processes out within the block; raises as `locked`, and for something else's folder."""
        # A killed process may leave the lock and drafts of the identity.
        name = self._identity.name
        if not self._identity.exists():
            for path in self.folder.glob("*"):
                if path.name != _LOCK and not path.name.startswith(f".{name}."):
                    raise HddmError(
                        f"{self.folder}: has files, but no {name}; move it away, or choose {self._other}"
                    )
        with locked(self.folder / _LOCK, self._busy, self._other, patience):
            yield

    def found(self) -> dict[str, Any] | None:
        """What decides the work that was begun here; None without any."""
        return read_json(self._identity) if self._identity.is_file() else None

    def begin(
        self, identity: Mapping[str, Any], refusal: str, replace: bool, again: bool = False
    ) -> None:
        """Continue work of this ``identity``, or begin it if there is none, or ``again``.

        Work of another identity goes if ``replace``; else raises `HddmError` with ``refusal`` and all
        differences.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        before = self.found()
        differing = differences(before or {}, identity)
        if before is not None and differing and not replace:
            raise HddmError(refusal, map(str, differing))
        if before is None or differing or again:
            self.clear()
            self.write(identity)
        self.sweep()

    def write(self, identity: Mapping[str, Any]) -> None:
        """Write the identity, of plain values."""
        write_whole(self._identity, lambda draft: write_json(draft, identity))

    def clear(self) -> None:
        """Remove everything but the lock; of links, the links alone: what they lead to may be shared."""
        # The identity goes last, since without it the rest would be taken for something else.
        for path in sorted(self.folder.iterdir(), key=lambda path: path == self._identity):
            if path.name != _LOCK:
                remove(path)

    def sweep(self) -> None:
        """Remove drafts of files and folders, as processes leave them that are killed."""
        for path in [path for path in below(self.folder) if is_draft(path.name)]:
            remove(path)

    def path(self, kind: str, identity: str) -> Path:
        """Where the part of this ``kind`` lies that depends on what ``identity`` is the hash of."""
        return self.folder / f"{kind}-{identity[:_SHORT]}"

    def has(self, path: Path) -> bool:
        """True if the part at ``path`` is done."""
        return _record(path).is_file()

    def record(self, path: Path) -> dict[str, Any]:
        """Record of the part at ``path``; raises `HddmError` for one that is missing or was changed."""
        content = read_json(_record(path), LARGEST)
        if content.pop("seal", None) != hash_of(content):
            text = "was changed after it was written; delete it to repeat this part"
            raise HddmError(f"{_record(path)}: {text}")
        return content

    def forget(self, path: Path) -> None:
        """Remove the record of the part at ``path``, which is then made again."""
        _record(path).unlink(missing_ok=True)

    def done(self, path: Path) -> dict[str, Any] | None:
        """Record of the part at ``path``, or None if it or one of its files is missing or damaged."""
        try:
            content = self.record(path)
            for name, sha256 in content.pop("files", {}).items():
                if sha256_of(self.folder / name) != sha256:
                    return None
        except HddmError:
            return None
        return content

    def finish(
        self, path: Path, content: Mapping[str, Any], files: Mapping[str, str] | None = None
    ) -> None:
        """Record that the part at ``path`` is done, with plain values about it.

        ``files`` are the SHA-256 of its files by their paths in the folder, for `done`.
        """
        written = json.loads(
            json.dumps({**content, **({} if files is None else {"files": dict(files)})})
        )
        sealed = written | {"seal": hash_of(written)}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(_record(path), lambda draft: write_json(draft, sealed))


def _record(path: Path) -> Path:
    return path.with_name(path.name + DONE)


class Draft(Work):
    """The hidden folder of the ``work`` on ``target``: its files in `whole`, all else in `parts`."""

    def __init__(self, target: Path, work: str) -> None:
        super().__init__(target.parent / f".{target.name}.{work}", "draft.json")
        self.target, self.whole, self.parts = target, self.folder / "whole", self.folder / "parts"

    @property
    def has_parts(self) -> bool:
        """True if a later run can continue it."""
        return any(self.parts.rglob(f"*{DONE}"))

    def discard_finished(self) -> None:
        """Remove what a process left that was killed after it had put the target in place."""
        if self.target.exists() and self.folder.is_dir() and not self.whole.exists():
            with contextlib.suppress(HddmError), alone(self.target):
                shutil.rmtree(self.folder, ignore_errors=True)
        recover(self.target)


@contextlib.contextmanager
def open_draft(
    target: Path,
    record: str,
    identity: Mapping[str, Any],
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

    Raises `HddmError` as `check_absent`, `alone` and `writing`, and for a draft of another identity;
    `Stopped` for `Interrupted`.
    """
    draft = Draft(target, work)

    def remains() -> str:
        return kept() if draft.has_parts else nothing()

    draft.discard_finished()
    check_absent(target, record, overwrite)
    with writing(target, remains), alone(target):
        try:
            check_absent(target, record, overwrite)
            unfinished = f"{target}: {draft.folder} holds an unfinished {work}"
            if resume is False and not overwrite and draft.found() is not None:
                raise HddmError(
                    f"{unfinished}; `resume=True` continues it, `overwrite=True` starts again"
                )
            refusal = (
                "of other options; repeat those to continue, or pass `overwrite=True` to discard it"
            )
            draft.begin(identity, f"{unfinished} {refusal}", overwrite, again=resume is False)
            for folder in (draft.whole, draft.parts):
                folder.mkdir(exist_ok=True)
            yield draft
            put_in_place(draft.whole, target, overwrite)
        except BaseException as error:
            if not draft.has_parts:
                shutil.rmtree(draft.folder, ignore_errors=True)
            if isinstance(error, Interrupted) and not target.exists():
                raise Stopped(f"{target}: stopped; {remains()}", error.number) from error
            raise
        shutil.rmtree(draft.folder, ignore_errors=True)
