"""Files that mean harm, made by the tests, and what reading them costs."""

import contextlib
import resource
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ZIP_OR_LEGACY = pytest.mark.parametrize("in_zip", [True, False], ids=["zip", "legacy"])


class Calls:
    """Unpickled in full, it calls ``function`` with ``arguments``."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._reduced = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._reduced


def save(content: object, folder: Path, in_zip: bool) -> Path:
    """Write ``folder/a.pt`` in the format of today or of before torch 1.6."""
    path = folder / "a.pt"
    torch.save(content, path, _use_new_zipfile_serialization=in_zip)
    return path


def zipped(folder: Path, code: bytes, *storages: bytes) -> Path:
    """Write ``folder/a.pt`` as `torch.save` would, around any pickle."""
    path = folder / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", code)
        archive.writestr("a/byteorder", "little")
        for index, content in enumerate(storages):
            archive.writestr(f"a/data/{index}", content)
        archive.writestr("a/version", "3\n")
    return path


def grown_by(call: Callable[[], object]) -> int:
    """Bytes by which memory of this process has peaked above its start during a call."""
    meter = Path("/proc/self/clear_refs")
    if not meter.exists():
        pytest.skip("peaks of memory are measured on Linux only")
    meter.write_text("5")
    before = _memory("VmRSS")
    kept = call()
    peak = _memory("VmHWM")
    del kept
    return peak - before


@contextlib.contextmanager
def address_space(size: int) -> Iterator[None]:
    """Allocations of more than ``size`` bytes fail in this block, even if nothing touches their pages."""
    if not Path("/proc/self/status").exists():
        pytest.skip("the address space in use is known on Linux only")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
