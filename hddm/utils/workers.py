"""Calls in other processes: a few at a time, restarted if one dies, saved and ended by a signal.

`Backend.run` supervises the calls. `Workers` runs them in processes of this machine, and
`hddm.utils.ray_workers.RayWorkers` runs them on a Ray cluster.
"""

import collections
import contextlib
import logging
import multiprocessing
import os
import signal
import tempfile
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

from hddm.utils.accelerators import count_gpus
from hddm.utils.errors import HddmError, Stopped, one_line
from hddm.utils.processes import (
    Interrupted,
    StopRequest,
    compute_environment,
    end_with_parent,
    environment,
    stoppable,
)

RETRIES = 3
_MOST = 2**16
"""Bytes of output that are read at once."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Call:
    """``function(**arguments, report=report)``, to be run in another process; messages show its ``name``.

    ``function`` is importable by name, and may call ``report`` with any values.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]
    name: str
    units: int = 0
    """Units of work that it reports in all, for a caller that counts them."""
    threads: int | None = 1
    """CPU threads; None is an equal share of this machine's, and 1 on a cluster."""
    uses_gpu: bool = True
    writes: Path | None = None
    """A file or folder that is there when it has ended."""
    after: frozenset[str] = frozenset()
    """Names of other calls that end before it starts."""


class Died(HddmError):
    """A process ended before its call did, or by a bug in it; the message says how."""


Event = tuple[Any, bool, Any]
"""What stands for a call, and values that it reported, or True and its result or `HddmError`."""


def perform(
    function: Callable[..., Any], arguments: dict[str, Any], report: Callable[..., object]
) -> Any | HddmError:
    """Result of a call, or the error that it raised, to be sent to another process."""
    try:
        with stoppable("was stopped"):
            return function(**arguments, report=report)
    except Stopped:
        return Died("was stopped")
    except HddmError as error:
        return error
    except Exception as error:
        died = Died(f"failed ({type(error).__name__}: {one_line(error)})")
        died.add_note(traceback.format_exc())
        return died


class Backend(ABC):
    """Runs calls in other processes, ``count`` at a time; use as a context manager.

    A call whose process died, or that failed by a bug, is started again up to ``retries`` times. An
    `HddmError` ends a call at once: it is for the user to fix.
    """

    running: tuple[str, ...] = ()
    """Names of the calls that run now."""

    def __init__(self, count: int, retries: int) -> None:
        self.count, self.retries = count, retries

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        self.stop()

    @abstractmethod
    def start(self, call: Call) -> Any:
        """Start a call; return what stands for it."""

    @abstractmethod
    def wait(self, seconds: float) -> list[Event]:
        """Wait at most ``seconds`` for reports and ends of calls."""

    @abstractmethod
    def stop(self) -> None:
        """End all processes; a call that saves its work on a signal does so first."""

    def run(
        self,
        calls: Sequence[Call],
        on_report: Callable[..., object] = lambda call, *values: None,
        on_start: Callable[[Call], object] = lambda call: None,
        on_end: Callable[[Call, Any], object] = lambda call, result: None,
        keep_going: bool = False,
    ) -> list[Any]:
        """Results of ``calls``, in their order, in which they also start, but for those that wait (`after`).

        ``on_report`` gets a call and what it reports, ``on_start`` each call as it starts for the first time,
        ``on_end`` each call and its result.

        The first `HddmError` of a call is raised, or with ``keep_going`` is its result. Before an error is
        raised, and `Interrupted` after a signal, all calls that run have saved and ended.
        """
        names = {call.name for call in calls}
        for call in calls:
            assert call.after <= names, f"{call.name} waits for what is no call"
        waiting, starts = list(range(len(calls))), collections.Counter[int]()
        running: dict[Any, int] = {}
        results: dict[int, Any] = {}
        with StopRequest() as stop, contextlib.ExitStack() as on_error:
            on_error.callback(self.stop)
            while waiting or running:
                unfinished = {calls[k].name for k in (*waiting, *running.values())}
                ready = [k for k in waiting if not calls[k].after & unfinished]
                assert ready or running, "calls that wait for one another"
                for k in ready[: self.count - len(running)]:
                    waiting.remove(k)
                    starts[k] += 1
                    if starts[k] == 1:
                        on_start(calls[k])
                    running[self.start(calls[k])] = k
                self.running = tuple(calls[k].name for k in sorted(running.values()))
                events = self.wait(0.2)
                if stop.number is not None:
                    raise Interrupted(stop.number)
                for job, has_ended, value in events:
                    k = running[job]
                    if not has_ended:
                        on_report(calls[k], *value)
                        continue
                    del running[job]
                    if isinstance(value, Died):
                        how = f"{calls[k].name}: its process {value.message}"
                        if starts[k] <= self.retries:
                            log.warning(
                                "%s; restarting it (%d of %d)", how, starts[k], self.retries
                            )
                            waiting.insert(0, k)
                            continue
                        if starts[k] > 1:
                            how = f"{how}, {starts[k]} times in all"
                        cause, value = value, HddmError(how)
                        value.__cause__ = cause
                    if isinstance(value, HddmError) and not keep_going:
                        raise value
                    results[k] = value
                    on_end(calls[k], value)
            on_error.pop_all()
        return [results[k] for k in range(len(calls))]


class Workers(Backend):
    """Processes of this machine, each used for one call after another; they share the cores and the GPUs."""

    def __init__(self, count: int = 1, retries: int = 0) -> None:
        super().__init__(count, retries)
        self._workers: dict[int, _Worker] = {}

    def start(self, call: Call) -> "_Worker":
        slot = next(k for k in range(self.count) if self._is_free(k))
        cores = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):
            cores = len(os.sched_getaffinity(0))
        variables = compute_environment(call.threads or max(1, cores // self.count))
        gpus = count_gpus()
        if gpus > 1:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
            variables["CUDA_VISIBLE_DEVICES"] = visible.split(",")[slot % gpus]
        worker = self._workers.get(slot)
        if worker is None or worker.variables != variables:
            if worker is not None:
                worker.end()
            worker = self._workers[slot] = _Worker(variables)
        worker.begin(call)
        return worker

    def _is_free(self, slot: int) -> bool:
        return slot not in self._workers or not self._workers[slot].is_busy

    def wait(self, seconds: float) -> list[Event]:
        busy = [worker for worker in self._workers.values() if worker.is_busy]
        awaited: list[Any] = []
        for worker in busy:
            awaited += [worker.connection, worker.process.sentinel]
        wait(awaited, seconds)
        events: list[Event] = []
        for worker in busy:
            events += [(worker, *event) for event in worker.received()]
        return events

    def stop(self) -> None:
        for worker in self._workers.values():
            worker.connection.close()
            if worker.is_busy:
                worker.process.terminate()
        for worker in self._workers.values():
            worker.end()
        self._workers.clear()


class _Worker:
    """A process that performs one call after another; what it writes to standard error is passed on."""

    def __init__(self, variables: dict[str, str]) -> None:
        self.variables, self.is_busy = variables, False
        self._output, self._read = tempfile.TemporaryFile(), 0  # noqa: SIM115
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,))
        ours = os.dup(2)
        os.dup2(self._output.fileno(), 2)
        try:
            with environment(variables), theirs:
                self.process.start()
        finally:
            os.dup2(ours, 2)
            os.close(ours)

    def begin(self, call: Call) -> None:
        """Send a call to the process."""
        self.is_busy = True
        # It may have died since the last call, which `received` reports.
        with contextlib.suppress(OSError):
            self.connection.send((call.function, call.arguments))

    def received(self) -> list[tuple[bool, Any]]:
        """Return what has come since the last time, as in an `Event`."""
        # Checked before reading: a process that is dead now has sent all that it will.
        events, is_alive = list[tuple[bool, Any]](), self.process.is_alive()
        try:
            while self.is_busy and self.connection.poll():
                events.append(self.connection.recv())
                self.is_busy = not events[-1][0]
        except (EOFError, OSError):
            is_alive = False
        self._pass_on()
        if self.is_busy and not is_alive:
            self.process.join()
            self.is_busy = False
            events.append((True, Died(self._how_it_ended())))
        if events and isinstance(events[-1][1], HddmError):
            # What failed may have left anything behind, so it is not used again.
            self.variables = {}
        return events

    def end(self) -> None:
        """Wait until the process has ended, after its call."""
        self.connection.close()
        while self.process.is_alive():
            self.process.join(0.2)
            self._pass_on()
        self._pass_on()

    def _pass_on(self) -> None:
        """Write what is new in the output to our standard error."""
        while new := os.pread(self._output.fileno(), _MOST, self._read):
            self._read += len(new)
            os.write(2, new)

    def _how_it_ended(self) -> str:
        """Words, and the last line of the output: ``ended with exit code 1 (…)``."""
        self._pass_on()
        code = self.process.exitcode or 0
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        if code == -signal.SIGKILL:
            how += ", probably because memory ran out, so let fewer run at a time"
        text = os.pread(self._output.fileno(), _MOST, max(0, self._read - _MOST)).decode(
            errors="replace"
        )
        return f"{how} ({one_line(text.strip().rpartition(chr(10))[2])})" if text.strip() else how


def _serve(connection: Connection) -> None:
    """Perform the calls that come from the process that started this one."""
    end_with_parent()

    def report(*values: object) -> None:
        # Nobody reads any more once all are stopped.
        with contextlib.suppress(OSError):
            connection.send((False, values))

    with contextlib.suppress(EOFError, OSError):
        while True:
            function, arguments = connection.recv()
            connection.send((True, perform(function, arguments, report)))
