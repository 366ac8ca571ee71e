"""Worker processes of a benchmark do not outlive who started them."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection

from hddm.benchmark.jobs import end_with_parent


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
