"""Experts under their own samplers, beside diffusers' schedulers, closed forms, and what is refused."""

from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler
from torch import Tensor

import hddm
from hddm.ensemble import Ensemble
from hddm.guidance import Guidance
from hddm.noise import Seeded
from hddm.schedules import EDMSchedule, from_diffusers
from hddm.settings import NativeName
from hddm.utils.errors import HddmError
from hddm.velocity import VelocityField
from tests.artefacts import Command
from tests.cases import LINEAR, Case, case_named, in_parts, oracle_field
from tests.checkpoint_files import plain_unet
from tests.ensemble_files import flow_expert, write_ensemble
from tests.method.test_units import edm_network
from tests.oracles import GaussianMixture

SHAPE = (2, 2, 2)
DATA = GaussianMixture.random(7, modes=1, dim=8)
SD = case_named("sd-scaled-linear")
KINDS: list[tuple[Case, str]] = [
    (SD, "epsilon"),
    (SD, "sample"),
    (SD, "v_prediction"),
    (case_named("cosine"), "v_prediction"),
    (LINEAR, "flow_prediction"),
    (LINEAR, "sample"),
]
NUM = 64


def _field(case: Case, kind: str, **options: Any) -> VelocityField:
    return oracle_field(DATA, case, kind, sample_shape=SHAPE, **options)


def _exact() -> Tensor:
    """Where the flow of Gaussian data leads the noise of seed 0."""
    values, vectors = torch.linalg.eigh(DATA.covariance)
    flat = Seeded(0).initial(range(NUM), SHAPE).double().flatten(1)
    return (DATA.mean + (flat @ vectors * values.sqrt()) @ vectors.T).view(NUM, *SHAPE)


@pytest.mark.parametrize("name", ["ddim", "dpmsolver++", "unipc"])
@pytest.mark.parametrize(("case", "kind"), KINDS)
def test_exact_experts_lead_noise_to_its_data(case: Case, kind: str, name: NativeName) -> None:
    found = hddm.sample(_field(case, kind), NUM, 0, 250, native=name, batch_size=NUM)
    error = (found - _exact()).square().mean().sqrt()
    # Where a schedule ends with some signal left, a sampler of its own takes that for noise.
    assert error < (0.09 if case is SD else 0.03)


@pytest.mark.parametrize("units", [{"data_scale": 0.5, "data_shift": 0.25}])
def test_samples_are_in_common_units(units: dict[str, float]) -> None:
    plain = hddm.sample(_field(SD, "epsilon"), 8, 0, 100, native="ddim")
    scale, shift = units["data_scale"], units["data_shift"]
    own = GaussianMixture(DATA.weights, scale * DATA.means + shift, scale**2 * DATA.covariances)
    field = oracle_field(own, SD, "epsilon", sample_shape=SHAPE, **units)
    found = hddm.sample(field, 8, 0, 100, native="ddim")
    # The noise that a schedule ends with is not that of the same data in other units.
    torch.testing.assert_close(found, plain, rtol=0, atol=0.15)


@pytest.mark.parametrize("name", ["ddim", "dpmsolver++"])
@torch.no_grad()
def test_a_network_of_diffusers_gives_what_its_scheduler_gives(name: NativeName) -> None:
    network = plain_unet()
    stated = DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    shape = (network.config.in_channels, network.config.sample_size, network.config.sample_size)
    field = VelocityField(
        network, from_diffusers(stated), "epsilon", time_scale=1.0, sample_shape=shape
    )
    if name == "ddim":
        scheduler = DDIMScheduler.from_config(
            stated.config, timestep_spacing="trailing", clip_sample=True, set_alpha_to_one=True
        )
    else:
        scheduler = DPMSolverMultistepScheduler.from_config(
            stated.config, timestep_spacing="trailing", thresholding=True
        )
    scheduler.set_timesteps(5)
    x = Seeded(3).initial(range(2), shape)
    for timestep in scheduler.timesteps:
        x = scheduler.step(network(x, timestep).sample, timestep, x).prev_sample
    found = hddm.sample(field, 2, 3, 5, native=name)
    torch.testing.assert_close(found, x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["ddim", "unipc"])
def test_experts_of_edm_begin_with_all_of_their_noise(name: NativeName) -> None:
    schedule = EDMSchedule(0.002, 80.0, 0.5)
    network = edm_network(DATA, 0.5, -1.0)
    field = VelocityField(network, schedule, "v_prediction", sample_shape=SHAPE, time_scale=1.0)
    found = hddm.sample(field, NUM, 0, 250, native=name, batch_size=NUM)
    assert (found - _exact()).square().mean().sqrt() < 0.06


def test_under_draw_each_sample_is_that_of_its_expert_alone() -> None:
    fields = [_field(SD, "epsilon"), _field(LINEAR, "flow_prediction")]
    model = Ensemble(in_parts(fields), strategy="draw")
    found = hddm.sample(model, 12, 0, 8, native="unipc")
    alone = [hddm.sample(model, 12, 0, 8, native="unipc", expert=k) for k in range(2)]
    makers = []
    for row in range(12):
        matches = [torch.allclose(found[row], one[row], atol=1e-6) for one in alone]
        assert sum(matches) == 1
        makers.append(matches.index(True))
    assert set(makers) == {0, 1}


def test_guidance_acts_on_the_prediction() -> None:
    field = _field(SD, "epsilon")
    plain = hddm.sample(field, 4, 0, 5, native="ddim")
    calls = []

    def watch(index: int, x: Tensor) -> Tensor:
        calls.append(index)
        return x

    assert torch.equal(hddm.sample(field, 4, 0, 5, native="ddim", on_step=watch), plain)
    assert calls == [0, 1, 2, 3, 4]


def test_what_a_native_sampler_has_not_is_refused() -> None:
    ddpm, flow = _field(SD, "epsilon"), _field(LINEAR, "flow_prediction")
    both = Ensemble(in_parts([ddpm, flow]), lambda x, t: torch.full((len(x), 2), 0.5), "full")
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (both, {"native": "ddim"}, "`strategy` draw does so, full mixes"),
        (ddpm, {"native": "flow-euler"}, "is for flow experts"),
        (ddpm, {"native": "ddim", "solver": "euler"}, "drop `solver`"),
        (ddpm, {"native": "ddim", "shift": 2.0}, "drop `shift`"),
        (ddpm, {"native": "ddim", "guidance_scale": Guidance(2.0, by="weak")}, "weak"),
        (
            ddpm,
            {"native": "ddim", "steps": 300},
            "steps must divide 1000, not 300; choose 200 or 250",
        ),
        (ddpm, {"native": "unipc", "steps": 1001}, "takes at most 1000 steps"),
    ]
    for model, options, message in cases:
        with pytest.raises(HddmError, match=message):
            hddm.sample(model, 2, 0, **{"steps": 4, **options})
    part = _field(LINEAR, "flow_prediction", noise_range=(0.0, 0.5))
    pair = Ensemble(in_parts([part, _field(SD, "epsilon", noise_range=(0.5, 1.0))], [0, 0]))
    with pytest.raises(HddmError, match="covers a part of the noise only"):
        hddm.sample(pair, 2, 0, 4, native="ddim")


@pytest.mark.integration
def test_the_command_records_the_sampler(tmp_path: Any, hddm: Command) -> None:
    folder = write_ensemble(tmp_path / "model", [flow_expert(0), flow_expert(1)])
    out = tmp_path / "samples"
    options = ("--num-images", 3, "--steps", 2, "--strategy", "draw", "--native", "unipc")
    code, _, _ = hddm("sample", folder, "--out", out, *options)
    assert code == 0
    text = (out / "sampling.json").read_text(encoding="utf-8")
    assert '"native": "unipc"' in text
    assert '"solver": "unipc"' in text
    # Its times are its own: no shift of the time grid was used.
    assert '"shift": null' in text
    plain = tmp_path / "plain"
    assert hddm("sample", folder, "--out", plain, *options[:-2])[0] == 0
    assert '"shift": 1.0' in (plain / "sampling.json").read_text(encoding="utf-8")
