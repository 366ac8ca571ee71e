"""Tiny checkpoints as real tools write them, and what their networks mean, written down by hand."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DiTTransformer2DModel,
    ModelMixin,
    PixArtTransformer2DModel,
    SchedulerMixin,
    UNet2DConditionModel,
    UNet2DModel,
)
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint
from torch import Tensor

import hddm

SHARES = (0.05, 0.4, 0.7, 0.97)
"""Of an expert's range of noise levels."""
UNET = {
    "sample_size": 8,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 16,
}
UNCONDITIONAL = {
    "sample_size": 8,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8}
DIT = _HEADS | {"num_embeds_ada_norm": 5, "out_channels": 8}
PIXART = _HEADS | {"cross_attention_dim": 16, "caption_channels": 12, "out_channels": 8}
SD_BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def shared_checkpoint(name: str) -> Path:
    """A folder of checkpoints with their own tools' outputs; the test is skipped where there is none."""
    default = Path(__file__).parents[2] / "shared" / "checkpoints"
    folder = Path(os.environ.get("HDDM_CHECKPOINTS", default)) / name
    if not folder.is_dir():
        pytest.skip(f"{folder}: no such folder")
    return folder


def randomised(network: ModelMixin, seed: int = 0) -> ModelMixin:
    """Every parameter drawn anew, so that none is zero and every one matters."""
    noise = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        scale = 1.0 if "norm" in name and parameter.ndim == 1 else 0.0
        parameter.data = scale + 0.1 * torch.randn(parameter.shape, generator=noise)
    return network.eval().requires_grad_(False)


def text_unet(seed: int = 0, **changes: Any) -> UNet2DConditionModel:
    return randomised(UNet2DConditionModel(**UNET | changes), seed)


def plain_unet(seed: int = 0, **changes: Any) -> UNet2DModel:
    return randomised(UNet2DModel(**UNCONDITIONAL | changes), seed)


def dit(seed: int = 0, **changes: Any) -> DiTTransformer2DModel:
    return randomised(DiTTransformer2DModel(**DIT | changes), seed)


def pixart(seed: int = 0, **changes: Any) -> PixArtTransformer2DModel:
    return randomised(PixArtTransformer2DModel(**PIXART | changes), seed)


def pipeline(
    folder: Path, network: ModelMixin, scheduler: SchedulerMixin | None = None, **saving: Any
) -> Path:
    """A pipeline folder of one denoiser and its scheduler, written by diffusers."""
    scheduler = scheduler or DDIMScheduler()
    unet = isinstance(network, UNet2DModel | UNet2DConditionModel)
    part, name = ("unet", "StableDiffusionPipeline") if unet else ("transformer", "DiTPipeline")
    network.save_pretrained(folder / part, **saving)
    scheduler.save_pretrained(folder / "scheduler")
    index = {
        "_class_name": name,
        part: ["diffusers", type(network).__name__],
        "scheduler": ["diffusers", type(scheduler).__name__],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def conditions_of(network: ModelMixin, rows: int = 1) -> dict[str, Tensor]:
    """Conditions of every kind that the network takes, under the names of `VelocityField.velocity`."""
    noise = torch.Generator().manual_seed(3)
    config = network.config
    if isinstance(network, DiTTransformer2DModel):
        return {"class_labels": torch.arange(rows) % 5}
    if isinstance(network, UNet2DModel):
        return {}
    width = config.get("caption_channels") or config["cross_attention_dim"]
    given = {"encoder_hidden_states": torch.randn(rows, 6, width, generator=noise)}
    if config.get("addition_embed_type") == "text_time":
        pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        given["text_embeds"] = torch.randn(rows, pooled, generator=noise)
        given["time_ids"] = torch.tensor([[64.0, 64, 0, 0, 64, 64]]).expand(rows, 6)
    if config.get("use_additional_conditions"):
        given["resolution"] = torch.tensor([[64.0, 64.0]]).expand(rows, 2)
        given["aspect_ratio"] = torch.tensor([[1.0]]).expand(rows, 1)
    return given


def call(network: ModelMixin, y: Tensor, timestep: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    """The raw output of diffusers' own network."""
    added = {k: v for k, v in given.items() if k in ("text_embeds", "time_ids", "resolution", "aspect_ratio")}
    plain = {k: v for k, v in given.items() if k not in added}
    nested = {"added_cond_kwargs": added} if added else {}
    with torch.no_grad():
        return network(y, timestep=timestep, return_dict=False, **plain, **nested)[0]


def check_velocity(
    expert: Path, network: ModelMixin, betas: Tensor, kind: str = "epsilon", tolerance: float = 2e-5
) -> None:
    """Compare an expert's velocity with the closed form over diffusers' own network."""
    field = hddm.load(expert)
    assert isinstance(field, hddm.VelocityField)
    given = conditions_of(network)
    kept = np.cumprod(1 - betas.double().numpy())
    ratio = np.sqrt((1 - kept) / kept)
    low, high = (r / (1 + r) for r in (ratio[0], ratio[-1]))
    noise = torch.Generator().manual_seed(5)
    size = network.config["sample_size"]
    for share in SHARES:
        t = low + share * (high - low)
        x = torch.randn(1, network.config["in_channels"], size, size, generator=noise)
        # The log-SNR is linear between two timesteps.
        u = float(np.interp(math.log(t / (1 - t)), np.log(ratio), np.arange(len(kept))))
        norm = math.hypot(1 - t, t)
        a, s, y = (1 - t) / norm, t / norm, x / norm
        output = call(network, y, torch.tensor([u], dtype=torch.float32), given)[:, : x.shape[1]].double()
        x, y = x.double(), y.double()
        x_0, eps = {
            "epsilon": lambda d, y=y, a=a, s=s: ((y - s * d) / a, d),
            "sample": lambda d, y=y, a=a, s=s: (d, (y - a * d) / s),
            "v_prediction": lambda d, y=y, a=a, s=s: (a * y - s * d, s * y + a * d),
        }[kind](output)
        velocity = field.velocity(x.float(), torch.tensor([t], dtype=torch.float64), **given)
        assert velocity.shape == x.shape
        error = ((velocity - (eps - x_0)).norm() / (eps - x_0).norm()).item()
        assert error < tolerance, f"{error:.1e} at t = {t:.3f}"


def ldm_unet(network: UNet2DConditionModel) -> dict[str, Tensor]:
    """The tensors of a UNet under latent diffusion's names, by inverting diffusers' own conversion."""
    weights, config = network.state_dict(), network.config
    names = {name: torch.empty(0) for name in _ldm_names(config)}
    mapped = convert_ldm_unet_checkpoint(dict(names), config)
    origins = {id(tensor): name for name, tensor in names.items()}
    found = {origins[id(tensor)]: weights[name] for name, tensor in mapped.items() if name in weights}
    assert len(found) == len(weights)
    return found


def _ldm_names(config: Mapping[str, Any]) -> list[str]:
    """More names than there are: each block has every part that it may have."""
    resnet = ["in_layers.0", "in_layers.2", "emb_layers.1", "out_layers.0", "out_layers.3", "skip_connection"]
    inner = ["norm1", "norm2", "norm3", "ff.net.0.proj", "ff.net.2"]
    inner += [f"attn{n}.{leaf}" for n in (1, 2) for leaf in ("to_q", "to_k", "to_v", "to_out.0")]
    depth = max(np.ravel(config["transformer_layers_per_block"]))
    attention = ["norm", "proj_in", "proj_out"]
    attention += [f"transformer_blocks.{n}.{leaf}" for n in range(depth) for leaf in inner]
    level = config["layers_per_block"] + 1
    modules = ["time_embed.0", "time_embed.2", "input_blocks.0.0", "out.0", "out.2"]
    modules += ["label_emb.0.0", "label_emb.0.2"] if config["addition_embed_type"] else []
    modules += [f"middle_block.{n}.{leaf}" for n in (0, 2) for leaf in resnet]
    modules += [f"middle_block.1.{leaf}" for leaf in attention]
    for n, kind in enumerate(config["down_block_types"]):
        for i in range(1 + n * level, (n + 1) * level):
            modules += [f"input_blocks.{i}.0.{leaf}" for leaf in resnet]
            modules += [f"input_blocks.{i}.1.{leaf}" for leaf in attention if "CrossAttn" in kind]
        if n < len(config["down_block_types"]) - 1:
            modules.append(f"input_blocks.{(n + 1) * level}.0.op")
    for n, kind in enumerate(config["up_block_types"]):
        for i in range(n * level, (n + 1) * level):
            modules += [f"output_blocks.{i}.0.{leaf}" for leaf in resnet]
            modules += [f"output_blocks.{i}.1.{leaf}" for leaf in attention if "CrossAttn" in kind]
        if n < len(config["up_block_types"]) - 1:
            modules.append(f"output_blocks.{(n + 1) * level - 1}.{1 + ('CrossAttn' in kind)}.conv")
    return [f"model.diffusion_model.{name}.{leaf}" for name in modules for leaf in ("weight", "bias")]


def ldm_file(
    network: UNet2DConditionModel, averaged: UNet2DConditionModel | None = None
) -> dict[str, Tensor]:
    """A whole Stable Diffusion file: the UNet, its averaged copy, the VAE, the text encoder, the buffers."""
    content = ldm_unet(network)
    if averaged is not None:
        for name, tensor in ldm_unet(averaged).items():
            content["model_ema." + "".join(name.split(".")[1:])] = tensor
        content |= {"model_ema.decay": torch.tensor(0.9999), "model_ema.num_updates": torch.tensor(7)}
    scheduler = DDPMScheduler(**SD_BETAS)
    kept = scheduler.alphas_cumprod
    for name, value in (
        ("betas", scheduler.betas),
        ("alphas_cumprod", kept),
        ("alphas_cumprod_prev", torch.cat([torch.ones(1), kept[:-1]])),
        ("sqrt_alphas_cumprod", kept.sqrt()),
        ("sqrt_one_minus_alphas_cumprod", (1 - kept).sqrt()),
        ("log_one_minus_alphas_cumprod", (1 - kept).log()),
        ("posterior_variance", scheduler.betas.clone()),
    ):
        content[name] = value
    content["first_stage_model.encoder.conv_in.weight"] = torch.zeros(4, 3, 3, 3)
    content["cond_stage_model.transformer.text_model.final_layer_norm.bias"] = torch.zeros(4)
    return content
