"""Layouts of single files: their interface, and those of DiT and of PixArt-α; `ldm` has latent diffusion's.

Each layout's network is written over the layout's own names, after the papers and independently of
`hddm.networks` and diffusers, so that comparing the two finds mistakes in a table of names. Tensors are cast
when used, so that mapped weights never lie in memory as a whole.

The training code of facebookresearch/DiT (arXiv:2212.09748) and of PixArt-α (arXiv:2310.00426) fixes linear
betas, 1,000 steps, noise prediction with a learned variance, and latents of Stable Diffusion's VAE × 0.18215.

DiT has classes and adaLN-Zero; the last row of its class table is the null class. SiT files have the same
names with another meaning, and nothing in them distinguishes the two. PixArt has text and AdaLN-Single;
``y_embedder.y_embedding`` is the null text. Its positions are computed, so a file may lack them; where it has
them, they must match a known scale.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.models.embeddings import get_2d_sincos_pos_embed
from torch import Tensor
from torch.nn import functional as F

from hddm.checkpoints.sources import Declared, Forward, KeyTable, Pair, Weights, module, same
from hddm.condition_names import LABELS, TEXT
from hddm.networks.encoders import STABLE_DIFFUSION_SCALE
from hddm.networks.families.expert import EXPERT
from hddm.networks.families.family import Family
from hddm.networks.families.pixart import PIXART
from hddm.networks.sizes import SIZES
from hddm.predictions import PredictionType
from hddm.settings import Reading
from hddm.utils.errors import HddmError, Unstated
from hddm.utils.tensors import count_blocks, shape_of


@dataclass(frozen=True)
class FileLayout:
    """The checkpoint file format of one code base.

    Args:
        name: as in ``--to-layout``.
        markers: keys that every file of this layout has; no file of another layout has all of them.
        family: of the network that computes the same function.
        arguments: its arguments, from the tensors and the user's options.
        table: maps names of both sides, from the network's tensors, its arguments and the origin for errors.
        forward: the layout's own network over its own names, for the check of a conversion; None where that
            is the class itself.
        declared: from the file's tensors, the arguments, the user's options and the origin for errors.
        scheduler: training schedule that the layout's code fixes for a network of these arguments, as a
            diffusers config; None if it fixes none.
        nulls: foreign tensors that stand for no condition, by condition.
    """

    name: str
    markers: tuple[str, ...]
    family: Family
    arguments: Callable[[Weights, Reading, str], dict[str, Any]]
    table: Callable[[Weights, Mapping[str, Any], str], KeyTable]
    forward: Callable[[Weights, Mapping[str, Any]], Forward] | None
    declared: Callable[[Weights, Mapping[str, Any], Reading, str], Declared]
    scheduler: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None
    nulls: Mapping[str, str] = field(default_factory=dict)

    def forward_over(
        self, weights: Weights, arguments: Mapping[str, Any]
    ) -> Callable[[], Forward] | None:
        """Builds the layout's own network over ``weights``; None where that is the class itself."""
        return None if self.forward is None else functools.partial(self.forward, weights, arguments)


class Modules:
    """Layers by the name of their tensors, computed in the dtype of ``like``."""

    def __init__(self, weights: Weights, like: Tensor) -> None:
        self.weights, self._dtype = weights, like.dtype

    def get(self, name: str) -> Tensor:
        """Tensor ``name``."""
        return self.weights[name].to(self._dtype)

    def both(self, name: str) -> tuple[Tensor, Tensor]:
        """Weight and bias."""
        return self.get(f"{name}.weight"), self.get(f"{name}.bias")

    def affine(self, value: Tensor, name: str) -> Tensor:
        """``value`` (…, in) through the linear layer ``name``."""
        return F.linear(value, *self.both(name))

    def perceptron(
        self, value: Tensor, first: str, second: str, act: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Two linear layers with ``act`` between."""
        return self.affine(act(self.affine(value, first)), second)

    def waves(self, values: Tensor, width: int) -> Tensor:
        """Cosines, then sines of ``values`` (batch,) at rates from 1 to 1e-4: (batch, width)."""
        half = width // 2
        rates = torch.exp(-math.log(1e4) * torch.arange(half, dtype=torch.float32) / half)
        angles = values.float()[:, None] * rates
        return torch.cat([angles.cos(), angles.sin()], 1).to(self._dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Multi-head attention of (batch, tokens, width)."""
    q, k, v = _by_head(q, heads), _by_head(k, heads), _by_head(v, heads)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """(batch, tokens, width) as (batch, heads, tokens, width / heads)."""
    split: Tensor = x.unflatten(-1, (heads, -1))
    return split.transpose(1, 2)


NULL_TEXT = "y_embedder.y_embedding"
LINEAR_BETAS = {
    "_class_name": "DDPMScheduler",
    "num_train_timesteps": 1000,
    "beta_schedule": "linear",
    "beta_start": 1e-4,
    "beta_end": 0.02,
    "prediction_type": PredictionType.EPSILON.value,
}
_SIT = (
    "SiT files look the same but predict a velocity: this file is read as DiT, which predicts noise"
)
_SIGMA_TOKENS = 300
_SCALES = (1.0, 2.0, 0.5, 4.0)
_EXTRA = {"csize_embedder": "resolution_embedder", "ar_embedder": "aspect_ratio_embedder"}


def _sizes(weights: Weights, reading: Reading, origin: str) -> tuple[int, int, int, dict[str, int]]:
    """Width, depth and heads of either network, and the arguments that both classes share.

    The heads are the user's, or those of the published size with this width and depth.
    """
    width, channels, patch, _ = shape_of(weights, "x_embedder.proj.weight", 4, origin)
    rows = shape_of(weights, "final_layer.linear.weight", 2, origin)[0]
    depth, heads = count_blocks(weights, "blocks"), reading.num_heads
    if heads is None and width >= 384:
        for one in SIZES.values():
            if (one["hidden_size"], one["depth"]) == (width, depth):
                heads = one["num_heads"]
    if heads is None:
        text = f"{depth} blocks of width {width} are not a published size, and no tensor shows the number"
        raise Unstated(origin, f"{text} of attention heads: pass `num_heads`", "num_heads")
    if heads < 1 or width % heads:
        raise HddmError(f"`num_heads` {heads}: the width {width} is not a multiple of it")
    sizes = {"in_channels": channels, "out_channels": rows // patch**2, "patch_size": patch}
    return width, depth, heads, sizes


def _side(weights: Weights, patch: int, origin: str) -> int:
    """The side of the square input that the positions cover."""
    return math.isqrt(shape_of(weights, "pos_embed", 3, origin)[1]) * patch


def _dit_arguments(weights: Weights, reading: Reading, origin: str) -> dict[str, Any]:
    width, depth, heads, sizes = _sizes(weights, reading, origin)
    return sizes | {
        "sample_size": _side(weights, sizes["patch_size"], origin),
        "hidden_size": width,
        "depth": depth,
        "num_heads": heads,
        "num_classes": shape_of(weights, "y_embedder.embedding_table.weight", 2, origin)[0] - 1,
        "modulation": "zero",
        "norm_eps": 1e-6,
    }


def _dit_table(names: Iterable[str], config: Mapping[str, Any], origin: str) -> KeyTable:
    pairs: list[Pair] = [
        same("pos_embed", "pos_embed"),
        same("y_embedder.embedding_table.weight", "class_embed.weight"),
        *module("x_embedder.proj", "patch_embed"),
        *module("t_embedder.mlp.0", "time_embed.mlp.0"),
        *module("t_embedder.mlp.2", "time_embed.mlp.2"),
        *module("final_layer.linear", "final_layer.linear"),
        *module("final_layer.adaLN_modulation.1", "final_layer.modulation"),
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
    return KeyTable(pairs)


def _pixart_arguments(weights: Weights, reading: Reading, origin: str) -> dict[str, Any]:
    width, depth, heads, sizes = _sizes(weights, reading, origin)
    side, scale = _positions(weights, width, sizes["patch_size"], reading, origin)
    return sizes | {
        "num_attention_heads": heads,
        "attention_head_dim": width // heads,
        "num_layers": depth,
        "cross_attention_dim": width,
        "sample_size": side,
        "norm_eps": 1e-6,
        "interpolation_scale": scale,
        "use_additional_conditions": "csize_embedder.mlp.0.weight" in weights,
        "caption_channels": shape_of(weights, "y_embedder.y_proj.fc1.weight", 2, origin)[1],
    }


def _positions(
    weights: Weights, width: int, patch: int, reading: Reading, origin: str
) -> tuple[int, float | None]:
    """The input's side and the scale of its positions, which the network computes itself."""
    if "pos_embed" not in weights:
        if reading.sample_size is None:
            text = "has no pos_embed; pass `sample_size`, the side of its latents"
            raise Unstated(origin, text, "sample_size")
        return reading.sample_size, None
    stored, side = weights["pos_embed"].float(), _side(weights, patch, origin)
    for scale in _SCALES:
        computed = _positions_at(width, side // patch, scale)
        if computed.shape == stored.shape and torch.allclose(computed, stored, atol=2e-3):
            return side, scale
    raise HddmError(f"{origin}: pos_embed {tuple(stored.shape)} is not one that PixArt computes")


def _positions_at(width: int, grid: int, scale: float) -> Tensor:
    """Positions (1, tokens, width) as PixArt's code computes them."""
    computed: Tensor = get_2d_sincos_pos_embed(
        width, grid, interpolation_scale=scale, base_size=grid, output_type="pt"
    )
    return computed[None].float()


def _pixart_table(names: Iterable[str], config: Mapping[str, Any], origin: str) -> KeyTable:
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
        to_itself, to_text = f"{ours}.attn1", f"{ours}.attn2"
        qkv = [f"{to_itself}.to_q", f"{to_itself}.to_k", f"{to_itself}.to_v"]
        pairs += [
            same(f"{theirs}.scale_shift_table", f"{ours}.scale_shift_table"),
            *module(f"{theirs}.attn.qkv", qkv),
            *module(f"{theirs}.attn.proj", f"{to_itself}.to_out.0"),
            *module(f"{theirs}.cross_attn.q_linear", f"{to_text}.to_q"),
            *module(f"{theirs}.cross_attn.kv_linear", [f"{to_text}.to_k", f"{to_text}.to_v"]),
            *module(f"{theirs}.cross_attn.proj", f"{to_text}.to_out.0"),
            *module(f"{theirs}.mlp.fc1", f"{ours}.ff.net.0.proj"),
            *module(f"{theirs}.mlp.fc2", f"{ours}.ff.net.2"),
        ]
    return KeyTable(pairs, {"pos_embed": "computed anew", NULL_TEXT: "kept as the null condition"})


class _Dit(Modules):
    """Parts of both networks, by name."""

    def tokens(self, x: Tensor, patch: int) -> Tensor:
        """Patches of ``x`` (batch, C, S, S): (batch, tokens, width)."""
        return F.conv2d(x, *self.both("x_embedder.proj"), patch).flatten(2).mT

    def times(self, values: Tensor, name: str) -> Tensor:
        """Sinusoidal embedding of ``values`` (batch,), then a perceptron."""
        return self.perceptron(self.waves(values, 256), f"{name}.mlp.0", f"{name}.mlp.2", F.silu)

    def block(
        self,
        h: Tensor,
        name: str,
        modulation: tuple[Tensor, ...],
        heads: int,
        text: Tensor | None = None,
    ) -> Tensor:
        """Self-attention, cross-attention to ``text`` and a perceptron, with six modulation vectors."""
        q, k, v = self.affine(_norm(h, *modulation[:2]), f"{name}.attn.qkv").chunk(3, -1)
        h = h + modulation[2] * self.affine(attend(q, k, v, heads), f"{name}.attn.proj")
        if text is not None:
            k, v = self.affine(text, f"{name}.cross_attn.kv_linear").chunk(2, -1)
            crossed = attend(self.affine(h, f"{name}.cross_attn.q_linear"), k, v, heads)
            h = h + self.affine(crossed, f"{name}.cross_attn.proj")
        z = _norm(h, *modulation[3:5])
        return h + modulation[5] * self.perceptron(z, f"{name}.mlp.fc1", f"{name}.mlp.fc2", _gelu)

    def output(self, h: Tensor, shift: Tensor, scale: Tensor, patch: int) -> Tensor:
        """Tokens to (batch, C, S, S); channels are last in a patch."""
        rows, side = (
            self.affine(_norm(h, shift, scale), "final_layer.linear"),
            math.isqrt(h.shape[1]),
        )
        grid = rows.view(len(rows), side, side, patch, patch, -1)
        return torch.einsum("nhwpqc->nchpwq", grid).reshape(
            len(rows), -1, side * patch, side * patch
        )


def _norm(value: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(value, value.shape[-1:], eps=1e-6) * (1 + scale) + shift


def _gelu(value: Tensor) -> Tensor:
    return F.gelu(value, approximate="tanh")


def _dit_forward(weights: Weights, config: Mapping[str, Any]) -> Forward:
    def run(x: Tensor, timestep: Tensor, conditions: Weights) -> Tensor:
        own, patch = _Dit(weights, x), config["patch_size"]
        h = own.tokens(x, patch) + own.get("pos_embed")
        label = own.get("y_embedder.embedding_table.weight")[conditions[LABELS]]
        c = F.silu(own.times(timestep, "t_embedder") + label)[:, None]
        for n in range(config["depth"]):
            modulation = own.affine(c, f"blocks.{n}.adaLN_modulation.1").chunk(6, -1)
            h = own.block(h, f"blocks.{n}", modulation, config["num_heads"])
        shift, scale = own.affine(c, "final_layer.adaLN_modulation.1").chunk(2, -1)
        return own.output(h, shift, scale, patch)

    return run


def _pixart_forward(weights: Weights, config: Mapping[str, Any]) -> Forward:
    """PixArt's network, without attention masks."""

    def run(x: Tensor, timestep: Tensor, conditions: Weights) -> Tensor:
        own, patch, heads = _Dit(weights, x), config["patch_size"], config["num_attention_heads"]
        # In half precision the file holds them rounded; they are computed anew all the same.
        if "pos_embed" in weights and weights["pos_embed"].dtype == torch.float32:
            positions = own.get("pos_embed")
        else:
            scale = config["interpolation_scale"] or max(config["sample_size"] // 64, 1)
            width, grid = config["cross_attention_dim"], config["sample_size"] // patch
            positions = _positions_at(width, grid, scale).to(x)
        h = own.tokens(x, patch) + positions
        c = own.times(timestep, "t_embedder")
        if config["use_additional_conditions"]:
            sizes = conditions["resolution"].flatten(), conditions["aspect_ratio"].flatten()
            embedded = []
            for name, values in zip(_EXTRA, sizes, strict=True):
                embedded.append(own.times(values, name).view(len(x), -1))
            c = c + torch.cat(embedded, 1)
        shared = own.affine(F.silu(c), "t_block.1").unflatten(-1, (6, -1))
        given = conditions[TEXT].to(x.dtype)
        text = own.perceptron(given, "y_embedder.y_proj.fc1", "y_embedder.y_proj.fc2", _gelu)
        for n in range(config["num_layers"]):
            modulation = (own.get(f"blocks.{n}.scale_shift_table") + shared).chunk(6, 1)
            h = own.block(h, f"blocks.{n}", modulation, heads, text)
        shift, scale = (own.get("final_layer.scale_shift_table") + c[:, None]).chunk(2, 1)
        return own.output(h, shift, scale, patch)

    return run


def _pixart_declared(weights: Weights, *_: object) -> Declared:
    """Distinguish PixArt-Σ: same names, but 300 text tokens instead of 120, and another VAE's latents."""
    null = weights.get(NULL_TEXT)
    if null is not None and null.ndim > 1 and null.shape[-2] == _SIGMA_TOKENS:
        note = f"texts of {_SIGMA_TOKENS} tokens are PixArt-Σ's: no latent scale is claimed"
        return Declared(notes=(note,))
    return Declared(latent_scale=STABLE_DIFFUSION_SCALE)


FACEBOOK_DIT = FileLayout(
    name="facebook-dit",
    markers=(
        "y_embedder.embedding_table.weight",
        "blocks.0.adaLN_modulation.1.weight",
        "x_embedder.proj.weight",
    ),
    family=EXPERT,
    arguments=_dit_arguments,
    table=_dit_table,
    forward=_dit_forward,
    declared=lambda *_: Declared(latent_scale=STABLE_DIFFUSION_SCALE, notes=(_SIT,)),
    scheduler=lambda _: LINEAR_BETAS,
)
PIXART_ORIGINAL = FileLayout(
    name="pixart-original",
    markers=("t_block.1.weight", "y_embedder.y_proj.fc1.weight", "blocks.0.scale_shift_table"),
    family=PIXART,
    arguments=_pixart_arguments,
    table=_pixart_table,
    forward=_pixart_forward,
    declared=_pixart_declared,
    scheduler=lambda _: LINEAR_BETAS,
    nulls={TEXT: NULL_TEXT},
)
