"""What a training and its resume come to on each device."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hddm
from hddm.networks.folders import WEIGHTS
from hddm.training.expert import train_expert
from hddm.training.settings import RunOptions
from tests.artefacts import expert_settings


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class _Killed(Exception):
    pass


def test_a_training_that_is_gone_on_with_is_that_of_a_cpu(device: str, whole: Path, tmp_path: Path) -> None:
    """Devices round differently; a lost moment or a wrong step count would show at once."""
    settings = expert_settings("flow", steps=12, threads=1, device=device)
    on_cpu = train_expert(whole, tmp_path / "cpu", settings.model_copy(update={"device": "cpu"}))

    def kill(step: int, loss: float, seconds: float) -> None:
        if step == 7:
            raise _Killed

    run = RunOptions(checkpoint_every=3, resume=True)
    with pytest.raises(_Killed):
        train_expert(whole, tmp_path / "out", settings, on_step=kill, run=run)
    losses = train_expert(whole, tmp_path / "out", settings, run=run)
    assert losses == pytest.approx(on_cpu, rel=1e-4)
    expected = load_file(tmp_path / "cpu" / WEIGHTS)
    for name, value in load_file(tmp_path / "out" / WEIGHTS).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_samples_on_a_gpu_are_those_of_a_cpu(flow_expert: Path, ensemble: Path) -> None:
    for folder in (flow_expert, ensemble):
        expected, found = (
            hddm.sample(hddm.load(folder, device=one), num=4, seed=1, steps=5) for one in ("cpu", "cuda")
        )
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)
