"""Parts of long work that are done or not, found again by what they depend on.

FOLDER/lock             held by the one process that works here
FOLDER/NAME…            what a part wrote, under the hash of all that it depends on
FOLDER/NAME.done.json   its record, written last: a part without it is made again

Works that share a folder share their parts. A record is sealed by its hash, so a damaged one is
recognised; the files of a part are checked by whoever reads them.
"""

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hddm.utils.errors import HddmError
from hddm.utils.files import locked, read_json, sha256_of, write_json, write_whole

LARGEST = 2**28
_SHORT = 16
DONE = ".done.json"
"""Ending of the record of a part that is done."""


def hash_of(content: Any) -> str:
    """SHA-256 of plain values, whatever the order of their keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def content_of(path: Path) -> str:
    """SHA-256 of a file, or of the names and contents of all files in a folder that are not hidden."""
    if not path.exists():
        raise HddmError(f"{path}: no such file or folder")
    if path.is_file():
        return sha256_of(path)
    files = sorted(one for one in path.rglob("*") if one.is_file() and not one.name.startswith("."))
    lines = [f"{one.relative_to(path).as_posix()} {sha256_of(one)}" for one in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class Work:
    """The parts in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, kind: str, identity: str) -> Path:
        """Where the part of this ``kind`` lies that depends on what ``identity`` is the hash of."""
        return self.folder / f"{kind}-{identity[:_SHORT]}"

    def has(self, path: Path) -> bool:
        """True if the part at ``path`` is done."""
        return self._record(path).is_file()

    def record(self, path: Path) -> dict[str, Any]:
        """Record of the part at ``path``; raises `HddmError` for one that is missing or was changed."""
        content = read_json(self._record(path), LARGEST)
        if content.pop("seal", None) != hash_of(content):
            raise HddmError(
                f"{self._record(path)}: was changed after it was written; delete it to repeat this part"
            )
        return content

    def finish(self, path: Path, content: Mapping[str, Any]) -> None:
        """Record that the part at ``path`` is done, with plain values about it."""
        written = json.loads(json.dumps(dict(content)))
        sealed = written | {"seal": hash_of(written)}
        write_whole(self._record(path), lambda draft: write_json(draft, sealed))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep others from working in the folder within the block; raises `HddmError` if a process does."""
        self.folder.mkdir(parents=True, exist_ok=True)
        said = f"{self.folder}: another process works in it ({{}}); wait, or choose another folder"
        with locked(self.folder / "lock", said.format):
            yield

    def _record(self, path: Path) -> Path:
        return path.with_name(path.name + DONE)
