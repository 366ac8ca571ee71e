"""hddm.drop_in: experts in place of a stock pipeline's network, against that pipeline and closed forms."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DiffusionPipeline,
    SD3Transformer2DModel,
    StableDiffusionPipeline,
)
from safetensors.torch import save_file
from torch import Tensor

from hddm import Ensemble, VelocityField, drop_in, load
from hddm.checkpoints.lora import convert_lora
from hddm.ensemble import Part
from hddm.experts.assembly import assemble
from hddm.experts.expert_folders import open_expert
from hddm.experts.expert_set import ExpertSet
from hddm.experts.topics import describe_topic
from hddm.networks.tokenizer import read_tokenizer
from hddm.networks.wrappers import NetworkWrapper
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.schedules import CosineSchedule, LinearSchedule, from_diffusers
from tests.artefacts import Command, printed, refusal
from tests.cases import BetaTable
from tests.checkpoint_files import SD_BETAS, dit, pixart, plain_unet, randomised, text_unet
from tests.component_files import texts_in, write_clip, write_vae
from tests.ensemble_files import saved, text_experts
from tests.lora_files import kohya
from tests.oracles import GaussianMixture, OracleNetwork, exact_router, predicted

SD = {**SD_BETAS, "clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}
TINY = {
    "num_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "pooled_projection_dim": 16,
}
TEXT = {"cross_attention_dim": 16}
XL = {"addition_embed_type": "text_time", "addition_time_embed_dim": 4}
XL |= {"projection_class_embeddings_input_dim": 16 + 6 * 4}
SD3 = {"joint_attention_dim": 16, "caption_projection_dim": 32, "pos_embed_max_size": 8, **TINY}
CHROMA = {
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
}
CHROMA |= {"joint_attention_dim": 16, "axes_dims_rope": (4, 6, 6), "approximator_num_channels": 16}
CHROMA |= {"approximator_hidden_dim": 24, "approximator_layers": 2}
FLUX = {"joint_attention_dim": 16, "axes_dims_rope": (4, 6, 6), "guidance_embeds": True, **TINY}


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def texts(*names: str, tokens: int = 7, width: int = 16) -> dict[str, Tensor]:
    """Two embedded prompts, and negative ones."""
    made = {}
    for seed, name in enumerate(names):
        shape = (2, tokens, width) if name == "prompt_embeds" else (2, 16)
        made |= {
            name: numbers(*shape, seed=seed),
            f"negative_{name}": numbers(*shape, seed=seed + 10),
        }
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
        diffusers.StableDiffusionXLPipeline,
        "unet",
        lambda: text_unet(**XL),
        diffusers.EulerDiscreteScheduler(**SD_BETAS),
        texts("prompt_embeds", "pooled_prompt_embeds"),
        ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
    ),
    "sd3": Family(
        diffusers.StableDiffusion3Pipeline,
        "transformer",
        lambda: randomised(
            SD3Transformer2DModel(sample_size=8, in_channels=4, out_channels=4, **SD3)
        ),
        diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        texts("prompt_embeds", "pooled_prompt_embeds"),
        (
            "text_encoder",
            "tokenizer",
            "text_encoder_2",
            "tokenizer_2",
            "text_encoder_3",
            "tokenizer_3",
        ),
    ),
    "flux": Family(
        diffusers.FluxPipeline,
        "transformer",
        lambda: randomised(
            diffusers.FluxTransformer2DModel(in_channels=16, num_single_layers=1, **FLUX)
        ),
        diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        {**texts("prompt_embeds", "pooled_prompt_embeds"), "true_cfg_scale": 2.0},
        ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
    ),
    "chroma": Family(
        diffusers.ChromaPipeline,
        "transformer",
        lambda: randomised(diffusers.ChromaTransformer2DModel(in_channels=16, **CHROMA)),
        diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        texts("prompt_embeds")
        | {
            "prompt_attention_mask": (torch.arange(7) < 4).float().expand(2, 7),
            "negative_prompt_attention_mask": (torch.arange(7) < 2).float().expand(2, 7),
        },
        ("text_encoder", "tokenizer"),
    ),
    "pixart": Family(
        diffusers.PixArtAlphaPipeline,
        "transformer",
        pixart,
        diffusers.DPMSolverMultistepScheduler(),
        {
            **texts("prompt_embeds", tokens=6, width=12),
            "negative_prompt": None,
            "use_resolution_binning": False,
        }
        | {f"{sign}prompt_attention_mask": torch.ones(2, 6) for sign in ("", "negative_")},
        ("text_encoder", "tokenizer"),
    ),
}
FAMILIES["pixart sigma"] = replace(
    FAMILIES["pixart"],
    pipeline=diffusers.PixArtSigmaPipeline,
    network=lambda: pixart(use_additional_conditions=False),
)


V_PREDICTION = DDIMScheduler(**SD, prediction_type="v_prediction", rescale_betas_zero_snr=True)
FAMILIES["sd-v"] = replace(FAMILIES["sd"], scheduler=V_PREDICTION)
EDM = diffusers.EDMDPMSolverMultistepScheduler()
EDM_V = diffusers.EDMEulerScheduler(sigma_max=120.0, sigma_data=1.0, prediction_type="v_prediction")
FAMILIES["sdxl of EDM"] = replace(FAMILIES["sdxl"], scheduler=EDM)
FAMILIES["sdxl of EDM's v"] = replace(FAMILIES["sdxl"], scheduler=EDM_V)
HALF_TIMES = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, num_train_timesteps=500)
FAMILIES["sd3 of 500 steps"] = replace(FAMILIES["sd3"], scheduler=HALF_TIMES)
# A mask of booleans, as of a caller's own, hides padding.
BOOLEANS = {name: one.bool() for name, one in FAMILIES["chroma"].inputs.items() if "mask" in name}
FAMILIES["chroma of a mask of booleans"] = replace(
    FAMILIES["chroma"], inputs=FAMILIES["chroma"].inputs | BOOLEANS
)
FLUX_CONTROL = randomised(
    diffusers.FluxControlNetModel(in_channels=16, num_single_layers=1, **FLUX)
)
FAMILIES["flux with ControlNet"] = replace(
    FAMILIES["flux"],
    pipeline=diffusers.FluxControlNetPipeline,
    inputs=FAMILIES["flux"].inputs | {"control_image": numbers(2, 3, 16, 16).clamp(-1, 1)},
    more={"controlnet": FLUX_CONTROL},
)


def stock(name: str, folder: Path) -> DiffusionPipeline:
    family = FAMILIES[name]
    vae = write_vae(folder / "vae", shift_factor=0.0)
    parts = {family.part: family.network(), "scheduler": family.scheduler, "vae": vae}
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


def _size(name: str) -> list[str]:
    """The option that a network without a size in its config needs."""
    return ["--sample-size", "8"] if name.startswith(("flux", "chroma")) else []


@pytest.mark.integration
@pytest.mark.parametrize("name", FAMILIES)
def test_an_expert_of_the_pipelines_own_weights_makes_its_images(
    name: str, tmp_path: Path, hddm: Command
) -> None:
    family, pipe = FAMILIES[name], stock(name, tmp_path)
    theirs = latents(pipe, **family.inputs)
    field = converted(pipe, tmp_path, hddm, *_size(name))
    setattr(pipe, family.part, drop_in(field, pipe))
    ours = latents(pipe, **family.inputs)
    assert (ours - theirs).abs().max() < 2e-5 * theirs.abs().max()


def test_images_of_classes_are_those_of_the_stock_dit_pipeline(
    tmp_path: Path, hddm: Command
) -> None:
    """Its network also predicts a variance, which the scheduler does not use."""
    network = dit(num_embeds_ada_norm=1000, in_channels=4, out_channels=8, sample_size=8)
    pipe = diffusers.DiTPipeline(network, write_vae(tmp_path / "vae"), DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)

    def images() -> Tensor:
        given = {"class_labels": [3, 981], "guidance_scale": 3.0, "num_inference_steps": 4}
        made = pipe(**given, generator=torch.Generator().manual_seed(0), output_type="pt")
        return torch.as_tensor(made.images)

    theirs = images()
    pipe.transformer = drop_in(converted(pipe, tmp_path, hddm), pipe)
    assert (images() - theirs).abs().max() < 1e-4


def sd_pipeline(
    kind: type[DiffusionPipeline], like: DiffusionPipeline, **parts: Any
) -> DiffusionPipeline:
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
    return [
        own,
        VelocityField(flow, LinearSchedule(), "flow_prediction", 1000.0, conditions=conditions),
    ]


SCHEDULERS = (
    "EulerDiscrete EulerAncestralDiscrete HeunDiscrete DPMSolverMultistep UniPCMultistep PNDM"
)


@pytest.mark.parametrize("name", SCHEDULERS.split())
def test_the_scheduler_may_be_exchanged(
    name: str, sd: DiffusionPipeline, experts: list[VelocityField]
) -> None:
    inputs = FAMILIES["sd"].inputs
    pipe = sd_pipeline(StableDiffusionPipeline, sd)
    stand_in = drop_in(experts[0], pipe)
    pipe.scheduler = getattr(diffusers, f"{name}Scheduler").from_config(sd.scheduler.config)
    theirs = latents(pipe, **inputs)
    pipe.unet = stand_in
    assert (latents(pipe, **inputs) - theirs).abs().max() < 2e-5 * theirs.abs().max()


def test_image_to_image_inpainting_and_controlnet_work(
    sd: DiffusionPipeline, experts: list[VelocityField]
) -> None:
    inputs, picture = FAMILIES["sd"].inputs, numbers(2, 3, 16, 16).clamp(-1, 1)
    control = diffusers.ControlNetModel.from_unet(
        sd.unet, conditioning_embedding_out_channels=(8, 8)
    )
    mask = (torch.arange(16) < 8).float().expand(2, 1, 16, 16)
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("Img2Img", {}, {"image": picture, "strength": 0.5}),
        ("Inpaint", {}, {"image": picture, "mask_image": mask, "strength": 0.8}),
        ("ControlNet", {"controlnet": randomised(control)}, {"image": picture}),
    ]
    for name, parts, more in cases:
        pipe = sd_pipeline(getattr(diffusers, f"StableDiffusion{name}Pipeline"), sd, **parts)
        theirs = latents(pipe, **inputs, **more)
        pipe.unet = drop_in(experts[0], pipe)
        assert (latents(pipe, **inputs, **more) - theirs).abs().max() < 2e-5 * theirs.abs().max(), (
            name
        )
        pipe.unet = drop_in(Ensemble(experts, strategy="draw"), pipe)
        assert latents(pipe, **inputs, **more).isfinite().all()


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:.*only the shares do")
def test_loras_of_the_pipelines_network_share_it_and_make_the_images_of_merged_weights(
    sd: DiffusionPipeline, tmp_path: Path, hddm: Command
) -> None:
    converted(sd, tmp_path, hddm)
    folders = [tmp_path / "expert"]
    for seed in range(2):
        noise, content = torch.Generator().manual_seed(seed), kohya(sd.unet)
        for name, value in content.items():
            if value.ndim:
                content[name] = 0.1 * torch.randn(value.shape, generator=noise)
        save_file(content, tmp_path / f"{seed}.safetensors")
        convert_lora(tmp_path / f"{seed}.safetensors", folders[0], tmp_path / str(seed))
        folders.append(tmp_path / str(seed))
    control = diffusers.ControlNetModel.from_unet(
        sd.unet, conditioning_embedding_out_channels=(8, 8)
    )
    kind, inputs = diffusers.StableDiffusionControlNetPipeline, FAMILIES["sd"].inputs
    with_control = {"image": numbers(2, 3, 16, 16).clamp(-1, 1)}
    made: dict[bool, list[Tensor]] = {}
    for shares in (True, False):
        held = ExpertSet([open_expert(one) for one in folders], shares=shares)
        model = Ensemble(held.fields(), strategy="draw")
        made[shares] = []
        for cls, parts, more in (
            (StableDiffusionPipeline, {}, {}),
            (kind, {"controlnet": randomised(control)}, with_control),
        ):
            pipe = sd_pipeline(cls, sd, **parts)
            pipe.unet = drop_in(model, pipe)
            made[shares].append(latents(pipe, **inputs, **more))
        assert len(set(held.stored)) == (1 if shares else 3)
    for found, expected in zip(made[True], made[False], strict=True):
        assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.filterwarnings("ignore:.*only the shares do")
def test_under_draw_the_noise_decides_which_expert_makes_an_image(
    sd: DiffusionPipeline, experts: list[VelocityField]
) -> None:
    inputs, pipe, found = FAMILIES["sd"].inputs, sd_pipeline(StableDiffusionPipeline, sd), []
    # The second one scales its states, and starts at another timestep.
    trailing = diffusers.EulerDiscreteScheduler.from_config(
        sd.scheduler.config, timestep_spacing="trailing"
    )

    def images(model: VelocityField | Ensemble) -> list[Tensor]:
        pipe.unet = drop_in(model, pipe)
        return [latents(pipe, seed=seed, **inputs) for seed in (0, 1, 2)]

    for pipe.scheduler in (sd.scheduler, trailing):
        drawn = images(Ensemble(experts, strategy="draw", prior=[0.5, 0.5]))
        assert latents(pipe, seed=0, **inputs).equal(drawn[0])
        alone = list(map(images, experts))
        by = [
            [
                k
                for k in (0, 1)
                if (image - alone[k][seed][row]).abs().max() < 2e-5 * image.abs().max()
            ]
            for seed in (0, 1, 2)
            for row, image in enumerate(drawn[seed])
        ]
        assert {k for (k,) in by} == {0, 1}
        found.append(by)
    assert found[0] == found[1]


def _own_loop(stand_in: Any, timesteps: Tensor, state: Tensor) -> Tensor:
    """Denoise by hand, as one does who has made the timesteps once."""
    text = numbers(1, 7, 16, seed=3).expand(len(state), -1, -1)
    for t in timesteps:
        output = stand_in(state, t, encoder_hidden_states=text).sample
        state = stand_in.pipe.scheduler.step(output, t, state).prev_sample
    return state


@pytest.mark.filterwarnings("ignore:.*only the shares do")
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("strategy", ["draw", "commit-1"])
def test_images_of_a_loop_over_one_tensor_of_timesteps_have_an_expert_each(
    steps: int, strategy: str, sd: DiffusionPipeline, experts: list[VelocityField]
) -> None:
    pipe = sd_pipeline(StableDiffusionPipeline, sd)
    pipe.scheduler.set_timesteps(steps)
    timesteps = pipe.scheduler.timesteps

    def router(x: Tensor, t: Tensor) -> Tensor:
        return x.new_full((len(x), 2), 0.5)

    stand_in = drop_in(Ensemble(experts, router, strategy), pipe)
    states = [numbers(1, 4, 8, 8, seed=seed) for seed in (0, 4, 5, 6, 7)]
    found = [_own_loop(stand_in, timesteps, state) for state in states]
    drawn = set()
    for state, image in zip(states, found, strict=True):
        assert _own_loop(
            drop_in(Ensemble(experts, router, strategy), pipe), timesteps, state
        ).equal(image)
        alone = [_own_loop(drop_in(one, pipe), timesteps, state) for one in experts]
        drawn |= {k for k in (0, 1) if alone[k].equal(image)}
    assert drawn == {0, 1}
    # A loop that was left stays without effect on the next one.
    stand_in(states[0], timesteps[0], encoder_hidden_states=numbers(1, 7, 16, seed=3))
    assert _own_loop(stand_in, timesteps, states[1]).equal(found[1])


@pytest.mark.filterwarnings("ignore:.*only the shares do")
def test_branches_one_after_the_other_are_one_generation_and_two_by_turns_are_refused(
    sd: DiffusionPipeline, experts: list[VelocityField]
) -> None:
    pipe = sd_pipeline(StableDiffusionPipeline, sd)
    pipe.scheduler.set_timesteps(3)
    first, second, _ = pipe.scheduler.timesteps
    model = Ensemble(experts, strategy="draw")
    stand_in, text = drop_in(model, pipe), {"encoder_hidden_states": numbers(1, 7, 16, seed=3)}
    states = [numbers(1, 4, 8, 8, seed=seed) for seed in range(3)]
    begun = [stand_in(states[0], first, **one).sample for one in (text, text)]
    assert begun[0].equal(begun[1])
    stand_in(states[0], second, **text)
    # Three images that are denoised a step at a time, by turns.
    for state in states:
        stand_in(state, first, **text)
    assert "two generations take turns" in refusal(stand_in, states[0], second, **text)
    # The last one may go on.
    stand_in(states[2], second, **text)


@pytest.mark.integration
def test_prompts_choose_the_expert_as_for_hddm_sample(tmp_path: Path) -> None:
    encoder = write_clip(tmp_path)
    for k, (one, text) in enumerate(
        zip(text_experts(2), ("cat, a cat", "dog, two dogs"), strict=True)
    ):
        describe_topic(saved(tmp_path / str(k), one), text=text, **texts_in(tmp_path))
    texts = texts_in(tmp_path)
    assemble([tmp_path / "0", tmp_path / "1"], tmp_path / "both", trust_components=True, **texts)
    prompts = ["a cat", "two dogs"]
    prior = HDDMPipeline.from_pretrained(tmp_path / "both").encode(prompts).prior
    assert prior is not None
    assert prior.round().tolist() == [[1, 0], [0, 1]]
    pipe = stock("sd", tmp_path)
    pipe.register_modules(text_encoder=encoder, tokenizer=read_tokenizer(tmp_path / "tokenizer"))
    model = load(tmp_path / "both")
    assert isinstance(model, Ensemble)
    size: dict[str, Any] = {
        "height": 8,
        "width": 8,
        "guidance_scale": 3.0,
        "negative_prompt": ["a bird"] * 2,
    }
    given = size | {"num_images_per_prompt": 3, "num_inference_steps": 2, "output_type": "latent"}

    def images(stand_in: Any, **inputs: Any) -> Tensor:
        pipe.unet = stand_in
        made = pipe(generator=torch.Generator().manual_seed(0), **given, **inputs).images
        return torch.as_tensor(made)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = images(drop_in(model, pipe), prompt=prompts)
        alone = [images(drop_in(one, pipe), prompt=prompts) for one in model.experts]
    expected = torch.cat([alone[0][:3], alone[1][3:]])
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()
    # Of embeddings that it did not see being made, a stand-in does not know the prompt, and says so.
    with torch.no_grad():
        other = encoder(torch.arange(77)[None]).last_hidden_state
    pipe.text_encoder._forward_hooks.clear()
    with pytest.warns(
        UserWarning, match="only the shares do; descriptions of experts need it as text"
    ):
        images(drop_in(model, pipe), prompt=None, prompt_embeds=other.flip(1).repeat(2, 1, 1))


def test_an_expert_without_text_makes_no_image_of_a_prompt(
    sd: DiffusionPipeline, experts: list[VelocityField]
) -> None:
    pipe = sd_pipeline(StableDiffusionPipeline, sd)
    pixels = NetworkWrapper(plain_unet(in_channels=4, out_channels=4))
    blind = VelocityField(pixels, LinearSchedule(), "flow_prediction", 1000.0, conditions=())
    for strategy in ("draw", "full"):
        model = Ensemble(
            [blind, experts[0]],
            lambda x, t: x.new_tensor([[0.9, 0.1]]).expand(len(x), 2),
            strategy,
            [9, 1],
        )
        pipe.unet = drop_in(model, pipe)
        made = [latents(pipe, seed=seed, **FAMILIES["sd"].inputs) for seed in range(3)]
        pipe.unet = drop_in(experts[0], pipe)
        for seed, images in enumerate(made):
            expected = latents(pipe, seed=seed, **FAMILIES["sd"].inputs)
            assert (images - expected).abs().max() < 2e-5 * expected.abs().max()


def test_an_expert_that_does_not_know_a_class_is_refused() -> None:
    pipe = diffusers.DDPMPipeline(plain_unet(num_class_embeds=3), DDIMScheduler(**SD))
    network, schedule = NetworkWrapper(pipe.unet), from_diffusers(pipe.scheduler)
    declared = {
        "conditions": ["class_labels"],
        "null_conditions": {"class_labels": torch.tensor(2)},
    }
    one, other = (
        VelocityField(network, schedule, "epsilon", **declared, classes=own) for own in ("ab", "bc")
    )
    x, labels = numbers(1, 3, 8, 8), torch.tensor([0, 2])
    assert "from 0 to 2 here (2 is no class), not [3]" in refusal(
        drop_in(one, pipe), x, 500, labels[1:] + 1
    )
    mixed = Ensemble([one, other], strategy="draw")
    # Three images of equal noise, with guidance away from no class: two branches, and each has its expert.
    drop_in(mixed, pipe)(x.repeat(6, 1, 1, 1), 500, torch.tensor([0, 2, 2, 9, 9, 9]))
    assert "expert 0 knows no class 'c'" in refusal(
        drop_in(mixed, pipe), x.repeat(2, 1, 1, 1), 500, labels
    )


def test_it_is_loaded_as_the_network_was_and_cast_with_the_pipeline(
    tmp_path: Path, hddm: Command
) -> None:
    pipe = stock("sd", tmp_path)
    converted(pipe, tmp_path, hddm)
    pipe.to(torch.bfloat16)
    pipe.unet = drop_in(tmp_path / "expert", pipe)
    assert pipe.unet.dtype == pipe.unet.model.dtype == torch.bfloat16
    pipe.to(torch.float32)
    assert pipe.unet.dtype == pipe.unet.model.dtype == torch.float32


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
            VelocityField(
                OracleNetwork(shards[0], table, "epsilon"), from_diffusers(scheduler), "epsilon"
            ),
            VelocityField(
                OracleNetwork(shards[1], cosine, "v_prediction"), CosineSchedule(), "v_prediction"
            ),
        ],
        exact_router(shards, prior),
        "full",
        prior,
    )
    pipe = diffusers.DDPMPipeline(plain_unet(in_channels=3, out_channels=3), scheduler)
    stand_in, y = drop_in(mixed, pipe), numbers(4, 3, 1, 1).double()
    for step in (20, 400, 930):
        a, s = table(torch.full((4,), float(step), dtype=torch.float64))
        x_0, eps = whole.x_0_and_eps(y, a, s)
        a, s = a.view(-1, 1, 1, 1), s.view(-1, 1, 1, 1)
        truth = predicted(prediction, x_0, eps, a, s)
        assert (
            stand_in(y, torch.tensor(step)).sample - truth
        ).abs().max() < 1e-9 * truth.abs().max()


def test_it_looks_like_the_network_that_it_replaces(
    sd: DiffusionPipeline, experts: list[VelocityField]
) -> None:
    pipe = sd_pipeline(StableDiffusionPipeline, sd)
    own = pipe.unet = drop_in(experts[0], pipe)
    assert (own.config, own.dtype, own.device.type) == (sd.unet.config, torch.float32, "cpu")
    assert sum(one.numel() for one in own.parameters()) == sum(
        one.numel() for one in sd.unet.parameters()
    )
    state, text = numbers(1, 4, 8, 8).bfloat16(), numbers(1, 7, 16)
    (output,) = own(state, 500, encoder_hidden_states=text, return_dict=False)
    assert (output.dtype, output.shape) == (torch.bfloat16, state.shape)
    # It takes the place of another stand-in, and of a compiled network.
    for pipe.unet in (own, torch.compile(sd.unet, backend="eager")):
        again = drop_in(experts[0], pipe)
        assert again.config == sd.unet.config
        assert again(state, 500, encoder_hidden_states=text).sample.equal(output)


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
    assert "AutoencoderKL has no transformer and no unet" in refusal(drop_in, experts[0], pipe.vae)
    zero_snr = DDIMScheduler(**SD, rescale_betas_zero_snr=True, prediction_type="v_prediction")
    pipe.unet, pipe.scheduler = drop_in(experts[0], pipe), zero_snr
    refused = refusal(pipe.unet, numbers(1, 4, 8, 8), 999, encoder_hidden_states=numbers(1, 7, 16))
    assert "t = 1 of the pipeline's scheduler lies outside the range of all experts" in refused
    parts = [Part(one, text_encoder=k) for k, one in enumerate(experts)]
    assert "trained with several" in refusal(drop_in, Ensemble(parts, strategy="draw"), pipe)
    assert "unet is of class AutoencoderKL" in refusal(
        drop_in, experts[0], SimpleNamespace(unet=pipe.vae)
    )


@pytest.mark.parametrize(
    ("inputs", "scheduler", "said"),
    [
        (
            {"cross_attention_kwargs": {"scale": 0.5}},
            None,
            "cross_attention_kwargs: the experts have no",
        ),
        ({"timestep_cond": numbers(1, 8)}, None, "takes no condition 'timestep_cond'"),
        (
            {"mid_block_additional_residual": numbers(1)},
            None,
            "adds to layers of UNet2DConditionModel",
        ),
        (
            {},
            diffusers.DDPMScheduler(variance_type="learned_range"),
            "variance_type is learned_range",
        ),
        (
            {},
            diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
            "invert_sigmas turns time around",
        ),
    ],
)
def test_what_would_be_lost_in_a_call_is_refused_in_one_line(
    inputs: dict[str, Any], scheduler: Any, said: str, sd: DiffusionPipeline
) -> None:
    pipe = sd_pipeline(StableDiffusionPipeline, sd)
    other = NetworkWrapper(plain_unet(in_channels=4, out_channels=4))
    field = VelocityField(
        other, LinearSchedule(), "flow_prediction", conditions=["encoder_hidden_states"]
    )
    pipe.unet, pipe.scheduler = drop_in(field, pipe), scheduler or pipe.scheduler
    assert said in refusal(pipe.unet, numbers(1, 4, 8, 8), 500, numbers(1, 7, 16), **inputs)


def test_what_changes_layers_is_refused_before_it_does(
    sd: DiffusionPipeline, experts: list[VelocityField]
) -> None:
    pipe = sd_pipeline(diffusers.StableDiffusionPAGPipeline, sd, pag_applied_layers=["mid"])
    before = set(sd.unet.attn_processors.values())
    pipe.unet = drop_in(experts[0], pipe)
    assert "attn_processors needs layers of" in refusal(latents, pipe, **FAMILIES["sd"].inputs)
    assert set(sd.unet.attn_processors.values()) == before
    assert "enable_freeu needs layers of" in refusal(pipe.enable_freeu, 0.9, 0.2, 1.2, 1.4)
