"""Files that mean harm, made by the tests, and what reading them costs."""

import contextlib
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


class Calls:
    """Unpickled in full, it calls ``function`` with ``arguments``."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._reduced = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._reduced


def save(content: object, path: Path) -> Path:
    """Write a checkpoint of today's format."""
    torch.save(content, path)
    return path


def zipped(path: Path, code: bytes, *storages: bytes) -> Path:
    """Write ``path`` as `torch.save` would, around any pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", code)
        archive.writestr("a/byteorder", "little")
        for index, content in enumerate(storages):
            archive.writestr(f"a/data/{index}", content)
        archive.writestr("a/version", "3\n")
    return path


def attempts(paths: Iterable[Path]) -> list[str]:
    """What stops the process that tries to load pickles, by file; all are tried in one."""
    code = "import sys; from hddm.utils.pickles import try_to_load\n"
    code += "for path in sys.argv[1:]: try_to_load(path); print(flush=True)"
    done = subprocess.run(
        [sys.executable, "-c", code, *paths], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.splitlines()


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
