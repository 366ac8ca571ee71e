"""Scaled dot-product attention, with a quick gradient where PyTorch's own is slow."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

MOST_SCORES = 256 * 256
"""Scores of one head up to which `_Attend` is the quicker."""


def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """softmax(Q Kᵀ / sqrt(d)) V; all of shape (batch, heads, tokens, d), keys and values of one length.

    PyTorch's gradient of this in bfloat16 on CPUs takes several times as long as the matrix products that it
    consists of (2.15, 64 tokens: with the forward pass 59 ms against 20 ms). There, the forward pass stays
    PyTorch's and the gradient is written out. Elsewhere this is ``F.scaled_dot_product_attention``.
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

    P is computed anew from float32 scores, as the forward pass has them: of bfloat16 ones, a score of 30
    would be off by 0.06, and its probability by 6 %.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(queries, keys, values)
        return F.scaled_dot_product_attention(queries, keys, values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # Heads lie apart by tokens; each product would copy them for itself.
        queries, keys, values, gradient = (x.contiguous() for x in (*ctx.saved_tensors, *gradients))
        scale = queries.shape[-1] ** -0.5
        scores = torch.matmul(scale * queries.float(), keys.float().transpose(-1, -2))
        weights = scores.softmax(-1).to(queries.dtype)
        of_weights = gradient @ values.transpose(-1, -2)
        of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)
        of_scores = scale * of_scores
        return (
            of_scores @ keys,
            of_scores.transpose(-1, -2) @ queries,
            weights.transpose(-1, -2) @ gradient,
        )
