"""Where networks of a service run: workers without a GPU are told to use the CPU, whatever they can see."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hddm.serving.placement import FRONT, Placement
from hddm.serving.service import application, serve
from hddm.settings import ServeSettings
from tests.artefacts import refusal
from tests.ensemble_files import flow_expert, write_ensemble

NAMES = ("a", "b")


def devices(
    gpus: float, device: str = "auto", resources: Mapping[str, Mapping[str, float]] | None = None
) -> dict[str, Any]:
    """Device of each worker and of the front, in a cluster of so many GPUs."""
    of = Placement({}, resources or {}).of_all(NAMES, gpus)
    front = application(Path("folder"), ServeSettings(device=device), of, dict.fromkeys(NAMES, 1))
    _, beside, _, _, workers = front._bound_deployment.init_args
    found = {FRONT: beside.device}
    for name, worker in workers.items():
        _, _, settings, _ = worker._bound_deployment.init_args
        found[name] = settings.device
    return found


@pytest.mark.parametrize(
    ("gpus", "resources", "on_cpu"),
    [
        (0, {}, {"a", "b", FRONT}),
        (1, {}, set()),
        (2, {"": {"num_gpus": 1}}, {FRONT}),
        (2, {"": {"num_gpus": 0}}, {"a", "b"}),
        (2, {"b": {"num_gpus": 0}}, {"b"}),
        (1, {FRONT: {"num_gpus": 0}}, {FRONT}),
    ],
)
def test_who_got_no_gpu_runs_on_the_cpu(
    gpus: float, resources: Mapping[str, Mapping[str, float]], on_cpu: set[str]
) -> None:
    """Ray lets them see the GPUs of others."""
    pytest.importorskip("ray.serve")
    found = devices(gpus, resources=resources)
    assert {name for name, device in found.items() if device == "cpu"} == on_cpu
    assert set(found.values()) <= {"cpu", "auto"}
    if gpus:
        assert {*devices(gpus, "cuda", resources).values()} <= {"cpu", "cuda"}


@pytest.mark.parametrize("device", ["cpu", "mps", "cuda:1"])
def test_a_device_that_the_user_names_stays(device: str) -> None:
    pytest.importorskip("ray.serve")
    assert {*devices(0, device).values()} == {device}


def test_cuda_is_refused_where_the_cluster_counts_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All experts on the CPU are not what the user asked for."""
    pytest.importorskip("ray.serve")
    monkeypatch.setattr(
        "hddm.serving.service.connected", lambda *_, **own: contextlib.nullcontext()
    )
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 9.0})
    folder = write_ensemble(tmp_path, [flow_expert(seed) for seed in range(2)])
    told = refusal(serve, folder, port=8463, settings=ServeSettings(device="cuda"))
    assert told.startswith("`device` cuda: the cluster has no GPU")
