"""The layout of PixArt-α's own code: text-conditional DiT with AdaLN-Single (arXiv:2310.00426).

Its training code fixes linear betas, 1,000 steps, noise prediction with a learned variance and latents of
Stable Diffusion's VAE × 0.18215. ``y_embedder.y_embedding`` stands for no text. Positions are computed, so
a file may lack them; one that has them must have those of a known scale.
"""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import PixArtTransformer2DModel
from diffusers.models.embeddings import get_2d_sincos_pos_embed
from torch import Tensor
from torch.nn import functional as F

from hddm.checkpoints.keys import KeyTable, Pair, module, same, split
from hddm.checkpoints.layouts import (
    LATENT_SCALE,
    LINEAR_BETAS,
    FileLayout,
    Forward,
    Hints,
    Modules,
    Weights,
    agreed_side,
    attend,
    count_blocks,
    heads,
    image,
    norm,
    shape_of,
    square,
)
from hddm.utils.errors import HddmError

NULL_TEXT = "y_embedder.y_embedding"
_SIGMA_TOKENS = 300
_SCALES = (1.0, 2.0, 0.5, 4.0)
_EXTRA = {"csize_embedder": "resolution_embedder", "ar_embedder": "aspect_ratio_embedder"}


def arguments(weights: Weights, hints: Hints, origin: str) -> dict[str, Any]:
    """Arguments of the `PixArtTransformer2DModel` with the same function."""
    width, channels, patch, _ = shape_of(weights, "x_embedder.proj.weight", 4, origin)
    rows = shape_of(weights, "final_layer.linear.weight", 2, origin)[0]
    depth = count_blocks(weights, "blocks")
    number = heads(width, depth, hints, origin)
    side, scale = _positions(weights, width, patch, hints, origin)
    return {
        "num_attention_heads": number,
        "attention_head_dim": width // number,
        "in_channels": channels,
        "out_channels": rows // patch**2,
        "num_layers": depth,
        "cross_attention_dim": width,
        "sample_size": side,
        "patch_size": patch,
        "norm_eps": 1e-6,
        "interpolation_scale": scale,
        "use_additional_conditions": "csize_embedder.mlp.0.weight" in weights,
        "caption_channels": shape_of(weights, "y_embedder.y_proj.fc1.weight", 2, origin)[1],
    }


def _positions(
    weights: Weights, width: int, patch: int, hints: Hints, origin: str
) -> tuple[int, float | None]:
    """Side of the input and scale of its positions, which the network computes anew."""
    if "pos_embed" not in weights:
        if hints.sample_size is None:
            raise HddmError(f"{origin}: has no pos_embed; pass --sample-size, the side of its latents")
        return hints.sample_size, None
    stored = weights["pos_embed"]
    tokens = shape_of(weights, "pos_embed", 3, origin)[1]
    side = agreed_side(square(tokens, patch, origin), hints, origin)
    if tuple(stored.shape) == (1, tokens, width):
        for scale in _SCALES:
            if torch.allclose(_positions_at(width, side // patch, scale), stored.float(), atol=2e-3):
                return side, scale
    raise HddmError(f"{origin}: pos_embed {tuple(stored.shape)} is none that PixArt computes")


def table(config: Mapping[str, Any], weights: Weights) -> KeyTable:
    """Names of the layout against those of `PixArtTransformer2DModel`."""
    time = "adaln_single.emb.timestep_embedder"
    pairs: list[Pair] = [
        *module("x_embedder.proj", "pos_embed.proj"),
        *module("t_embedder.mlp.0", f"{time}.linear_1"),
        *module("t_embedder.mlp.2", f"{time}.linear_2"),
        *module("t_block.1", "adaln_single.linear"),
        *module("y_embedder.y_proj.fc1", "caption_projection.linear_1"),
        *module("y_embedder.y_proj.fc2", "caption_projection.linear_2"),
        same("final_layer.scale_shift_table", "scale_shift_table"),
        *module("final_layer.linear", "proj_out"),
    ]
    if config["use_additional_conditions"]:
        for theirs, ours in _EXTRA.items():
            pairs += module(f"{theirs}.mlp.0", f"adaln_single.emb.{ours}.linear_1")
            pairs += module(f"{theirs}.mlp.2", f"adaln_single.emb.{ours}.linear_2")
    for n in range(config["num_layers"]):
        theirs, ours = f"blocks.{n}", f"transformer_blocks.{n}"
        pairs += [
            same(f"{theirs}.scale_shift_table", f"{ours}.scale_shift_table"),
            *split(f"{theirs}.attn.qkv", [f"{ours}.attn1.to_{leaf}" for leaf in "qkv"]),
            *module(f"{theirs}.attn.proj", f"{ours}.attn1.to_out.0"),
            *module(f"{theirs}.cross_attn.q_linear", f"{ours}.attn2.to_q"),
            *split(f"{theirs}.cross_attn.kv_linear", [f"{ours}.attn2.to_{leaf}" for leaf in "kv"]),
            *module(f"{theirs}.cross_attn.proj", f"{ours}.attn2.to_out.0"),
            *module(f"{theirs}.mlp.fc1", f"{ours}.ff.net.0.proj"),
            *module(f"{theirs}.mlp.fc2", f"{ours}.ff.net.2"),
        ]
    return KeyTable(pairs, {"pos_embed": "computed anew", NULL_TEXT: "kept as the null condition"})


def forward(weights: Weights, config: Mapping[str, Any]) -> Forward:
    """The network over the layout's own names, without masks."""

    def run(x: Tensor, timestep: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        own, patch, number = Modules(weights, x), config["patch_size"], config["num_attention_heads"]
        # In half precision the file holds them rounded; they are computed anew all the same.
        is_exact = "pos_embed" in weights and weights["pos_embed"].dtype == torch.float32
        positions = own.get("pos_embed") if is_exact else _computed(config).to(x)
        h = own.tokens(x, "x_embedder.proj", patch) + positions
        c = own.times(timestep, "t_embedder.mlp")
        if config["use_additional_conditions"]:
            sizes = conditions["resolution"].flatten(), conditions["aspect_ratio"].flatten()
            pieces = [
                own.times(values, f"{name}.mlp").view(len(x), -1)
                for name, values in zip(_EXTRA, sizes, strict=True)
            ]
            c = c + torch.cat(pieces, 1)
        shared = own.affine(F.silu(c), "t_block.1").unflatten(-1, (6, -1))
        given = conditions["encoder_hidden_states"].to(x.dtype)
        text = own.perceptron(given, "y_embedder.y_proj.fc1", "y_embedder.y_proj.fc2")
        for n in range(config["num_layers"]):
            block = f"blocks.{n}"
            parts = (own.get(f"{block}.scale_shift_table") + shared).chunk(6, 1)
            q, k, v = own.affine(norm(h, parts[0], parts[1]), f"{block}.attn.qkv").chunk(3, -1)
            h = h + parts[2] * own.affine(attend(q, k, v, number), f"{block}.attn.proj")
            k, v = own.affine(text, f"{block}.cross_attn.kv_linear").chunk(2, -1)
            crossed = attend(own.affine(h, f"{block}.cross_attn.q_linear"), k, v, number)
            h = h + own.affine(crossed, f"{block}.cross_attn.proj")
            z = norm(h, parts[3], parts[4])
            h = h + parts[5] * own.perceptron(z, f"{block}.mlp.fc1", f"{block}.mlp.fc2")
        shift, scale = (own.get("final_layer.scale_shift_table") + c[:, None]).chunk(2, 1)
        return image(own.affine(norm(h, shift, scale), "final_layer.linear"), patch)

    return run


def _computed(config: Mapping[str, Any]) -> Tensor:
    """Positions (1, tokens, width) as PixArt's code computes them."""
    scale = config["interpolation_scale"] or max(config["sample_size"] // 64, 1)
    width = config["num_attention_heads"] * config["attention_head_dim"]
    return _positions_at(width, config["sample_size"] // config["patch_size"], scale)


def _positions_at(width: int, grid: int, scale: float) -> Tensor:
    computed: Tensor = get_2d_sincos_pos_embed(
        width, grid, interpolation_scale=scale, base_size=grid, output_type="pt"
    )
    return computed[None].float()


def _latents(weights: Weights) -> tuple[float | None, tuple[str, ...]]:
    """PixArt-Σ has the same names, texts of 300 tokens instead of 120, and the latents of another VAE."""
    null = weights.get(NULL_TEXT)
    if null is not None and null.ndim > 1 and null.shape[-2] == _SIGMA_TOKENS:
        return None, (f"texts of {_SIGMA_TOKENS} tokens are PixArt-Σ's: no latent scale is claimed",)
    return LATENT_SCALE, ()


PIXART_ORIGINAL = FileLayout(
    name="pixart-original",
    markers=("t_block.1.weight", "y_embedder.y_proj.fc1.weight", "blocks.0.scale_shift_table"),
    network=PixArtTransformer2DModel,
    arguments=arguments,
    table=table,
    forward=forward,
    nulls={"encoder_hidden_states": NULL_TEXT},
    scheduler=LINEAR_BETAS,
    latents=_latents,
)
