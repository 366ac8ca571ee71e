"""Calls on the machines of a Ray cluster, as tasks that share nothing but files.

Every machine needs this package, and sees the folders of all calls under the same path. A call whose worker
or machine dies is started again, elsewhere if need be.
"""

import contextlib
import itertools
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any, Self

from hddm.utils.errors import HddmError, one_line, optional
from hddm.utils.processes import SIGNALS, compute_environment, environment, switched
from hddm.utils.workers import RETRIES, Backend, Call, Died, Event, perform

LOCAL = "local"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
AUTHENTICATION, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
"""Environment variables of Ray: whether and with what a cluster authenticates."""
HIDES_GPUS = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
"""Environment variable of Ray: whether a task that asks for no GPU sees none. By default it sees them all."""
SAVE_SECONDS = 120.0
REACH_SECONDS = 10.0
"""Seconds that the head of a cluster has to answer."""

log = logging.getLogger(__name__)


class RayWorkers(Backend):
    """A Ray cluster, which decides how many calls run at a time; every call is a task.

    A task takes a CPU per thread, and a GPU where the cluster has some and the call uses one; from all others
    GPUs are hidden. The ``address``
    ``local`` starts a cluster on this machine. Raises `HddmError` without Ray, and on entering for a cluster
    that does not answer.
    """

    def __init__(self, address: str = LOCAL, retries: int = RETRIES) -> None:
        super().__init__(sys.maxsize, retries)
        self._ray, self._connection = optional("ray", "`ray`", "ray"), contextlib.ExitStack()
        self._address, self._tasks, self._numbers = (
            address,
            dict[int, tuple[Call, Any]](),
            itertools.count(),
        )

    def __enter__(self) -> Self:
        ray = self._ray
        self._connection.enter_context(connected(ray, self._address))
        # All other nodes may die.
        node, on_node = ray.get_runtime_context().get_node_id(), ray.util.scheduling_strategies
        here = on_node.NodeAffinitySchedulingStrategy(node, soft=False)
        options = {
            "num_cpus": 0,
            "max_restarts": -1,
            "max_task_retries": -1,
            "scheduling_strategy": here,
        }
        self._reports = ray.remote(**options)(_Reports).remote()
        self._has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        return self

    def __exit__(self, *ended: object) -> None:
        super().__exit__(*ended)
        self._connection.close()

    def start(self, call: Call) -> int:
        threads, number = call.threads or 1, next(self._numbers)
        gpus, variables = int(self._has_gpus and call.uses_gpu), compute_environment(threads)
        if not gpus:
            variables[HIDES_GPUS] = "1"
        needs = {"num_cpus": threads, "num_gpus": gpus, "runtime_env": {"env_vars": variables}}
        # `run` starts it again.
        task = self._ray.remote(_perform).options(name=call.name, max_retries=0, **needs)
        arguments = call.function, call.arguments, os.getcwd(), self._reports, number
        self._tasks[number] = call, task.remote(*arguments)
        return number

    def wait(self, seconds: float) -> list[Event]:
        numbers = {task: number for number, (_, task) in self._tasks.items()}
        done, _ = self._ray.wait(list(numbers), timeout=seconds)
        reports = self._ray.get(self._reports.take.remote())
        events: list[Event] = [(k, False, values) for k, values in reports if k in self._tasks]
        for one in done:
            number = numbers[one]
            events.append((number, True, self._result(*self._tasks.pop(number))))
        return events

    def _result(self, call: Call, task: Any) -> Any:
        try:
            result = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
            return Died(f"died ({type(error).__name__}: {one_line(reason)})")
        if isinstance(result, HddmError) or call.writes is None or call.writes.exists():
            return result
        text = "was written on another machine and is not visible here; use a folder that all machines share"
        return HddmError(f"{call.writes}: {text}")

    def stop(self) -> None:
        tasks = [task for _, task in self._tasks.values()]
        for task in tasks:
            # Its process gets a SIGINT.
            self._ray.cancel(task, force=False, recursive=False)
        if tasks:
            self._ray.wait(tasks, num_returns=len(tasks), timeout=SAVE_SECONDS)
        self._tasks.clear()


class _Reports:
    """Reports of tasks, by their numbers, in a process of their own."""

    def __init__(self) -> None:
        self._new: list[tuple[int, Any]] = []

    def add(self, number: int, values: Any) -> None:
        self._new.append((number, values))

    def take(self) -> list[tuple[int, Any]]:
        new, self._new = self._new, []
        return new


def _perform(
    function: Callable[..., Any], arguments: dict[str, Any], folder: str, reports: Any, number: int
) -> Any:
    """Perform a call as the body of a task."""
    # Relative paths are those of the driver.
    with contextlib.suppress(OSError):
        os.chdir(folder)
    result = perform(function, arguments, lambda *values: reports.add.remote(number, values))
    if isinstance(result, HddmError) and not isinstance(result, Died):
        return HddmError(f"on {os.uname().nodename}: {result.message}", result.details)
    return result


@contextlib.contextmanager
def connected(ray: Any, address: str, **own: Any) -> Iterator[None]:
    """Connect to Ray for a block; a connection that existed before stays.

    ``own`` are options of the cluster that ``local`` starts. It listens at this machine alone, but for the
    replicas of Ray Serve, and who connects needs a token, made for this run where the environment has none.

    Raises `HddmError` where no cluster answers, and where anybody could run code on it.
    """
    has_tls = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
    if (mode := os.environ.get(AUTHENTICATION, "token")).lower() != "token" and not has_tls:
        text = "Ray would run the code of whoever reaches one of its ports; unset it, or set RAY_USE_TLS=1"
        raise HddmError(f"{AUTHENTICATION}={mode}: {text} and its certificates")
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
                socket.create_connection(
                    (host.rpartition("/")[2], int(port)), REACH_SECONDS
                ).close()
            ray.init(address=address, logging_level=logging.ERROR, **own)
        # Ray raises a bare one where a machine is too busy to start it.
        except Exception as error:
            remedy = f"; if it needs a token, set {AUTHENTICATION}=token"
            hint = "" if AUTHENTICATION in os.environ else remedy
            raise HddmError(
                f"`ray` {address}: no cluster answers there ({one_line(error)}){hint}"
            ) from error
        try:
            # Ray's own handler of SIGTERM would exit in the middle of our work.
            for one, handler in handlers.items():
                signal.signal(one, handler)
            if is_local and (there := ray.util.get_node_ip_address()) not in LOOPBACK:
                raise HddmError(f"`ray` {LOCAL}: Ray listens at {there}; use another version of it")
            if not (is_local or has_tls or AUTHENTICATION in os.environ):
                text = "`ray` %s: runs the code of whoever reaches its ports; see docs/guides/machines.md"
                log.warning(text, address)
            yield
        finally:
            ray.shutdown()
