"""Waiting until what was written is on the disk, so that it outlives a loss of power."""

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

_FEW = 64
"""Files that are waited for one by one; each takes up to some milliseconds."""


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(paths: Iterable[Path], folder: Path) -> None:
    """Wait until files and folders below ``folder`` are on the disk.

    Where there are many, this waits once for all that was written to their file system, if the operating
    system has a call for it.
    """
    for number, path in enumerate(paths):
        if number == _FEW and _sync_file_system(folder):
            return
        sync(path)


def _sync_file_system(folder: Path) -> bool:
    """Wait until everything on the file system of a folder is on the disk; False if that is not possible."""
    syncfs = getattr(ctypes.CDLL(None), "syncfs", None)
    if syncfs is None:
        return False
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        return bool(syncfs(descriptor) == 0)
    finally:
        os.close(descriptor)
