"""One process at a time: a lock that the system lets go of when its holder ends, however that happens."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from hddm.errors import HddmError


@contextlib.contextmanager
def locked(path: Path, refusal: Callable[[str], str]) -> Iterator[None]:
    """Hold the lock ``path`` within the block; the file says by which process, and stays.

    Whoever holds the lock may remove its file, as the last of what it guards.

    Args:
        path: the file; its folder is made where it is missing.
        refusal: the message of the error, from what the file says of its holder.

    Raises:
        HddmError: where another process holds it.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_opened(path))
        _hold(file, refusal)
        # One that was removed since it was opened locks nobody out.
        while not _is_at(file, path):
            file = stack.enter_context(_opened(path))
            _hold(file, refusal)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        yield


def _opened(path: Path) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return path.open("a+")
    except FileNotFoundError:
        # The folder went with another's lock just now.
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a+")


def _hold(file: TextIO, refusal: Callable[[str], str]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise HddmError(refusal(file.read().strip() or "unknown")) from None


def _is_at(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
