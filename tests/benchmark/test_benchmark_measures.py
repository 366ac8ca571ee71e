"""What is measured of experts and routers on validation images agrees with what is known of them."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection

import pytest
import torch
from torch import Tensor

from hddm.benchmark.jobs import end_with_parent
from hddm.benchmark.measures import LOOKS, reliability
from hddm.ensemble import Router


class _Posterior:
    """Logits of the exact posterior of two shards of one pixel, N(-2, 1) and N(+2, 1), sharpened."""

    def __init__(self, sharpness: float = 1.0) -> None:
        self.sharpness = sharpness

    def __call__(self, x_t: Tensor, timestep: Tensor) -> Tensor:
        t = (timestep / 1000)[:, None]
        gap = 4 * (1 - t) * x_t.flatten(1) / ((1 - t) ** 2 + t**2)
        return self.sharpness * torch.cat([-gap / 2, gap / 2], dim=1)


def _data(num: int = 4000) -> tuple[Tensor, Tensor]:
    labels = torch.arange(num) % 2
    noise = torch.randn(num, 1, 1, 1, generator=torch.Generator().manual_seed(1))
    return noise + (4.0 * labels - 2)[:, None, None, None], labels


def test_the_exact_posterior_is_right_as_often_as_it_says() -> None:
    images, labels = _data()
    found = reliability(Router(_Posterior()), images, labels)
    assert found["ece"] < 0.01
    for one in found["bins"]:
        assert one["outcome"] == pytest.approx(one["mean"], abs=4 * (0.25 / one["count"]) ** 0.5)
    assert sum(one["count"] for one in found["bins"]) == 2 * LOOKS * len(images)
    accuracy = [one["accuracy"] for one in found["time_bins"]]
    assert accuracy == sorted(accuracy, reverse=True)
    # Near data the shards are two normal distributions at a distance of 4: Φ(2).
    assert accuracy[0] == pytest.approx(0.977, abs=0.005)
    assert accuracy[-1] < 0.6


def test_a_router_that_is_too_sure_is_shown_to_be_and_a_temperature_mends_it() -> None:
    images, labels = _data()
    exact, sure = (reliability(Router(_Posterior(s)), images, labels) for s in (1.0, 4.0))
    mended = reliability(Router(_Posterior(4.0), temperatures=(4.0,)), images, labels)
    assert sure["ece"] > 0.05
    assert sure["cross_entropy"] > exact["cross_entropy"]
    assert sure["accuracy"] == exact["accuracy"]
    assert mended["cross_entropy"] == pytest.approx(exact["cross_entropy"], rel=1e-5)


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
