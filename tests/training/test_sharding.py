"""Weights that are split over processes, against trainings by one process that has them whole."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hddm
from hddm.networks.folders import WEIGHTS
from hddm.training.expert import train_expert
from hddm.training.resume import run_folder_of
from hddm.training.settings import ExpertSettings, RunOptions
from tests.artefacts import expert_settings
from tests.killed_runs import checkpoint
from tests.several_processes import LOSSES, check_close, together, train_in_float64

pytestmark = pytest.mark.integration
STEPS = 40
SPLIT = {"shard_weights": True}


def _settings(optimizer: str, **changes: object) -> ExpertSettings:
    chosen = {"steps": STEPS, "batch_size": 12, "threads": 1, "device": "cpu", **changes}
    return expert_settings("flow", optimizer=optimizer, **chosen)


@pytest.fixture(scope="module", params=["muon", pytest.param("adamw", marks=pytest.mark.slow)])
def optimizer(request: pytest.FixtureRequest) -> str:
    """Muon trains the matrices, and AdamW the rest or all."""
    return str(request.param)


@pytest.fixture(scope="module")
def alone(optimizer: str, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training by one process."""
    out = tmp_path_factory.mktemp("alone") / "out"
    train_in_float64(whole, out, _settings(optimizer), RunOptions(checkpoint_every=STEPS))
    return out


@pytest.fixture(scope="module")
def two(optimizer: str, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training by two processes that split the weights, and each batch in two parts each."""
    out = tmp_path_factory.mktemp("two") / "out"
    settings = _settings(optimizer, gradient_accumulation_steps=2, **SPLIT)
    together(2, train_in_float64, whole, out, settings, RunOptions(checkpoint_every=STEPS))
    return out


def _losses(out: Path) -> list[float]:
    found: list[float] = json.loads((out / LOSSES).read_text())
    return found


def _held(out: Path, rank: str = "") -> dict[str, int]:
    found: dict[str, int] = json.loads(out.with_name(f"out.held{rank}").read_text())
    return found


def _check_alike(out: Path, alone: Path) -> None:
    assert _losses(out) == pytest.approx(_losses(alone), rel=1e-6)
    check_close(out / WEIGHTS, alone / WEIGHTS)


def test_two_processes_with_half_the_weights_each_train_to_the_weights_of_one(
    two: Path, alone: Path
) -> None:
    _check_alike(two, alone)
    expected = _held(alone)
    assert min(expected.values()) > 100_000
    for rank in ("0", "1"):
        for kind, size in _held(two, rank).items():
            assert size <= 0.51 * expected[kind], kind


def test_processes_that_are_stopped_go_on_to_the_same_bits(
    two: Path, optimizer: str, whole: Path, tmp_path: Path
) -> None:
    out, run = tmp_path / "out", RunOptions(resume=True, checkpoint_every=STEPS)
    settings = _settings(optimizer, gradient_accumulation_steps=2, **SPLIT)
    for until in (17, None):
        together(2, train_in_float64, whole, out, settings, run, until)
        assert out.exists() == (until is None)
    found, expected = checkpoint(run_folder_of(out)), checkpoint(run_folder_of(two))
    assert {"weights.1.safetensors", "ema.1.safetensors"} <= found.keys()
    assert found == expected
    assert (out / WEIGHTS).read_bytes() == (two / WEIGHTS).read_bytes()


@pytest.mark.parametrize(
    "numbers",
    [
        (2, 1),
        pytest.param((1, 4), marks=pytest.mark.slow),
        pytest.param((3, 2, 4), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_goes_on_with_its_weights_split_over_another_number_of_processes(
    numbers: tuple[int, ...], alone: Path, optimizer: str, whole: Path, tmp_path: Path
) -> None:
    """Three parts are of unequal size."""
    out, run = tmp_path / "out", RunOptions(resume=True, checkpoint_every=STEPS)
    for life, number in enumerate(numbers, 1):
        until = 11 * life if life < len(numbers) else None
        arguments = (train_in_float64, whole, out, _settings(optimizer, **SPLIT), run, until)
        together(number, *arguments)
        assert out.exists() == (until is None)
    _check_alike(out, alone)
    held = [_held(out, str(rank))["averages"] for rank in range(numbers[-1])]
    assert max(held) <= 1.1 * _held(alone)["averages"] / numbers[-1]


def test_the_finished_expert_is_one_like_any_other(whole: Path, tmp_path: Path) -> None:
    """With its calibration and its weak model."""
    settings = _settings("muon", steps=8, class_conditional=True)
    one, both = tmp_path / "one", tmp_path / "both"
    train_expert(whole, one, settings)
    together(2, train_expert, whole, both, settings.model_copy(update=SPLIT))
    names = {path.name for path in one.iterdir()}
    assert {path.name for path in both.iterdir()} == names
    tensors = {name for name in names if name.endswith(".safetensors")}
    assert len(tensors) == 3
    for name in tensors:
        found, expected = load_file(both / name), load_file(one / name)
        assert {k: (v.shape, v.dtype) for k, v in found.items()} == {
            k: (v.shape, v.dtype) for k, v in expected.items()
        }
    x_t, t = torch.randn(4, *hddm.load(one).sample_shape), torch.full((4,), 0.9)
    velocities = [hddm.load(folder).velocity(x_t, t) for folder in (both, one)]
    torch.testing.assert_close(*velocities, rtol=0, atol=1e-3)
