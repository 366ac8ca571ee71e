"""Layouts of single files: the interface, how sizes are read from tensors, and pieces of their networks.

A layout's own network is written out over its own names, apart from `hddm.networks` and diffusers and after
the papers, so that comparing the two finds a mistake in a table of names. A tensor is cast when it is used,
so that mapped weights never lie in memory as a whole.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import ModelMixin
from torch import Tensor
from torch.nn import functional as F

from hddm.checkpoints.keys import KeyTable
from hddm.networks.identity import SIZES
from hddm.utils.errors import HddmError

Weights = Mapping[str, Tensor]
Forward = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]
"""A source's own network: (x, timestep, conditions) to its raw output."""


class UnstatedHeads(HddmError):
    """A number of attention heads that neither a tensor nor the user states."""


@dataclass(frozen=True)
class Hints:
    """Sizes that the user states since no tensor does."""

    num_heads: int | None = None
    sample_size: int | None = None


@dataclass(frozen=True)
class FileLayout:
    """A checkpoint file of one code base.

    Args:
        name: as ``--layout`` spells it.
        markers: keys that every file of this layout has, and together no other.
        network: the class that holds the same function.
        arguments: the class's arguments, from the tensors and the hints.
        table: names of both sides, given the arguments and the tensors' names.
        forward: the layout's own network over its own names, written out for the check of a conversion.
        nulls: foreign tensors that stand for no condition, by condition.
        scheduler: the training schedule that the layout's code fixes, as a diffusers config.
        latents: scale of the VAE that the layout's code fixes, None where a file is of another code's, and
            notes on what the file does not tell.
    """

    name: str
    markers: tuple[str, ...]
    network: type[ModelMixin]
    arguments: Callable[[Weights, Hints, str], dict[str, Any]]
    table: Callable[[Mapping[str, Any], Weights], KeyTable]
    forward: Callable[[Weights, Mapping[str, Any]], Forward]
    nulls: Mapping[str, str]
    scheduler: Mapping[str, Any]
    latents: Callable[[Weights], tuple[float | None, tuple[str, ...]]]


LINEAR_BETAS = {
    "_class_name": "DDPMScheduler",
    "num_train_timesteps": 1000,
    "beta_schedule": "linear",
    "beta_start": 1e-4,
    "beta_end": 0.02,
    "trained_betas": None,
    "rescale_betas_zero_snr": False,
    "prediction_type": "epsilon",
}
LATENT_SCALE = 0.18215
_SD, _XL = (320, 640, 1280, 1280), (320, 640, 1280)
# Heads by widths, width of the text and whether projections are linear: Stable Diffusion 1, 2 and XL.
_UNET_HEADS: dict[tuple[tuple[int, ...], int, bool], int | list[int]] = {
    (_SD, 768, False): 8,
    (_SD, 1024, True): [5, 10, 20, 20],
    (_XL, 2048, True): [5, 10, 20],
}


def count_blocks(names: Weights, prefix: str) -> int:
    """Number of blocks: one more than the highest index after ``prefix``, at most one a tensor."""
    found = [re.match(rf"{re.escape(prefix)}\.(\d{{1,6}})\.", name) for name in names]
    return min(1 + max((int(match[1]) for match in found if match), default=-1), len(names))


def heads(width: int, depth: int, hints: Hints, origin: str) -> int:
    """Attention heads: the user's, or those of the published size with this width and depth.

    Raises:
        UnstatedHeads: for another size without ``--num-heads``, since no tensor tells.
    """
    if hints.num_heads is not None:
        if hints.num_heads < 1 or width % hints.num_heads:
            raise HddmError(f"--num-heads {hints.num_heads}: a width of {width} does not divide by it")
        return hints.num_heads
    for size in SIZES.values():
        if (size["hidden_size"], size["depth"]) == (width, depth) and width >= 384:
            return size["num_heads"]
    raise UnstatedHeads(
        f"{origin}: {depth} blocks of width {width} are no published size, and no tensor tells the number of "
        "attention heads: pass --num-heads"
    )


def unet_heads(
    channels: list[int], context: int, is_linear: bool, hints: Hints, origin: str
) -> int | list[int]:
    """The number of heads, which diffusers calls attention_head_dim.

    No tensor states it, so only published networks are known without ``--num-heads``, one for every level.

    Raises:
        UnstatedHeads: for any other network without the option.
    """
    number = hints.num_heads
    if number is not None:
        odd = [width for width in channels if number < 1 or width % number]
        if odd:
            raise HddmError(f"--num-heads {number}: a width of {odd[0]} in {origin} does not divide by it")
        return number
    signature = (tuple(channels), context, is_linear)
    if signature in _UNET_HEADS:
        return _UNET_HEADS[signature]
    raise UnstatedHeads(
        f"{origin}: widths {channels} with text of width {context} are no Stable Diffusion 1, 2 or XL, and "
        "no tensor tells the number of attention heads: pass --num-heads, the same number at every level"
    )


def square(tokens: int, patch: int, origin: str) -> int:
    """Side of the square input that ``tokens`` patches cover."""
    side = math.isqrt(tokens)
    if side * side != tokens:
        raise HddmError(f"{origin}: {tokens} positions are no square")
    return side * patch


def agreed_side(side: int, hints: Hints, origin: str) -> int:
    """The side that a file states, which the user may not contradict."""
    if hints.sample_size not in (None, side):
        raise HddmError(
            f"--sample-size {hints.sample_size}: {origin} states a sample of side {side}; drop the option"
        )
    return side


def shape_of(weights: Weights, name: str, ndim: int, origin: str) -> tuple[int, ...]:
    """Shape of a tensor that sizes are read from.

    Raises:
        HddmError: where it is missing, has another number of dimensions or an empty one.
    """
    if name not in weights:
        raise HddmError(f"{origin}: missing {name}")
    shape = tuple(weights[name].shape)
    if len(shape) != ndim or 0 in shape:
        raise HddmError(f"{origin}: {name} has shape {shape}; {ndim} dimensions are expected")
    return shape


def gelu(value: Tensor) -> Tensor:
    """GELU in its tanh form."""
    return F.gelu(value, approximate="tanh")


class Modules:
    """Affine maps and perceptrons by name, in the dtype of ``like``."""

    def __init__(self, weights: Mapping[str, Tensor], like: Tensor) -> None:
        self._weights, self._dtype = weights, like.dtype

    def get(self, name: str) -> Tensor:
        """A tensor."""
        return self._weights[name].to(self._dtype)

    def affine(self, value: Tensor, name: str) -> Tensor:
        """``value`` (…, in) through the linear layer ``name``."""
        return F.linear(value, self.get(f"{name}.weight"), self.get(f"{name}.bias"))

    def perceptron(
        self, value: Tensor, first: str, second: str, act: Callable[[Tensor], Tensor] = gelu
    ) -> Tensor:
        """Two linear layers with ``act`` between."""
        return self.affine(act(self.affine(value, first)), second)

    def tokens(self, x: Tensor, name: str, patch: int) -> Tensor:
        """Patches of ``x`` (batch, C, S, S) through the convolution ``name``: (batch, tokens, width)."""
        weight, bias = self.get(f"{name}.weight"), self.get(f"{name}.bias")
        return F.conv2d(x, weight, bias, patch).flatten(2).mT

    def times(self, timestep: Tensor, name: str) -> Tensor:
        """256 waves of ``timestep`` (batch,), cosines first, through the perceptron ``name``.0, .2."""
        rates = torch.exp(-torch.arange(128, dtype=torch.float32) / 128 * torch.tensor(1e4).log())
        angles = timestep.float()[:, None] * rates
        waves = torch.cat([angles.cos(), angles.sin()], 1).to(self._dtype)
        return self.perceptron(waves, f"{name}.0", f"{name}.2", F.silu)


def norm(value: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Layer norm with epsilon 1e-6, scaled and shifted."""
    return F.layer_norm(value, value.shape[-1:], eps=1e-6) * (1 + scale) + shift


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Multi-head attention of (batch, tokens, width)."""
    q, k, v = (z.unflatten(-1, (heads, -1)).transpose(1, 2) for z in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def image(tokens: Tensor, patch: int) -> Tensor:
    """(batch, S² / patch², patch² C), channels last in a patch, to (batch, C, S, S)."""
    side = round(tokens.shape[1] ** 0.5)
    grid = tokens.view(len(tokens), side, side, patch, patch, -1)
    return torch.einsum("nhwpqc->nchpwq", grid).reshape(len(tokens), -1, side * patch, side * patch)
