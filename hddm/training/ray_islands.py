"""Train islands on the machines of a Ray cluster, as tasks that share nothing but files.

Every machine needs this package, and sees the folders of shards and experts under the same path. A task whose
worker or machine dies is started again from its last checkpoint, elsewhere if need be.
"""

import contextlib
import logging
import math
import os
import secrets
import signal
import socket
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
from hddm.training.state import LOSSES, read_progress, wait_for_run
from hddm.utils.errors import HddmError, one_line, optional
from hddm.utils.processes import SIGNALS, Stopped, StopRequest, compute_environment, environment, switched

LOCAL = "local"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
AUTHENTICATION, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
"""Environment variables of Ray: whether and with what a cluster authenticates."""
LOCK_SECONDS = 60.0
"""Seconds that a task waits for the lock of its predecessor, whose machine may be gone."""
SAVE_SECONDS = 120.0
REACH_SECONDS = 10.0
"""Seconds that the head of a cluster has to answer."""

log = logging.getLogger(__name__)


class RayCluster:
    """A Ray cluster as a backend of `hddm.training.islands.train_islands`; every island is a task.

    A task takes a CPU per thread, 1 where none were given, and a GPU where the cluster has some and
    ``device`` allows it; it is started again ``retries`` times at most. Reports come from checkpoints. The
    ``address`` ``local`` starts a cluster on this machine for the time of the training. A missing Ray raises
    `HddmError`, and so does an unreachable cluster in `run`.
    """

    def __init__(self, address: str = LOCAL, retries: int = RETRIES) -> None:
        self.address, self.retries = address, retries
        self._ray = optional("ray", "--ray", "ray")

    def run(self, islands: Sequence[Island], stop: StopRequest, on_step: OnIsland | None) -> list[Outcome]:
        ray = self._ray
        with connected(ray, self.address):
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
        if on_step is not None and (newest := _newest(island.out, before)) is not None:
            step, loss, seconds = newest
            seen[island.index] = step, seconds
            on_step(island.index, step, loss, seconds - seconds_before)

    while tasks and time.monotonic() < end:
        if stop.requested and end == math.inf:
            end = time.monotonic() + SAVE_SECONDS
            for task in tasks:
                # The worker gets a SIGINT, on which a training saves.
                ray.cancel(task, force=False, recursive=False)
        done, _ = ray.wait(list(tasks), timeout=0.5)
        for island in tasks.values():
            report(island)
        for task in done:
            outcome = _outcome(ray, task, tasks.pop(task))
            if outcome is not None and not (outcome.failure and stop.requested):
                outcomes.append(outcome)
    return outcomes


def _outcome(ray: Any, task: Any, island: Island) -> Outcome | None:
    """Return the outcome of a task that has ended; None for one that was stopped and saved."""
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
        text = "was written on another machine and is not visible here; use a folder that all machines share"
    return Outcome(island, failure=HddmError(f"{island.out}: {text}"))


def _submit(ray: Any, island: Island, retries: int, has_gpus: bool) -> Any:
    on_gpu = has_gpus and island.settings.device in ("auto", "cuda")
    threads = island.threads(1)
    task = ray.remote(_train).options(
        name=island.name,
        num_cpus=threads,
        num_gpus=int(on_gpu),
        max_retries=retries,
        # Errors that the user must mend are returned, not raised, so they are not retried.
        retry_exceptions=True,
        runtime_env={"env_vars": compute_environment(threads)},
    )
    return task.remote(island)


def _train(island: Island) -> Outcome | None:
    """Train ``island`` as the body of a task; return None where the driver stopped it."""
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
        # A signal that is not the driver's: Ray starts the task elsewhere.
        raise RuntimeError(f"{island.name}: {error}") from error
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    if (failure := outcome.failure) is None:
        return outcome
    return Outcome(island, failure=HddmError(f"on {os.uname().nodename}: {failure.message}", failure.details))


@contextlib.contextmanager
def connected(ray: Any, address: str, variables: Any = (), **own: Any) -> Iterator[None]:
    """Connect to Ray for a block; a connection that existed before stays.

    ``own`` are options of the cluster that ``local`` starts, ``variables`` are those of all our processes. A
    local cluster listens at this machine alone, but for the replicas of Ray Serve, and who connects needs a
    token, made for this run where the environment has none.

    Raises `HddmError` where no cluster answers, and where anybody could run code on it.
    """
    has_tls = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
    if (mode := os.environ.get(AUTHENTICATION, "token")).lower() != "token" and not has_tls:
        text = "Ray would run the code of whoever reaches one of its ports"
        raise HddmError(
            f"{AUTHENTICATION}={mode}: {text}; unset it, or set RAY_USE_TLS=1 and its certificates"
        )
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # It would tell how to do without a token.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    handlers, is_local = {one: signal.getsignal(one) for one in SIGNALS}, address == LOCAL
    own = {"include_dashboard": False} | own if is_local else {}
    # Ray itself would leave one in a file that all users of the machine can read.
    token = {TOKEN: os.environ.get(TOKEN) or secrets.token_hex(32)} if is_local else {}
    # Without it Ray listens at 127.0.0.1; its option for an address puts the machine's in that one's place.
    alone = switched(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", not is_local)
    host, _, port = address.rpartition(":")
    with environment(token), alone:
        try:
            if host and port.isdecimal():
                # Ray itself would try for minutes.
                socket.create_connection((host.rpartition("/")[2], int(port)), REACH_SECONDS).close()
            own |= {"logging_level": logging.ERROR, "runtime_env": {"env_vars": dict(variables)}}
            ray.init(address=address, **own)
        except (OSError, OverflowError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            hint = (
                "" if AUTHENTICATION in os.environ else f"; if it needs a token, set {AUTHENTICATION}=token"
            )
            raise HddmError(f"--ray {address}: no cluster answers there ({one_line(error)}){hint}") from error
        try:
            # Ray's own handler of SIGTERM would exit in the middle of our work.
            for one, handler in handlers.items():
                signal.signal(one, handler)
            if is_local and (there := ray.util.get_node_ip_address()) not in LOOPBACK:
                raise HddmError(f"--ray {LOCAL}: Ray listens at {there}; use another version of it")
            if not (is_local or has_tls or AUTHENTICATION in os.environ):
                text = (
                    "--ray %s: runs the code of whoever reaches one of its ports; see docs/guides/machines.md"
                )
                log.warning(text, address)
            yield
        finally:
            ray.shutdown()


def _newest(out: Path, since: int) -> tuple[int, float, float] | None:
    """Return step, mean loss after ``since`` and seconds of a checkpoint newer than ``since``, else None."""
    newest = next(iter(checkpoints_in(run_folder_of(out) / CHECKPOINTS)), None)
    if newest is None or step_of(newest) == since:
        return None
    try:
        losses = load_file(newest / f"{LOSSES}.safetensors")["losses"]
        seconds = read_progress(newest).seconds
    except (OSError, SafetensorError, HddmError):
        # It was just removed to make room for the next.
        return None
    return step_of(newest), mean(losses[since:].tolist()), seconds


def _absolute(island: Island) -> Island:
    """Make all paths absolute, since workers have a working directory of their own."""
    paths: dict[str, Any] = {k: one.absolute() for k, one in vars(island).items() if isinstance(one, Path)}
    return replace(island, **paths)
