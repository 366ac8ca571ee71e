"""Workers of a benchmark do not outlive who started them, and a workload tells how long they will take."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection

import pytest

from hddm.benchmark import workload
from hddm.benchmark.jobs import end_with_parent
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


def test_a_workload_tells_the_time_of_all_seeds_by_the_pace_of_each_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(workload.time, "perf_counter", lambda: now[-1])
    stages = {workload.TRAIN: 1000, workload.SAMPLE: 400, workload.SCORE: 3}
    work = workload.Workload({(seed, stage): units for seed in (0, 1) for stage, units in stages.items()})

    def pass_time(seconds: float, seed: int, stage: str, units: int) -> list[str]:
        now.append(now[-1] + seconds)
        work.count(seed, stage, units)
        return work.left()

    # A quarter of the training was there already, and a score is taken to need ten seconds.
    work.begin(0, workload.TRAIN, 750)
    assert work.left() == []
    assert pass_time(50, 0, workload.TRAIN, 500) == [
        f"{round((250 + 1000 + 800) / 10 / 60 + 1)} min to the end"
    ]
    assert pass_time(25, 0, workload.TRAIN, 250) == [f"{round((1000 + 800) / 10 / 60 + 1)} min to the end"]
    # Samples turn out to take five times as long.
    work.begin(0, workload.SAMPLE, 400)
    assert pass_time(200, 0, workload.SAMPLE, 400) == [f"{round((100 + 200 + 60) / 60)} min to the end"]
    work.begin(0, workload.SCORE, 3)
    assert pass_time(3, 0, workload.SCORE, 3) == [f"{round((100 + 200 + 3) / 60)} min to the end"]


@pytest.mark.parametrize(
    ("changes", "calls"),
    [
        ({"strategy": "draw", "steps": 10}, 10),
        ({"strategy": "top-2", "steps": 10, "solver": "euler"}, 20),
        ({"strategy": "full", "steps": 10, "solver": "heun"}, 80),
        ({"strategy": "top-1", "steps": 10, "guidance_scale": 2.0}, 20),
    ],
)
def test_a_workload_counts_the_networks_that_one_image_needs(changes: dict[str, object], calls: int) -> None:
    assert workload.evaluations(SamplingPoint.model_validate(changes), 4) == calls
