"""Velocities of converted pipelines against azula's denoisers, at times where azula is exact."""

from pathlib import Path

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from torch import Tensor

import hddm
from hddm.networks.families.flux import pack, unpack
from tests.checkpoint_files import SD_BETAS, pipeline, randomised, text_unet

pytest.importorskip("azula")
from azula.noise import RectifiedSchedule
from azula.plugins.flux import FluxDenoiser
from azula.plugins.sd import StableDenoiser

pytestmark = pytest.mark.slow
COMMON = RectifiedSchedule(alpha_min=0.0, sigma_min=0.0)
"""The common path, as one of azula's schedules."""


def _preserving(sigma: Tensor) -> tuple[Tensor, Tensor]:
    """A schedule of variance 1, without which azula's v prediction is not exact, with sigma as its time."""
    return (1 - sigma**2).sqrt(), sigma


def _numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("ours", "theirs"), [("epsilon", "epsilon"), ("v_prediction", "velocity")])
@pytest.mark.parametrize("index", [0, 1, 250, 600, 999])
def test_stable_diffusion(ours: str, theirs: str, index: int, tmp_path: Path) -> None:
    """azula takes the first index whose sigma is not below the state's, so it is exact at the indices."""
    scheduler = DDIMScheduler(**SD_BETAS, prediction_type=ours)
    network = text_unet()
    hddm.convert(pipeline(tmp_path / "source", network, scheduler), tmp_path / "expert")
    field = hddm.load(tmp_path / "expert", dtype=torch.float64)
    sigmas = (1 - scheduler.alphas_cumprod.double()).sqrt()
    denoiser = StableDenoiser(network.double(), sigmas, _preserving, theirs).double()
    # Its table is of float32; rounding must not lead to the next index.
    sigma = denoiser.sigmas[index] * (1 - 1e-12)
    alpha = (1 - sigma**2).sqrt()
    x, text, t = _numbers(2, 4, 8, 8, seed=1), _numbers(2, 7, 16, seed=2), sigma / (alpha + sigma)
    with torch.no_grad():
        x_0 = denoiser((alpha + sigma) * x, sigma.expand(2), prompt_embeds=text).mean
        found = field.velocity(x, t, encoder_hidden_states=text)
    expected = (x - x_0) / t
    # The table of sigmas is of float32; the next index would be off by 1e-3.
    assert (found - expected).abs().max() < 3e-5 * expected.abs().max()


@pytest.mark.parametrize("t", [0.0137, 0.5, 0.77777, 1.0])
def test_flux(t: float, tmp_path: Path) -> None:
    sizes = {
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "axes_dims_rope": (4, 6, 6),
    }
    heads = {"attention_head_dim": 16, "num_attention_heads": 2, "guidance_embeds": True}
    wide = {"joint_attention_dim": 32, "pooled_projection_dim": 16}
    network = randomised(FluxTransformer2DModel(**sizes, **heads, **wide))
    source = pipeline(tmp_path / "source", network, FlowMatchEulerDiscreteScheduler(shift=3.0))
    hddm.convert(source, tmp_path / "expert", sample_size=8)
    field, denoiser = hddm.load(tmp_path / "expert"), FluxDenoiser(network, COMMON)
    x, text, pooled = (
        _numbers(*shape, seed=seed).float()
        for seed, shape in enumerate([(2, 4, 8, 8), (2, 7, 32), (2, 16)])
    )
    times = torch.full((2,), t)
    with torch.no_grad():
        rows = denoiser(
            pack(x).view(2, 4, 4, 16), times, prompt_clip=pooled, prompt_t5=text, guidance=3.5
        ).mean
        given = {"encoder_hidden_states": text, "pooled_projections": pooled}
        found = field.velocity(x, times, guidance=torch.full((2,), 3.5), **given)
    expected = (x - unpack(rows.flatten(1, 2), 8)) / t
    assert (found - expected).abs().max() < 1e-6 / t * expected.abs().max()
