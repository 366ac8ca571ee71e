"""Copies of files: a hard link, blocks that both files share, or bytes, whichever the file system can do."""

import contextlib
import os
from collections.abc import Callable
from io import BufferedReader, BufferedWriter
from pathlib import Path

from hddm.utils.files import opened, writing

_COPIED = 2**26
"""Bytes that are copied at once, between two reports."""


def link_or_copy(source: Path, target: Path) -> None:
    """Make ``target`` a hard link to ``source`` if the file system allows, else a copy.

    Raises `HddmError` as `copy_file`, also for a target that is there.
    """
    try:
        os.link(source.resolve(), target)
    except OSError:
        copy_file(source, target)


def copy_file(
    source: Path, target: Path, on_bytes: Callable[[int], None] = lambda count: None
) -> None:
    """Copy the content of a file to a new one; where the file system can, they share it on the disk.

    ``on_bytes`` hears how many bytes were copied. Raises `HddmError` as `opened` and `writing`.
    """
    with opened(source) as file, writing(target), target.open("xb") as copy:
        try:
            _copy(file, copy, on_bytes)
        except BaseException:
            target.unlink(missing_ok=True)
            raise


def _copy(file: BufferedReader, copy: BufferedWriter, on_bytes: Callable[[int], None]) -> None:
    # Not all systems do this, nor between all file systems; some copy nothing, and say 0 as at the end.
    # What is left is copied by reading, which fails as it should on a full disk.
    while count := _copied_by_system(file, copy):
        on_bytes(count)
    while piece := file.read(_COPIED):
        copy.write(piece)
        on_bytes(len(piece))
    # Which may fail on a full disk too.
    copy.flush()


def _copied_by_system(file: BufferedReader, copy: BufferedWriter) -> int:
    with contextlib.suppress(AttributeError, OSError):
        return os.copy_file_range(file.fileno(), copy.fileno(), _COPIED)
    return 0
