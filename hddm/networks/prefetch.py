"""Weights on their way to a device while another network computes there.

A thread of its own reads them. On a GPU it copies them from pinned memory on a stream of its own, so that
neither the thread that samples nor the GPU waits: only streams that compute with the weights wait for the
last copy, each before its first use. On a CPU the thread reads and casts them.
"""

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hddm.utils.errors import one_line

Named = tuple[str, Tensor]
Fetched = tuple[list[Named], torch.cuda.Event | None]
"""Names and tensors, and on a GPU the end of their copies."""
ALIGNED = 64
"""Bytes: a tensor within a block of memory begins at a multiple of these."""
SMALL = 2**20
"""Bytes that are pinned in one block, whatever is wasted of it."""

log = logging.getLogger(__name__)


def has_streams(device: torch.device) -> bool:
    """True where copies and computations run side by side, on streams."""
    return device.type == "cuda"


class Arrival:
    """The tensors of a network, fetched by a thread.

    Args:
        fetch: yields name and tensor, on the device.
        device: where they go.
        after: on a GPU, the ends of the computations whose memory they may take.
    """

    def __init__(
        self,
        fetch: Callable[[], Iterable[Named]],
        device: torch.device,
        after: Sequence[torch.cuda.Event] = (),
    ) -> None:
        self._fetch, self._device, self._after = fetch, device, after
        self._future: Future[Fetched] = Future()
        threading.Thread(target=self._run, daemon=True).start()

    def wait(self) -> Fetched:
        """What was fetched, for a `Presence`; raises what ``fetch`` raises."""
        return self._future.result()

    def discard(self) -> None:
        """Wait for the thread, and drop what it fetched, or its error."""
        self._future.exception()

    def _run(self) -> None:
        try:
            self._future.set_result(self._fetched())
        # Raised again where the weights are needed.
        except BaseException as error:
            self._future.set_exception(error)

    @torch.no_grad()
    def _fetched(self) -> Fetched:
        if not has_streams(self._device):
            return list(self._fetch()), None
        # The thread is new: without this it would make a context on the first GPU.
        torch.cuda.set_device(self._device)
        for event in self._after:
            event.synchronize()
        stream = _copying(self._device)
        with torch.cuda.stream(stream):
            tensors = list(self._fetch())
            return tensors, stream.record_event()


class Presence:
    """Tensors on a device, and the streams that use them.

    A stream waits for their copies before its first use. Their memory is given to nothing else until all that
    these streams were told to compute by then has ended.

    Args:
        device: where they are.
        copied: the end of their copies; None for tensors that are there already.
    """

    def __init__(self, device: torch.device, copied: torch.cuda.Event | None) -> None:
        self._device, self._copied = device, copied
        self._ends: dict[torch.cuda.Stream, torch.cuda.Event | None] = {}
        """By stream, the end of its last use."""

    def begin(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """Let the present stream use the ``tensors``."""
        if self._copied is None:
            return
        stream = torch.cuda.current_stream(self._device)
        if stream in self._ends:
            return
        stream.wait_event(self._copied)
        for value in tensors():
            keep_for(stream, value)
        self._ends[stream] = None

    def end(self) -> None:
        """Note that the present stream has been told all that it shall compute with them for now."""
        if self._copied is not None:
            stream = torch.cuda.current_stream(self._device)
            self._ends[stream] = stream.record_event()

    def ends(self) -> list[torch.cuda.Event]:
        """The ends of all uses so far."""
        return [event for event in self._ends.values() if event is not None]


@torch.no_grad()
def fetched_here(fetch: Callable[[], Iterable[Named]], device: torch.device) -> Fetched:
    """What ``fetch`` yields, fetched in this thread and on the present stream."""
    tensors = list(fetch())
    copied_at = torch.cuda.current_stream(device).record_event() if has_streams(device) else None
    return tensors, copied_at


@functools.cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def keep_for(stream: torch.cuda.Stream, value: Tensor) -> None:
    """Keep the memory of a tensor that another stream made until this ``stream`` has used it."""
    if is_traceable_wrapper_subclass(value):
        # An int8 weight is several tensors.
        names, _ = value.__tensor_flatten__()
        for name in names:
            keep_for(stream, getattr(value, name))
    elif has_streams(value.device):
        value.record_stream(stream)


def copied(value: Tensor, device: torch.device) -> Tensor:
    """``value`` on a device; from main memory to a GPU through pinned memory, in stream order."""
    if not has_streams(device) or value.device.type != "cpu":
        return value.to(device)
    try:
        value = value.pin_memory()
    except RuntimeError as error:
        _say_unpinned(one_line(error, 120))
    return value.to(device, non_blocking=True)


def pinned(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The same tensors in pinned memory, or as they are where there is none to be had."""
    found = {}
    try:
        for size, names in blocks({name: value.nbytes for name, value in tensors.items()}):
            block, start = pinned_block(size), 0
            for name in names:
                value = tensors[name]
                place = block[start : start + value.nbytes].view(value.dtype).view(value.shape)
                found[name] = place.copy_(value)
                start += _aligned(value.nbytes)
    # A limit of main memory, not of the GPU's: smaller batches would not help.
    except RuntimeError as error:
        _say_unpinned(one_line(error, 120))
        return tensors
    return {name: found[name] for name in tensors}


def pinned_block(size: int) -> Tensor:
    """Pinned memory of so many bytes; raises `RuntimeError` where the system gives none."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def blocks(sizes: Mapping[str, int]) -> list[tuple[int, list[str]]]:
    """Sizes of blocks of memory, each a power of two, and the names that lie in it.

    torch rounds pinned memory up to powers of two, so that tensor by tensor nearly half of it may be wasted.
    """
    left = {name: _aligned(size) for name, size in sizes.items()}
    found = []
    while left:
        order = sorted(left, key=lambda name: -left[name])
        total = sum(left.values())
        size = _power_from(total)
        if total > SMALL:
            size = max(_power_from(total + 1) // 2, _power_from(left[order[0]]))
        free, inside = size, list[str]()
        for name in order:
            if left[name] <= free:
                free -= left.pop(name)
                inside.append(name)
        found.append((size, inside))
    return found


def _aligned(size: int) -> int:
    return max(1, -(-size // ALIGNED)) * ALIGNED


def _power_from(size: int) -> int:
    """The smallest power of two that is not below ``size``."""
    return 1 << (size - 1).bit_length()


@functools.cache
def _say_unpinned(reason: str) -> None:
    log.warning(
        "main memory cannot be pinned (%s): weights are copied from ordinary memory, which takes longer",
        reason,
    )
