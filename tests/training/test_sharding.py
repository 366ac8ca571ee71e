"""Weights that are split over processes, against trainings by one process that has them whole."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import hddm
from hddm.experts.records import WEAK_FILE
from hddm.training.continuation import continue_expert
from hddm.training.distill import distill
from hddm.training.expert import train_expert
from hddm.training.resume import run_folder_of
from hddm.training.settings import DistillSettings, ExpertSettings, RunOptions
from hddm.training.sharding import Shards
from hddm.utils.records import WEIGHTS
from tests.artefacts import expert_settings
from tests.killed_runs import checkpoint
from tests.s3 import free_port, in_its_own
from tests.several_processes import LOSSES, check_close, together, train_in_float64

pytestmark = pytest.mark.integration
STEPS, KILLS = 16, 10
SPLIT = {"shard_weights": True}


def _settings(optimizer: str, **changes: object) -> ExpertSettings:
    chosen = {"steps": STEPS, "batch_size": 12, "threads": 1, "device": "cpu", **changes}
    return expert_settings("flow", optimizer=optimizer, **chosen)


def _split(optimizer: str) -> ExpertSettings:
    return _settings(optimizer, shard_weights=True, gradient_accumulation_steps=2)


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
    run = RunOptions(checkpoint_every=STEPS)
    together(2, train_in_float64, whole, out, _split(optimizer), run)
    return out


def _losses(out: Path) -> list[float]:
    found: list[float] = json.loads((out / LOSSES).read_text())
    return found


def _held(out: Path, rank: str = "") -> dict[str, int]:
    found: dict[str, int] = json.loads(out.with_name(f"out.held{rank}").read_text())
    return found


def _check_alike(out: Path, alone: Path, rel: float = 1e-6, atol: float = 1e-6) -> None:
    assert _losses(out) == pytest.approx(_losses(alone), rel=rel)
    check_close(out / WEIGHTS, alone / WEIGHTS, atol)


def test_two_processes_with_half_the_weights_each_train_to_the_weights_of_one(
    two: Path, alone: Path
) -> None:
    _check_alike(two, alone)
    expected = _held(alone)
    assert min(expected.values()) > 100_000
    for rank in ("0", "1"):
        for kind, size in _held(two, rank).items():
            assert size <= 0.51 * expected[kind], kind


@pytest.fixture(scope="module")
def stopped(optimizer: str, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of `two`, stopped on the way."""
    out = tmp_path_factory.mktemp("stopped") / "out"
    run = RunOptions(checkpoint_every=STEPS)
    together(2, train_in_float64, whole, out, _split(optimizer), run, STEPS // 2)
    assert not out.exists()
    assert len(checkpoint(run_folder_of(out))) == 7
    return out


def _resumed(stopped: Path, folder: Path) -> Path:
    """A copy of a stopped run, in an empty folder."""
    out = folder / "out"
    shutil.copytree(run_folder_of(stopped), run_folder_of(out))
    return out


RESUMED = RunOptions(resume=True, checkpoint_every=STEPS)


@pytest.mark.slow
def test_processes_that_are_stopped_go_on_to_the_same_bits(
    two: Path, stopped: Path, optimizer: str, whole: Path, tmp_path: Path
) -> None:
    out = _resumed(stopped, tmp_path)
    together(2, train_in_float64, whole, out, _split(optimizer), RESUMED)
    found, expected = checkpoint(run_folder_of(out)), checkpoint(run_folder_of(two))
    assert {"weights.1.safetensors", "ema.1.safetensors"} <= found.keys()
    assert found == expected
    assert (out / WEIGHTS).read_bytes() == (two / WEIGHTS).read_bytes()


def test_one_process_goes_on_with_the_weights_of_two(
    alone: Path, stopped: Path, optimizer: str, whole: Path, tmp_path: Path
) -> None:
    out = _resumed(stopped, tmp_path)
    train_in_float64(whole, out, _split(optimizer), RESUMED)
    _check_alike(out, alone)
    assert checkpoint(run_folder_of(out)).keys() == checkpoint(run_folder_of(alone)).keys()


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [(1, 4), (3, 2, 4)], ids=str)
def test_a_run_goes_on_with_its_weights_split_over_another_number_of_processes(
    numbers: tuple[int, ...], alone: Path, optimizer: str, whole: Path, tmp_path: Path
) -> None:
    """Three parts are of unequal size."""
    out = tmp_path / "out"
    for life, number in enumerate(numbers, 1):
        until = 5 * life if life < len(numbers) else None
        settings = _settings(optimizer, shard_weights=True)
        together(number, train_in_float64, whole, out, settings, RESUMED, until)
        assert out.exists() == (until is None)
    if optimizer == "muon" and 3 in numbers:
        # A mean over three rounds; Muon goes on in bfloat16, where a last digit becomes a step of 2^-8.
        _check_alike(out, alone, rel=1e-3, atol=3e-2)
    else:
        _check_alike(out, alone)
    held = [_held(out, str(rank)) for rank in range(numbers[-1])]
    for kind, size in _held(alone).items():
        assert max(one[kind] for one in held) <= 1.1 * size / numbers[-1], kind


def _alike(one: Path, other: Path, t: float = 0.4, **conditions: Tensor) -> None:
    """The velocities of two experts are equal to what a few steps of Adam make of rounding."""
    generator = torch.Generator().manual_seed(0)
    x_t = torch.randn(4, *hddm.load(one).sample_shape, generator=generator)
    times = torch.full((4,), t)
    found, expected = (
        hddm.load(folder).velocity(x_t, times, **conditions) for folder in (one, other)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


# The calibration evaluates the network at thousands of states.
@pytest.mark.parametrize(
    "noise_range", ["0:0.5", pytest.param("0:1", marks=pytest.mark.slow)], ids=str
)
def test_the_finished_expert_is_one_like_any_other(
    noise_range: str, whole: Path, tmp_path: Path
) -> None:
    """With its calibration, its weak model and its classes."""
    settings = _settings("muon", steps=8, class_conditional=True, noise_range=noise_range)
    one, both = tmp_path / "one", tmp_path / "both"
    train_expert(whole, one, settings)
    together(2, train_expert, whole, both, settings.model_copy(update=SPLIT))
    names = {path.name for path in one.iterdir()}
    assert {path.name for path in both.iterdir()} == names
    tensors = {name for name in names if name.endswith(".safetensors")}
    assert len(tensors) == 3
    for name in tensors:
        shapes = []
        for folder in (one, both):
            found = load_file(folder / name)
            shapes.append({key: (value.shape, value.dtype) for key, value in found.items()})
        assert shapes[0] == shapes[1]
    weak = [load_file(folder / WEAK_FILE) for folder in (one, both)]
    for name, value in weak[0].items():
        torch.testing.assert_close(weak[1][name], value, rtol=0, atol=1e-2)
    high = float(noise_range.partition(":")[2])
    _alike(both, one, 0.9 * high, class_labels=torch.tensor([0, 1, 2, 0]) % 2)
    for folder, is_split in ((one, False), (both, True)):
        assert (
            json.loads((folder / "expert.json").read_text())["training"]["shard_weights"]
            is is_split
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {
            "mixed_precision": "bf16",
            "gradient_checkpointing": True,
            "gradient_accumulation_steps": 2,
        },
        {"lora_rank": 2, "gradient_checkpointing": True},
    ],
    ids=["bf16", "adapter"],
)
def test_an_expert_that_goes_on_with_its_weights_split_is_that_of_two_whole_copies(
    changes: dict[str, object], flow_expert: Path, whole: Path, tmp_path: Path
) -> None:
    settings = _settings("adamw", learning_rate=1e-4, **changes)
    outs = [tmp_path / "whole", tmp_path / "split"]
    for out, is_split in zip(outs, (False, True), strict=True):
        chosen = settings.model_copy(update={"shard_weights": is_split})
        together(2, continue_expert, flow_expert, whole, out, chosen)
    assert {path.name for path in outs[0].iterdir()} == {path.name for path in outs[1].iterdir()}
    _alike(*outs)


@pytest.mark.slow
@pytest.mark.parametrize("sampling_steps", [None, 1])
def test_a_student_whose_weights_are_split_is_that_of_one_process(
    sampling_steps: int | None, ensemble: Path, flow_expert: Path, shards: Path, tmp_path: Path
) -> None:
    chosen = {"steps": 10, "batch_size": 16, "size": "tiny", "threads": 1, "device": "cpu"}
    few = {"sampling_steps": sampling_steps, "trajectories": 16} if sampling_steps else {}
    init = flow_expert if sampling_steps else None
    settings = DistillSettings.model_validate({**chosen, "teacher": "routed", **few})
    one, both = tmp_path / "one", tmp_path / "both"
    distill(ensemble, shards, one, settings, init=init)
    arguments = (ensemble, shards, both, settings.model_copy(update=SPLIT), False, None, None, init)
    together(2, distill, *arguments)
    if sampling_steps is None:
        _alike(both, one)
    else:
        found, expected = (hddm.sample(hddm.load(folder), num=4, seed=1) for folder in (both, one))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def _networks() -> dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]]:
    """Networks of other families, and inputs of one call: with blocks in blocks, and without any."""
    torch.manual_seed(0)
    steps, text = torch.tensor([10.0, 700.0]), torch.randn(2, 5, 16)
    x = torch.randn(2, 4, 8, 8)
    unet = {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "block_out_channels": (32, 32),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "attention_head_dim": 8,
    }
    crossed = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 16,
    }
    plain = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    joint = {
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "caption_projection_dim": 16,
        "pooled_projection_dim": 16,
    }
    given = {"sample": x, "timestep": steps}
    asked = {"timestep": steps, "encoder_hidden_states": text}
    return {
        "UNet2DConditionModel": (
            lambda: diffusers.UNet2DConditionModel(**unet, **crossed),
            {"sample": x, **asked},
        ),
        "UNet2DModel": (lambda: diffusers.UNet2DModel(**unet, **plain), given),
        "SD3Transformer2DModel": (
            lambda: diffusers.SD3Transformer2DModel(**joint),
            {"hidden_states": x, "pooled_projections": torch.randn(2, 16), **asked},
        ),
    }


def compare_gradients(name: str) -> None:
    """Outputs and gradients of a network with split weights are its own, and it is whole again at the end."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    make, inputs = _networks()[name]
    network = make().double()
    given = {key: value.double() for key, value in inputs.items()}
    expected = network(**given).sample
    expected.square().mean().backward()
    gradients = {key: p.grad for key, p in network.named_parameters()}
    weights = {key: value.clone() for key, value in network.state_dict().items()}
    network.zero_grad()
    shards = Shards(network, torch.device("cpu"), 2)
    found = network(**given).sample
    torch.testing.assert_close(found, expected)
    found.square().mean().backward()
    for key, parameter in network.named_parameters():
        held: Any = parameter.grad
        torch.testing.assert_close(held.full_tensor(), gradients[key])
    for key, value in shards.whole().state_dict().items():
        if torch.distributed.get_rank() == 0:
            assert torch.equal(value, weights[key])
        else:
            assert value.is_meta


@pytest.mark.slow
@pytest.mark.parametrize("name", _networks())
def test_networks_of_other_families_are_split_to_the_same_gradients(name: str) -> None:
    together(2, compare_gradients, name)


@pytest.mark.slow
def test_a_training_by_torchrun_that_is_killed_at_many_moments_ends_with_the_same_bits(
    whole: Path, tmp_path: Path
) -> None:
    """Some kills hit one process, and some all of them with torchrun itself."""
    words = ["--objective=flow", "--size=tiny", "--batch-size=12", "--device=cpu", "--threads=1"]
    words += ["--steps=60", "--checkpoint-every=2", "--shard-weights", "--resume"]
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-port={}",
    ]

    def launched(out: Path) -> "subprocess.Popen[str]":
        command = [word.format(free_port()) for word in launch]
        command += ["-m", "hddm_cli", "train", "expert", str(whole), f"--out={out}", *words]
        with out.with_name("log").open("a") as log:
            return subprocess.Popen(
                command,
                env=in_its_own()["env"],
                text=True,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    alone, out = tmp_path / "alone", tmp_path / "out"
    assert launched(alone).wait() == 0
    checkpoints = run_folder_of(out) / "checkpoints"
    draws, kills = random.Random(0), 0
    while kills < KILLS:
        before = set(checkpoints.glob("step_*"))
        process = launched(out)
        while set(checkpoints.glob("step_*")) <= before and process.poll() is None:
            time.sleep(0.02)
        time.sleep(draws.uniform(0, 0.5))
        if process.poll() is not None:
            break
        # Workers have sessions of their own, and outlive a torchrun that is killed.
        workers = _workers(process.pid)
        killed = [process.pid, *workers] if draws.random() < 0.5 else workers[:1]
        for one in killed:
            os.kill(one, signal.SIGKILL)
        kills += 1
        assert process.wait() != 0
    assert kills == KILLS
    assert launched(out).wait() == 0, out.with_name("log").read_text()
    for path in sorted(alone.glob("*.safetensors")):
        assert (out / path.name).read_bytes() == path.read_bytes()


def _workers(parent: int) -> list[int]:
    """Processes of hddm that torchrun started."""
    children = psutil.Process(parent).children()
    workers = [one.pid for one in children if "hddm_cli" in one.cmdline()]
    assert len(workers) == 2
    return workers
