"""Tasks of a Ray cluster that has a GPU by its own account: which of them see it."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from hddm.utils.ray_workers import RayWorkers
from hddm.utils.workers import Call

pytestmark = pytest.mark.slow


def visible(report: Callable[..., object]) -> str | None:
    """What CUDA may see in a task."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_task_without_a_gpu_sees_none(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whatever runs on a GPU if there is one would take that of another task."""
    ray: Any = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(num_cpus=1, num_gpus=gpus, include_dashboard=False, log_to_driver=False)
    signal.signal(signal.SIGTERM, handler)
    try:
        with RayWorkers() as workers:
            calls = [Call(visible, {}, str(uses), uses_gpu=uses) for uses in (True, False)]
            assert workers.run(calls) == ["0" if gpus else "", ""]
    finally:
        ray.shutdown()
