"""The router network: a DiT with adaLN-Zero blocks that classifies a noised image by shard."""

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn

from hddm.models.layers import (
    LAYER_NORM_EPS,
    Attention,
    PatchEmbedding,
    TimeEmbedding,
    add_gated,
    grid_positions,
    layer_norm,
    linear,
    mlp,
    modulate,
)


class RouterBlock(nn.Module):
    """Self-attention and MLP with adaLN-Zero: each block has its own modulation."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.norm = layer_norm(hidden_size)
        self.attn = Attention(hidden_size, num_heads)
        self.mlp = mlp(hidden_size)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), linear(hidden_size, 6 * hidden_size, std=0))

    def forward(self, x: Tensor, embedded: Tensor, only_first: bool = False) -> Tensor:
        """Tokens (batch, tokens, hidden_size), or the first of them alone."""
        parts = self.adaLN_modulation(embedded)[:, None].chunk(6, dim=-1)
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = parts
        normed = modulate(self.norm(x), shift_attn, scale_attn)
        if only_first:
            x = add_gated(x[:, :1], gate_attn, self.attn(normed[:, :1], normed))
        else:
            x = add_gated(x, gate_attn, self.attn(normed))
        return add_gated(x, gate_mlp, self.mlp(modulate(self.norm(x), shift_mlp, scale_mlp)))


class RouterTransformer(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Classifier of (x_t, t) over ``num_experts`` shards, read off a CLS token.

    It is trained on the common path x_t = (1 - t) x_0 + t eps, whatever the experts' own schedules
    are, and it sees no condition. The CLS token carries no position. Parameters are named as in
    the Paris release; at B/2 with 8 experts there are 129.14M of them.

    Sources: DDM (arXiv:2501.05450), section 3.3; Paris (arXiv:2510.03434).
    """

    _supports_gradient_checkpointing = True

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        num_experts: int = 8,
        sample_size: int = 32,
        in_channels: int = 4,
        patch_size: int = 2,
        hidden_size: int = 768,
        depth: int = 12,
        num_heads: int = 12,
    ) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.patch_embed = PatchEmbedding(in_channels, hidden_size, patch_size)
        self.pos_embed = nn.Parameter(grid_positions(hidden_size, sample_size // patch_size))
        self.cls_token = nn.Parameter(torch.randn(1, 1, hidden_size) * 0.02)
        self.time_embed = TimeEmbedding(hidden_size)
        self.layers = nn.ModuleList(RouterBlock(hidden_size, num_heads) for _ in range(depth))
        self.head = nn.Sequential(
            linear(hidden_size, hidden_size),
            nn.GELU(approximate="tanh"),
            nn.LayerNorm(hidden_size, eps=LAYER_NORM_EPS),
            nn.GELU(approximate="tanh"),
            linear(hidden_size, num_experts, std=0),
        )

    def forward(self, hidden_states: Tensor, timestep: Tensor) -> Tensor:
        """Logits (batch, num_experts) of x_t (batch, C, S, S) at ``timestep`` (batch,)."""
        patches = self.patch_embed(hidden_states) + self.pos_embed
        x = torch.cat([self.cls_token.expand(len(patches), -1, -1), patches], dim=1)
        embedded = self.time_embed(timestep)
        for index, layer in enumerate(self.layers, 1):
            # The head reads the CLS token alone, so the last block makes no other.
            last = index == len(self.layers)
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = self._gradient_checkpointing_func(layer, x, embedded, last)
            else:
                x = layer(x, embedded, only_first=last)
        logits: Tensor = self.head(x[:, 0])
        return logits
