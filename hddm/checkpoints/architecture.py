"""Changes to a network during its conversion, on request: attention to text, and the paper's recipe."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiTTransformer2DModel, ModelMixin
from torch import Tensor

from hddm.checkpoints.sources import Checkpoint, KeyTable, Pair, Weights, as_planned, module
from hddm.networks.folders import empty_network
from hddm.networks.layers import Attention, linear
from hddm.networks.transformers import ExpertTransformer
from hddm.utils.errors import HddmError
from hddm.utils.streams import Use, seed_of
from hddm.utils.tensors import Planned

PAPER_STEPS = 999.0
# Parts that the recipe of arXiv:2603.06741 reinitialises: the head and the text projection.
_REINITIALISED: Mapping[str, tuple[str, ...]] = {
    "ExpertTransformer": ("final_layer.", "text_proj."),
    "DiTTransformer2DModel": ("proj_out_",),
    "PixArtTransformer2DModel": ("proj_out.", "scale_shift_table", "caption_projection."),
}
# Options of `DiTTransformer2DModel` that are fixed in `ExpertTransformer`.
_AS_OURS = {"attention_bias": True, "norm_elementwise_affine": False, "activation_fn": "gelu-approximate"}


@dataclass(frozen=True)
class Built:
    """A network to write: class, arguments and tensors."""

    network: type[ModelMixin]
    arguments: dict[str, Any]
    tensors: list[Planned]


def restart(built: Built, channels: int) -> Built:
    """Give the network a fresh head of ``channels`` outputs and a fresh text projection; keep all else."""
    prefixes = _REINITIALISED.get(built.network.__name__)
    if prefixes is None:
        raise HddmError(f"`recipe` paper is for transformers ({', '.join(_REINITIALISED)})")
    arguments = {**built.arguments, "out_channels": channels}
    depth = "depth" if built.network is ExpertTransformer else "num_layers"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(0, Use.FRESH_WEIGHTS))
        fresh = built.network(**{**arguments, depth: 0}).state_dict()
    tensors = [one for one in built.tensors if not one.name.startswith(prefixes)]
    tensors += [as_planned(name, value) for name, value in fresh.items() if name.startswith(prefixes)]
    return Built(built.network, arguments, tensors)


def as_expert_transformer(
    source: Checkpoint, tensors: list[Planned]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights and arguments of the `ExpertTransformer` that computes the function of a source's DiT."""
    weights = {one.name: one.read() for one in tensors}
    if source.network is ExpertTransformer:
        return weights, dict(source.arguments)
    if source.network is not DiTTransformer2DModel:
        kinds = "facebook-dit, diffusers-dit or an expert folder of hddm's own transformer"
        raise HddmError(f"{source.path}: only a DiT can take text ({kinds})")
    # Includes the class's defaults, which a config may omit.
    given = empty_network(source.network, source.arguments, len(weights), str(source.path)).config
    alike = ("sample_size", "in_channels", "out_channels", "patch_size")
    config = {
        **{key: given[key] for key in alike},
        "hidden_size": given["num_attention_heads"] * given["attention_head_dim"],
        "depth": given["num_layers"],
        "num_heads": given["num_attention_heads"],
        "num_classes": given["num_embeds_ada_norm"],
        "modulation": "zero",
        "norm_eps": 1e-6,
        "mlp_norm_eps": given["norm_eps"],
        "frequency_shift": 1,
    }
    for key, usual in _AS_OURS.items():
        if given[key] != usual:
            raise HddmError(
                f"{source.path}: {key} is {str(given[key])[:40]!r}, and a DiT can take text "
                f"with {usual!r} only; convert without `text_dim`"
            )
    renamed = _diffusers_dit_table(config["depth"]).renamed(weights, str(source.path))
    # The class computes its positions; ours are a parameter.
    shallow = DiTTransformer2DModel(**{**source.arguments, "num_layers": 0})
    return {**renamed, "pos_embed": shallow.pos_embed.pos_embed.clone()}, config


def _diffusers_dit_table(depth: int) -> KeyTable:
    """Map names of `DiTTransformer2DModel` to ours; each of its blocks holds a copy of the embedders."""
    pairs = [
        *module("pos_embed.proj", "patch_embed"),
        *module("proj_out_1", "final_layer.modulation"),
        *module("proj_out_2", "final_layer.linear"),
    ]
    copies = {"class_embedder.embedding_table.weight": "class_embed.weight"}
    for leaf in ("weight", "bias"):
        copies[f"timestep_embedder.linear_1.{leaf}"] = f"time_embed.mlp.0.{leaf}"
        copies[f"timestep_embedder.linear_2.{leaf}"] = f"time_embed.mlp.2.{leaf}"
    for theirs, ours in copies.items():
        names = tuple(f"transformer_blocks.{n}.norm1.emb.{theirs}" for n in range(depth))
        pairs.append(Pair(names, (ours,), copies=True))
    for n in range(depth):
        theirs, ours = f"transformer_blocks.{n}", f"layers.{n}"
        for leaf in ("weight", "bias"):
            fused = tuple(f"{theirs}.attn1.to_{one}.{leaf}" for one in "qkv")
            pairs.append(Pair(fused, (f"{ours}.attn.in_proj_{leaf}",)))
        pairs += [
            *module(f"{theirs}.attn1.to_out.0", f"{ours}.attn.out_proj"),
            *module(f"{theirs}.ff.net.0.proj", f"{ours}.mlp.0"),
            *module(f"{theirs}.ff.net.2", f"{ours}.mlp.2"),
            *module(f"{theirs}.norm1.linear", f"{ours}.modulation"),
        ]
    return KeyTable(pairs)


def add_text(
    weights: Weights, config: Mapping[str, Any], text_dim: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return weights and config with cross-attention to text tokens of width ``text_dim``.

    Output projections are zero, so that outputs keep their bits with any text until training changes that;
    the rest starts as in a fresh `ExpertTransformer`. Raises `HddmError` where the network takes text.
    """
    if config.get("text_dim") is not None:
        raise HddmError(f"text_dim is {config['text_dim']}: the network already takes text")
    width, heads = int(config["hidden_size"]), int(config["num_heads"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(0, Use.FRESH_WEIGHTS, 1))
        modules = {"text_proj": linear(text_dim, width).state_dict()}
        for i in range(int(config["depth"])):
            modules[f"layers.{i}.cross_attn"] = Attention(width, heads, silent=True).state_dict()
    like = weights["patch_embed.weight"]
    added = {f"{name}.{key}": one.to(like) for name, own in modules.items() for key, one in own.items()}
    return {**weights, **added}, {**config, "text_dim": text_dim}
