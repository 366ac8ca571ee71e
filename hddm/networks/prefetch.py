"""Weights on their way to a device while another network computes there.

A thread of its own reads them. On a GPU it copies them from pinned memory on a stream of its own, so that
neither the thread that samples nor the GPU waits: only the stream that computes waits for the last copy, when
it needs the weights. On a CPU the thread reads and casts them.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Named = tuple[str, Tensor]


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
        self._future: Future[tuple[list[Named], torch.cuda.Event | None]] = Future()
        threading.Thread(target=self._run, daemon=True).start()

    def wait(self) -> list[Named]:
        """Names and tensors, ready for the present stream; raises what ``fetch`` raises."""
        tensors, copied = self._future.result()
        if copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            for _, value in tensors:
                _keep_for(stream, value)
        return tensors

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
    def _fetched(self) -> tuple[list[Named], torch.cuda.Event | None]:
        if self._device.type != "cuda":
            return list(self._fetch()), None
        # The thread is new: without this it would make a context on the first GPU.
        torch.cuda.set_device(self._device)
        for event in self._after:
            event.synchronize()
        stream = _copying(self._device)
        with torch.cuda.stream(stream):
            tensors = list(self._fetch())
            return tensors, stream.record_event()


@functools.cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _keep_for(stream: torch.cuda.Stream, value: Tensor) -> None:
    """Keep the memory of a tensor that another stream made until this ``stream`` has used it."""
    if is_traceable_wrapper_subclass(value):
        # An int8 weight is several tensors.
        names, _ = value.__tensor_flatten__()
        for name in names:
            _keep_for(stream, getattr(value, name))
    elif value.device.type == "cuda":
        value.record_stream(stream)


def copied(value: Tensor, device: torch.device) -> Tensor:
    """``value`` on a device; from main memory to a GPU through pinned memory, in stream order."""
    if device.type == "cuda" and value.device.type == "cpu":
        return value.pin_memory().to(device, non_blocking=True)
    return value.to(device)
