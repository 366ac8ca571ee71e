"""hddm.drop_in: experts in place of a stock pipeline's network, against that pipeline and closed forms."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    ControlNetModel,
    DDIMScheduler,
    DDPMPipeline,
    DiffusionPipeline,
    DiTPipeline,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    HeunDiscreteScheduler,
    PixArtAlphaPipeline,
    PNDMScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UniPCMultistepScheduler,
)
from torch import Tensor

from hddm import Ensemble, HddmError, VelocityField, drop_in, load
from hddm.networks.wrappers import NetworkWrapper
from hddm.schedules import CosineSchedule, LinearSchedule, from_diffusers
from tests.artefacts import Command, printed, refusal
from tests.cases import BetaTable
from tests.checkpoint_files import SD_BETAS, dit, pixart, plain_unet, randomised, text_unet
from tests.component_files import write_vae
from tests.oracles import GaussianMixture, OracleNetwork, exact_router

SD = {**SD_BETAS, "clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}
TINY = {"num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2, "pooled_projection_dim": 16}
TEXT = {"cross_attention_dim": 16}
XL = {"addition_embed_type": "text_time", "addition_time_embed_dim": 4}
XL |= {"projection_class_embeddings_input_dim": 16 + 6 * 4}
SD3 = {"joint_attention_dim": 16, "caption_projection_dim": 32, "pos_embed_max_size": 8, **TINY}
FLUX = {"joint_attention_dim": 16, "axes_dims_rope": (4, 6, 6), "guidance_embeds": True, **TINY}


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def texts(*names: str, tokens: int = 7, width: int = 16) -> dict[str, Tensor]:
    """Two embedded prompts, and negative ones."""
    made = {}
    for seed, name in enumerate(names):
        shape = (2, tokens, width) if name == "prompt_embeds" else (2, 16)
        made |= {name: numbers(*shape, seed=seed), f"negative_{name}": numbers(*shape, seed=seed + 10)}
    return made


@dataclass(frozen=True)
class Family:
    """A stock pipeline, its tiny components, and the arguments of a call."""

    pipeline: type[DiffusionPipeline]
    part: str
    network: Callable[[], torch.nn.Module]
    scheduler: Any
    inputs: dict[str, Any]
    empty: tuple[str, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "sd": Family(
        StableDiffusionPipeline,
        "unet",
        text_unet,
        DDIMScheduler(**SD),
        texts("prompt_embeds"),
        ("text_encoder", "tokenizer", "safety_checker", "feature_extractor"),
        {"requires_safety_checker": False},
    ),
    "sdxl": Family(
        StableDiffusionXLPipeline,
        "unet",
        lambda: text_unet(**XL),
        EulerDiscreteScheduler(**SD_BETAS),
        texts("prompt_embeds", "pooled_prompt_embeds"),
        ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
    ),
    "sd3": Family(
        StableDiffusion3Pipeline,
        "transformer",
        lambda: randomised(SD3Transformer2DModel(sample_size=8, in_channels=4, out_channels=4, **SD3)),
        FlowMatchEulerDiscreteScheduler(shift=3.0),
        texts("prompt_embeds", "pooled_prompt_embeds"),
        ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3"),
    ),
    "flux": Family(
        FluxPipeline,
        "transformer",
        lambda: randomised(FluxTransformer2DModel(in_channels=16, num_single_layers=1, **FLUX)),
        FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        {**texts("prompt_embeds", "pooled_prompt_embeds"), "true_cfg_scale": 2.0},
        ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
    ),
    "pixart": Family(
        PixArtAlphaPipeline,
        "transformer",
        pixart,
        DPMSolverMultistepScheduler(),
        {
            **texts("prompt_embeds", tokens=6, width=12),
            "negative_prompt": None,
            "use_resolution_binning": False,
        }
        | {f"{sign}prompt_attention_mask": torch.ones(2, 6) for sign in ("", "negative_")},
        ("text_encoder", "tokenizer"),
    ),
}


V_PREDICTION = DDIMScheduler(**SD, prediction_type="v_prediction", rescale_betas_zero_snr=True)
FAMILIES["sd-v"] = replace(FAMILIES["sd"], scheduler=V_PREDICTION)


def stock(name: str, folder: Path) -> DiffusionPipeline:
    family = FAMILIES[name]
    parts = {family.part: family.network(), "scheduler": family.scheduler, "vae": write_vae(folder / "vae")}
    pipe = family.pipeline(**parts, **dict.fromkeys(family.empty), **family.more)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def latents(pipe: DiffusionPipeline, seed: int = 0, **inputs: Any) -> Tensor:
    size = {} if "image" in inputs else {"height": 16, "width": 16}
    made: Tensor = pipe(
        **size,
        **inputs,
        num_inference_steps=4,
        generator=torch.Generator().manual_seed(seed),
        output_type="latent",
    ).images
    return made


def converted(pipe: DiffusionPipeline, folder: Path, hddm: Command, *options: str) -> VelocityField:
    pipe.save_pretrained(folder / "pipeline")
    printed(hddm, "convert", folder / "pipeline", "--out", folder / "expert", *options)
    return load(folder / "expert")


@pytest.mark.integration
@pytest.mark.parametrize("name", FAMILIES)
def test_an_expert_of_the_pipelines_own_weights_makes_its_images(
    name: str, tmp_path: Path, hddm: Command
) -> None:
    family, pipe = FAMILIES[name], stock(name, tmp_path)
    theirs = latents(pipe, **family.inputs)
    field = converted(pipe, tmp_path, hddm, *(["--sample-size", "8"] if name == "flux" else []))
    setattr(pipe, family.part, drop_in(field, pipe))
    ours = latents(pipe, **family.inputs)
    assert (ours - theirs).abs().max() < 2e-5 * theirs.abs().max()


def test_images_of_classes_are_those_of_the_stock_dit_pipeline(tmp_path: Path, hddm: Command) -> None:
    """Its network also predicts a variance, which the scheduler does not use."""
    network = dit(num_embeds_ada_norm=1000, in_channels=4, out_channels=8, sample_size=8)
    pipe = DiTPipeline(network, write_vae(tmp_path / "vae"), DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)

    def images() -> Tensor:
        given = {"class_labels": [3, 981], "guidance_scale": 3.0, "num_inference_steps": 4}
        made = pipe(**given, generator=torch.Generator().manual_seed(0), output_type="pt")
        return torch.as_tensor(made.images)

    theirs = images()
    pipe.transformer = drop_in(converted(pipe, tmp_path, hddm), pipe)
    assert (images() - theirs).abs().max() < 1e-4


def sd_pipeline(kind: type[DiffusionPipeline], like: DiffusionPipeline, **parts: Any) -> DiffusionPipeline:
    """A pipeline of another kind with the same components."""
    empty = dict.fromkeys(FAMILIES["sd"].empty)
    shared = {"vae": like.vae, "unet": like.unet, "scheduler": like.scheduler}
    made = kind(**empty, **shared, **parts, requires_safety_checker=False)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def sd(tmp_path_factory: pytest.TempPathFactory) -> DiffusionPipeline:
    return stock("sd", tmp_path_factory.mktemp("sd"))


@pytest.fixture(scope="module")
def experts(sd: DiffusionPipeline) -> list[VelocityField]:
    """The pipeline's own network, and another one that predicts velocities of the linear path."""
    conditions = ["encoder_hidden_states"]
    own = VelocityField(
        NetworkWrapper(sd.unet), from_diffusers(sd.scheduler), "epsilon", conditions=conditions
    )
    flow = NetworkWrapper(text_unet(seed=5))
    return [own, VelocityField(flow, LinearSchedule(), "flow_prediction", 1000.0, conditions=conditions)]


SCHEDULERS = [
    EulerDiscreteScheduler,
    EulerAncestralDiscreteScheduler,
    HeunDiscreteScheduler,
    DPMSolverMultistepScheduler,
    UniPCMultistepScheduler,
    PNDMScheduler,
]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_scheduler_may_be_exchanged(
    scheduler: Any, sd: DiffusionPipeline, experts: list[VelocityField]
) -> None:
    inputs = FAMILIES["sd"].inputs
    pipe = sd_pipeline(StableDiffusionPipeline, sd)
    stand_in = drop_in(experts[0], pipe)
    pipe.scheduler = scheduler.from_config(sd.scheduler.config)
    theirs = latents(pipe, **inputs)
    pipe.unet = stand_in
    assert (latents(pipe, **inputs) - theirs).abs().max() < 2e-5 * theirs.abs().max()


def test_image_to_image_inpainting_and_controlnet_work(
    sd: DiffusionPipeline, experts: list[VelocityField]
) -> None:
    inputs, picture = FAMILIES["sd"].inputs, numbers(2, 3, 16, 16).clamp(-1, 1)
    control = ControlNetModel.from_unet(sd.unet, conditioning_embedding_out_channels=(8, 8))
    mask = (torch.arange(16) < 8).float().expand(2, 1, 16, 16)
    cases: list[tuple[type[DiffusionPipeline], dict[str, Any], dict[str, Any]]] = [
        (StableDiffusionImg2ImgPipeline, {}, {"image": picture, "strength": 0.5}),
        (StableDiffusionInpaintPipeline, {}, {"image": picture, "mask_image": mask, "strength": 0.8}),
        (StableDiffusionControlNetPipeline, {"controlnet": randomised(control)}, {"image": picture}),
    ]
    for kind, parts, more in cases:
        pipe = sd_pipeline(kind, sd, **parts)
        theirs = latents(pipe, **inputs, **more)
        pipe.unet = drop_in(experts[0], pipe)
        assert (latents(pipe, **inputs, **more) - theirs).abs().max() < 2e-5 * theirs.abs().max(), kind
        pipe.unet = drop_in(Ensemble(experts, strategy="draw"), pipe)
        assert latents(pipe, **inputs, **more).isfinite().all()


def test_under_draw_the_noise_decides_which_expert_makes_an_image(
    sd: DiffusionPipeline, experts: list[VelocityField]
) -> None:
    inputs, pipe = FAMILIES["sd"].inputs, sd_pipeline(StableDiffusionPipeline, sd)
    pipe.unet = drop_in(Ensemble(experts, strategy="draw", prior=[0.5, 0.5]), pipe)
    drawn = [latents(pipe, seed=seed, **inputs) for seed in (0, 1, 2, 0)]
    assert drawn[0].equal(drawn[3])
    alone = []
    for one in experts:
        pipe.unet = drop_in(one, pipe)
        alone.append([latents(pipe, seed=seed, **inputs) for seed in (0, 1, 2)])
    by = [
        [k for k in (0, 1) if (image - alone[k][seed][row]).abs().max() < 2e-5 * image.abs().max()]
        for seed in (0, 1, 2)
        for row, image in enumerate(drawn[seed])
    ]
    assert {k for (k,) in by} == {0, 1}


@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
def test_predictions_are_the_mixtures_in_closed_form(prediction: str) -> None:
    shards, prior = [GaussianMixture.random(seed, 2, 3) for seed in (0, 1)], [0.3, 0.7]
    whole = GaussianMixture.union(shards, prior)
    scheduler = DDIMScheduler(**SD, prediction_type=prediction)
    table = BetaTable(scheduler.betas.numpy())

    def cosine(t: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cos(torch.pi / 2 * t), torch.sin(torch.pi / 2 * t)

    mixed = Ensemble(
        [
            VelocityField(OracleNetwork(shards[0], table, "epsilon"), from_diffusers(scheduler), "epsilon"),
            VelocityField(OracleNetwork(shards[1], cosine, "v_prediction"), CosineSchedule(), "v_prediction"),
        ],
        exact_router(shards, prior),
        "full",
        prior,
    )
    pipe = DDPMPipeline(plain_unet(in_channels=3, out_channels=3), scheduler)
    stand_in, y = drop_in(mixed, pipe), numbers(4, 3, 1, 1).double()
    for step in (20, 400, 930):
        a, s = table(torch.full((4,), float(step), dtype=torch.float64))
        x_0, eps = whole.x_0_and_eps(y, a, s)
        a, s = a.view(-1, 1, 1, 1), s.view(-1, 1, 1, 1)
        truth = {"epsilon": eps, "sample": x_0, "v_prediction": a * eps - s * x_0}[prediction]
        assert (stand_in(y, torch.tensor(step)).sample - truth).abs().max() < 1e-9 * truth.abs().max()


def test_it_looks_like_the_network_that_it_replaces(
    sd: DiffusionPipeline, experts: list[VelocityField], tmp_path: Path
) -> None:
    pipe = sd_pipeline(StableDiffusionPipeline, sd)
    half = pipe.unet = drop_in(experts[0], pipe)
    assert (half.config, half.dtype, half.device.type) == (sd.unet.config, torch.float32, "cpu")
    assert sum(one.numel() for one in half.parameters()) == sum(one.numel() for one in sd.unet.parameters())
    state, text = numbers(1, 4, 8, 8).bfloat16(), numbers(1, 7, 16)
    (output,) = half(state, 500, encoder_hidden_states=text, return_dict=False)
    assert (output.dtype, output.shape) == (torch.bfloat16, state.shape)
    # A stand-in takes the place of another one.
    assert drop_in(experts[1], pipe).config == sd.unet.config


def test_what_cannot_stand_in_is_refused_in_one_line(
    sd: DiffusionPipeline, experts: list[VelocityField], tmp_path: Path
) -> None:
    pipe = sd_pipeline(StableDiffusionPipeline, sd)
    schedule = from_diffusers(sd.scheduler)
    pixels = VelocityField(NetworkWrapper(plain_unet()), schedule, "epsilon", conditions=[])
    refused = refusal(drop_in, pixels, pipe)
    assert "samples have 3 channels, and StableDiffusionPipeline's unet takes 4" in refused
    wide = NetworkWrapper(text_unet(cross_attention_dim=32))
    other = VelocityField(wide, schedule, "epsilon", conditions=["encoder_hidden_states"])
    assert "an expert takes text of width 32, and Stable" in refusal(drop_in, other, pipe)
    assert "no: neither an expert folder" in refusal(drop_in, tmp_path / "no", pipe)
    assert "AutoencoderKL has no unet and no transformer" in refusal(drop_in, experts[0], pipe.vae)
    zero_snr = DDIMScheduler(**SD, rescale_betas_zero_snr=True, prediction_type="v_prediction")
    pipe.unet, pipe.scheduler = drop_in(experts[0], pipe), zero_snr
    refused = refusal(pipe.unet, numbers(1, 4, 8, 8), 999, encoder_hidden_states=numbers(1, 7, 16))
    assert "t = 1 of the pipeline's scheduler lies outside the range of all experts" in refused
    pipe.scheduler = sd.scheduler
    with pytest.raises(HddmError, match="cross_attention_kwargs: the experts have no such input"):
        pipe.unet(
            numbers(1, 4, 8, 8),
            999,
            encoder_hidden_states=numbers(1, 7, 16),
            cross_attention_kwargs={"scale": 0.5},
        )
