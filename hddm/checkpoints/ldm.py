"""Single-file checkpoints of latent diffusion (CompVis, Stability): all of Stable Diffusion in one file.

Block names count across all levels here, and anew in each level in diffusers' class. Sizes are read from
shapes. Files of Stable Diffusion 1 and 2 may hold betas and latent scale as buffers; no file holds all that a
conversion needs, which a preset states (`hddm.checkpoints.presets`).
"""

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hddm.checkpoints.layouts import FileLayout, Modules, attend
from hddm.checkpoints.presets import PRESETS
from hddm.checkpoints.sources import Declared, Forward, KeyTable, Weights, WeightSet, same
from hddm.condition_names import TEXT, TEXT_EMBEDS
from hddm.networks.families.stable_diffusion import STABLE_DIFFUSION
from hddm.settings import Reading
from hddm.utils.errors import HddmError, Unstated
from hddm.utils.tensors import count_blocks, shape_of

UNET = "model.diffusion_model."
MARKERS = (f"{UNET}input_blocks.0.0.weight", f"{UNET}time_embed.0.weight")
EMA = "model_ema."
OTHER_PARTS = ("first_stage_model.", "cond_stage_model.", "conditioner.")
"""What the names of the VAE and of text encoders begin with."""
_GROUPS = 32
_SIZES, _SIZE_WIDTH = 6, 256
"""Numbers on the size and crop of a picture that XL takes, and the width to which it embeds each."""
_SD, _XL = (320, 640, 1280, 1280), (320, 640, 1280)
# Heads by widths, width of the text and whether projections are linear: Stable Diffusion 1, 2 and XL.
_HEADS: dict[tuple[tuple[int, ...], int, bool], int | list[int]] = {
    (_SD, 768, False): 8,
    (_SD, 1024, True): [5, 10, 20, 20],
    (_XL, 2048, True): [5, 10, 20],
}
_MIDDLE = "UNetMidBlock2DCrossAttn"
_BLOCKS = {_MIDDLE, "CrossAttnDownBlock2D", "DownBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"}
_OUTER = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
_INNER = re.compile(
    r"(mid_block|down_blocks|up_blocks)(?:\.(\d+))?\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)"
)
_ROOTS = (UNET, "diffusion_model.", "model.", "")
"""What the names of a network begin with: in whole files, and in those of a network alone."""
_TOP = ("input_blocks.", "middle_block.", "output_blocks.", "time_embed.", "label_emb.", "out.")
_TEXT_PROJECTION = "conditioner.embedders.1.model.text_projection"


def root_of(names: Collection[str]) -> str | None:
    """What the names of the network begin with among ``names``; None where there is no such network."""
    for root in _ROOTS:
        if all(f"{root}{marker.removeprefix(UNET)}" in names for marker in MARKERS):
            return root
    return None


def from_root(content: Mapping[str, Tensor], root: str) -> dict[str, Tensor]:
    """The tensors with names as in a whole file."""
    found = {}
    for name, tensor in content.items():
        is_network = name.startswith(root) and name.removeprefix(root).startswith(_TOP)
        found[f"{UNET}{name.removeprefix(root)}" if is_network else name] = tensor
    return found


def to_root(name: str, root: str) -> str:
    """The name of a tensor in a file whose network's names begin with ``root``."""
    return f"{root}{name.removeprefix(UNET)}" if name.startswith(UNET) else name


def weight_sets(content: Mapping[str, Tensor]) -> dict[WeightSet, dict[str, Tensor]]:
    """The network's tensors by set, given all tensors of a file."""
    raw = {name: tensor for name, tensor in content.items() if name.startswith(UNET)}
    averaged = {}
    for name in raw:
        # Averaged copies have flattened names.
        copy = EMA + "".join(name.split(".")[1:])
        if copy in content:
            averaged[name] = content[copy]
    return {"raw": raw, "ema": averaged} if averaged else {"unstated": raw}


def others_in(content: Weights) -> dict[str, Tensor]:
    """Tensors of the VAE and the text encoders."""
    return {name: one for name, one in content.items() if name.startswith(OTHER_PARTS)}


def arguments(weights: Weights, reading: Reading, origin: str) -> dict[str, Any]:
    """Arguments of diffusers' UNet that computes the same function, read from shapes.

    The network must take text and have the same number of layers at every level.
    """
    unet = {name.removeprefix(UNET): tensor for name, tensor in weights.items()}
    levels: list[list[int]] = [[]]
    for n in range(1, count_blocks(unet, "input_blocks")):
        if f"input_blocks.{n}.0.op.weight" in unet:
            levels.append([])
        else:
            levels[-1].append(n)
    prefix = None
    for n in itertools.chain.from_iterable(levels):
        if f"input_blocks.{n}.1.proj_in.weight" in unet:
            prefix = f"input_blocks.{n}.1"
            break
    sizes = [len(level) for level in levels]
    if len(set(sizes)) > 1 or prefix is None:
        attends = "no attention" if prefix is None else "attention"
        raise HddmError(
            f"{origin}: is no Stable Diffusion UNet: levels of {sizes} layers, {attends} to text"
        )
    firsts = [f"input_blocks.{level[0]}" for level in levels]
    channels = []
    for first in firsts:
        channels.append(shape_of(unet, f"{first}.0.out_layers.3.weight", 4, origin)[0])
    depths = [count_blocks(unet, f"{first}.1.transformer_blocks") for first in firsts]
    middle = count_blocks(unet, "middle_block.1.transformer_blocks")
    context = shape_of(unet, f"{prefix}.transformer_blocks.0.attn2.to_k.weight", 2, origin)[1]
    is_linear = unet[f"{prefix}.proj_in.weight"].ndim == 2
    types = ["CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in depths]
    layers = [max(depth, 1) for depth in depths]
    if depths[-1] == 0 and middle:
        layers[-1] = middle
    result: dict[str, Any] = {
        "sample_size": reading.sample_size or (128 if "label_emb.0.0.weight" in unet else 64),
        "in_channels": shape_of(unet, "input_blocks.0.0.weight", 4, origin)[1],
        "out_channels": shape_of(unet, "out.2.weight", 4, origin)[0],
        "block_out_channels": channels,
        "down_block_types": types,
        "up_block_types": [name.replace("Down", "Up") for name in reversed(types)],
        "layers_per_block": len(levels[0]),
        "transformer_layers_per_block": layers[0] if len(set(layers)) == 1 else layers,
        "cross_attention_dim": context,
        "use_linear_projection": is_linear,
        "attention_head_dim": unet_heads(channels, context, is_linear, reading, origin),
    }
    if "label_emb.0.0.weight" in unet:
        result |= {
            "addition_embed_type": "text_time",
            **_added_widths(unet, origin),
        }
    return result


def _added_widths(unet: Mapping[str, Tensor], origin: str) -> dict[str, int]:
    """Widths of the vector that XL adds, of the text and six embedded sizes, and of one size.

    Where the file holds the text encoder that makes the vector of the text, a size has an equal part of the
    rest; else it has that of all published networks.
    """
    name = "label_emb.0.0.weight"
    width, each = shape_of(unet, name, 2, origin)[1], _SIZE_WIDTH
    if _TEXT_PROJECTION in unet:
        rest = width - shape_of(unet, _TEXT_PROJECTION, 2, origin)[1]
        if rest < 2 * _SIZES or rest % (2 * _SIZES):
            raise HddmError(
                f"{origin}: {UNET}{name} takes a vector of width {width}, of which {_TEXT_PROJECTION} "
                f"leaves {rest}; they must divide into {_SIZES} sizes"
            )
        each = rest // _SIZES
    elif width <= _SIZES * each:
        raise HddmError(
            f"{origin}: {UNET}{name} takes a vector of width {width}; Stable Diffusion XL's is wider than "
            f"{_SIZES * each}, which its {_SIZES} sizes take ({each} each) beside the text"
        )
    return {"addition_time_embed_dim": each, "projection_class_embeddings_input_dim": width}


def unet_heads(
    channels: list[int], context: int, is_linear: bool, reading: Reading, origin: str
) -> int | list[int]:
    """Number of heads (attention_head_dim in diffusers): the user's, a published network's or a preset's."""
    number = reading.num_heads
    if number is not None:
        odd = [width for width in channels if number < 1 or width % number]
        if odd:
            raise HddmError(
                f"`num_heads` {number}: a width of {odd[0]} in {origin} does not divide by it"
            )
        return number
    found = _HEADS.get((tuple(channels), context, is_linear))
    if found is None and reading.preset is not None:
        return PRESETS[reading.preset].heads(channels, origin)
    if found is None:
        text = (
            f"widths {channels} with text of width {context} do not match Stable Diffusion 1, 2 or "
            "XL, and no tensor shows the number of attention heads: pass `num_heads`, the same "
            "number at every level"
        )
        raise Unstated(origin, text, "num_heads")
    return found


def key_table(names: Iterable[str], config: Mapping[str, Any], origin: str) -> KeyTable:
    """Map the file's names to ``names``, those of the class; raises for one without a name in the layout."""
    blocks = {
        *config["down_block_types"],
        *config["up_block_types"],
        config.get("mid_block_type", _MIDDLE),
    }
    odd, layers, pairs = blocks - _BLOCKS, config["layers_per_block"], []
    for name in names if isinstance(layers, int) else ():
        foreign = _name(name, layers, config["up_block_types"])
        odd |= {name} if foreign is None else set()
        pairs.append(same(f"{UNET}{foreign}", name))
    if odd or not pairs:
        text = f"has no names for {', '.join(sorted(odd)) or f'{layers} layers per block'}"
        raise HddmError(f"{origin}: {text}")
    return KeyTable(pairs)


def _name(name: str, layers: int, up_block_types: Sequence[str]) -> str | None:
    """The layout's name of a tensor of the class; None where it has none."""
    head, _, leaf = name.rpartition(".")
    if head in _OUTER:
        return f"{_OUTER[head]}.{leaf}"
    match = _INNER.fullmatch(name)
    if match is None:
        return None
    place, block, part, index, rest = (
        match[1],
        int(match[2] or 0),
        match[3],
        int(match[4]),
        match[5],
    )
    level = layers + 1
    if part == "resnets":
        for ours, theirs in _RESNET.items():
            rest = re.sub(rf"^{ours}\b", theirs, rest)
    kind = {"resnets": 0, "attentions": 1}.get(part)
    if place == "mid_block":
        return f"middle_block.{2 * index + (kind or 0)}.{rest}"
    if place == "down_blocks":
        if kind is None:
            return f"input_blocks.{level * (block + 1)}.0.op.{leaf}"
        return f"input_blocks.{1 + level * block + index}.{kind}.{rest}"
    if kind is None:
        after = 2 if "CrossAttn" in up_block_types[block] else 1
        return f"output_blocks.{level * (block + 1) - 1}.{after}.conv.{leaf}"
    return f"output_blocks.{level * block + index}.{kind}.{rest}"


def forward(weights: Weights, config: Mapping[str, Any]) -> Forward:
    """Run the network over the layout's own names, independently of the table used in conversions.

    It follows the paper (arXiv:2112.10752) and SDXL's (arXiv:2307.01952) and reads each block's parts from
    the file, so that comparing both networks finds mistakes in the table. ``config`` has only what no tensor
    states: the number of heads, under diffusers' name, one for all or one per level.
    """
    weights = {name.removeprefix(UNET): one for name, one in weights.items()}
    number, levels = config["attention_head_dim"], len(config["block_out_channels"])
    heads: Sequence[int] = number if isinstance(number, Sequence) else [number] * levels

    def run(x: Tensor, timestep: Tensor, conditions: Weights) -> Tensor:
        own = _Unet(weights, x)
        text = conditions[TEXT].to(x.dtype)
        width = weights["input_blocks.0.0.weight"].shape[0]
        emb = own.perceptron(own.waves(timestep, width), "time_embed.0", "time_embed.2", F.silu)
        if own.has("label_emb.0.0"):
            sizes = conditions["time_ids"]
            each = own.waves(sizes.flatten(), config["addition_time_embed_dim"]).view(
                len(sizes), -1
            )
            given = torch.cat([conditions[TEXT_EMBEDS].to(x.dtype), each], 1)
            emb = emb + own.perceptron(given, "label_emb.0.0", "label_emb.0.2", F.silu)
        h, level = own.conv(x, "input_blocks.0.0"), 0
        skips = [h]
        for n in range(1, count_blocks(weights, "input_blocks")):
            block = f"input_blocks.{n}"
            if own.has(f"{block}.0.op"):
                h, level = own.conv(h, f"{block}.0.op", 2), level + 1
            else:
                h = own.residual(h, emb, f"{block}.0")
                if own.has(f"{block}.1.proj_in"):
                    h = own.spatial(h, text, f"{block}.1", heads[level])
            skips.append(h)
        h = own.residual(h, emb, "middle_block.0")
        h = own.spatial(h, text, "middle_block.1", heads[level])
        h = own.residual(h, emb, "middle_block.2")
        for n in range(count_blocks(weights, "output_blocks")):
            block, after = f"output_blocks.{n}", 1
            h = own.residual(torch.cat([h, skips.pop()], 1), emb, f"{block}.0")
            if own.has(f"{block}.1.proj_in"):
                h, after = own.spatial(h, text, f"{block}.1", heads[level]), 2
            if own.has(f"{block}.{after}.conv"):
                # Twice the size, but for a side that was odd on the way down.
                h = F.interpolate(h, skips[-1].shape[2:], mode="nearest")
                h, level = own.conv(h, f"{block}.{after}.conv"), level - 1
        return own.conv(F.silu(own.group_norm(h, "out.0", 1e-5)), "out.2")

    return run


class _Unet(Modules):
    """Parts of the network, by name."""

    def has(self, name: str) -> bool:
        """True where the file has a part of this name."""
        return f"{name}.weight" in self.weights

    def conv(self, x: Tensor, name: str, stride: int = 1) -> Tensor:
        """Convolution that keeps the size, up to its stride."""
        weight, bias = self.both(name)
        return F.conv2d(x, weight, bias, stride, weight.shape[-1] // 2)

    def group_norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        return F.group_norm(x, _GROUPS, *self.both(name), eps)

    def layer_norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], *self.both(name))

    def residual(self, x: Tensor, emb: Tensor, name: str) -> Tensor:
        """Two convolutions with the time embedding added between them, and a skip."""
        h = self.conv(
            F.silu(self.group_norm(x, f"{name}.in_layers.0", 1e-5)), f"{name}.in_layers.2"
        )
        h = h + self.affine(F.silu(emb), f"{name}.emb_layers.1")[:, :, None, None]
        h = self.conv(
            F.silu(self.group_norm(h, f"{name}.out_layers.0", 1e-5)), f"{name}.out_layers.3"
        )
        skip = f"{name}.skip_connection"
        return h + (self.conv(x, skip) if self.has(skip) else x)

    def attention(self, x: Tensor, context: Tensor, name: str, heads: int) -> Tensor:
        """Attention of ``x`` (batch, tokens, width) to ``context``."""
        q = F.linear(x, self.get(f"{name}.to_q.weight"))
        k = F.linear(context, self.get(f"{name}.to_k.weight"))
        v = F.linear(context, self.get(f"{name}.to_v.weight"))
        return self.affine(attend(q, k, v, heads), f"{name}.to_out.0")

    def spatial(self, x: Tensor, text: Tensor, name: str, heads: int) -> Tensor:
        """Transformer blocks over the pixels of ``x``, between two projections, with a skip."""
        h = self.group_norm(x, f"{name}.norm", 1e-6).flatten(2).mT
        h = self._project(h, f"{name}.proj_in")
        for n in range(count_blocks(self.weights, f"{name}.transformer_blocks")):
            block = f"{name}.transformer_blocks.{n}"
            own = self.layer_norm(h, f"{block}.norm1")
            h = h + self.attention(own, own, f"{block}.attn1", heads)
            h = h + self.attention(
                self.layer_norm(h, f"{block}.norm2"), text, f"{block}.attn2", heads
            )
            both = self.affine(self.layer_norm(h, f"{block}.norm3"), f"{block}.ff.net.0.proj")
            value, gate = both.chunk(2, -1)
            h = h + self.affine(value * F.gelu(gate), f"{block}.ff.net.2")
        h = self._project(h, f"{name}.proj_out")
        return x + h.mT.reshape(x.shape)

    def _project(self, tokens: Tensor, name: str) -> Tensor:
        """Linear layer, or an equivalent 1×1 convolution."""
        return F.linear(tokens, self.get(f"{name}.weight").flatten(1), self.get(f"{name}.bias"))


LDM = FileLayout(
    name="ldm",
    markers=MARKERS,
    family=STABLE_DIFFUSION,
    arguments=arguments,
    table=key_table,
    forward=forward,
    declared=lambda *_: Declared(),
    scheduler=None,
)
