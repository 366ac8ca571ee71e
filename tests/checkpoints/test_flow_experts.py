"""Transformers of SD3, Flux and Chroma as experts: velocity, shift and grid of times, and the way back."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    ChromaTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    ModelMixin,
    SD3Transformer2DModel,
    UniPCMultistepScheduler,
)
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

import hddm as library
from hddm.networks.families import families
from hddm.networks.families.flux import pack, positions, unpack
from hddm.networks.folders import empty_network
from hddm.sampling import time_grid
from hddm.utils.errors import HddmError
from hddm_cli.app import commands
from tests.artefacts import Command, copied, edit_json
from tests.checkpoint_files import (
    DDPM_BETAS,
    check_velocity,
    converted,
    dit,
    pipeline,
    pixart,
    plain_unet,
    record_of,
    refused,
    written_back,
)
from tests.flow_models import (
    SD35,
    SIDE,
    WITH_SIDE,
    chroma,
    flow_pipeline,
    flux,
    places_by_hand,
    rows_by_hand,
    sd3,
    state_by_hand,
    text,
    velocity_by_hand,
)

WEIGHTS = "diffusion_pytorch_model.safetensors"
Make = Callable[..., ModelMixin]
SOURCES: dict[str, tuple[Make, dict[str, Any], tuple[object, ...]]] = {
    "sd3.5": (sd3, SD35, ()),
    "flux-dev": (flux, {"guidance_embeds": True}, WITH_SIDE),
    "chroma": (chroma, {}, WITH_SIDE),
}
X = torch.randn(2, 4, SIDE, SIDE, generator=torch.Generator().manual_seed(5))
TIMES = torch.tensor([0.2, 0.83])


@dataclass(frozen=True)
class Converted:
    """A network, the expert that its pipeline became, and what the conversion printed."""

    network: ModelMixin
    expert: Path
    options: tuple[object, ...]
    said: str

    @property
    def kind(self) -> str:
        return type(self.network).__name__.removesuffix("Transformer2DModel").lower()


@pytest.fixture(scope="module", params=SOURCES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    make, changes, options = SOURCES[request.param]
    folder, network = tmp_path_factory.mktemp("made"), make(**changes)
    source = flow_pipeline(folder / "source", network, shift=3.0, use_karras_sigmas=True)
    line = ["convert", source, "--out", folder / "expert", *options]
    found = CliRunner().invoke(commands, list(map(str, line)))
    assert found.exit_code == 0, found.output
    return Converted(network, folder / "expert", options, found.output)


def _is_close(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> bool:
    return bool((found.double() - wanted.double()).norm() <= tolerance * wanted.double().norm())


@pytest.mark.parametrize(("height", "width"), [(4, 4), (6, 10), (2, 8)])
def test_a_state_is_packed_as_fluxs_own_pipeline_packs_it(height: int, width: int) -> None:
    x = torch.randn(2, 3, height, width)
    rows = pack(x)
    assert torch.equal(rows, rows_by_hand(x))
    assert torch.equal(rows, FluxPipeline._pack_latents(x, 2, 3, height, width))
    assert torch.equal(unpack(rows, height), x)
    assert torch.equal(state_by_hand(rows, height, width), x)
    places = positions(height, width, x.device)
    assert torch.equal(places, places_by_hand(height, width))
    theirs = FluxPipeline._prepare_latent_image_ids(2, height // 2, width // 2, x.device, x.dtype)
    assert torch.equal(places, theirs)


def test_the_velocity_of_an_expert_is_its_networks_output(made: Converted, hddm: Command) -> None:
    network, given = made.network, text(made.network)
    assert f"layout: diffusers-{made.kind}" in made.said
    assert "shift: 3" in made.said
    facts = record_of(made.expert)
    assert facts["schedule"] == {"name": "linear"}
    assert (facts["prediction_type"], facts["objective"]) == ("flow_prediction", "flow")
    assert facts["time_scale"] == (1000 if made.kind == "sd3" else 1)
    assert (facts["sample_shape"], facts["shift"]) == ([4, SIDE, SIDE], 3.0)
    assert facts["conditions"] == list(given)
    field = library.load(made.expert)
    wanted = velocity_by_hand(network, X, TIMES, given)
    assert _is_close(field.velocity(X, TIMES, **given), wanted)
    assert not _is_close(field.velocity(X, TIMES + 0.01, **given), wanted, 1e-4)
    for name in given.keys() & {"pooled_projections", "encoder_attention_mask"}:
        other = given | {name: 1 - given[name]}
        assert not _is_close(field.velocity(X, TIMES, **other), wanted, 1e-3)
    if made.kind != "sd3":
        wide = torch.randn(2, 4, 6, 12)
        assert _is_close(
            field.velocity(wide, TIMES, **given), velocity_by_hand(network, wide, TIMES, given)
        )
    else:
        source = made.expert.with_name("source")
        assert "says sample_size 8; drop the option" in refused(hddm, source, "--sample-size", 4)


def test_samples_follow_the_networks_own_ode(made: Converted) -> None:
    given = text(made.network)
    samples = library.sample(
        library.load(made.expert), 2, steps=2, shift=1.0, solver="euler", **given
    )
    x = library.noise.Seeded(0).initial(range(2), (4, SIDE, SIDE))
    for t in (1.0, 0.5):
        x = x - 0.5 * velocity_by_hand(made.network, x, torch.full((2,), t), given)
    assert _is_close(samples, x)


@pytest.mark.integration
def test_an_expert_goes_back_to_diffusers_bit_for_bit(
    made: Converted, hddm: Command, tmp_path: Path
) -> None:
    network, back = made.network, tmp_path / "back"
    assert "use_karras_sigmas is True; the sampler's time grid" in made.said
    written_back(hddm, made.expert, back, f"diffusers-{made.kind}")
    theirs = type(network).from_pretrained(back / "transformer")
    for name, tensor in network.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], tensor)
    for key, value in network.config.items():
        assert key.startswith("_") or json.dumps(theirs.config[key]) == json.dumps(value)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(back / "scheduler")
    assert (scheduler.config.shift, scheduler.config.use_karras_sigmas) == (3.0, True)
    index = json.loads((back / "model_index.json").read_text())
    assert index["_class_name"] in ("StableDiffusion3Pipeline", "FluxPipeline", "ChromaPipeline")
    elsewhere = {"source": None, "schedule_source": None}
    for source, name in ((back, "again"), (made.expert, "copy")):
        converted(hddm, source, tmp_path / name, *(made.options if source is back else ()))
        assert record_of(made.expert) | elsewhere == record_of(tmp_path / name) | elsewhere


@pytest.mark.parametrize(("make", "changes", "options"), SOURCES.values(), ids=SOURCES)
def test_an_expert_runs_in_the_dtype_that_is_asked_for(
    hddm: Command, tmp_path: Path, make: Make, changes: dict[str, Any], options: tuple[object, ...]
) -> None:
    stored = make(**changes).to(torch.bfloat16)
    given = text(stored)
    converted(hddm, flow_pipeline(tmp_path / "source", stored), tmp_path / "expert", *options)
    assert load_file(tmp_path / "expert" / WEIGHTS)["proj_out.weight"].dtype == torch.bfloat16
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        velocity = library.load(tmp_path / "expert", dtype=dtype).velocity(X, TIMES, **given)
        assert velocity.dtype == torch.float32
        # Anew, as constants that no file holds are not rounded to the dtype of the file.
        network = make(**changes).to(dtype)
        network.load_state_dict(stored.state_dict())
        its = {
            name: value if name == "guidance" else value.to(dtype) for name, value in given.items()
        }
        assert _is_close(velocity, velocity_by_hand(network, X.to(dtype), TIMES, its))


def test_flux_asks_for_the_size_that_its_config_does_not_hold(
    hddm: Command, tmp_path: Path
) -> None:
    source = flow_pipeline(tmp_path / "source", flux())
    assert "FluxTransformer2DModel has no sample_size: pass --sample-size" in refused(hddm, source)
    assert "sample_shape: none" in hddm("inspect", source)[1]
    expert = tmp_path / "expert"
    converted(hddm, source, expert, *WITH_SIDE)
    assert "sample_size" not in json.loads((expert / "config.json").read_text())
    assert record_of(expert)["source"]["options"]["sample_size"] == SIDE
    edit_json(expert / "expert.json", sample_shape=[4, 8, 10**9])
    with pytest.raises(HddmError, match=r"sample_shape|sample_size|a sample of"):
        library.load(expert)


NETWORK, SCHEDULER = "transformer/config.json", "scheduler/scheduler_config.json"
DYNAMIC = {"use_dynamic_shifting": True, "shift": 3.0}
HOSTILE: list[tuple[str, str, dict[str, Any], str]] = [
    ("sd3", NETWORK, {"dual_attention_layers": list(range(10**5))}, ""),
    ("sd3", NETWORK, {"pos_embed_max_size": 10**9}, ""),
    ("sd3", NETWORK, {"sample_size": [8, 8]}, ""),
    ("flux", NETWORK, {"num_single_layers": 10**9}, ""),
    ("flux", NETWORK, {"axes_dims_rope": [10**9, 6, 6]}, ""),
    ("flux", NETWORK, {"patch_size": 2}, ""),
    ("chroma", NETWORK, {"approximator_layers": 10**9}, "its depth is 1000000000"),
    ("chroma", NETWORK, {"num_single_layers": 10**9}, "its depth is 1000000000"),
    ("chroma", NETWORK, {"approximator_num_channels": 10**9}, "does not fit its Chroma"),
    ("chroma", NETWORK, {"approximator_num_channels": 18}, "does not fit its Chroma"),
    ("chroma", NETWORK, {"approximator_num_channels": "16"}, "no network can be built from it"),
    ("chroma", NETWORK, {"approximator_hidden_dim": 10**9}, "does not fit its Chroma"),
    ("chroma", NETWORK, {"axes_dims_rope": [4, 6, 8]}, "three even numbers that sum to"),
    ("chroma", NETWORK, {"axes_dims_rope": [10**9, 6, 6]}, "three even numbers that sum to"),
    ("chroma", NETWORK, {"axes_dims_rope": [16]}, "three even numbers that sum to"),
    ("chroma", NETWORK, {"patch_size": 2}, "does not fit its Chroma"),
    ("chroma", NETWORK, {"guidance_embeds": True}, "has no key 'guidance_embeds'"),
    ("chroma", NETWORK, {"auto_map": {"AutoModel": "evil.Evil"}}, "names code of its own"),
    ("chroma", NETWORK, {"_class_name": "EvilTransformer"}, "holds an EvilTransformer"),
    ("chroma", "model_index.json", {"transformer": ["evil", "Evil"]}, "hddm runs no other code"),
    ("sd3", SCHEDULER, {"shift": -3}, "a shift is from 0.001 to 1000"),
    ("sd3", SCHEDULER, {"shift": "3"}, "a shift is from"),
    ("sd3", SCHEDULER, {"shift": float("nan")}, "a shift is from"),
    ("sd3", SCHEDULER, DYNAMIC | {"max_shift": 10**6}, "a shift is from"),
    ("sd3", SCHEDULER, DYNAMIC | {"max_shift": "a"}, "a shift is from"),
    ("sd3", SCHEDULER, DYNAMIC | {"max_image_seq_len": 256}, "a shift is from"),
    ("sd3", SCHEDULER, {"invert_sigmas": True}, "invert_sigmas turns time around"),
]
"""Networks that no tensor backs, and schedulers without a sound shift."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("flow")
    makers: dict[str, Make] = {"sd3": sd3, "flux": flux, "chroma": chroma}
    return {name: flow_pipeline(folder / name, make()) for name, make in makers.items()}


@pytest.mark.parametrize(
    ("name", "file", "changes", "said"), HOSTILE, ids=lambda value: str(value)[:40]
)
def test_configs_that_no_conversion_can_trust(
    hddm: Command,
    tmp_path: Path,
    sources: dict[str, Path],
    name: str,
    file: str,
    changes: dict[str, Any],
    said: str,
) -> None:
    source = copied(sources[name], tmp_path)
    edit_json(source / file, **changes)
    assert said in refused(hddm, source, *(() if name == "sd3" else WITH_SIDE))


def test_pixart_sigma_is_pixart_with_another_config(hddm: Command, tmp_path: Path) -> None:
    """Sizes are no conditions of it; its folders have the former name of the class."""
    network = pixart(sample_size=128, patch_size=8, use_additional_conditions=False)
    source, name = pipeline(tmp_path / "source", network), "Transformer2DModel"
    edit_json(source / "transformer" / "config.json", _class_name=name, attention_type="default")
    edit_json(source / "model_index.json", _class_name="PixArtSigmaPipeline")
    converted(hddm, source, tmp_path / "expert")
    facts = record_of(tmp_path / "expert")
    assert facts["variance_head"]
    assert facts["conditions"] == ["encoder_hidden_states", "encoder_attention_mask"]
    check_velocity(tmp_path / "expert", network, DDPM_BETAS)


def test_networks_of_full_size_are_within_bounds() -> None:
    """The published configs of Stable Diffusion 3.5 Large, Flux and Chroma; nothing takes memory."""
    large = {"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432}
    large |= {"qk_norm": "rms_norm", "pos_embed_max_size": 192}
    for kind, arguments, num_tensors in (
        (SD3Transformer2DModel, large, 1400),
        (FluxTransformer2DModel, {"guidance_embeds": True}, 1160),
        (ChromaTransformer2DModel, {}, 1000),
    ):
        network = empty_network(kind, arguments, num_tensors, "config.json")
        assert abs(len(network.state_dict()) - num_tensors) < 200
        assert families()[kind.__name__].interface(network.config, (128, 128)).num_patches == 4096


STEPS = 8
LENGTHS = ("base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len")


def _check_grid(expert: Path, settings: dict[str, Any], num_patches: int) -> None:
    """Hold an expert's grid of times against that of a pipeline of Flux."""
    scheduler = FlowMatchEulerDiscreteScheduler(**settings)
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    mu = calculate_shift(num_patches, *(scheduler.config[name] for name in names))
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / STEPS, STEPS), mu=mu)
    ours = time_grid(STEPS, record_of(expert)["shift"])
    torch.testing.assert_close(ours, scheduler.sigmas.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "side"),
    [
        ({"shift": 0.4}, 32),
        (DYNAMIC, 8),
        (DYNAMIC | dict(zip(LENGTHS, (0.2, 0.9, 16, 99), strict=True)), 8),
        (DYNAMIC | {"time_shift_type": "linear"}, 32),
    ],
    ids=str,
)
def test_the_time_grid_of_samples_is_the_pipelines(
    hddm: Command, tmp_path: Path, settings: dict[str, Any], side: int
) -> None:
    source = flow_pipeline(tmp_path / "source", flux(), **settings)
    said = converted(hddm, source, tmp_path / "expert", "--sample-size", side, "--no-verify")
    _check_grid(tmp_path / "expert", settings, side * side // 4)
    note = f"at {side}×{side}, of {side * side // 4} patches; at another size it is another"
    assert (note in said) == ("use_dynamic_shifting" in settings)


def test_flux_dev_at_1024_pixels_has_the_shift_that_is_known_of_it(
    hddm: Command, tmp_path: Path
) -> None:
    source = flow_pipeline(tmp_path / "source", flux(), **DYNAMIC)
    assert "at 1024×1024" in (said := refused(hddm, source, "--sample-size", 1024))
    assert "pass another --sample-size (in latents: 128 for pictures of 1024 pixels)" in said
    converted(hddm, source, tmp_path / "expert", "--sample-size", 128, "--no-verify")
    assert record_of(tmp_path / "expert")["shift"] == pytest.approx(math.exp(1.15))


def test_the_patches_of_sd3_are_those_of_its_config(hddm: Command, tmp_path: Path) -> None:
    converted(hddm, flow_pipeline(tmp_path / "source", sd3(), **DYNAMIC), tmp_path / "expert")
    _check_grid(tmp_path / "expert", DYNAMIC, 16)


@pytest.mark.integration
def test_a_shift_is_kept_where_scheduler_and_network_give_one(
    hddm: Command, tmp_path: Path
) -> None:
    flow_sigmas = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 5.0}
    for source, shift, note in (
        (
            flow_pipeline(tmp_path / "unet", plain_unet(), **DYNAMIC),
            1,
            "a UNet has none; no shift is kept",
        ),
        (pipeline(tmp_path / "unipc", sd3(), UniPCMultistepScheduler(**flow_sigmas)), 5, ""),
        (pipeline(tmp_path / "ddpm", dit()), 1, ""),
    ):
        assert note in converted(hddm, source, tmp_path / f"{source.name}-expert")
        assert record_of(tmp_path / f"{source.name}-expert")["shift"] == shift


@pytest.mark.integration
def test_a_network_of_clean_samples_on_the_flow_path_is_stated_by_its_user(
    hddm: Command, tmp_path: Path
) -> None:
    """The class of a flow-match scheduler means the velocity, and has no key for another prediction."""
    network = plain_unet()
    network.save_pretrained(tmp_path / "net")
    FlowMatchEulerDiscreteScheduler().save_pretrained(tmp_path / "net")
    said = converted(hddm, tmp_path / "net", tmp_path / "expert", "--prediction-type", "sample")
    assert "sample as stated, where the class of" in said
    record = record_of(tmp_path / "expert")
    assert (record["objective"], record["prediction_type"]) == ("flow", "sample")
    field = library.load(tmp_path / "expert")
    x, t = torch.randn(2, *record["sample_shape"]), torch.tensor([0.3, 0.8])
    with torch.no_grad():
        x_0 = network.eval()(x, 1000 * t).sample
    expected = (x - x_0) / t.view(-1, 1, 1, 1)
    torch.testing.assert_close(field.velocity(x, t), expected, rtol=1e-4, atol=1e-4)
