"""What a conversion may change about a network on request: its modulation, text, and the paper's recipe."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiTTransformer2DModel, ModelMixin
from torch import Tensor

from hddm.checkpoints.keys import KeyTable, Pair, as_planned, module
from hddm.checkpoints.modulation import add_text, fold
from hddm.checkpoints.sources import Source
from hddm.networks.transformers import ExpertTransformer
from hddm.utils.errors import HddmError
from hddm.utils.weights import Planned

ADALN_SINGLE = "adaln-single"
PAPER_STEPS = 999.0
FOLD_TIMES = 1000
# What the recipe of arXiv:2603.06741 starts anew: the head and the projection of the text.
_REINITIALISED: Mapping[str, tuple[str, ...]] = {
    "ExpertTransformer": ("final_layer.", "text_proj."),
    "DiTTransformer2DModel": ("proj_out_",),
    "PixArtTransformer2DModel": ("proj_out.", "scale_shift_table", "caption_projection."),
}
# What `DiTTransformer2DModel` may vary and `ExpertTransformer` does not.
_AS_OURS = {"attention_bias": True, "norm_elementwise_affine": False, "activation_fn": "gelu-approximate"}


@dataclass(frozen=True)
class Built:
    """A network to write: its class, arguments and tensors.

    ``modulation_error`` is that of a fold, None where the modulation is the source's.
    """

    network: type[ModelMixin]
    arguments: dict[str, Any]
    tensors: list[Planned]
    modulation_error: float | None = None


def reshape(
    source: Source,
    tensors: list[Planned],
    end: float,
    architecture: str | None,
    rank: int,
    text_dim: int | None,
) -> Built:
    """The source's network, with AdaLN-Single for adaLN-Zero and with text where that is asked for.

    Args:
        source: see `Source`.
        tensors: the network's, planned.
        end: the largest timestep that the network is fed.
        architecture: `ADALN_SINGLE` or None.
        rank: of the residual that every block keeps; see `hddm.checkpoints.modulation.fold`.
        text_dim: width of text tokens to attend to.

    Raises:
        HddmError: for a network that is no DiT with adaLN-Zero, or that knows text already.
    """
    if architecture is None and text_dim is None:
        return Built(source.network, dict(source.arguments), tensors)
    weights, config = _as_expert_transformer(source, tensors)
    error = None
    if architecture is not None:
        if architecture != ADALN_SINGLE:
            raise HddmError(f"--architecture {architecture}: the one that there is is {ADALN_SINGLE}")
        if config.get("modulation") != "zero":
            raise HddmError(f"--architecture {architecture}: {source.path} has no adaLN-Zero to fold")
        folded = fold(weights, config, torch.linspace(0, end, FOLD_TIMES), rank)
        weights, config, error = folded.weights, folded.config, folded.modulation_error
    if text_dim is not None:
        weights, config = add_text(weights, config, text_dim, seed=0)
    return Built(ExpertTransformer, config, [as_planned(*item) for item in weights.items()], error)


def restart(built: Built, channels: int, seed: int = 0) -> Built:
    """The network with a fresh head of ``channels`` outputs and fresh text projection, all else kept.

    Raises:
        HddmError: for a network whose head is not known.
    """
    prefixes = _REINITIALISED.get(built.network.__name__)
    if prefixes is None:
        raise HddmError(f"--recipe paper is for transformers ({', '.join(_REINITIALISED)})")
    arguments = {**built.arguments, "out_channels": channels}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = built.network(**{**arguments, _depth_key(built.network): 0}).state_dict()
    tensors = [one for one in built.tensors if not one.name.startswith(prefixes)]
    tensors += [as_planned(name, value) for name, value in fresh.items() if name.startswith(prefixes)]
    return Built(built.network, arguments, tensors, built.modulation_error)


def _depth_key(network: type[ModelMixin]) -> str:
    return "depth" if network is ExpertTransformer else "num_layers"


def _as_expert_transformer(
    source: Source, tensors: list[Planned]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    weights = {one.name: one.read() for one in tensors}
    if source.network is ExpertTransformer:
        return weights, dict(source.arguments)
    if source.network is not DiTTransformer2DModel:
        kinds = "facebook-dit, diffusers-dit or an expert folder of hddm's own transformer"
        raise HddmError(f"{source.path}: only a DiT can change its architecture ({kinds})")
    # A config may leave out what is the class's default.
    parameters = inspect.signature(DiTTransformer2DModel.__init__).parameters
    given = {name: one.default for name, one in parameters.items()} | dict(source.arguments)
    del given["self"]
    width = given["num_attention_heads"] * given["attention_head_dim"]
    config = {
        "sample_size": given["sample_size"],
        "in_channels": given["in_channels"],
        "out_channels": given["out_channels"],
        "patch_size": given["patch_size"],
        "hidden_size": width,
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
                f"{source.path}: {key} is {str(given[key])[:40]!r}, and a DiT can change its architecture "
                f"with {usual!r} only; convert without --architecture and --text-dim"
            )
    renamed = _diffusers_dit_table(config["depth"]).renamed(weights, str(source.path))
    # The class computes its positions; ours are a parameter.
    shallow = DiTTransformer2DModel(**{**given, "num_layers": 0})
    return {**renamed, "pos_embed": shallow.pos_embed.pos_embed.clone()}, config


def _diffusers_dit_table(depth: int) -> KeyTable:
    """Names of `DiTTransformer2DModel` against ours; its blocks hold a copy of the embedders each."""

    def copies(leaf: str, ours: str) -> Pair:
        names = tuple((f"transformer_blocks.{n}.norm1.emb.{leaf}", 1) for n in range(depth))
        return Pair(names, ((ours, 1),), copies=True)

    pairs = [
        copies("class_embedder.embedding_table.weight", "class_embed.weight"),
        *module("pos_embed.proj", "patch_embed"),
        *module("proj_out_1", "final_layer.modulation"),
        *module("proj_out_2", "final_layer.linear"),
    ]
    for theirs, ours in (("linear_1", "0"), ("linear_2", "2")):
        for leaf in ("weight", "bias"):
            pairs.append(copies(f"timestep_embedder.{theirs}.{leaf}", f"time_embed.mlp.{ours}.{leaf}"))
    for n in range(depth):
        theirs, ours = f"transformer_blocks.{n}", f"layers.{n}"
        qkv = [tuple((f"{theirs}.attn1.to_{one}.{leaf}", 1) for one in "qkv") for leaf in ("weight", "bias")]
        pairs += [
            Pair(qkv[0], ((f"{ours}.attn.in_proj_weight", 3),)),
            Pair(qkv[1], ((f"{ours}.attn.in_proj_bias", 3),)),
            *module(f"{theirs}.attn1.to_out.0", f"{ours}.attn.out_proj"),
            *module(f"{theirs}.ff.net.0.proj", f"{ours}.mlp.0"),
            *module(f"{theirs}.ff.net.2", f"{ours}.mlp.2"),
            *module(f"{theirs}.norm1.linear", f"{ours}.modulation"),
        ]
    return KeyTable(pairs)
