"""Signals that stop work, and calls in local processes.

`interruptible` turns a signal into an exception, so that drafts are removed or kept as after a failure;
`StopRequest` only notes it, so that work is saved before the process ends. The exit code is 130 after SIGINT,
143 after SIGTERM, 138 after SIGUSR1. A second signal exits at once if it comes `TOGETHER` seconds or more
after the first, since a scheduler and its launcher may both forward one request. It may interrupt a write,
since checkpoints are complete or absent.
"""

import collections
import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from types import FrameType
from typing import Any

from hddm.utils.errors import HddmError, one_line
from hddm.utils.progress import Progress

TOGETHER = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Stopped(HddmError):
    """Raised once work is saved after a signal; ``exit_code`` is 128 plus the signal's number."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number

    @property
    def exit_code(self) -> int:
        """The exit code of the process."""
        return 128 + self.number

    def __reduce__(self) -> Any:
        return type(self), (self.message, self.number)


class Interrupted(BaseException):
    """Raised in the middle of work by the signal ``number`` (`interruptible`)."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class _Interrupt:
    """Handler that raises `Interrupted`, once; a later signal ends the process."""

    def __init__(self) -> None:
        self.number, self._since = 0, 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number, self._since = number, time.monotonic()
            raise Interrupted(number)
        if time.monotonic() - self._since >= TOGETHER:
            os._exit(128 + number)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Open a block in which a signal raises `Interrupted`; does nothing outside the main thread."""
    with handling(handler := _Interrupt()):
        try:
            yield
        except Stopped:
            raise
        except Exception as error:
            # Code in C that is interrupted may raise an error of its own in its place.
            if handler.number:
                raise Interrupted(handler.number) from error
            raise


@contextlib.contextmanager
def stoppable(kept: str) -> Iterator[None]:
    """Open a block in which a signal raises `Stopped`, whose message says what is ``kept``."""
    try:
        with interruptible():
            yield
    except Interrupted as error:
        raise Stopped(kept, error.number) from error


@contextlib.contextmanager
def at(what: str) -> Iterator[None]:
    """Begin every `HddmError` raised in the block with ``what``; `Stopped` passes as it is."""
    try:
        yield
    except Stopped:
        raise
    except HddmError as error:
        raise HddmError(f"{what}: {error.message}", error.details) from error


@contextlib.contextmanager
def handling(handler: Callable[[int, FrameType | None], object]) -> Iterator[dict[int, Any]]:
    """Let ``handler`` take `SIGNALS` within the block, whose previous handlers are yielded.

    Does nothing outside the main thread, where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield {}
        return
    before: dict[int, Any] = {one: signal.signal(one, handler) for one in SIGNALS}
    try:
        yield before
    finally:
        for one, former in before.items():
            # None stands for a handler that was not set from Python.
            signal.signal(one, signal.SIG_DFL if former is None else former)


class StopRequest:
    """Block in which signals are only noted, as ``number``; previous handlers run too (`handling`)."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._since = 0.0
        self._handling = handling(self._note)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        self._before = self._handling.__enter__()
        return self

    def __exit__(self, *ended: object) -> None:
        self._handling.__exit__(None, None, None)

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
        handler: Callable[..., object] | int | None = self._before.get(number)
        # Python's own handler and ours raise an exception in the middle of a step.
        if callable(handler) and not (
            handler is signal.default_int_handler or isinstance(handler, _Interrupt)
        ):
            handler(number, frame)


Report = Callable[[int], None]

# Without these glibc returns large blocks to the system, which costs page faults in every step.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 31)}


@dataclass(frozen=True)
class Call:
    """``function(**arguments, report=report)``, to be run in a worker.

    ``function`` is importable by name and calls ``report(n)`` after n of its ``units`` of work. ``name`` is
    shown while it runs.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]
    units: int
    name: str = ""


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


def require_main_guard() -> None:
    """Raise `HddmError` in a worker that is importing its own script, which would start workers again."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        text = 'put what it runs below if __name__ == "__main__":'
        raise HddmError(f"worker processes import the script that starts them; {text}")


_VMSTAT = Path("/proc/vmstat")
_MOST = 2**16
"""Bytes of output that are read at once."""


def _kills_for_memory() -> int:
    """Processes that the system has killed because memory ran out; 0 where it does not count them."""
    with contextlib.suppress(OSError):
        return int(_VMSTAT.read_text().partition("oom_kill ")[2].split()[0])
    return 0


class Output:
    """What processes write to their standard error: passed on to ours, and quoted if one dies."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it stays open
        self._read, self._kills = 0, _kills_for_memory()

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Block in which a process starts, as `require_main_guard`; what we write in it is passed on too."""
        require_main_guard()
        ours = os.dup(2)
        os.dup2(self._file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(ours, 2)
            os.close(ours)

    def pass_on(self) -> None:
        """Write what is new to our standard error."""
        while new := os.pread(self._file.fileno(), _MOST, self._read):
            self._read += len(new)
            os.write(2, new)

    def ended(self, code: int | None) -> str:
        """Say how a process ended, by its exit code, and the last line: ``ended with exit code 1 (…)``."""
        self.pass_on()
        how = f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL and _kills_for_memory() > self._kills:
            how += " because memory ran out; let fewer run at a time"
        text = os.pread(self._file.fileno(), _MOST, max(0, self._read - _MOST)).decode(errors="replace")
        return f"{how} ({one_line(text.strip().rpartition(chr(10))[2])})" if text.strip() else how


def when_parent_ends(act: Callable[[], object]) -> None:
    """Call ``act`` in a thread once the process that started this one is gone; never in the main process."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        act()

    threading.Thread(target=watch, daemon=True, name="ends with its parent").start()


_watching = False


def end_with_parent() -> None:
    """End this process when its parent is gone, however that happened; in the main process, do nothing.

    Workers of a killed process would hold what the next one needs. What a terminal sends to all is left to
    the parent, which tells its workers once to stop.
    """
    global _watching
    if multiprocessing.parent_process() is None or _watching:
        return
    _watching = True
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    when_parent_ends(lambda: os._exit(1))


class Workers:
    """A pool of ``count`` fresh processes; use as a context manager."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._count = count
        # Written without a helper thread, so that reports of a call arrive before its result.
        self._reports: SimpleQueue[int] = context.SimpleQueue()
        # The process number of each worker that is within a call, else 0.
        self._states, number = context.RawArray("q", count), context.Value("i", 0)
        self._pool = ProcessPoolExecutor(count, context, _start, (self._reports, self._states, number))
        self._environment = contextlib.ExitStack()
        self._output = Output()
        self.running: tuple[str, ...] = ()
        """Names of the calls that run now."""

    def __enter__(self) -> "Workers":
        self._environment.enter_context(environment(compute_environment(1)))
        return self

    def __exit__(self, kind: type[BaseException] | None, *ended: object) -> None:
        if kind is not None:
            self._stop()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._output.pass_on()
        self._environment.close()

    def _stop(self) -> None:
        """End all workers; a call that saves its work on a signal does so first, and none begins."""
        children = list(self._pool._processes.values())
        for child in children:
            child.terminate()
        while any(child.is_alive() for child in children):
            for child in children:
                # It has nothing to save, and may wait for ever for a lock that another took with it.
                if child.is_alive() and child.pid not in self._states[:]:
                    child.kill()
            time.sleep(0.05)

    def run(
        self,
        calls: Sequence[Call],
        on_progress: Report,
        on_start: Callable[[Call], object] | None = None,
        on_end: Callable[[Call, Any], object] | None = None,
    ) -> list[Any]:
        """Results of ``calls``, in their order, in which they also start.

        ``on_start`` is called with each call as it starts, ``on_end`` with each call and its result.

        The first exception in a worker is raised here, and no further calls start. Raises `HddmError` if a
        worker process died, since the others cannot continue; it says how, and the worker's last words.
        """
        waiting = collections.deque(range(len(calls)))
        running: dict[Future[Any], int] = {}
        results: dict[int, Any] = {}
        try:
            while waiting or running:
                # No more than can run: a pool queues calls ahead, and a worker that is stopping would begin
                # the next one.
                while waiting and len(running) < self._count:
                    k = waiting.popleft()
                    if on_start is not None:
                        on_start(calls[k])
                    with self._output.caught():
                        running[self._pool.submit(_run, calls[k].function, calls[k].arguments)] = k
                self.running = tuple(calls[k].name for k in sorted(running.values()))
                done, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                self._output.pass_on()
                while not self._reports.empty():
                    on_progress(self._reports.get())
                for future in done:
                    k = running.pop(future)
                    results[k] = future.result()
                    if on_end is not None:
                        on_end(calls[k], results[k])
        except BrokenProcessPool as error:
            raise HddmError(f"a worker process {self._how_one_died()}") from error
        return [results[k] for k in range(len(calls))]

    def _how_one_died(self) -> str:
        """Say how the worker ended that broke the pool, which then ends the others by SIGTERM."""
        code, end = None, time.monotonic() + TOGETHER
        # The system reports a code once, and the pool's own thread may just be reading it.
        while code in (None, -signal.SIGTERM) and time.monotonic() < end:
            codes = [one.exitcode for one in self._pool._processes.values()]
            code = max(codes, key=lambda one: one not in (None, -signal.SIGTERM))
        return self._output.ended(code)


_reports: "SimpleQueue[int] | None" = None
_states: Any = None
_own = 0


def _start(reports: "SimpleQueue[int]", states: Any, number: Any) -> None:
    global _reports, _states, _own
    _reports, _states = reports, states
    with number.get_lock():
        _own = number.value
        number.value += 1
    Progress.is_quiet = True
    import torch

    torch.set_num_threads(1)


def _run(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    assert _reports is not None
    _states[_own] = os.getpid()
    try:
        return function(**arguments, report=_reports.put)
    finally:
        _states[_own] = 0
