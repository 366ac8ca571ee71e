"""A UNet, a DiT and a flow transformer as one pipeline: the same images in any process, batch and place."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import hddm
from hddm.networks.offload import Offload
from hddm.pipelines.pipeline import HDDMPipeline
from tests.ensemble_files import load_pipeline, write_mixed

STEPS, NUM = 5, 8
LABELS = [0, 1, 2, 3, 4, 0, 1, 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DDPM with linear betas and epsilon; DDPM with scaled-linear betas, v and classes; flow with classes."""
    return write_mixed(tmp_path_factory.mktemp("mixed"))


def _latents(pipe: HDDMPipeline, start: int = 0, stop: int = NUM, **options: object) -> Tensor:
    given = {"seed": 3, "num_inference_steps": STEPS, "output_type": "latent", **options}
    return pipe(class_labels=LABELS[start:stop], start=start, **given).images


@pytest.mark.integration
@pytest.mark.parametrize("strategy", ["top-1", "nucleus-0.9"])
def test_in_float64_an_image_is_the_same_in_any_batch(folder: Path, strategy: str) -> None:
    pipe = load_pipeline(folder).to(torch.float64)
    whole = _latents(pipe, strategy=strategy)
    model, labels = hddm.load(folder, torch.float64), torch.tensor(LABELS)
    assert whole.dtype == torch.float64
    for size in (1, 3):
        parts = [
            _latents(pipe, i, min(i + size, NUM), strategy=strategy) for i in range(0, NUM, size)
        ]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-9)
        sampled = hddm.sample(model, NUM, 3, STEPS, strategy, batch_size=size, class_labels=labels)
        torch.testing.assert_close(sampled, whole, rtol=0, atol=1e-9)


@pytest.mark.parametrize("offload", ["ram", "disk"])
def test_networks_of_others_come_back_with_all_that_they_had(
    folder: Path, offload: Offload
) -> None:
    # Diffusers' networks have constants that no file holds.
    plain = _latents(load_pipeline(folder))
    pipe = load_pipeline(folder, offload=offload)
    largest = max(network.size for network in pipe.experts.stored)
    pipe.experts.offload(offload, largest)
    for _ in range(2):
        assert torch.equal(_latents(pipe), plain)


def test_guidance_leaves_the_expert_without_classes_alone(folder: Path) -> None:
    pipe = load_pipeline(folder)
    assert torch.equal(_latents(pipe, expert=0, guidance_scale=3.0), _latents(pipe, expert=0))
    for k in (1, 2):
        gap = _latents(pipe, expert=k, guidance_scale=3.0) - _latents(pipe, expert=k)
        assert gap.flatten(1).abs().amax(1).min() > 1e-3


@pytest.mark.integration
def test_half_precision_is_near_float32(folder: Path) -> None:
    """Solver state and mixing stay in float32; networks round to 2^-9 at each of some ten layers."""
    for k in range(3):
        exact = _latents(load_pipeline(folder), expert=k)
        pipe = load_pipeline(folder, torch_dtype=torch.bfloat16)
        found = _latents(pipe, expert=k)
        assert {network.dtype for network in pipe.experts.stored} == {torch.bfloat16}
        assert found.dtype == torch.float32
        noise = hddm.noise.Seeded(3).initial(range(NUM), exact.shape[1:])
        # Of what the networks contributed, not of the noise.
        error = (found - exact).norm() / (exact - noise).norm()
        assert 0 < error < 0.02
