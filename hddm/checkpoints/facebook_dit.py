"""The layout of facebookresearch/DiT: class-conditional DiT with adaLN-Zero (arXiv:2212.09748).

Its training code fixes linear betas, 1,000 steps, noise prediction with a learned variance, latents of
Stable Diffusion's VAE × 0.18215, and a last row of the class table that stands for no class. SiT files have
the same names and another meaning; nothing in them tells.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from hddm.checkpoints.keys import KeyTable, Pair, module, same
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
from hddm.networks.transformers import ExpertTransformer


def arguments(weights: Weights, hints: Hints, origin: str) -> dict[str, Any]:
    """Arguments of the `ExpertTransformer` with the same function."""
    width, channels, patch, _ = shape_of(weights, "x_embedder.proj.weight", 4, origin)
    tokens = shape_of(weights, "pos_embed", 3, origin)[1]
    rows = shape_of(weights, "final_layer.linear.weight", 2, origin)[0]
    classes = shape_of(weights, "y_embedder.embedding_table.weight", 2, origin)[0] - 1
    depth = count_blocks(weights, "blocks")
    return {
        "sample_size": agreed_side(square(tokens, patch, origin), hints, origin),
        "in_channels": channels,
        "out_channels": rows // patch**2,
        "patch_size": patch,
        "hidden_size": width,
        "depth": depth,
        "num_heads": heads(width, depth, hints, origin),
        "num_classes": classes,
        "modulation": "zero",
        "norm_eps": 1e-6,
    }


def table(config: Mapping[str, Any], weights: Weights) -> KeyTable:
    """Names of the layout against those of `ExpertTransformer`."""
    pairs: list[Pair] = [
        same("pos_embed", "pos_embed"),
        same("y_embedder.embedding_table.weight", "class_embed.weight"),
        *module("x_embedder.proj", "patch_embed"),
        *module("t_embedder.mlp.0", "time_embed.mlp.0"),
        *module("t_embedder.mlp.2", "time_embed.mlp.2"),
    ]
    for n in range(config["depth"]):
        theirs, ours = f"blocks.{n}", f"layers.{n}"
        pairs += [
            same(f"{theirs}.attn.qkv.weight", f"{ours}.attn.in_proj_weight"),
            same(f"{theirs}.attn.qkv.bias", f"{ours}.attn.in_proj_bias"),
            *module(f"{theirs}.attn.proj", f"{ours}.attn.out_proj"),
            *module(f"{theirs}.mlp.fc1", f"{ours}.mlp.0"),
            *module(f"{theirs}.mlp.fc2", f"{ours}.mlp.2"),
            *module(f"{theirs}.adaLN_modulation.1", f"{ours}.modulation"),
        ]
    pairs += module("final_layer.linear", "final_layer.linear")
    pairs += module("final_layer.adaLN_modulation.1", "final_layer.modulation")
    return KeyTable(pairs)


def forward(weights: Weights, config: Mapping[str, Any]) -> Forward:
    """The network over the layout's own names."""

    def run(x: Tensor, timestep: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        own, patch = Modules(weights, x), config["patch_size"]
        h = own.tokens(x, "x_embedder.proj", patch) + own.get("pos_embed")
        label = own.get("y_embedder.embedding_table.weight")[conditions["class_labels"]]
        c = F.silu(own.times(timestep, "t_embedder.mlp") + label)[:, None]
        for n in range(config["depth"]):
            block = f"blocks.{n}"
            parts = own.affine(c, f"{block}.adaLN_modulation.1").chunk(6, -1)
            q, k, v = own.affine(norm(h, parts[0], parts[1]), f"{block}.attn.qkv").chunk(3, -1)
            h = h + parts[2] * own.affine(attend(q, k, v, config["num_heads"]), f"{block}.attn.proj")
            z = norm(h, parts[3], parts[4])
            h = h + parts[5] * own.perceptron(z, f"{block}.mlp.fc1", f"{block}.mlp.fc2")
        shift, scale = own.affine(c, "final_layer.adaLN_modulation.1").chunk(2, -1)
        return image(own.affine(norm(h, shift, scale), "final_layer.linear"), patch)

    return run


_SIT = "SiT files look the same and mean a velocity: this is read as DiT's noise prediction, wrong for a SiT"
FACEBOOK_DIT = FileLayout(
    name="facebook-dit",
    markers=(
        "y_embedder.embedding_table.weight",
        "blocks.0.adaLN_modulation.1.weight",
        "x_embedder.proj.weight",
    ),
    network=ExpertTransformer,
    arguments=arguments,
    table=table,
    forward=forward,
    nulls={},
    scheduler=LINEAR_BETAS,
    latents=lambda _: (LATENT_SCALE, (_SIT,)),
)
