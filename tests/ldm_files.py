"""Single files of latent diffusion, by inverting diffusers' own conversion."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint
from torch import Tensor

from tests.checkpoint_files import SD_BETAS

XL: dict[str, Any] = {
    "use_linear_projection": True,
    "attention_head_dim": 2,
    "block_out_channels": (64, 64, 64),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": [1, 1, 2],
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 6 * 256 + 10,
}
"""Of Stable Diffusion XL, in small."""


def ldm_unet(network: UNet2DConditionModel) -> dict[str, Tensor]:
    """The tensors of a UNet under latent diffusion's names, by inverting diffusers' own conversion."""
    weights, config = network.state_dict(), network.config
    names = {name: torch.empty(0) for name in _ldm_names(config)}
    mapped = convert_ldm_unet_checkpoint(dict(names), config)
    origins = {id(tensor): name for name, tensor in names.items()}
    found = {
        origins[id(tensor)]: weights[name] for name, tensor in mapped.items() if name in weights
    }
    assert len(found) == len(weights)
    return found


def _ldm_names(config: Mapping[str, Any]) -> list[str]:
    """More names than there are: each block has every part that it may have."""
    resnet = [
        "in_layers.0",
        "in_layers.2",
        "emb_layers.1",
        "out_layers.0",
        "out_layers.3",
        "skip_connection",
    ]
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
    return [
        f"model.diffusion_model.{name}.{leaf}" for name in modules for leaf in ("weight", "bias")
    ]


def ldm_file(
    network: UNet2DConditionModel, averaged: UNet2DConditionModel | None = None
) -> dict[str, Tensor]:
    """A whole Stable Diffusion file: the UNet, its averaged copy, the VAE, the text encoder, the buffers."""
    content = ldm_unet(network)
    if averaged is not None:
        for name, tensor in ldm_unet(averaged).items():
            content["model_ema." + "".join(name.split(".")[1:])] = tensor
        content |= {
            "model_ema.decay": torch.tensor(0.9999),
            "model_ema.num_updates": torch.tensor(7),
        }
    scheduler = DDPMScheduler(**SD_BETAS)
    kept = scheduler.alphas_cumprod
    content |= {
        "betas": scheduler.betas,
        "alphas_cumprod": kept,
        "alphas_cumprod_prev": torch.cat([torch.ones(1), kept[:-1]]),
        "sqrt_alphas_cumprod": kept.sqrt(),
        "sqrt_one_minus_alphas_cumprod": (1 - kept).sqrt(),
        "log_one_minus_alphas_cumprod": (1 - kept).log(),
        "posterior_variance": scheduler.betas.clone(),
    }
    content["first_stage_model.encoder.conv_in.weight"] = torch.zeros(4, 3, 3, 3)
    content["cond_stage_model.transformer.text_model.final_layer_norm.bias"] = torch.zeros(4)
    return content
