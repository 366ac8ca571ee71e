"""Training many experts at once, each alone (an island), on this machine or on a cluster.

`train_islands` checks all folders, hands the islands to a `Backend` and collects how each of them ended.
`Processes` is the backend of this machine: a process for each island, which is started again from its last
checkpoint if it dies. `hddm.training.ray_islands.RayCluster` is the other one.

`work` is the body of such a process. It reports to its parent through a pipe, and is stopped through it too:
a scheduler, or Ctrl-C in a terminal, signals every process at once, and a second signal would end a training
that is just being saved.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Protocol

import torch
from safetensors import SafetensorError

from hddm.experts.records import EXPERT_FILE
from hddm.training.continuation import continue_expert
from hddm.training.expert import ddpm_schedule, train_expert
from hddm.training.island_jobs import Island, Outcome
from hddm.training.logs import Trend, mean, trend_of
from hddm.training.loop import OnStep, completed
from hddm.training.resume import is_kept, recorded, run_folder_of
from hddm.training.state import discard_runs
from hddm.utils.errors import HddmError
from hddm.utils.files import check_absent
from hddm.utils.processes import SIGNALS, Stopped, StopRequest, compute_environment, environment

RETRIES = 3
REPORT_SECONDS = 0.1
_PATIENCE = 60.0

OnIsland = Callable[[int, int, float, float], None]
"""Called with the index of an island, its newest step, and of the steps since the last call the mean loss and
the seconds."""

log = logging.getLogger(__name__)


class Backend(Protocol):
    """A place where islands are trained."""

    @property
    def threads(self) -> int:
        """CPU threads of an island that leaves their number open."""

    def run(self, islands: Sequence[Island], stop: StopRequest, on_step: OnIsland | None) -> list[Outcome]:
        """Train ``islands`` until all have ended, or ``stop`` came and what was trained is saved.

        Returns:
            Outcomes in any order; without those that were stopped.
        """


def train_islands(
    islands: Sequence[Island], backend: "Backend | None" = None, on_step: OnIsland | None = None
) -> list[Outcome]:
    """Train islands, which share nothing.

    One whose process dies (killed, out of memory, a bug) is started again and goes on from its last
    checkpoint; one that fails for a reason that the user must mend is not. The others go on in both cases.

    Args:
        islands: see `hddm.training.island_jobs.make_islands`.
        backend: where they are trained; `Processes` one after the other by default.
        on_step: called with what the islands report.

    Returns:
        How each ended, in their order; `hddm.training.island_jobs.refuse_failed` judges it.

    Raises:
        HddmError: for folders that are in the way, before anything starts, or a backend out of reach.
        Stopped: after a signal, with all runs saved.
    """
    backend = backend or Processes()
    ready = threaded(islands, backend.threads)
    prepare(ready)
    with StopRequest() as stop:
        outcomes = backend.run(ready, stop, on_step)
    if stop.number is not None and len(outcomes) < len(ready):
        raise Stopped(
            f"{ready[0].out.parent}: stopped; what was trained is saved, and --resume goes on with it",
            stop.number,
        )
    return sorted(outcomes, key=lambda one: one.island.index)


def threaded(islands: Sequence[Island], default: int) -> list[Island]:
    """Fill in the threads of ``islands``: their own, those of the run that they resume, or ``default``."""
    return [
        replace(one, settings=completed(one.settings, one.out if one.run.resume else None, default))
        for one in islands
    ]


def prepare(islands: Sequence[Island]) -> None:
    """Check the folders of ``islands``, and remove the runs that ``overwrite`` without ``resume`` replaces.

    Every start after this resumes what the one before has done.

    Raises:
        HddmError: for folders that are in the way or worked on, all of them at once, before anything is
            removed.
    """
    problems = [problem for island in islands for problem in _in_the_way(island)]
    if problems:
        raise HddmError(
            f"{islands[0].out.parent}: holds experts or runs already; --resume goes on with them, "
            "--overwrite starts anew",
            problems,
        )
    discard_runs([island.out for island in islands if island.overwrite and not island.run.resume])


def train_island(island: Island, on_step: OnStep | None = None) -> list[float]:
    """Train an island in this process, after `prepare`; return the loss of every step.

    Raises:
        HddmError: as `train_expert` and `continue_expert`, and for a disk that is full or fails.
        Stopped: after a signal, with the run saved.
    """
    run = island.run.model_copy(update={"resume": True})
    shard, out, settings, overwrite = island.shard, island.out, island.settings, island.overwrite
    try:
        if island.init is not None:
            return continue_expert(island.init, shard, out, settings, overwrite, on_step, run=run)
        schedule, source = ddpm_schedule(island.schedule)
        return train_expert(shard, out, settings, schedule, source, overwrite, on_step, run)
    except (OSError, SafetensorError) as error:
        raise HddmError(
            f"{out}: could not be written, or its data read ({error}); mend that, and --resume goes on"
        ) from error


def _in_the_way(island: Island) -> list[str]:
    if is_kept(island.out, EXPERT_FILE, island.run, island.overwrite):
        return []
    problems: list[str] = []
    try:
        check_absent(island.out, EXPERT_FILE, island.overwrite)
    except HddmError as error:
        problems.append(error.message)
    if recorded(island.out) and not (island.run.resume or island.overwrite):
        problems.append(f"{run_folder_of(island.out)}: holds a run")
    return problems


@dataclass(frozen=True)
class Stepped:
    """A report of ``step``, with the mean loss and the seconds of the steps since the last report.

    ``loss`` is NaN where none was finite.
    """

    step: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class Logged:
    """A line of the log."""

    level: int
    message: str


@dataclass(frozen=True)
class Ended:
    """The last message: ``done``, failed by ``failure``, or, with neither, stopped."""

    done: bool = False
    trend: Trend | None = None
    failure: HddmError | None = None


def work(island: Island, connection: "Connection[object, int]") -> None:
    """Train ``island``; the body of its process.

    Args:
        island: what to train.
        connection: to the parent. Takes `Stepped`, `Logged` and last `Ended`, unless the process dies. A
            number that it gives is that of a signal, on which the training stops; so it does when the other
            end is closed.
    """
    logger = logging.getLogger("hddm")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(_Forwarding(connection))
    reporter = _Reporter(connection, island.settings.steps)
    for one in SIGNALS:
        signal.signal(one, reporter.on_signal)
    ended = Ended()
    try:
        losses = train_island(island, reporter.on_step)
        # No losses where the expert was there already: its process died after it had written it.
        ended = Ended(True, trend_of(losses))
    except Stopped:
        pass
    except HddmError as error:
        ended = Ended(failure=error)
    _send(connection, ended)


class _Reporter:
    """Reports the steps of a training to its parent, and listens for the request to stop."""

    def __init__(self, connection: "Connection[object, int]", steps: int) -> None:
        self._connection, self._steps = connection, steps
        self._stopping = False
        self._reported = 0.0
        self._step, self._losses, self._seconds = 0, list[float](), 0.0

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        # A training in its loop has a handler of its own, which calls this one; before and after it there
        # is nothing to be saved.
        if signal.getsignal(number) == self.on_signal:
            raise SystemExit(128 + number)
        self._stopping = True

    def on_step(self, step: int, loss: float, seconds: float) -> None:
        self._step = step
        self._losses.append(loss)
        self._seconds += seconds
        # The last step is reported before the calibration that follows it.
        due = step == self._steps or time.monotonic() - self._reported >= REPORT_SECONDS
        if due and not self._report():
            self._stop(signal.SIGTERM)
        try:
            if self._connection.poll():
                self._stop(self._connection.recv())
        except (EOFError, OSError):
            self._stop(signal.SIGTERM)

    def _report(self) -> bool:
        """Report the steps since the last report; False where nobody reads."""
        message = Stepped(self._step, mean(self._losses), self._seconds)
        self._losses, self._seconds = [], 0.0
        self._reported = time.monotonic()
        return _send(self._connection, message)

    def _stop(self, number: int) -> None:
        if not self._stopping:
            self._stopping = True
            os.kill(os.getpid(), number)


class _Forwarding(logging.Handler):
    """Sends log lines to the parent."""

    def __init__(self, connection: "Connection[object, int]") -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        _send(self._connection, Logged(record.levelno, record.getMessage()))


def _send(connection: "Connection[object, int]", message: object) -> bool:
    """Send ``message``; False where nobody reads any more."""
    try:
        connection.send(message)
    except OSError:
        return False
    return True


@dataclass
class _Job:
    """A running process of an island."""

    island: Island
    process: SpawnProcess
    slot: int
    starts: int
    ended: Ended | None = None


class Processes:
    """Processes of this machine, ``parallel`` at a time, each started again ``retries`` times at most.

    Islands share the cores. Each has one GPU of several to itself as far as they go round. They report some
    ten times a second.
    """

    def __init__(self, parallel: int = 1, retries: int = RETRIES) -> None:
        self.parallel, self.retries = parallel, retries
        self._waiting, self._outcomes = deque[Island](), list[Outcome]()
        self._running: dict[Connection[int, object], _Job] = {}
        self._on_step: OnIsland | None = None
        self._stopping = False

    @property
    def threads(self) -> int:
        """The share of the cores."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, cores // self.parallel)

    def run(self, islands: Sequence[Island], stop: StopRequest, on_step: OnIsland | None) -> list[Outcome]:
        """Run islands as a `Backend` does."""
        self._waiting, self._outcomes = deque(islands), []
        self._on_step, self._stopping = on_step, False
        try:
            while True:
                while self._waiting and len(self._running) < self.parallel and not stop.requested:
                    self._start(self._waiting.popleft(), self._free_slot(), 1)
                if not self._running:
                    return self._outcomes
                if stop.number is not None and not self._stopping:
                    self._stop(stop.number)
                # Returns in time to notice a signal, which interrupts nothing.
                for connection in wait(list(self._running), timeout=0.2):
                    assert isinstance(connection, Connection)
                    self._read(connection)
        finally:
            self._close()

    def _close(self) -> None:
        """Close the pipes of what still runs, on which a process saves and ends; kill what does not."""
        for connection in self._running:
            connection.close()
        for job in self._running.values():
            job.process.join(_PATIENCE)
            if job.process.is_alive():
                job.process.kill()
                job.process.join()
        self._running.clear()

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
        self._waiting.clear()
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
        if isinstance(message, Stepped) and self._on_step is not None:
            self._on_step(job.island.index, message.step, message.loss, message.seconds)
        elif isinstance(message, Logged):
            log.log(message.level, "%s: %s", job.island.name, message.message)
        elif isinstance(message, Ended):
            job.ended = message

    def _finish(self, job: _Job) -> None:
        island, ended = job.island, job.ended
        if ended is not None and (ended.done or ended.failure):
            self._outcomes.append(Outcome(island, ended.trend, ended.failure, job.starts))
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
        self._outcomes.append(Outcome(island, None, failure, job.starts))


def _how(code: int | None, ended: Ended | None) -> str:
    """Say how a process ended."""
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
