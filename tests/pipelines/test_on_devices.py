"""What people do with hddm, on each device and in each half-precision format: finite, and nearly the same.

The tests on a GPU are marked; with "cpu" the same code runs everywhere.
"""

import asyncio
import base64
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from PIL import Image
from torch import Tensor

import hddm as library
from hddm.serving.front import Front
from hddm.serving.service import names_of
from hddm.serving.workers import Worker
from hddm.settings import Computing, ServeSettings
from hddm.training.expert import train_expert
from hddm.training.settings import RunOptions
from tests.artefacts import Died, ending_at, expert_settings
from tests.checkpoint_files import SD_BETAS, conditions_of, pipeline, text_unet
from tests.ensemble_files import flow_expert, load_ensemble, load_pipeline, write_ensemble
from tests.serving.test_front import Handle, ask

GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
HALVES = ["bfloat16", "float16"]
ROUNDING = {"bfloat16": 0.05, "float16": 0.01}
"""Relative difference of small networks' results from those of float32, at most."""
PRECISIONS = [
    ("cpu", "bf16"),
    pytest.param("cuda", "bf16", marks=GPU),
    pytest.param("cuda", "fp16", marks=GPU),
]
STEPS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three experts of classes, wide enough for int8."""
    size = {"num_classes": 3, "hidden_size": 64, "num_heads": 4}
    experts = [flow_expert(seed, **size) for seed in range(3)]
    # Another choice of a router would be another image.
    return write_ensemble(tmp_path_factory.mktemp("devices"), experts, strategy="draw")


def _settings(device: str, precision: str) -> Any:
    chosen = {"steps": STEPS, "device": device, "mixed_precision": precision}
    return expert_settings("flow", threads=1, **chosen)


def _sampled(model: Any, **options: Any) -> Tensor:
    labels = torch.tensor([0, 1, 2, 0])
    given = {"num": 4, "seed": 1, "steps": 5, "class_labels": labels, **options}
    return library.sample(model, **given).float().cpu()


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def exact(folder: Path) -> Tensor:
    """Samples of a CPU in float32."""
    return _sampled(load_ensemble(folder))


@pytest.mark.integration
@pytest.mark.parametrize(("device", "precision"), PRECISIONS)
def test_a_training_learns_and_its_expert_makes_finite_images(
    device: str, precision: str, whole: Path, tmp_path: Path
) -> None:
    settings = _settings(device, precision).model_copy(update={"steps": 60})
    losses = train_expert(whole, tmp_path / "out", settings)
    assert all(map(math.isfinite, losses))
    assert np.mean(losses[-10:]) < np.mean(losses[:10])
    images = library.sample(library.load(tmp_path / "out", device=device), num=4, steps=5)
    assert images.isfinite().all()


@pytest.mark.integration
@pytest.mark.parametrize(("device", "precision"), PRECISIONS)
def test_a_training_that_died_goes_on_as_one_that_did_not(
    device: str, precision: str, whole: Path, tmp_path: Path
) -> None:
    settings = _settings(device, precision)
    straight = train_expert(whole, tmp_path / "straight", settings)
    run = RunOptions(checkpoint_every=2, resume=True)
    with pytest.raises(Died):
        train_expert(whole, tmp_path / "out", settings, on_step=ending_at(5), run=run)
    resumed = train_expert(whole, tmp_path / "out", settings, run=run)
    # Kernels of a GPU may sum in another order each time; a lost moment would show far above this.
    assert resumed == pytest.approx(straight, rel=0 if device == "cpu" else 5e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALVES)
def test_samples_in_half_precision_are_nearly_those_of_float32(
    device: str, dtype: str, folder: Path, exact: Tensor
) -> None:
    found = _sampled(load_ensemble(folder, dtype=dtype, device=device))
    assert 0 < _error(found, exact) < ROUNDING[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_converted_checkpoint_has_the_velocity_of_float32(
    device: str, dtype: str, tmp_path: Path
) -> None:
    network = text_unet().to(getattr(torch, dtype))
    source = pipeline(tmp_path / "source", network, DDIMScheduler(**SD_BETAS))
    library.convert(source, tmp_path / "expert", device=device)
    noise = torch.Generator().manual_seed(0)
    x, t = torch.randn(2, 4, 8, 8, generator=noise), torch.tensor([0.4, 0.7])
    velocities = []
    for place, number in (("cpu", "float32"), (device, dtype)):
        field = library.load(tmp_path / "expert", dtype=number, device=place)
        given = {name: one.to(place) for name, one in conditions_of(network, 2).items()}
        velocities.append(field.velocity(x.to(place), t, **given).float().cpu())
    assert 0 < _error(velocities[1], velocities[0]) < ROUNDING[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_service_makes_images_of_the_asked_format(device: str, dtype: str, folder: Path) -> None:
    pictures = []
    for place, number in (("cpu", "float32"), (device, dtype)):
        settings = ServeSettings(device=place, dtype=number)
        workers = {}
        for number_of, name in enumerate(names_of(folder)):
            workers[name] = Handle(Worker(str(folder), number_of, settings, 1))
        for handle in workers.values():
            assert asyncio.run(handle.worker.ready()) == ""
        answer = ask(Front(str(folder), settings, 1, None, workers), prompt="dog")
        assert answer.status_code == 200, answer.text
        image = Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"])))
        pictures.append(torch.from_numpy(np.asarray(image).astype(np.float32)))
    assert (pictures[0] - pictures[1]).abs().mean() < 255 * ROUNDING[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [*HALVES, "float32"])
@pytest.mark.parametrize("offload", ["ram", "disk"])
def test_experts_that_come_and_go_make_the_same_bytes(
    device: str, dtype: str, offload: str, folder: Path
) -> None:
    kept = _sampled(load_ensemble(folder, dtype=dtype, device=device))
    coming = load_ensemble(folder, dtype=dtype, device=device, offload=offload)
    assert torch.equal(_sampled(coming), kept)
    # Once more, after each of them has been away.
    assert torch.equal(_sampled(coming), kept)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [*HALVES, "float32"])
def test_quantised_experts_make_nearly_the_same(
    device: str, dtype: str, folder: Path, exact: Tensor
) -> None:
    pytest.importorskip("torchao")
    pipe = load_pipeline(folder, dtype=getattr(torch, dtype)).to(device)
    pipe.experts.prepare(Computing(device=device, quantize="int8"))
    found = _sampled(pipe.ensemble)
    assert 1e-5 < _error(found, exact) < 0.1


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_compiled_before")
@pytest.mark.parametrize("dtype", [*HALVES, "float32"])
@pytest.mark.parametrize("device", ["cpu"])
def test_compiled_experts_make_nearly_the_same(device: str, dtype: str, folder: Path) -> None:
    check_compiled(device, dtype, folder)


@GPU
@pytest.mark.usefixtures("nothing_compiled_before")
@pytest.mark.parametrize("dtype", [*HALVES, "float32"])
def test_compiled_experts_make_nearly_the_same_on_a_gpu(dtype: str, folder: Path) -> None:
    check_compiled("cuda", dtype, folder)


def check_compiled(device: str, dtype: str, folder: Path) -> None:
    """Compare samples of compiled experts with those of the same experts as they are."""
    plain = _sampled(load_ensemble(folder, dtype=dtype, device=device))
    pipe = load_pipeline(folder, dtype=getattr(torch, dtype)).to(device)
    pipe.experts.prepare(Computing(device=device, compile=True))
    found = _sampled(pipe.ensemble)
    # Fused kernels round less often.
    assert _error(found, plain) < ROUNDING.get(dtype, 2e-3)
