"""Signals that stop work, and what processes are started with; `hddm.utils.workers` starts them.

`interruptible` turns a signal into an exception, so that drafts are removed or kept as after a failure;
`StopRequest` only notes it, so that work is saved before the process ends. The exit code is 130 after SIGINT,
143 after SIGTERM, 138 after SIGUSR1. A second signal exits at once if it comes `TOGETHER` seconds or more
after the first, since a scheduler and its launcher may both forward one request. It may interrupt a write,
since checkpoints are complete or absent.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from hddm.utils.errors import Stopped

TOGETHER = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Interrupted(BaseException):
    """Raised in the middle of work by the signal ``number`` (`interruptible`)."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class StopRequest:
    """Block in which signals are only noted, as ``number``, or raise `Interrupted` if it ``interrupts``.

    Previous handlers run too, but for those that raise an exception in the middle of a step. Does nothing
    outside the main thread, where Python allows no handlers.
    """

    def __init__(self, interrupts: bool = False) -> None:
        self.number: int | None = None
        self._interrupts, self._since = interrupts, 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {one: signal.signal(one, self._note) for one in SIGNALS}
        return self

    def __exit__(self, *ended: object) -> None:
        for one, former in self._before.items():
            # None stands for a handler that was not set from Python.
            signal.signal(one, signal.SIG_DFL if former is None else former)

    @property
    def requested(self) -> bool:
        """True after a signal."""
        return self.number is not None

    def wait(self) -> None:
        """Wait for a signal."""
        while not self.requested:
            time.sleep(0.2)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            if time.monotonic() - self._since >= TOGETHER:
                os._exit(128 + number)
            return
        self.number, self._since = number, time.monotonic()
        if self._interrupts:
            raise Interrupted(number)
        handler: Callable[..., object] | int | None = self._before.get(number)
        owner = getattr(handler, "__self__", None)
        interrupts = isinstance(owner, StopRequest) and owner._interrupts
        if callable(handler) and handler is not signal.default_int_handler and not interrupts:
            handler(number, frame)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Open a block in which a signal raises `Interrupted`; does nothing outside the main thread."""
    with StopRequest(interrupts=True) as request:
        try:
            yield
        except Stopped:
            raise
        except Exception as error:
            # Code in C that is interrupted may raise an error of its own in its place.
            if request.number is not None:
                raise Interrupted(request.number) from error
            raise


@contextlib.contextmanager
def stoppable(kept: str) -> Iterator[None]:
    """Open a block in which a signal raises `Stopped`, whose message says what is ``kept``."""
    try:
        with interruptible():
            yield
    except Interrupted as error:
        raise Stopped(kept, error.number) from error


# Without these glibc returns large blocks to the system, which costs page faults in every step.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 31)}


def compute_environment(threads: int) -> dict[str, str]:
    """Environment variables for a process that computes with ``threads`` threads, set before its start."""
    return {"OMP_NUM_THREADS": str(threads), **_MALLOC}


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables within the block, for the processes that it starts."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


@contextlib.contextmanager
def switched(module: Any, name: str, value: Any) -> Iterator[None]:
    """Set a constant of another library within the block, where it has no option for that."""
    before = getattr(module, name, None)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def number_of_processes() -> int:
    """Processes of this training, as its launcher says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """True for the first of the processes of one training, which speaks for all of them."""
    return os.environ.get("RANK", "0") == "0"


def end_with_parent() -> None:
    """Stop this process by SIGTERM, on which work is saved, once the process that started it is gone.

    Workers of a killed process would hold what the next one needs. SIGINT, which a terminal sends to all, is
    left to the parent, which stops its workers. In the main process, do nothing.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="ends with its parent").start()
