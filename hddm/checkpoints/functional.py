"""Pieces from which a layout's own network is written out over its own names.

Apart from `hddm.models` and diffusers, and after the papers, so that comparing the two finds a mistake in a
table of names. A tensor is cast when it is used, so that mapped weights never lie in memory as a whole.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F


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
