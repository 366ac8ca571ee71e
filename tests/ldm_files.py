"""Single files of latent diffusion: the network by inverting diffusers' own conversion, the rest by hand."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DDPMScheduler,
    DiffusionPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint
from torch import Tensor
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedModel,
)

from tests.checkpoint_files import SD_BETAS, randomised, text_unet
from tests.component_files import write_clip, write_vae

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
    """A Stable Diffusion file without VAE and text encoder: the UNet, its averaged copy, the buffers."""
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
    return content


_RENAMED_VAE = (
    (r"^(\w+)\.conv_norm_out\.", r"\1.norm_out."),
    (r"\.down_blocks\.(\d+)\.resnets\.", r".down.\1.block."),
    (r"\.down_blocks\.(\d+)\.downsamplers\.0\.", r".down.\1.downsample."),
    (r"\.up_blocks\.(\d+)\.resnets\.", r".up.\1.block."),
    (r"\.up_blocks\.(\d+)\.upsamplers\.0\.", r".up.\1.upsample."),
    (r"\.mid_block\.resnets\.0\.", r".mid.block_1."),
    (r"\.mid_block\.resnets\.1\.", r".mid.block_2."),
    (r"\.mid_block\.attentions\.0\.group_norm\.", r".mid.attn_1.norm."),
    (r"\.mid_block\.attentions\.0\.to_([qkv])\.", r".mid.attn_1.\1."),
    (r"\.mid_block\.attentions\.0\.to_out\.0\.", r".mid.attn_1.proj_out."),
    (r"\.conv_shortcut\.", r".nin_shortcut."),
)
_RENAMED_CLIP = (
    ("embeddings.token_embedding.", "token_embedding."),
    ("embeddings.position_embedding.weight", "positional_embedding"),
    ("final_layer_norm.", "ln_final."),
    ("encoder.layers.", "transformer.resblocks."),
    ("layer_norm1.", "ln_1."),
    ("layer_norm2.", "ln_2."),
    ("self_attn.out_proj.", "attn.out_proj."),
    ("mlp.fc1.", "mlp.c_fc."),
    ("mlp.fc2.", "mlp.c_proj."),
)


def ldm_vae(vae: AutoencoderKL) -> dict[str, Tensor]:
    """A VAE's tensors as in a whole file, renamed by hand: its attention is made of convolutions there."""
    last, content = len(vae.config["block_out_channels"]) - 1, {}
    for name, tensor in vae.state_dict().items():
        for ours, theirs in _RENAMED_VAE:
            name = re.sub(ours, theirs, name)
        name = re.sub(r"\.up\.(\d+)", lambda match: f".up.{last - int(match[1])}", name)
        is_layer = re.search(r"\.mid\.attn_1\.(q|k|v|proj_out)\.weight", name)
        content[f"first_stage_model.{name}"] = tensor[:, :, None, None] if is_layer else tensor
    return content


def plain_clip(prefix: str, model: PreTrainedModel) -> dict[str, Tensor]:
    """A text encoder's tensors under the names of transformers, with what old versions of it saved."""
    content = {
        f"{prefix}text_model.{name.removeprefix('text_model.')}": tensor
        for name, tensor in model.state_dict().items()
    }
    length = model.config.max_position_embeddings
    return content | {f"{prefix}text_model.embeddings.position_ids": torch.arange(length)[None]}


def open_clip(prefix: str, model: PreTrainedModel) -> dict[str, Tensor]:
    """A text encoder's tensors under the names of open_clip, renamed by hand."""
    content, fused = {}, dict[str, dict[str, Tensor]]()
    for name, tensor in model.state_dict().items():
        name = name.removeprefix("text_model.")
        if name == "text_projection.weight":
            content[f"{prefix}text_projection"] = tensor.T.contiguous()
            continue
        for ours, theirs in _RENAMED_CLIP:
            name = name.replace(ours, theirs)
        match = re.fullmatch(r"(.*)self_attn\.([qkv])_proj\.(weight|bias)", name)
        if match is None:
            content[prefix + name] = tensor
        else:
            place = f"{prefix}{match[1]}attn.in_proj_{match[3]}"
            fused.setdefault(place, {})[match[2]] = tensor
    for name, parts in fused.items():
        content[name] = torch.cat([parts[part] for part in "qkv"])
    return content | {f"{prefix}logit_scale": torch.tensor(4.6)}


def whole_file(pipe: DiffusionPipeline, kind: str) -> dict[str, Tensor]:
    """A whole file of Stable Diffusion ``1``, ``2`` or ``XL`` that holds what a pipeline does."""
    if kind == "1":
        text = plain_clip("cond_stage_model.transformer.", pipe.text_encoder)
        return ldm_file(pipe.unet) | ldm_vae(pipe.vae) | text
    if kind == "2":
        text = open_clip("cond_stage_model.model.", pipe.text_encoder)
        # Its code reads the output of the last layer but one.
        last = f"transformer.resblocks.{pipe.text_encoder.config.num_hidden_layers}."
        for name in [*text]:
            if "resblocks.0." in name:
                text[name.replace("transformer.resblocks.0.", last)] = torch.ones_like(text[name])
        width = pipe.text_encoder.config.hidden_size
        text["cond_stage_model.model.text_projection"] = torch.eye(width)
        return ldm_file(pipe.unet) | ldm_vae(pipe.vae) | text
    first = plain_clip("conditioner.embedders.0.transformer.", pipe.text_encoder)
    second = open_clip("conditioner.embedders.1.model.", pipe.text_encoder_2)
    return ldm_unet(pipe.unet) | ldm_vae(pipe.vae) | first | second


SIZES: dict[str, dict[str, Any]] = {
    "1": {"cross_attention_dim": 64, "attention_head_dim": 8, "block_out_channels": (32, 64)},
    "2": {
        "cross_attention_dim": 64,
        "use_linear_projection": True,
        "attention_head_dim": [1, 2],
        "block_out_channels": (64, 128),
    },
    "XL": XL
    | {
        "cross_attention_dim": 128,
        "attention_head_dim": 1,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 64,
    },
}
"""Of tiny networks with text of width 64, or twice that for XL, whose heads are those of the presets."""
VAE_SCALES = {"1": 0.18215, "2": 0.18215, "XL": 0.13025}


def tiny_pipeline(
    folder: Path,
    kind: str,
    seed: int = 0,
    unet: UNet2DConditionModel | None = None,
    text_layers: int = 2,
    **scheduler: Any,
) -> DiffusionPipeline:
    """A tiny Stable Diffusion ``1``, ``2`` or ``XL`` of random weights, saved in ``folder``."""
    kept = {"kind": "kl", "factor": 8, "block_out_channels": (32,) * 4, "norm_num_groups": 32}
    parts: dict[str, Any] = {
        "vae": write_vae(folder / "parts/vae", scaling_factor=VAE_SCALES[kind], **kept),
        "unet": unet or text_unet(seed, **SIZES[kind]),
        "scheduler": DDIMScheduler(**SD_BETAS, clip_sample=False, steps_offset=1, **scheduler),
    }
    heads = {"num_attention_heads": 1, "num_hidden_layers": text_layers, "eos_token_id": 517}
    open_clips = {"hidden_act": "gelu"}
    write_clip(folder / "parts", 64, **heads, **(open_clips if kind == "2" else {}))
    words = folder / "parts/tokenizer"
    parts["text_encoder"] = CLIPTextModel.from_pretrained(folder / "parts/text_encoder")
    parts["tokenizer"] = CLIPTokenizer.from_pretrained(words)
    if kind == "2":
        parts["tokenizer"] = CLIPTokenizer.from_pretrained(words, pad_token="!")
    if kind != "XL":
        none = {"safety_checker": None, "feature_extractor": None}
        pipe = StableDiffusionPipeline(**parts, **none, requires_safety_checker=False)
    else:
        config = parts["text_encoder"].config.to_dict() | open_clips | {"projection_dim": 64}
        second = CLIPTextModelWithProjection(CLIPTextConfig(**config))
        parts["text_encoder_2"] = randomised(second, 7)
        parts["tokenizer_2"] = CLIPTokenizer.from_pretrained(words, pad_token="!")
        pipe = StableDiffusionXLPipeline(**parts, add_watermarker=False)
    pipe.save_pretrained(folder / "pipeline")
    return pipe
