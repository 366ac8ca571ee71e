"""Train many experts at once, each alone (an island), on this machine or on a cluster.

`train_islands` checks all folders, hands the islands to a `Backend` and collects their outcomes. Backends are
`Processes`, for this machine, and `hddm.training.ray_islands.RayCluster`.

`work` is the body of a process. It reports to its parent and is stopped by it through a pipe: a scheduler, or
Ctrl-C in a terminal, signals every process at once, and a second signal would end a training that is saving.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError

from hddm.data.shards import open_shard
from hddm.experts.records import EXPERT_FILE, open_expert
from hddm.training.continuation import continue_expert, resolve_continued
from hddm.training.expert import resolve_new, train_expert
from hddm.training.island_jobs import Island, Outcome, refuse_present
from hddm.training.loop import OnStep, mean, summary_of
from hddm.training.resume import has_run, recipe_before
from hddm.training.state import discard_runs
from hddm.utils.errors import HddmError
from hddm.utils.processes import SIGNALS, Output, Stopped, StopRequest, compute_environment, environment

RETRIES = 3
REPORT_SECONDS = 0.1
_PATIENCE = 60.0

OnIsland = Callable[[int, int, float, float], None]
"""Called with an island's index, its newest step, and mean loss and seconds since the last call."""

log = logging.getLogger(__name__)


class Backend(Protocol):
    """A place where islands are trained."""

    def run(self, islands: Sequence[Island], stop: StopRequest, on_step: OnIsland | None) -> list[Outcome]:
        """Train until all islands ended, or saved after ``stop``; return outcomes of those that ended."""


def train_islands(
    islands: Sequence[Island], backend: Backend | None = None, on_step: OnIsland | None = None
) -> list[Outcome]:
    """Train islands, which share nothing; return their outcomes in their order.

    One whose process dies (killed, out of memory, a bug) is started again from its last checkpoint; one that
    fails for a reason that the user must mend is not. The others continue in both cases. The ``backend`` is
    `Processes`, one after the other, by default.

    Raises:
        HddmError: for folders that are in the way, and settings that do not fit a shard, before anything
            starts; for an unreachable backend.
        Stopped: after a signal, with all runs saved.
    """
    prepare(islands)
    with StopRequest() as stop:
        outcomes = (backend or Processes()).run(islands, stop, on_step)
    if stop.number is not None and len(outcomes) < len(islands):
        raise Stopped(
            f"{islands[0].out.parent}: stopped; progress is saved, and --resume continues", stop.number
        )
    return sorted(outcomes, key=lambda one: one.island.index)


def prepare(islands: Sequence[Island]) -> None:
    """Check ``islands``, and remove the runs that ``overwrite`` without ``resume`` replaces.

    All folders that are in the way or in use raise one `HddmError`, before anything is removed, and so do all
    settings that a shard does not allow.
    """
    refuse_present(islands)
    _check_settings(islands)
    discard_runs([one.out for one in islands if one.overwrite and not one.run.resume])


def _check_settings(islands: Sequence[Island]) -> None:
    """Refuse settings that the shard of any of ``islands`` does not allow, all in one `HddmError`.

    An island whose data cannot be read is left out: it fails alone.
    """
    problems = []
    for one in islands:
        try:
            shard = open_shard(one.shard, is_outline=True)
        except HddmError:
            continue
        try:
            before = recipe_before(one.out, EXPERT_FILE, one.run, one.overwrite)
            if one.init is None:
                resolve_new(shard, one.settings, one.schedule, before)
            else:
                resolve_continued(one.init, open_expert(one.init), shard, one.settings, before)
        except HddmError as error:
            problems.append(f"{one.name}: {error}")
    if problems:
        folder, number = islands[0].out.parent, f"{len(problems)} of {len(islands)} experts"
        raise HddmError(f"{folder}: {number} cannot be trained as requested, so none was started", problems)


def train_island(island: Island, on_step: OnStep | None = None) -> list[float]:
    """Train an island in this process, after `prepare`; return the loss of every step.

    Raises `HddmError` as `train_expert` and `continue_expert`, and for a disk that is full or fails;
    `Stopped` after a signal, with the run saved.
    """
    # A run that `prepare` has left is resumed, whether of this start or of the one before.
    run = island.run.model_copy(update={"resume": island.run.resume or has_run(island.out)})
    shard, out, settings, overwrite = island.shard, island.out, island.settings, island.overwrite
    try:
        if island.init is not None:
            return continue_expert(island.init, shard, out, settings, overwrite, on_step, run)
        return train_expert(shard, out, settings, island.schedule, None, overwrite, on_step, run)
    except (OSError, SafetensorError) as error:
        raise HddmError(
            f"{out}: could not be written, or its data read ({error}); fix that, and --resume continues"
        ) from error


def outcome_of(island: Island, on_step: OnStep | None = None) -> Outcome:
    """Run `train_island` and return its failures as outcomes; a signal raises `Stopped`."""
    try:
        return Outcome(island, summary_of(train_island(island, on_step)))
    except Stopped:
        raise
    except HddmError as error:
        return Outcome(island, failure=error)


class Stepped(NamedTuple):
    """Report of a ``step``: mean loss, NaN if none was finite, and seconds since the last report."""

    step: int
    loss: float
    seconds: float


class Logged(NamedTuple):
    """A line of the log."""

    level: int
    message: str


def work(island: Island, connection: "Connection[object, int]") -> None:
    """Train ``island``; the body of its process.

    ``connection`` sends `Stepped`, `Logged`, and last the `Outcome`, or None for a training that was stopped
    and saved. It receives the number of a signal, which stops the training, as closing the other end does.
    """
    logger = logging.getLogger("hddm")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(_Forwarding(connection))
    reporter = _Reporter(connection, island.settings.steps)
    for one in SIGNALS:
        signal.signal(one, reporter.on_signal)
    outcome = None
    with contextlib.suppress(Stopped):
        outcome = outcome_of(island, reporter.on_step)
    _send(connection, outcome)


class _Reporter:
    def __init__(self, connection: "Connection[object, int]", steps: int) -> None:
        self._connection, self._steps = connection, steps
        self._stopping = False
        self._losses, self._seconds, self._reported = list[float](), 0.0, 0.0

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        # The training loop has its own handler, which calls this one; outside it nothing needs saving.
        if signal.getsignal(number) == self.on_signal:
            raise SystemExit(128 + number)
        self._stopping = True

    def on_step(self, step: int, loss: float, seconds: float) -> None:
        self._losses.append(loss)
        self._seconds += seconds
        # The last step is reported before the calibration that follows it.
        if step == self._steps or time.monotonic() - self._reported >= REPORT_SECONDS:
            is_read = _send(self._connection, Stepped(step, mean(self._losses), self._seconds))
            self._losses, self._seconds, self._reported = [], 0.0, time.monotonic()
            if not is_read:
                self._stop(signal.SIGTERM)
        try:
            if self._connection.poll():
                self._stop(self._connection.recv())
        except (EOFError, OSError):
            self._stop(signal.SIGTERM)

    def _stop(self, number: int) -> None:
        if not self._stopping:
            self._stopping = True
            os.kill(os.getpid(), number)


class _Forwarding(logging.Handler):
    def __init__(self, connection: "Connection[object, int]") -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        _send(self._connection, Logged(record.levelno, record.getMessage()))


def _send(connection: "Connection[object, int]", message: object) -> bool:
    """Send ``message``; return False where nobody reads any more."""
    try:
        connection.send(message)
    except OSError:
        return False
    return True


@dataclass
class _Job:
    """A running process of an island, and the parent's end of its pipe."""

    island: Island
    process: SpawnProcess
    connection: "Connection[int, object]"
    output: Output
    slot: int
    starts: int
    has_ended: bool = False
    outcome: Outcome | None = None


class Processes:
    """Processes of this machine, ``parallel`` at a time, each started again ``retries`` times at most.

    Islands share the cores. Each uses one GPU, its own where there are enough.
    """

    def __init__(self, parallel: int = 1, retries: int = RETRIES) -> None:
        self.parallel, self.retries = parallel, retries

    def run(self, islands: Sequence[Island], stop: StopRequest, on_step: OnIsland | None) -> list[Outcome]:
        waiting, running, outcomes = deque(islands), list[_Job](), list[Outcome]()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = max(1, cores // self.parallel)
        is_stopping = False
        try:
            while True:
                while waiting and len(running) < self.parallel and not stop.requested:
                    slot = min(set(range(self.parallel)) - {job.slot for job in running})
                    running.append(_start(waiting.popleft(), threads, slot))
                if not running:
                    return outcomes
                if stop.number is not None and not is_stopping:
                    is_stopping = True
                    for job in running:
                        # One may have ended just now.
                        with contextlib.suppress(OSError):
                            job.connection.send(stop.number)
                # Returns in time to notice a signal, which interrupts nothing.
                ready = wait([job.connection for job in running], timeout=0.2)
                for job in list(running):
                    job.output.pass_on()
                    if job.connection not in ready or _read(job, on_step):
                        continue
                    running.remove(job)
                    if job.outcome is not None:
                        outcomes.append(job.outcome)
                    elif is_stopping:
                        continue
                    elif job.starts > self.retries:
                        text = f"its process {_how(job)}, {job.starts} times in all; --resume continues"
                        outcomes.append(Outcome(job.island, failure=HddmError(f"{job.island.out}: {text}")))
                    else:
                        attempt = f"{job.starts} of {self.retries}"
                        text = "%s: its process %s; restarting it from its last checkpoint (%s)"
                        log.warning(text, job.island.name, _how(job), attempt)
                        running.append(_start(job.island, threads, job.slot, job.starts + 1))
        finally:
            _close(running)


def _start(island: Island, threads: int, slot: int, starts: int = 1) -> _Job:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=work, args=(island, there), name=island.name)
    variables, gpus = compute_environment(island.threads(threads)), torch.cuda.device_count()
    if gpus > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        variables["CUDA_VISIBLE_DEVICES"] = visible.split(",")[slot % gpus]
    output = Output()
    with environment(variables), output.caught():
        process.start()
    # The child now holds the only copy of its end, which closes when it dies.
    there.close()
    return _Job(island, process, here, output, slot, starts)


def _read(job: _Job, on_step: OnIsland | None) -> bool:
    """Handle a message of a process; return False where it has ended."""
    try:
        message = job.connection.recv()
    except (EOFError, OSError):
        job.connection.close()
        job.process.join()
        return False
    if isinstance(message, Stepped) and on_step is not None:
        on_step(job.island.index, message.step, message.loss, message.seconds)
    elif isinstance(message, Logged):
        log.log(message.level, "%s: %s", job.island.name, message.message)
    elif message is None or isinstance(message, Outcome):
        job.has_ended, job.outcome = True, message
    return True


def _close(running: Sequence[_Job]) -> None:
    """Close the pipes of running processes, which then save and end; kill those that do not."""
    for job in running:
        job.connection.close()
    for job in running:
        job.process.join(_PATIENCE)
        if job.process.is_alive():
            job.process.kill()
            job.process.join()
        job.output.pass_on()


def _how(job: _Job) -> str:
    return "was told to stop" if job.has_ended else job.output.ended(job.process.exitcode)
