"""Train many experts at once, each alone (an island), on this machine or on a cluster.

`train_islands` checks all folders, hands the islands to a `Backend` and collects their outcomes. Backends are
`Processes`, for this machine, and `hddm.training.ray_islands.RayCluster`.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

import torch
from safetensors import SafetensorError

from hddm.data.shards import open_shard
from hddm.experts.records import EXPERT_FILE, open_expert
from hddm.training.continuation import continue_expert, resolve_continued
from hddm.training.expert import resolve_new, train_expert
from hddm.training.island_jobs import Island, Outcome
from hddm.training.loop import OnStep, summary_of
from hddm.training.resume import has_run, is_kept, recipe_before, refuse_run
from hddm.training.state import discard_runs
from hddm.utils.errors import HddmError, one_line
from hddm.utils.files import check_absent
from hddm.utils.processes import (
    Output,
    Stopped,
    StopRequest,
    compute_environment,
    environment,
    when_parent_ends,
)

RETRIES = 3
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
        text = "stopped; progress is saved, and --resume continues"
        raise Stopped(f"{islands[0].out.parent}: {text}", stop.number)
    return sorted(outcomes, key=lambda one: one.island.index)


def prepare(islands: Sequence[Island]) -> None:
    """Check ``islands``, and remove the runs that ``overwrite`` without ``resume`` replaces.

    All folders that are in the way or in use raise one `HddmError`, before anything is removed, and so do all
    settings that a shard does not allow.
    """
    _check(
        islands,
        _refuse_present,
        "{} of {} experts or their runs exist already; --resume continues them, --overwrite starts again",
    )
    _check(islands, _check_settings, "{} of {} experts cannot be trained as requested, so none was started")
    discard_runs([one.out for one in islands if one.overwrite and not one.run.resume])


def _check(islands: Sequence[Island], check: Callable[[Island], object], text: str) -> None:
    """Raise one `HddmError` with the errors of all ``islands``."""
    problems = []
    for one in islands:
        try:
            check(one)
        except HddmError as error:
            problems.append(f"{one.name}: {error.message}")
    if problems:
        number = text.format(len(problems), len(islands))
        raise HddmError(f"{islands[0].out.parent}: {number}", problems)


def _refuse_present(island: Island) -> None:
    if not is_kept(island.out, EXPERT_FILE, island.run, island.overwrite):
        check_absent(island.out, EXPERT_FILE, island.overwrite)
    if not (island.run.resume or island.overwrite):
        refuse_run(island.out)


def _check_settings(island: Island) -> None:
    """Refuse settings that the shard does not allow; data that cannot be read fails later, and alone."""
    try:
        shard = open_shard(island.shard, is_outline=True)
    except HddmError:
        return
    settings, before = island.settings, recipe_before(island.out, EXPERT_FILE, island.run, island.overwrite)
    if island.init is None:
        resolve_new(shard, settings, island.schedule, before)
    else:
        resolve_continued(island.init, open_expert(island.init), shard, settings, before)


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
        text = f"could not be written, or its data read ({error}); fix that, and --resume continues"
        raise HddmError(f"{out}: {text}") from error


def outcome_of(island: Island, on_step: OnStep | None = None) -> Outcome:
    """Run `train_island` and return its failures as outcomes; a signal raises `Stopped`."""
    try:
        return Outcome(island, summary_of(train_island(island, on_step)))
    except Stopped:
        raise
    except HddmError as error:
        return Outcome(island, failure=error)


_reports: Connection | None = None


def _begin(reports: Connection, name: str) -> None:
    """Prepare the process of an island, which writes its log to its standard error."""
    global _reports
    _reports = reports
    logging.basicConfig(format=f"hddm: {name}: %(message)s")
    logging.getLogger("hddm").setLevel(logging.INFO)
    # Without the process that started it, a training saves and ends.
    when_parent_ends(lambda: os.kill(os.getpid(), signal.SIGTERM))


def _work(island: Island) -> Outcome | None:
    """Train ``island`` in its process; return None for a training that was stopped and saved."""

    def on_step(step: int, loss: float, seconds: float) -> None:
        assert _reports is not None
        # Nobody may be reading any more.
        with contextlib.suppress(OSError):
            _reports.send((island.index, step, loss, seconds))

    try:
        return outcome_of(island, on_step)
    except Stopped:
        return None
    finally:
        starter = multiprocessing.parent_process()
        if starter is not None and not starter.is_alive():
            # The pool would wait for more work for ever.
            os._exit(128 + signal.SIGTERM)


class _Job:
    """A process of an island, which is on GPU ``slot`` where there are several."""

    def __init__(self, island: Island, threads: int, slot: int, starts: int = 1) -> None:
        self.island, self.slot, self.starts, self.output = island, slot, starts, Output()
        context = multiprocessing.get_context("spawn")
        # The process gets the writing end alone, so that it never fills a pipe that nobody reads.
        self.reports, writer = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(1, context, _begin, (writer, island.name))
        variables, gpus = compute_environment(island.threads(threads)), torch.cuda.device_count()
        if gpus > 1:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
            variables["CUDA_VISIBLE_DEVICES"] = visible.split(",")[slot % gpus]
        with environment(variables), self.output.caught():
            self.future = self._pool.submit(_work, island)
        (self.process,) = self._pool._processes.values()

    def pass_on(self, on_step: OnIsland | None) -> None:
        """Pass on what the process wrote and reported."""
        self.output.pass_on()
        while self.reports.poll():
            report = self.reports.recv()
            if on_step is not None:
                on_step(*report)

    def end(self) -> Outcome | str | None:
        """Return the outcome, None for a training that was stopped, or how the process died, in words."""
        error = self.future.exception()
        self._pool.shutdown()
        if error is None:
            return self.future.result()
        if isinstance(error, BrokenProcessPool):
            return self.output.ended(self.process.exitcode)
        log.debug("%s: its process failed", self.island.name, exc_info=error)
        return f"failed ({type(error).__name__}: {one_line(error)})"


@dataclass(frozen=True)
class Processes:
    """Processes of this machine, ``parallel`` at a time, each started again ``retries`` times at most.

    Islands share the cores. Each uses one GPU, its own where there are enough.
    """

    parallel: int = 1
    retries: int = RETRIES

    def run(self, islands: Sequence[Island], stop: StopRequest, on_step: OnIsland | None) -> list[Outcome]:
        waiting, running, outcomes = deque(islands), list[_Job](), list[Outcome]()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads, is_stopping = max(1, cores // self.parallel), False
        try:
            while True:
                while waiting and len(running) < self.parallel and not stop.requested:
                    slot = min(set(range(self.parallel)) - {job.slot for job in running})
                    running.append(_Job(waiting.popleft(), threads, slot))
                if not running:
                    return outcomes
                if stop.number is not None and not is_stopping:
                    is_stopping = True
                    for job in running:
                        _send(job, stop.number)
                # Returns in time to notice a signal, which interrupts nothing.
                done, _ = wait([job.future for job in running], timeout=0.2)
                for job in list(running):
                    job.pass_on(on_step)
                    if job.future not in done:
                        continue
                    running.remove(job)
                    island, times, ended = job.island, job.starts, job.end() or "was stopped"
                    if isinstance(ended, Outcome):
                        outcomes.append(ended)
                    elif not stop.requested and times > self.retries:
                        text = f"its process {ended}, {times} times in all; --resume continues"
                        outcomes.append(Outcome(island, failure=HddmError(f"{island.out}: {text}")))
                    elif not stop.requested:
                        text = "%s: its process %s; restarting it from its last checkpoint (%d of %d)"
                        log.warning(text, island.name, ended, times, self.retries)
                        running.append(_Job(island, threads, job.slot, times + 1))
        finally:
            # Those that still run save and end; those that do not are killed.
            for job in running:
                job.reports.close()
                _send(job, signal.SIGTERM)
            done, _ = wait([job.future for job in running], timeout=_PATIENCE)
            for job in running:
                if job.future not in done:
                    job.process.kill()
                job.end()


def _send(job: _Job, number: int) -> None:
    # One may have ended just now.
    if (pid := job.process.pid) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
