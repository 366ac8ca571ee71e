"""Workers of a benchmark do not outlive who started them, and progress counts what they do."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection

import pytest

from hddm.benchmark.jobs import end_with_parent
from hddm.benchmark.seed import evaluations
from hddm.benchmark.settings import SamplingPoint


def _work(connection: Connection) -> None:
    end_with_parent()
    connection.send(os.getpid())
    time.sleep(600)


def _lead(connection: Connection) -> None:
    multiprocessing.get_context("fork").Process(target=_work, args=(connection,)).start()
    time.sleep(600)


def test_a_worker_ends_when_its_parent_is_killed() -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    parent = context.Process(target=_lead, args=(there,))
    parent.start()
    worker = here.recv()
    assert parent.pid is not None
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    for _ in range(200):
        if not _runs(worker):
            return
        time.sleep(0.05)
    os.kill(worker, signal.SIGKILL)
    raise AssertionError("the worker lives on")


def _runs(process: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("changes", "calls"),
    [
        ({"strategy": "draw", "steps": 10}, 10),
        ({"strategy": "top-2", "steps": 10, "solver": "euler"}, 20),
        ({"strategy": "full", "steps": 10, "solver": "heun"}, 80),
        ({"strategy": "top-1", "steps": 10, "guidance_scale": 2.0}, 20),
    ],
)
def test_progress_counts_the_networks_that_one_image_needs(changes: dict[str, object], calls: int) -> None:
    assert evaluations(SamplingPoint.model_validate(changes), 4) == calls
