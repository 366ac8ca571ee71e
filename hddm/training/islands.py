"""Many experts at once on one machine: a process each, started again from its last checkpoint if it dies."""

import contextlib
import logging
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import torch

from hddm.errors import HddmError
from hddm.training.island_jobs import Island, Outcome
from hddm.training.island_process import Ended, Logged, Stepped, work
from hddm.training.island_training import prepare, threaded
from hddm.training.signals import Stopped, StopRequest
from hddm.workers import compute_environment, environment

RETRIES = 3
_PATIENCE = 60.0

OnIsland = Callable[[int, int, float, float], None]
"""Told the index of an island, a step that it has done, and of the steps since the one told before the mean
loss and the seconds."""

log = logging.getLogger(__name__)


def train_islands(
    islands: Sequence[Island], parallel: int = 1, retries: int = RETRIES, on_step: OnIsland | None = None
) -> list[Outcome]:
    """Train islands in processes of their own, which share nothing.

    One whose process dies (killed, out of memory, a bug) is started again and goes on from its last
    checkpoint; one that fails for a reason that the user must mend is not. The others go on in both cases.
    Islands without a number of threads share the machine's cores. Each has one GPU of several to itself as
    far as they go round.

    Args:
        islands: see `hddm.training.island_jobs.make_islands`.
        parallel: islands that are trained at a time.
        retries: how often each is started again at most.
        on_step: called with what the islands report, some ten times a second each.

    Returns:
        How each ended, in their order; `hddm.training.island_jobs.refuse_failed` judges it.

    Raises:
        HddmError: for folders that are in the way, before anything starts.
        Stopped: after a signal, with all runs saved.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ready = threaded(islands, max(1, cores // parallel))
    prepare(ready)
    fleet = _Fleet(deque(ready), parallel, retries, on_step)
    with StopRequest() as stop:
        try:
            fleet.run(stop)
        finally:
            fleet.close()
    if stop.number is not None and len(fleet.outcomes) < len(ready):
        raise Stopped(
            f"{ready[0].out.parent}: stopped; every run is saved, and --resume goes on with them", stop.number
        )
    return sorted(fleet.outcomes, key=lambda one: one.island.index)


@dataclass
class _Job:
    """An island whose process runs."""

    island: Island
    process: SpawnProcess
    slot: int
    starts: int
    ended: Ended | None = None


@dataclass
class _Fleet:
    """The processes of all islands."""

    waiting: deque[Island]
    parallel: int
    retries: int
    on_step: OnIsland | None
    outcomes: list[Outcome] = field(default_factory=list)
    _running: dict["Connection[int, object]", _Job] = field(default_factory=dict)
    _stopping: bool = False

    def run(self, stop: StopRequest) -> None:
        """Until all have ended, or a signal came and all have saved."""
        while True:
            while self.waiting and len(self._running) < self.parallel and not stop.requested:
                self._start(self.waiting.popleft(), self._free_slot(), 1)
            if not self._running:
                return
            if stop.number is not None and not self._stopping:
                self._stop(stop.number)
            # Returns in time to notice a signal, which interrupts nothing.
            for connection in wait(list(self._running), timeout=0.2):
                assert isinstance(connection, Connection)
                self._read(connection)

    def close(self) -> None:
        """Let go of what still runs: a process whose other end is closed saves, and ends."""
        for connection in self._running:
            connection.close()
        for job in self._running.values():
            job.process.join(_PATIENCE)
            if job.process.is_alive():
                job.process.kill()
                job.process.join()

    def _free_slot(self) -> int:
        return min(set(range(self.parallel)) - {job.slot for job in self._running.values()})

    def _start(self, island: Island, slot: int, starts: int) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=work, args=(island, there), name=island.name)
        with environment({**compute_environment(island.threads), **_gpu(slot)}):
            process.start()
        # Only then is its end of the pipe closed when it dies.
        there.close()
        self._running[here] = _Job(island, process, slot, starts)

    def _stop(self, number: int) -> None:
        self._stopping = True
        self.waiting.clear()
        for connection in self._running:
            # One may have ended just now.
            with contextlib.suppress(OSError):
                connection.send(number)

    def _read(self, connection: "Connection[int, object]") -> None:
        job = self._running[connection]
        try:
            message = connection.recv()
        except (EOFError, OSError):
            connection.close()
            del self._running[connection]
            job.process.join()
            self._finish(job)
            return
        if isinstance(message, Stepped) and self.on_step is not None:
            self.on_step(job.island.index, message.step, message.loss, message.seconds)
        elif isinstance(message, Logged):
            log.log(message.level, "%s: %s", job.island.name, message.message)
        elif isinstance(message, Ended):
            job.ended = message

    def _finish(self, job: _Job) -> None:
        island, ended = job.island, job.ended
        if ended is not None and (ended.done or ended.failure):
            self.outcomes.append(Outcome(island, ended.trend, ended.failure, job.starts))
            return
        if self._stopping:
            return
        how = _how(job.process.exitcode, ended)
        if job.starts <= self.retries:
            log.warning(
                "%s: its process %s; it is started again from its last checkpoint (%d of %d)",
                island.name,
                how,
                job.starts,
                self.retries,
            )
            self._start(island, job.slot, job.starts + 1)
            return
        failure = HddmError(f"{island.out}: its process {how}, {job.starts} times in all; --resume goes on")
        self.outcomes.append(Outcome(island, None, failure, job.starts))


def _how(code: int | None, ended: Ended | None) -> str:
    """How a process ended, in words."""
    if ended is not None:
        return "was told to stop"
    if code is not None and code < 0:
        reason = "; memory may have run out" if code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{reason}"
    return f"ended with code {code}"


def _gpu(slot: int) -> dict[str, str]:
    """The GPU of a slot, where there are several."""
    count = torch.cuda.device_count()
    if count < 2:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[slot % count]}
