"""Memory and time of Stable Diffusion XL's shapes at 1024 pixels, beside diffusers' pipeline.

Weights are random: memory and time do not depend on their values. Prompts are embedded already.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor

import hddm
from benchmarks.acceptance.checkpoints import be_exact, kept_expert
from benchmarks.acceptance.stages import Kit
from benchmarks.figures import Result, at_most, told
from benchmarks.full_size import MODELS, SD_BETAS
from benchmarks.inference.memory import peak
from benchmarks.timing import between, now
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.utils.memory import release

STEPS = 8
VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
    "scaling_factor": 0.13025,
    "force_upcast": False,
    "sample_size": 1024,
}
TINY_UNET = {
    "block_out_channels": (32, 64, 64),
    "layers_per_block": 1,
    "transformer_layers_per_block": (1, 1, 1),
    "attention_head_dim": (2, 2, 2),
}
TINY_VAE = {"block_out_channels": (32, 32, 32, 32), "layers_per_block": 1, "sample_size": 64}
MOST_TIME, MOST_MEMORY = 1.05, 1.05
"""Over diffusers' pipeline without slicing and tiling, per picture and as the largest amount."""


@dataclass(frozen=True)
class Taken:
    """Seconds and the largest number of bytes of one picture, and the calls of its network."""

    seconds: float
    peak: int
    calls: int


def sdxl_shapes(kit: Kit) -> Result:
    """Make a picture by diffusers, by diffusers with slicing and tiling, and by hddm."""
    be_exact()
    side = 128 if kit.is_gpu else 8
    dtype = torch.bfloat16 if kit.is_gpu else torch.float32
    place = kit.work / f"sdxl-shapes-{side}-{str(dtype)[6:]}"
    folder, expert = place / "pipeline", kept_expert(place, "random weights")
    build(folder, side, dtype, kit.is_gpu)
    if not expert.exists():
        hddm.convert(folder, expert, verify=False)
    given = embedded(dtype, kit.device)
    found = {
        "diffusers": _stock(folder, dtype, given, kit.device, is_tiled=False),
        "diffusers, slicing and tiling": _stock(folder, dtype, given, kit.device, is_tiled=True),
        "hddm": _ours(expert, dtype, given, kit.device),
    }
    plain, ours = found["diffusers"], found["hddm"]
    figures = []
    for way, one in found.items():
        figures.append(told(f"{way}: peak", one.peak / 1e9, " GB"))
        figures.append(told(f"{way}: time", one.seconds, " s"))
        figures.append(told(f"{way}: calls of the network", str(one.calls)))
    memory = ours.peak / max(plain.peak, 1)
    pace = (ours.seconds / ours.calls) / (plain.seconds / plain.calls)
    what = ("hddm's peak over that of diffusers", "hddm's time per call over that of diffusers")
    if kit.is_gpu:
        figures += [at_most(what[0], memory, MOST_MEMORY), at_most(what[1], pace, MOST_TIME)]
    else:
        figures += [told(what[0], memory, goal="judged on a GPU alone")]
        figures += [told(what[1], pace, goal="judged on a GPU alone")]
    notes = [
        f"One picture of {8 * side}×{8 * side} pixels in {STEPS} steps with guidance, {str(dtype)[6:]}, "
        "random weights, without text encoders. hddm decodes pictures of up to four million pixels at once, "
        "and larger ones in tiles."
    ]
    return Result(figures, notes, is_stand_in=not kit.is_gpu)


def build(folder: Path, side: int, dtype: torch.dtype, is_real: bool) -> None:
    """Write a pipeline folder of network, VAE and scheduler, with the published shapes or tiny ones."""
    if (folder / "model_index.json").exists():
        return
    torch.manual_seed(0)
    shapes = {**MODELS["sdxl"].config, "sample_size": side}
    unet = diffusers.UNet2DConditionModel(**shapes | ({} if is_real else TINY_UNET)).to(dtype)
    vae = diffusers.AutoencoderKL(**VAE | ({} if is_real else TINY_VAE)).to(dtype)
    scheduler = diffusers.EulerDiscreteScheduler(**SD_BETAS)
    unet.save_pretrained(folder / "unet")
    vae.save_pretrained(folder / "vae")
    scheduler.save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "StableDiffusionXLPipeline",
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "scheduler": ["diffusers", "EulerDiscreteScheduler"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))


def embedded(dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Embeddings of a prompt and of none, under the pipeline's names."""
    noise = torch.Generator().manual_seed(0)
    shapes = {"prompt_embeds": (1, 77, 2048), "pooled_prompt_embeds": (1, 1280)}
    given = {}
    for name, shape in shapes.items():
        for sign in ("", "negative_"):
            given[sign + name] = torch.randn(shape, generator=noise).to(device, dtype)
    return given


def _stock(
    folder: Path, dtype: torch.dtype, given: dict[str, Tensor], device: str, is_tiled: bool
) -> Taken:
    absent = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    parts = {
        "unet": diffusers.UNet2DConditionModel.from_pretrained(folder / "unet", torch_dtype=dtype),
        "vae": diffusers.AutoencoderKL.from_pretrained(folder / "vae", torch_dtype=dtype),
        "scheduler": diffusers.EulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
    }

    def opened() -> Any:
        pipe = diffusers.StableDiffusionXLPipeline(**parts, **absent, add_watermarker=False)
        pipe.set_progress_bar_config(disable=True)
        if is_tiled:
            pipe.vae.enable_slicing()
            pipe.vae.enable_tiling()
        return pipe.to(device)

    def call(pipe: Any) -> object:
        noise = torch.Generator().manual_seed(0)
        return pipe(
            **given,
            guidance_scale=5.0,
            num_inference_steps=STEPS,
            generator=noise,
            output_type="np",
        )

    return _taken(opened, call, lambda pipe: pipe.unet, device)


def _ours(expert: Path, dtype: torch.dtype, given: dict[str, Tensor], device: str) -> Taken:
    names = {"prompt_embeds": "encoder_hidden_states", "pooled_prompt_embeds": "text_embeds"}
    conditions = {ours: given[theirs] for theirs, ours in names.items()}
    negative = {ours: given[f"negative_{theirs}"] for theirs, ours in names.items()}

    def opened() -> Any:
        pipe = HDDMPipeline.from_pretrained(expert, dtype=dtype).to(device)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def call(pipe: Any) -> object:
        return pipe(
            conditions=conditions,
            negative_conditions=negative,
            guidance_scale=5.0,
            num_inference_steps=STEPS,
            seed=0,
            output_type="np",
        )

    return _taken(opened, call, _network_of, device)


def _network_of(pipe: Any) -> torch.nn.Module:
    network = pipe.ensemble.experts[0].network
    return getattr(network, "network", network)


def _taken(
    opened: Callable[[], Any],
    call: Callable[[Any], object],
    network: Callable[[Any], torch.nn.Module],
    device: str,
) -> Taken:
    """Open a pipeline, make a picture to warm up, and measure the next one."""
    release()
    pipe = opened()
    call(pipe)
    calls: list[int] = []
    hook = network(pipe).register_forward_hook(lambda *_: calls.append(1))
    with peak(device) as found:
        began = now(device)
        call(pipe)
        seconds = between(began, now(device)).seconds
    hook.remove()
    return Taken(seconds, found[0], max(len(calls), 1))
