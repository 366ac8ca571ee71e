"""Single files of facebookresearch/DiT and of PixArt-α's own code, from networks of the same function."""

import re
from typing import Any

import torch
from diffusers import PixArtTransformer2DModel
from torch import Tensor

from hddm.networks.transformers import ExpertTransformer
from tests.checkpoint_files import randomised

DIT = {
    "sample_size": 8,
    "hidden_size": 32,
    "depth": 2,
    "num_heads": 4,
    "num_classes": 5,
    "modulation": "zero",
    "norm_eps": 1e-6,
    "out_channels": 8,
}
_DIT_NAMES = {
    r"^patch_embed\.": "x_embedder.proj.",
    r"^time_embed\.": "t_embedder.",
    r"^class_embed\.": "y_embedder.embedding_table.",
    r"^layers\.": "blocks.",
    r"attn\.in_proj_": "attn.qkv.",
    r"attn\.out_proj": "attn.proj",
    r"mlp\.0": "mlp.fc1",
    r"(layers|blocks)(.*)mlp\.2": r"\1\2mlp.fc2",
    r"\.modulation\.": ".adaLN_modulation.1.",
    r"t_embedder\.mlp\.fc1": "t_embedder.mlp.0",
}
_PIXART_NAMES = {
    r"^pos_embed\.proj": "x_embedder.proj",
    r"^adaln_single\.emb\.timestep_embedder\.": "t_embedder.mlp.",
    r"^adaln_single\.emb\.resolution_embedder\.": "csize_embedder.mlp.",
    r"^adaln_single\.emb\.aspect_ratio_embedder\.": "ar_embedder.mlp.",
    r"^adaln_single\.linear": "t_block.1",
    r"^caption_projection\.linear_": "y_embedder.y_proj.fc",
    r"mlp\.linear_1": "mlp.0",
    r"mlp\.linear_2": "mlp.2",
    r"^scale_shift_table": "final_layer.scale_shift_table",
    r"^proj_out": "final_layer.linear",
    r"^transformer_blocks": "blocks",
    r"attn1\.to_out\.0": "attn.proj",
    r"attn2\.to_out\.0": "cross_attn.proj",
    r"attn2\.to_q": "cross_attn.q_linear",
    r"ff\.net\.0\.proj": "mlp.fc1",
    r"ff\.net\.2": "mlp.fc2",
}


def dit_network(seed: int = 0, **changes: Any) -> ExpertTransformer:
    """Small numbers, as `randomised` draws them."""
    network = randomised(ExpertTransformer(**DIT | changes), seed)
    assert isinstance(network, ExpertTransformer)
    return network


def dit_file(network: ExpertTransformer) -> dict[str, Tensor]:
    return {_renamed(name, _DIT_NAMES): tensor for name, tensor in network.state_dict().items()}


def pixart_file(network: PixArtTransformer2DModel, positions: bool = True) -> dict[str, Tensor]:
    """With fused matrices and an embedding of no text, with or without the table of positions."""
    weights = network.state_dict()
    content = {"y_embedder.y_embedding": torch.full((6, 12), 0.5)}
    if positions:
        content["pos_embed"] = network.pos_embed.pos_embed.clone()
    for n in range(network.config["num_layers"]):
        for leaf in ("weight", "bias"):
            one, two = f"transformer_blocks.{n}.attn1.to_", f"transformer_blocks.{n}.attn2.to_"
            fused = [weights.pop(f"{one}{letter}.{leaf}") for letter in "qkv"]
            content[f"blocks.{n}.attn.qkv.{leaf}"] = torch.cat(fused)
            crossed = [weights.pop(f"{two}{letter}.{leaf}") for letter in "kv"]
            content[f"blocks.{n}.cross_attn.kv_linear.{leaf}"] = torch.cat(crossed)
    return content | {_renamed(name, _PIXART_NAMES): tensor for name, tensor in weights.items()}


def _renamed(name: str, names: dict[str, str]) -> str:
    for pattern, theirs in names.items():
        name = re.sub(pattern, theirs, name)
    return name
