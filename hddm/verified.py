"""Files that were held against their hashes before, and have not been touched since.

A shard of 100 GB takes minutes to hash, and every restart of a training opens it; weights likewise. So a
folder keeps, in a hidden file, what each verified file was like: its hash, size and inode, and the times of
the last change of content and of status. A file that is like that still is not read again. Any write gives
it another time, and copying it another inode, so that both are hashed anew. What changes neither, such as a
disk that rots, shows once the hidden file is removed.

A file system's clock may be as coarse as two seconds. What was changed so shortly before it was hashed could
be changed again without another time, and is not remembered; git treats its index so.
"""

import contextlib
import os
import time
from pathlib import Path

from hddm.errors import HddmError
from hddm.files import read_json, sha256_of, write_json, write_whole

RECORD = ".verified.json"
SETTLED = 2 * 10**9
"""Nanoseconds after a change, from which on another one gives another time."""


class Verified:
    """What is known of the files in ``folder``; `keep` writes it down.

    Files of less than ``smallest`` bytes are hashed each time, and not remembered.
    """

    def __init__(self, folder: Path, smallest: int = 0) -> None:
        self._folder, self._smallest = folder, smallest
        self._known: dict[str, object] = {}
        with contextlib.suppress(HddmError):
            self._known = read_json(folder / RECORD)
        self._found: dict[str, object] = {}

    def matches(self, name: str, sha256: str) -> bool:
        """Whether the file ``name`` has this hash: by its content, unless it is as it was when it had.

        Raises:
            HddmError: for a file that cannot be read.
        """
        path, now = self._folder / name, time.time_ns()
        status = _status(path)
        state = [sha256, status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
        is_known = self._known.get(name) == state
        if not is_known and sha256_of(path) != sha256:
            return False
        if status.st_size < self._smallest:
            return True
        if is_known or now - status.st_ctime_ns > SETTLED:
            self._found[name] = state
        return True

    def keep(self) -> None:
        """Write down what was verified, where it is news and the folder can be written to."""
        if self._found != self._known:
            with contextlib.suppress(HddmError):
                write_whole(self._folder / RECORD, lambda draft: write_json(draft, self._found))


def _status(path: Path) -> os.stat_result:
    try:
        # Opening asks a network's file system anew, which a bare stat need not.
        with path.open("rb") as file:
            return os.fstat(file.fileno())
    except OSError as error:
        raise HddmError(f"{path}: cannot be read ({error.strerror or error})") from error
