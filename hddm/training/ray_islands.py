"""Training islands on the machines of a Ray cluster, as tasks that share nothing but files.

Every machine needs this package, and sees the folders of shards and experts under the same path. A task whose
worker or machine dies is started again, elsewhere if need be, and goes on from its last checkpoint.
"""

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from hddm.experts.records import EXPERT_FILE
from hddm.training.island_jobs import Island, Outcome
from hddm.training.islands import RETRIES, OnIsland, outcome_of
from hddm.training.loop import mean
from hddm.training.resume import CHECKPOINTS, checkpoints_in, run_folder_of, step_of
from hddm.training.state import LOSSES, PROGRESS, wait_for_run
from hddm.utils.errors import HddmError, optional
from hddm.utils.files import read_json
from hddm.utils.processes import SIGNALS, Stopped, StopRequest, compute_environment

LOCAL = "local"
LOCK_SECONDS = 60.0
"""Patience of a task with the lock of the one before it, whose machine may be gone."""
SAVE_SECONDS = 120.0

log = logging.getLogger(__name__)


class RayCluster:
    """A Ray cluster, on which every island is a task; a backend of `hddm.training.islands.train_islands`.

    A task takes as many of the cluster's CPUs as it has threads, 1 where none were given, and a GPU where
    the cluster has some and ``device`` does not say otherwise; it is started again ``retries`` times at most.
    What islands report comes from their checkpoints. The ``address`` ``local`` starts a cluster on this
    machine, for as long as the training takes.

    Raises:
        HddmError: without Ray; in `run` for a cluster that cannot be reached.
    """

    threads = 1

    def __init__(self, address: str = LOCAL, retries: int = RETRIES) -> None:
        self.address, self.retries = address, retries
        self._ray = optional("ray", "--ray", "ray")

    def run(self, islands: Sequence[Island], stop: StopRequest, on_step: OnIsland | None) -> list[Outcome]:
        """Run islands as a `hddm.training.islands.Backend` does."""
        ray = self._ray
        with _connected(ray, self.address):
            has_gpus = ray.cluster_resources().get("GPU", 0) > 0
            tasks = {_submit(ray, one, self.retries, has_gpus): one for one in map(_absolute, islands)}
            return _collect(ray, tasks, stop, on_step)


def _collect(
    ray: Any, tasks: dict[Any, Island], stop: StopRequest, on_step: OnIsland | None
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    seen: dict[int, tuple[int, float]] = {}
    end = math.inf

    def report(island: Island) -> None:
        before, seconds_before = seen.get(island.index, (0, math.nan))
        newest = _newest(island.out, before)
        if on_step is not None and newest is not None:
            step, loss, seconds = newest
            seen[island.index] = step, seconds
            on_step(island.index, step, loss, seconds - seconds_before)

    while tasks and time.monotonic() < end:
        if stop.requested and end == math.inf:
            end = time.monotonic() + SAVE_SECONDS
            for task in tasks:
                # In the worker this is a SIGINT, which a training answers by saving.
                ray.cancel(task, force=False, recursive=False)
        done, _ = ray.wait(list(tasks), timeout=0.5)
        for task in done:
            island = tasks.pop(task)
            outcome = _outcome(ray, task, island)
            if outcome is not None and not (outcome.failure and stop.requested):
                outcomes.append(outcome)
            if outcome is not None and outcome.summary:
                report(island)
        for island in tasks.values():
            report(island)
    return outcomes


def _outcome(ray: Any, task: Any, island: Island) -> Outcome | None:
    """The outcome of a task that has ended; None of one that was stopped and saved."""
    try:
        outcome: Outcome | None = ray.get(task)
    except ray.exceptions.TaskCancelledError:
        return None
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[-1]
        text = f"its task failed for good ({type(error).__name__}: {reason})"
    else:
        if outcome is None or outcome.failure is not None or (island.out / EXPERT_FILE).exists():
            return outcome
        text = "was written on another machine, and is not seen here; take a folder that all machines share"
    return Outcome(island, failure=HddmError(f"{island.out}: {text}"))


def _submit(ray: Any, island: Island, retries: int, has_gpus: bool) -> Any:
    on_gpu = has_gpus and island.settings.device in ("auto", "cuda")
    task = ray.remote(_train).options(
        name=island.name,
        num_cpus=island.threads,
        num_gpus=int(on_gpu),
        max_retries=retries,
        # What the user must mend is returned, not raised.
        retry_exceptions=True,
        runtime_env={"env_vars": compute_environment(island.threads)},
    )
    return task.remote(island)


def _train(island: Island) -> Outcome | None:
    """Train ``island`` in this worker; the body of a task. None where the driver stopped it."""
    # Ray shows what a worker writes to its standard error.
    logging.basicConfig(format=f"{island.name}: %(message)s")
    logging.getLogger("hddm").setLevel(logging.INFO)
    before = {one: signal.signal(one, signal.default_int_handler) for one in SIGNALS}
    try:
        wait_for_run(island.out, LOCK_SECONDS)
        outcome = outcome_of(island)
    except Stopped as error:
        if error.number == signal.SIGINT:
            return None
        # Another's signal: Ray starts it elsewhere.
        raise RuntimeError(f"{island.name}: {error}") from error
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    if (failure := outcome.failure) is None:
        return outcome
    return Outcome(island, failure=HddmError(f"on {os.uname().nodename}: {failure.message}", failure.details))


@contextlib.contextmanager
def _connected(ray: Any, address: str) -> Iterator[None]:
    """A block in which Ray is connected; one that was connected before stays so."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    handlers = {one: signal.getsignal(one) for one in SIGNALS}
    own = {"include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(address=address, logging_level=logging.WARNING, **own)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise HddmError(f"--ray {address}: no cluster answers there ({error})") from error
    try:
        # Its own handler of SIGTERM would leave in the middle of what we do.
        for one, handler in handlers.items():
            signal.signal(one, handler)
        yield
    finally:
        ray.shutdown()


def _newest(out: Path, since: int) -> tuple[int, float, float] | None:
    """Step, mean loss after step ``since`` and seconds of the newest checkpoint; None if it is not newer."""
    newest = next(iter(checkpoints_in(run_folder_of(out) / CHECKPOINTS)), None)
    if newest is None or step_of(newest) == since:
        return None
    try:
        losses = load_file(newest / f"{LOSSES}.safetensors")["losses"]
        seconds = float(read_json(newest / PROGRESS)["seconds"])
    except (OSError, SafetensorError, HddmError):
        # It has just made room for the next.
        return None
    return step_of(newest), mean(losses[since:].tolist()), seconds


def _absolute(island: Island) -> Island:
    """The same with absolute paths, since workers have a working directory of their own."""
    paths: dict[str, Any] = {k: one.absolute() for k, one in vars(island).items() if isinstance(one, Path)}
    return replace(island, **paths)
