"""Layouts of single files: their interface, sizes read from tensors, and parts of their networks.

Each layout's network is written over the layout's own names, after the papers and independently of
`hddm.networks` and diffusers, so that comparing the two finds mistakes in a table of names. Tensors are cast
when used, so that mapped weights never lie in memory as a whole.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import ModelMixin
from torch import Tensor
from torch.nn import functional as F

from hddm.checkpoints.sources import Declared, Forward, KeyTable, Weights
from hddm.utils.errors import HddmError
from hddm.utils.settings import Reading

LATENT_SCALE = 0.18215
IMAGENET_CLASSES = 1000
IMAGENET_LICENCE = (
    "CC-BY-NC-4.0 (assumed: it has the 1,000 classes of the released ImageNet DiT weights, which are "
    "non-commercial; `licence` states another)"
)


class UnstatedHeads(HddmError):
    """Raised where neither a tensor nor the user states the number of attention heads."""


@dataclass(frozen=True)
class FileLayout:
    """The checkpoint file format of one code base.

    Args:
        name: as in ``--to-layout``.
        markers: keys that all files of this layout have, and together no other.
        network: class that computes the same function.
        arguments: its arguments, from the tensors and the user's options.
        table: maps names of both sides, from the network's names, its arguments and the origin for errors.
        forward: the layout's own network over its own names, for the check of a conversion.
        declared: from the file's tensors, the arguments, the user's options and the origin for errors.
        scheduler: training schedule fixed by the layout's code, as a diffusers config; None if it fixes none.
        nulls: foreign tensors that stand for no condition, by condition.
    """

    name: str
    markers: tuple[str, ...]
    network: type[ModelMixin]
    arguments: Callable[[Weights, Reading, str], dict[str, Any]]
    table: Callable[[Iterable[str], Mapping[str, Any], str], KeyTable]
    forward: Callable[[Weights, Mapping[str, Any]], Forward]
    declared: Callable[[Weights, Mapping[str, Any], Reading, str], Declared]
    scheduler: Mapping[str, Any] | None
    nulls: Mapping[str, str] = field(default_factory=dict)


def count_blocks(names: Weights, prefix: str) -> int:
    """Count blocks: one more than the highest index after ``prefix``, limited to the number of tensors."""
    found = [re.match(rf"{re.escape(prefix)}\.(\d{{1,6}})\.", name) for name in names]
    return min(1 + max((int(match[1]) for match in found if match), default=-1), len(names))


def shape_of(weights: Weights, name: str, ndim: int, origin: str) -> tuple[int, ...]:
    """Shape of a tensor that sizes are read from; it must have ``ndim`` dimensions, none empty."""
    if name not in weights:
        raise HddmError(f"{origin}: missing {name}")
    shape = tuple(weights[name].shape)
    if len(shape) != ndim or 0 in shape:
        raise HddmError(f"{origin}: {name} has shape {shape}; {ndim} dimensions are expected")
    return shape


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

    def perceptron(self, value: Tensor, first: str, second: str, act: Callable[[Tensor], Tensor]) -> Tensor:
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
    q, k, v = (z.unflatten(-1, (heads, -1)).transpose(1, 2) for z in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
