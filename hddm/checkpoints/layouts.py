"""What a single-file layout is: how its tensors are known, named and sized."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from diffusers import ModelMixin
from torch import Tensor

from hddm.checkpoints.keys import KeyTable
from hddm.errors import HddmError
from hddm.models.sizes import SIZES

Weights = Mapping[str, Tensor]
Forward = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]
"""A source's own network: (x, timestep, conditions) to its raw output."""


class UnstatedHeads(HddmError):
    """A number of attention heads that no tensor tells and no one has said."""


@dataclass(frozen=True)
class Hints:
    """What the user says about a file that its tensors do not."""

    num_heads: int | None = None
    sample_size: int | None = None


@dataclass(frozen=True)
class Layout:
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
    """What diffusers misnames attention_head_dim: the number of heads.

    No tensor tells it, so only published networks are known without ``--num-heads``, which then holds at
    every level.

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
