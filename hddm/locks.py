"""One process at a time: a lock that the system lets go of when its holder ends, however that happens."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from hddm.errors import HddmError


@contextlib.contextmanager
def locked(path: Path, refusal: Callable[[str], str]) -> Iterator[None]:
    """Hold the lock ``path`` within the block; the file says by which process, and stays.

    Args:
        path: the file, in a folder that is there.
        refusal: the message of the error, from what the file says of its holder.

    Raises:
        HddmError: where another process holds it.
    """
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise HddmError(refusal(file.read().strip() or "unknown")) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        yield
