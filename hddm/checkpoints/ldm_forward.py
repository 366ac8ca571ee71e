"""The UNet of latent diffusion over its own names, written out for the check of a conversion.

After the paper (arXiv:2112.10752) and SDXL's (arXiv:2307.01952), apart from the table of names: which parts a
block has is read off the file, so that comparing the two networks finds a mistake in the table.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hddm.checkpoints.layouts import Forward, Modules, Weights, attend, count_blocks

_GROUPS = 32


class _Unet(Modules):
    """Parts of the network by name."""

    def __init__(self, weights: Weights, like: Tensor) -> None:
        super().__init__(weights, like)
        self._names = weights

    def has(self, name: str) -> bool:
        """Whether the file has a part of this name."""
        return f"{name}.weight" in self._names

    def depth(self, name: str) -> int:
        """Number of transformer blocks below ``name``."""
        return count_blocks(self._names, f"{name}.transformer_blocks")

    def conv(self, x: Tensor, name: str, stride: int = 1) -> Tensor:
        """A convolution that keeps the size but for its stride."""
        weight = self.get(f"{name}.weight")
        return F.conv2d(x, weight, self.get(f"{name}.bias"), stride, weight.shape[-1] // 2)

    def groups(self, x: Tensor, name: str, eps: float) -> Tensor:
        """Group norm."""
        return F.group_norm(x, _GROUPS, self.get(f"{name}.weight"), self.get(f"{name}.bias"), eps)

    def layer_norm(self, x: Tensor, name: str) -> Tensor:
        """Layer norm."""
        return F.layer_norm(x, x.shape[-1:], self.get(f"{name}.weight"), self.get(f"{name}.bias"))

    def residual(self, x: Tensor, emb: Tensor, name: str) -> Tensor:
        """Two convolutions with the time added between them, around a skip."""
        h = self.conv(F.silu(self.groups(x, f"{name}.in_layers.0", 1e-5)), f"{name}.in_layers.2")
        h = h + self.affine(F.silu(emb), f"{name}.emb_layers.1")[:, :, None, None]
        h = self.conv(F.silu(self.groups(h, f"{name}.out_layers.0", 1e-5)), f"{name}.out_layers.3")
        skip = f"{name}.skip_connection"
        return h + (self.conv(x, skip) if self.has(skip) else x)

    def attention(self, x: Tensor, context: Tensor, name: str, heads: int) -> Tensor:
        """Queries of ``x`` (batch, tokens, width) on ``context``."""
        q, k, v = (
            F.linear(given, self.get(f"{name}.to_{letter}.weight"))
            for given, letter in ((x, "q"), (context, "k"), (context, "v"))
        )
        return self.affine(attend(q, k, v, heads), f"{name}.to_out.0")

    def spatial(self, x: Tensor, text: Tensor, name: str, heads: int) -> Tensor:
        """Transformer blocks over the pixels of ``x``, between two projections and around a skip."""
        h = self.groups(x, f"{name}.norm", 1e-6).flatten(2).mT
        h = self._project(h, f"{name}.proj_in")
        for n in range(self.depth(name)):
            block = f"{name}.transformer_blocks.{n}"
            own = self.layer_norm(h, f"{block}.norm1")
            h = h + self.attention(own, own, f"{block}.attn1", heads)
            h = h + self.attention(self.layer_norm(h, f"{block}.norm2"), text, f"{block}.attn2", heads)
            value, gate = self.affine(self.layer_norm(h, f"{block}.norm3"), f"{block}.ff.net.0.proj").chunk(
                2, -1
            )
            h = h + self.affine(value * F.gelu(gate), f"{block}.ff.net.2")
        h = self._project(h, f"{name}.proj_out")
        return x + h.mT.reshape(x.shape)

    def _project(self, tokens: Tensor, name: str) -> Tensor:
        """A linear layer, or the convolution of one pixel that says the same."""
        return F.linear(tokens, self.get(f"{name}.weight").flatten(1), self.get(f"{name}.bias"))


def forward(weights: Weights, config: Mapping[str, Any]) -> Forward:
    """The network over the names of the file below its prefix.

    ``config`` tells what no tensor does: the number of heads, under diffusers' name, one or one a level.
    """
    number, levels = config["attention_head_dim"], len(config["block_out_channels"])
    heads: Sequence[int] = number if isinstance(number, Sequence) else [number] * levels

    def run(x: Tensor, timestep: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        own = _Unet(weights, x)
        text = conditions["encoder_hidden_states"].to(x.dtype)
        width = weights["input_blocks.0.0.weight"].shape[0]
        emb = own.perceptron(waves(timestep, width).to(x.dtype), "time_embed.0", "time_embed.2", F.silu)
        if own.has("label_emb.0.0"):
            sizes = conditions["time_ids"]
            each = waves(sizes.flatten(), config["addition_time_embed_dim"]).view(len(sizes), -1)
            given = torch.cat([conditions["text_embeds"].to(x.dtype), each.to(x.dtype)], 1)
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
        return own.conv(F.silu(own.groups(h, "out.0", 1e-5)), "out.2")

    return run


def waves(values: Tensor, width: int) -> Tensor:
    """Cosines, then sines of ``values`` (batch,) at rates from 1 to 1e-4: (batch, width)."""
    half = width // 2
    rates = torch.exp(-math.log(1e4) * torch.arange(half, dtype=torch.float32) / half)
    angles = values.float()[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], 1)
