"""Layers that expert and router share."""

import math
from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from hddm.utils.errors import HddmError

MOST_SCORES = 256 * 256
"""Scores per head up to which `_Attend` is faster."""


def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """softmax(Q Kᵀ / sqrt(d)) V, all (batch, heads, tokens, d); keys and values have equal length.

    It is ``F.scaled_dot_product_attention`` except for its bfloat16 gradient on CPUs, where PyTorch's takes
    several times as long as the matrix products that it consists of.
    """
    slow = queries.device.type == "cpu" and queries.dtype == torch.bfloat16
    if slow and torch.is_grad_enabled() and queries.shape[-2] * keys.shape[-2] <= MOST_SCORES:
        attended: Tensor = _Attend.apply(queries, keys, values)
        return attended
    return F.scaled_dot_product_attention(queries, keys, values)


class _Attend(torch.autograd.Function):
    """Attention with its gradient written out.

    With S = Q Kᵀ / sqrt(d), P = softmax(S), O = P V, and G the gradient of O:

        dV = Pᵀ G;    dS = P ∘ (G Vᵀ - rowsum(P ∘ G Vᵀ));    dQ = dS K / sqrt(d);    dK = dSᵀ Q / sqrt(d)

    P is recomputed from float32 scores, as in the forward pass: in bfloat16 a score of 30 would be off by
    0.06, and its probability by 6 %.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(queries, keys, values)
        return F.scaled_dot_product_attention(queries, keys, values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # Heads lie apart by tokens; each product would copy them for itself.
        queries, keys, values = ctx.saved_tensors
        queries, keys, values = queries.contiguous(), keys.contiguous(), values.contiguous()
        gradient = gradients[0].contiguous()
        scale = queries.shape[-1] ** -0.5
        scores = torch.matmul(scale * queries.float(), keys.float().transpose(-1, -2))
        weights = scores.softmax(-1).to(queries.dtype)
        of_weights = gradient @ values.transpose(-1, -2)
        of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)
        of_scores = scale * of_scores
        of_keys = of_scores.transpose(-1, -2) @ queries
        of_values = weights.transpose(-1, -2) @ gradient
        return of_scores @ keys, of_keys, of_values


LAYER_NORM_EPS = 1e-5
FREQUENCIES = 256
SMOOTH = 0.03
"""Highest frequency of a smooth embedding of times, in radians a timestep; 1000 timesteps are all of t."""


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """``x (1 + scale) + shift`` in one pass; x is (batch, tokens, width), the others broadcast to it."""
    # Under autocast x is float32 and the others may be bfloat16: they are the smaller to cast.
    return torch.addcmul(shift.to(x.dtype), x, 1 + scale.to(x.dtype))


def add_gated(x: Tensor, gate: Tensor, branch: Tensor) -> Tensor:
    """``x + gate branch`` in the dtype of x; gate broadcasts to (batch, tokens, width)."""
    # Cast first: on CPUs a pass over mixed dtypes takes longer than two passes.
    return torch.addcmul(x, branch.to(x.dtype), gate.to(x.dtype))


def sinusoid(
    times: Tensor, dim: int, dtype: torch.dtype, frequency_shift: int = 0, highest: float = 1.0
) -> Tensor:
    """Sinusoidal embedding (batch, dim) of ``times`` (batch,): cosines, then sines.

    With half = dim/2 the frequencies are 10000^(-i / (half - frequency_shift)) for i < half; those above
    ``highest`` give 0. Only the result is cast to ``dtype``, since 987.2 and 988.5 are one number in
    bfloat16.
    """
    half = dim // 2
    steps = torch.arange(half, device=times.device, dtype=times.dtype)
    frequencies = torch.exp(-math.log(1e4) * steps / (half - frequency_shift))
    angles = times[:, None] * frequencies
    embedded = torch.cat([angles.cos(), angles.sin()], dim=-1)
    if highest < 1:
        embedded = embedded * (frequencies <= highest).to(embedded).repeat(2)
    return embedded.to(dtype)


def square_positions(hidden_size: int, side: int) -> Tensor:
    """2-D sine-cosine positions (1, side², hidden_size), row by row, with which training begins."""
    of_place = sinusoid(torch.arange(side, dtype=torch.float32), hidden_size // 2, torch.float32)
    columns, rows = of_place.repeat(side, 1), of_place.repeat_interleave(side, dim=0)
    return torch.cat([columns, rows], dim=1)[None]


def square_rotations(head_dim: int, side: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (side², head_dim/2) of rotary positions of a square, row by row.

    The angles of a token are its row, then its column, times 100^(-i/n) for i < n = head_dim/4 (axial form of
    arXiv:2104.09864). Device and dtype are those of ``like``.
    """
    number = head_dim // 4
    frequencies = 100 ** (-torch.arange(number, device=like.device, dtype=torch.float32) / number)
    of_place = torch.arange(side, device=like.device, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat([of_place.repeat_interleave(side, 0), of_place.repeat(side, 1)], dim=1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, rotations: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (i, i + d/2) of x (batch, heads, tokens, d) by `square_rotations`."""
    cosines, sines = rotations[0].to(x.dtype), rotations[1].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


def linear(fan_in: int, fan_out: int, std: float | None = None, bias: bool = True) -> nn.Linear:
    """Linear layer with zero or no bias; weights Xavier-uniform, or normal with ``std`` (0: zeros)."""
    layer = nn.Linear(fan_in, fan_out, bias=bias)
    if bias:
        nn.init.zeros_(layer.bias)
    if std is None:
        nn.init.xavier_uniform_(layer.weight)
    else:
        nn.init.normal_(layer.weight, std=std)
    return layer


class TimeEmbedding(nn.Module):
    """Sinusoid, then a two-layer perceptron: times (batch,) to (batch, hidden_size).

    With ``smooth`` the frequencies above `SMOOTH` are left out. What a network learns with them is noise
    between the times that it has seen, and so is most of its derivative.
    """

    def __init__(self, hidden_size: int, frequency_shift: int = 0, smooth: bool = False) -> None:
        super().__init__()
        self.frequency_shift, self.smooth = frequency_shift, smooth
        first = linear(FREQUENCIES, hidden_size, std=0.02)
        self.mlp = nn.Sequential(first, nn.SiLU(), linear(hidden_size, hidden_size, std=0.02))

    def forward(self, times: Tensor) -> Tensor:
        dtype = next(self.mlp.parameters()).dtype
        angles = sinusoid(
            times, FREQUENCIES, dtype, self.frequency_shift, SMOOTH if self.smooth else 1.0
        )
        embedded: Tensor = self.mlp(angles)
        return embedded


class Attention(nn.Module):
    """Multi-head attention from ``x`` to ``context`` (default: itself), both of one width.

    With ``silent`` the output starts at zero. ``rotations`` are rotary positions of the tokens of ``x``.
    ``addition(x, output, part)`` adds to the output of ``in_proj_weight[part]`` in place, where it is set.
    """

    addition: Callable[[Tensor, Tensor, slice], None] | None = None

    def __init__(self, hidden_size: int, num_heads: int, silent: bool = False) -> None:
        super().__init__()
        if num_heads < 1 or hidden_size % num_heads:
            raise HddmError(f"a width of {hidden_size} does not divide into {num_heads} heads")
        self.num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * hidden_size, hidden_size))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * hidden_size))
        self.out_proj = linear(hidden_size, hidden_size, std=0 if silent else None)
        nn.init.xavier_uniform_(self.in_proj_weight)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        rotations: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        width, weight, bias = x.shape[-1], self.in_proj_weight, self.in_proj_bias
        if context is None:
            queries, keys, values = self._added(x, F.linear(x, weight, bias)).chunk(3, -1)
        else:
            first, others = slice(width), slice(width, None)
            queries = self._added(x, F.linear(x, weight[first], bias[first]), first)
            both = F.linear(context, weight[others], bias[others])
            keys, values = self._added(context, both, others).chunk(2, -1)
        q, k, v = self._heads(queries), self._heads(keys), self._heads(values)
        if rotations is not None:
            q, k = rotate(q, rotations), rotate(k, rotations)
        mixed = attend(q, k, v)
        projected: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return projected

    def _added(self, x: Tensor, output: Tensor, part: slice = slice(None)) -> Tensor:
        if self.addition is not None:
            self.addition(x, output, part)
        return output

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.num_heads, -1))
        return heads.transpose(1, 2)


class PatchEmbedding(nn.Conv2d):
    """Squares (batch, C, H, W) of ``side`` patches to tokens (batch, side², hidden_size), row by row.

    Its parameters are a convolution's, but it is computed as a linear layer of patches: tokens are then
    contiguous in memory, which makes every later norm and sum several times as fast. einops refuses other
    sizes.
    """

    def __init__(self, in_channels: int, hidden_size: int, patch_size: int, side: int) -> None:
        super().__init__(in_channels, hidden_size, patch_size, patch_size)
        self.side = side
        nn.init.xavier_uniform_(self.weight.view(hidden_size, -1))
        assert self.bias is not None
        nn.init.zeros_(self.bias)

    def forward(self, images: Tensor) -> Tensor:
        patch, _ = self.kernel_size
        sizes = {"h": self.side, "w": self.side, "p": patch, "q": patch}
        patches = rearrange(images, "b c (h p) (w q) -> b (h w) (c p q)", **sizes)
        return F.linear(patches, self.weight.flatten(1), self.bias)


class TanhGelu(nn.GELU):
    """GELU by a hyperbolic tangent: x (1 + tanh u) / 2 with u = sqrt(2/π) (x + 0.044715 x³).

    While `torch.compile` traces, it is x sigmoid(2u), the same function, since inductor writes faster code
    for a sigmoid on CPUs; GPUs were not tried. Otherwise torch's own kernel computes it.
    """

    def __init__(self) -> None:
        super().__init__(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        # Not `is_compiling`, which is true in `torch.export` too: programs keep the operator.
        if not torch.compiler.is_dynamo_compiling():
            return super().forward(x)
        # The kernel computes bfloat16 in float32 too.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        doubled = 2 * math.sqrt(2 / math.pi) * wide * (1 + 0.044715 * wide * wide)
        return (wide * torch.sigmoid(doubled)).to(x.dtype)


def mlp(hidden_size: int) -> nn.Sequential:
    """Feed-forward part of a block: four times the width, tanh-GELU, and back."""
    wide = 4 * hidden_size
    return nn.Sequential(linear(hidden_size, wide), TanhGelu(), linear(wide, hidden_size))


def layer_norm(hidden_size: int, eps: float = LAYER_NORM_EPS) -> nn.LayerNorm:
    """Layer norm without affine parameters, since scale and shift come from the time embedding."""
    # A config may hold anything; without float, a text would fail only once the network runs.
    return nn.LayerNorm(hidden_size, eps=float(eps), elementwise_affine=False)
