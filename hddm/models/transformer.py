"""The expert network: a DiT with AdaLN-Single and class, text or no conditioning."""

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from einops import rearrange
from torch import Tensor, nn

from hddm.models.layers import (
    Attention,
    TimeEmbedding,
    grid_positions,
    layer_norm,
    linear,
    mlp,
    modulate,
    patch_embedding,
)


class ExpertBlock(nn.Module):
    """Self-attention, cross-attention where there is text, and MLP; modulated by one shared vector.

    Each block adds its own ``scale_shift_table`` (6, width) to the modulation that all blocks
    share (PixArt-α's AdaLN-Single, arXiv:2310.00426, section 2.3). Cross-attention has neither a
    norm before it nor a gate.
    """

    def __init__(self, hidden_size: int, num_heads: int, cross_attention: bool) -> None:
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.randn(6, hidden_size) / hidden_size**0.5)
        self.norm = layer_norm(hidden_size)
        self.attn = Attention(hidden_size, num_heads)
        self.cross_attn = Attention(hidden_size, num_heads, silent=True) if cross_attention else None
        self.mlp = mlp(hidden_size)

    def forward(self, x: Tensor, modulation: Tensor, text: Tensor | None) -> Tensor:
        # (batch, 6, width), split into six of (batch, 1, width)
        parts = (self.scale_shift_table + modulation).chunk(6, dim=1)
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = parts
        x = x + gate_attn * self.attn(modulate(self.norm(x), shift_attn, scale_attn))
        if self.cross_attn is not None:
            x = x + self.cross_attn(x, text)
        result: Tensor = x + gate_mlp * self.mlp(modulate(self.norm(x), shift_mlp, scale_mlp))
        return result


class FinalLayer(nn.Module):
    """Norm, modulation by the time embedding itself, and the projection to patches."""

    def __init__(self, hidden_size: int, patch_channels: int) -> None:
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.randn(2, hidden_size) / hidden_size**0.5)
        self.norm = layer_norm(hidden_size)
        self.linear = linear(hidden_size, patch_channels, std=0)

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        shift, scale = (self.scale_shift_table + embedded[:, None]).chunk(2, dim=1)
        projected: Tensor = self.linear(modulate(self.norm(x), shift, scale))
        return projected


class ExpertTransformer(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Diffusion transformer with AdaLN-Single: x (batch, C, S, S) to an output of the same shape.

    What the output means (noise, velocity, …) is not the network's business: `VelocityField` holds
    that. With ``text_dim`` every block attends to ``encoder_hidden_states``; with ``num_classes``
    an embedding of ``class_labels`` is added to that of the time, and label ``num_classes`` is the
    null class of classifier-free guidance. Parameters are named as in the Paris release.

    Args:
        sample_size: side S of the square input, a multiple of ``patch_size``.
        in_channels: channels C.
        patch_size, hidden_size, depth, num_heads: see `hddm.models.sizes`.
        num_classes: number of classes, None for no class condition.
        text_dim: width of the text encoder's tokens, None for no text.

    Sources: DiT (arXiv:2212.09748); PixArt-α (arXiv:2310.00426).
    """

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        sample_size: int = 32,
        in_channels: int = 4,
        patch_size: int = 2,
        hidden_size: int = 1152,
        depth: int = 28,
        num_heads: int = 16,
        num_classes: int | None = None,
        text_dim: int | None = None,
    ) -> None:
        super().__init__()
        side = sample_size // patch_size
        self.patch_embed = patch_embedding(in_channels, hidden_size, patch_size)
        self.pos_embed = nn.Parameter(grid_positions(hidden_size, side))
        self.time_embed = TimeEmbedding(hidden_size)
        self.t_block = nn.Sequential(nn.SiLU(), linear(hidden_size, 6 * hidden_size, std=0.02))
        self.class_embed = nn.Embedding(num_classes + 1, hidden_size) if num_classes else None
        if self.class_embed is not None:
            nn.init.normal_(self.class_embed.weight, std=0.02)
        self.text_proj = linear(text_dim, hidden_size) if text_dim else None
        self.layers = nn.ModuleList(
            ExpertBlock(hidden_size, num_heads, text_dim is not None) for _ in range(depth)
        )
        self.final_layer = FinalLayer(hidden_size, patch_size**2 * in_channels)

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        class_labels: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
    ) -> Tensor:
        """Output (batch, C, S, S).

        Args:
            hidden_states: (batch, C, S, S).
            timestep: (batch,), in the unit that the network was trained with.
            class_labels: (batch,) integers; required with ``num_classes``.
            encoder_hidden_states: (batch, tokens, text_dim); required with ``text_dim``.
        """
        x = self.patch_embed(hidden_states).flatten(2).transpose(1, 2) + self.pos_embed
        embedded = self.time_embed(timestep)
        if self.class_embed is not None:
            embedded = embedded + self.class_embed(class_labels)
        text = self.text_proj(encoder_hidden_states) if self.text_proj is not None else None
        modulation = self.t_block(embedded).unflatten(-1, (6, -1))
        for layer in self.layers:
            x = layer(x, modulation, text)
        patch = self.config.patch_size
        image: Tensor = rearrange(
            self.final_layer(x, embedded),
            "b (h w) (p q c) -> b c (h p) (w q)",
            h=hidden_states.shape[-2] // patch,
            p=patch,
            q=patch,
        )
        return image
