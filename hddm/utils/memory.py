"""Work on many rows at once, in parts where a whole does not fit the memory of the device."""

import gc
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from hddm.utils.errors import HddmError
from hddm.utils.machine import has_own_memory, room_on

Made = TypeVar("Made")


def is_out_of_memory(error: BaseException) -> bool:
    """True for what torch raises where the memory of a device, or of the machine, is used up."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # MPS and the CPU's allocator raise plain errors.
    words = ("out of memory", "can't allocate memory")
    return isinstance(error, RuntimeError) and any(one in str(error) for one in words)


def release() -> None:
    """Give memory that is held in caches back to the device."""
    gc.collect()
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return
    if device.type == "mps":
        torch.mps.empty_cache()
    else:
        torch.accelerator.empty_cache()


def free_memory(device: torch.device) -> int | None:
    """Bytes that tensors on a device can still take, those in torch's cache included.

    None where the device has no memory of its own, and where it does not tell.
    """
    room = room_on(device) if has_own_memory(device) else None
    return None if room is None else room.free - torch.accelerator.memory_allocated(device)


class Fitting:
    """Rows that are worked on at once, halved each time that they do not fit.

    Args:
        what: the rows, in messages, such as "images".
        most: rows at once, to begin with; None for all of them.
    """

    def __init__(self, what: str, most: int | None = None) -> None:
        self.what, self.most = what, most

    def run(self, rows: int, make: Callable[[int, int], Made]) -> list[Made]:
        """What ``make(first, end)`` makes of the rows 0 … ``rows`` - 1, part by part, in order.

        Raises `HddmError` where even one row does not fit.
        """
        made = list[Made]()
        first = 0
        while first < rows:
            size = min(self.most or rows, rows - first)
            error = None
            try:
                made.append(make(first, first + size))
            except (RuntimeError, MemoryError) as raised:
                if not is_out_of_memory(raised):
                    raise
                error = str(raised).partition("\n")[0]
            if error is None:
                first += size
                continue
            # After the error, which holds on to its tensors.
            release()
            if size == 1:
                raise HddmError(
                    f"one of the {self.what} does not fit the memory ({error[:120]}); pass a smaller size, "
                    "`dtype` bfloat16, `quantize` int8, or `offload` ram"
                )
            self.most = size // 2
            warnings.warn(
                f"{size} {self.what} at once do not fit the memory; going on with {self.most}",
                stacklevel=2,
            )
        return made
