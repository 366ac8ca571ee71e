"""Memory of this machine, and what operations of torch take of it."""

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
_USED = ("memory.current", "memory/memory.usage_in_bytes")
_GROUPS = Path("/sys/fs/cgroup")
"""Limits and use of memory of a container, of both versions of cgroups."""


@dataclass(frozen=True)
class Room:
    """Memory of one place: its ``total`` bytes, and those ``free`` for this process, its own included."""

    name: str
    total: int
    free: int


def main_memory() -> Room:
    """Main memory of this machine, or the part of it that a container may use."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    free = total
    found = _of_system("/proc/meminfo")
    if "MemAvailable" in found:
        free = found["MemAvailable"] + resident_bytes()
    for limit_file, used_file in zip(_LIMITS, _USED, strict=True):
        limit, used = _number_in(_GROUPS / limit_file), _number_in(_GROUPS / used_file)
        if limit is not None and used is not None and limit < total:
            total = limit
            free = min(free, limit - used + resident_bytes())
    return Room("main memory", total, min(free, total))


def room_on(device: torch.device) -> Room | None:
    """Memory of a device; None where it does not tell."""
    if not has_own_memory(device):
        # MPS has main memory.
        return main_memory()
    try:
        free, total = torch.accelerator.get_memory_info(device)
        reserved = torch.accelerator.memory_reserved(device)
    # The first where a device does not tell, the second for a kind that is not this machine's accelerator.
    except (RuntimeError, ValueError):
        return None
    return Room(f"the memory of {_name_of(device)}", total, free + reserved)


def _name_of(device: torch.device) -> str:
    """The name that its makers gave a device, or torch's where it does not tell."""
    try:
        return str(torch.get_device_module(device).get_device_name(device))
    except (AttributeError, AssertionError, RuntimeError):
        return str(device)


def gpu_rooms() -> list[Room | None]:
    """Memory of each CUDA device that this process sees; None for one that does not tell."""
    return [room_on(torch.device("cuda", k)) for k in range(torch.cuda.device_count())]


def has_own_memory(device: torch.device) -> bool:
    """True for a device with memory beside the main memory."""
    return device.type not in ("cpu", "mps")


def resident_bytes() -> int:
    """Bytes of main memory that this process holds, files that it maps included; 0 where none can tell."""
    return _of_system("/proc/self/status").get("VmRSS", 0)


def _of_system(path: str) -> dict[str, int]:
    """Amounts in bytes by name, of a file of lines such as ``VmRSS: 12 kB``; empty without it."""
    found = {}
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        name, _, amount = line.partition(":")
        parts = amount.split()
        if len(parts) == 2 and parts[1] == "kB":
            found[name] = int(parts[0]) * 1024
    return found


def _number_in(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors that share nothing."""
    return sum(one.nbytes for one in tensors)


class LiveBytes(TorchDispatchMode):
    """Follows the memory of tensors that operations in its block make, on any device, until it is freed.

    What kernels take for themselves while they run is not seen, nor memory of tensors that were there before.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._changes: list[tuple[int, int]] = []
        """Bytes that were taken or freed, and the number of the memory."""
        self._numbers: dict[int, int] = {}
        """Numbers by address of what is alive."""
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._has_ended = False

    def __enter__(self) -> "LiveBytes":
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *ended: Any) -> None:
        super().__exit__(*ended)  # type: ignore[no-untyped-call]
        self._has_ended = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        made = func(*args, **given)
        before = {_key(one) for one in tree_leaves((args, given)) if isinstance(one, Tensor)}
        for one in tree_leaves(made):
            if isinstance(one, Tensor) and _key(one) not in before:
                self._follow(one)
        return made

    def _follow(self, made: Tensor) -> None:
        storage, key = made.untyped_storage(), _key(made)
        if key in self._numbers or not storage.nbytes():
            return
        number, size = len(self._seen), storage.nbytes()
        self._numbers[key] = number
        self._changes.append((size, number))

        def freed(_: object) -> None:
            self._numbers.pop(key, None)
            if not self._has_ended:
                self._changes.append((-size, number))

        self._seen[number] = weakref.ref(storage, freed)

    def peak(self, without: Iterable[Tensor] = ()) -> int:
        """Most bytes that were alive at a time in the block, those of the tensors ``without`` left out.

        These must be alive.
        """
        left_out = {self._numbers.get(_key(one)) for one in without}
        alive = most = 0
        for size, number in self._changes:
            if number not in left_out:
                alive += size
                most = max(most, alive)
        return most


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
