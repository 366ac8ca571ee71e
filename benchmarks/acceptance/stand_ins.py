"""Tiny models of random weights in the layouts and under the names of the published ones, on a local hub."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Tokenizer

from benchmarks.acceptance.entries import DINO, ENTRIES, Entry, Lora
from tests.checkpoint_files import dit, pixart, randomised, text_unet
from tests.component_files import write_t5, write_vae
from tests.hub import Hub, running_hub
from tests.ldm_files import SIZES, tiny_pipeline, whole_file
from tests.lora_files import kohya
from tests.pipelines import test_prompts_of_pipelines as stock_prompts
from tests.vision_files import write_vision_model

SIDE = 8
RANK = 3
WIDE = 128
"""Of the second text encoder of SDXL."""
_CONSISTENCY = (
    *("to_q", "to_k", "to_v", "to_out_0", "proj_in", "proj_out", "ff_net_0_proj", "ff_net_2"),
    *("conv1", "conv2", "conv_shortcut", "downsamplers_0_conv", "upsamplers_0_conv"),
    "time_emb_proj",
)
"""Ends of the layers that the published LoRA of latent consistency changes."""
_ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]


@contextmanager
def local_hub(work: Path) -> Iterator[tuple[Hub, dict[str, str]]]:
    """A hub on this machine that holds all stand-ins, and the environment of processes that use it.

    Models are written once into ``work``, and read from there by later starts.
    """
    source = work / "stand-ins"
    with running_hub() as hub:
        for entry in ENTRIES:
            put_stand_in(hub, entry, source)
        if not (source / "dino").exists():
            write_vision_model(source / "dino", "dinov2")
        hub.put(DINO[0], source / "dino")
        # A token of the user's must not reach a server that is not the hub.
        addresses = {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(work / "hub"),
            "HF_HUB_CACHE": str(work / "hub" / "hub"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_TOKEN": "",
            "HF_TOKEN_PATH": str(work / "no token"),
        }
        yield hub, addresses


def put_stand_in(hub: Hub, entry: Entry, source: Path) -> None:
    """Put the stand-in of an entry, and of its LoRA, on a hub; they are written once into ``source``."""
    folder = source / entry.name
    if not (folder / ".whole").exists():
        shutil.rmtree(folder, ignore_errors=True)
        write_stand_in(entry, folder)
        (folder / ".whole").touch()
    hub.put(entry.repo, folder / "repo")
    if entry.lora is not None:
        hub.put(entry.lora.repo, folder / "lora")


def write_stand_in(entry: Entry, folder: Path) -> None:
    """Write the repository of an entry, and that of its LoRA."""
    repo, parts = folder / "repo", folder / "parts"
    repo.mkdir(parents=True)
    if entry.file:
        _write_single_file(entry, repo, parts)
        return
    pipe = _PIPELINES[entry.name](parts)
    pipe.set_progress_bar_config(disable=True)
    is_pickled = bool(entry.conversion.get("allow_pickle"))
    pipe.save_pretrained(repo, safe_serialization=not is_pickled)
    if entry.lora is not None:
        network = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
        write_lora(entry.lora, network, folder / "lora")


def _dit(parts: Path) -> Any:
    network = dit(num_embeds_ada_norm=1000, in_channels=4, out_channels=8, sample_size=SIDE)
    scheduler = DDIMScheduler(beta_schedule="linear", clip_sample=False)
    names = {number: f"class {number}" for number in range(1000)}
    return diffusers.DiTPipeline(network, write_vae(parts / "vae", factor=8), scheduler, names)


def _sd15(parts: Path) -> Any:
    tiny_pipeline(parts, "1")
    return diffusers.StableDiffusionPipeline.from_pretrained(
        parts / "pipeline", safety_checker=None
    )


def _sdxl(parts: Path, seed: int = 0) -> Any:
    """Its two text encoders differ in width, as published: diffusers tells them apart by it."""
    sizes = SIZES["XL"] | {
        "cross_attention_dim": 64 + WIDE,
        "projection_class_embeddings_input_dim": 6 * 8 + WIDE,
    }
    pipe = tiny_pipeline(parts, "XL", seed, text_unet(seed, **sizes))
    config = pipe.text_encoder_2.config.to_dict()
    config |= {"hidden_size": WIDE, "projection_dim": WIDE, "num_attention_heads": WIDE // 64}
    second = randomised(CLIPTextModelWithProjection(CLIPTextConfig(**config)), 7)
    scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    pipe.register_modules(text_encoder_2=second, scheduler=scheduler)
    return pipe


def _write_single_file(entry: Entry, repo: Path, parts: Path) -> None:
    content = whole_file(_sdxl(parts, seed=1), "XL")
    content = {name: one.contiguous() for name, one in content.items()}
    # As its trainer leaves them.
    content |= {"v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)}
    save_file(content, repo / entry.file)


def _pixart(parts: Path) -> Any:
    encoder = write_t5(parts, 12)
    return diffusers.PixArtSigmaPipeline(
        tokenizer=T5Tokenizer.from_pretrained(parts / "tokenizer"),
        text_encoder=encoder,
        vae=write_vae(parts / "vae", factor=8),
        transformer=pixart(sample_size=SIDE),
        scheduler=DPMSolverMultistepScheduler(beta_schedule="linear"),
    )


def _sd35(parts: Path) -> Any:
    pipe = stock_prompts.stock("sd3", parts)
    pipe.register_modules(vae=write_vae(parts / "shifted", factor=8, shift_factor=0.0))
    return pipe


def _flux(parts: Path) -> Any:
    pipe = stock_prompts.stock("flux", parts)
    config = {**pipe.transformer.config, "guidance_embeds": False}
    network = diffusers.FluxTransformer2DModel.from_config(config)
    pipe.register_modules(
        transformer=randomised(network),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=write_vae(parts / "shifted", factor=8, shift_factor=0.0),
    )
    return pipe


_PIPELINES = {
    "dit": _dit,
    "sd15": _sd15,
    "sdxl": _sdxl,
    "pixart-sigma": _pixart,
    "sd35": _sd35,
    "flux": _flux,
}


def write_lora(lora: Lora, network: Any, folder: Path) -> None:
    """Write a LoRA in the form of the published one: kohya's, diffusers', or a folder of peft."""
    folder.mkdir(parents=True)
    if lora.reader == "diffusers" and type(network).__name__ == "UNet2DConditionModel":
        # One alpha, as that file has.
        content = {}
        for name, one in kohya(network, ranks=(RANK,), alphas=(2.0,)).items():
            if name.partition(".")[0].endswith(_CONSISTENCY):
                content[name] = one
        save_file(content, folder / lora.file)
        return
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=_ATTENTION)
    adapted = get_peft_model(network, config)
    noise = torch.Generator().manual_seed(7)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=noise)
    if lora.reader == "peft":
        adapted.save_pretrained(folder)
        return
    content = {}
    for name, one in get_peft_model_state_dict(adapted).items():
        content[f"transformer.{name.removeprefix('base_model.model.')}"] = one.contiguous()
    save_file(content, folder / lora.file)
