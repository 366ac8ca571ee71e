"""Transformers of experts and router: DiTs with adaLN-Zero, AdaLN-Single or a form between them."""

from typing import Any, cast

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from hddm.networks.layers import (
    LAYER_NORM_EPS,
    Attention,
    PatchEmbedding,
    TimeEmbedding,
    add_gated,
    layer_norm,
    linear,
    mlp,
    modulate,
    square_positions,
    square_rotations,
)
from hddm.utils.errors import HddmError
from hddm.utils.records import Record

INTERVAL_SCALE = 1000.0
"""Timesteps in all of t, in which intervals are embedded."""


class ExpertBlock(nn.Module):
    """Self-attention, cross-attention where there is text, and MLP, modulated by six vectors.

    With h = SiLU(embedded) the six are, of shape (6, width),

        single:  shared + table + R h    (PixArt-α's AdaLN-Single, arXiv:2310.00426, section 2.3)
        zero:    W h + b                 (DiT's adaLN-Zero, arXiv:2212.09748, section 3.2)

    in the order shift, scale, gate of the attention, then of the MLP. ``shared`` is common to all blocks, the
    rest is each block's own; R has the config's rank. Cross-attention has no norm and no gate.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, heads, is_zero = config.hidden_size, config.num_heads, config.modulation == "zero"
        if not is_zero:
            self.scale_shift_table = nn.Parameter(torch.randn(6, width) / width**0.5)
        self.norm = layer_norm(width, config.norm_eps)
        self.attn = Attention(width, heads)
        self.cross_attn = None if config.text_dim is None else Attention(width, heads, silent=True)
        mlp_eps = config.norm_eps if config.mlp_norm_eps is None else config.mlp_norm_eps
        self.mlp_norm = layer_norm(width, mlp_eps)
        self.mlp = mlp(width)
        self.modulation = linear(width, 6 * width, std=0) if is_zero else None
        self.residual = _residual(width, config.modulation_rank) if config.modulation_rank else None

    def forward(
        self,
        x: Tensor,
        shared: Tensor | None,
        activated: Tensor,
        text: Tensor | None,
        rotations: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        # (batch, 6, width), split into six of (batch, 1, width)
        six = self._modulation(shared, activated).chunk(6, dim=1)
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = six
        attended = self.attn(modulate(self.norm(x), shift_attn, scale_attn), rotations=rotations)
        x = add_gated(x, gate_attn, attended)
        if self.cross_attn is not None:
            x = x + self.cross_attn(x, text)
        return add_gated(x, gate_mlp, self.mlp(modulate(self.mlp_norm(x), shift_mlp, scale_mlp)))

    def _modulation(self, shared: Tensor | None, activated: Tensor) -> Tensor:
        if self.modulation is not None:
            return _six(self.modulation(activated))
        assert shared is not None
        if self.residual is None:
            return self.scale_shift_table + shared
        last: nn.Module = self.residual
        if isinstance(last, nn.Sequential):
            activated, last = last[0](activated), last[1]
        weight = cast(Tensor, last.weight)
        # With the table as its bias a matrix and a bias taken over from adaLN-Zero give the same bits
        # as there; adding the table afterwards would round once more.
        return _six(F.linear(activated, weight, self.scale_shift_table.flatten())) + shared


def _six(vectors: Tensor) -> Tensor:
    return cast(Tensor, vectors.unflatten(-1, (6, -1)))


def _residual(hidden_size: int, rank: int) -> nn.Linear | nn.Sequential:
    last = linear(rank, 6 * hidden_size, std=0, bias=False)
    return (
        last if rank == hidden_size else nn.Sequential(linear(hidden_size, rank, bias=False), last)
    )


class FinalLayer(nn.Module):
    """Norm, modulation and the projection to patches.

    Shift and scale are a table plus the embedding, or with ``own_modulation`` W SiLU(embedded) + b.
    """

    def __init__(
        self, hidden_size: int, patch_channels: int, own_modulation: bool, norm_eps: float
    ) -> None:
        super().__init__()
        if not own_modulation:
            self.scale_shift_table = nn.Parameter(torch.randn(2, hidden_size) / hidden_size**0.5)
        self.norm = layer_norm(hidden_size, norm_eps)
        self.linear = linear(hidden_size, patch_channels, std=0)
        self.modulation = linear(hidden_size, 2 * hidden_size, std=0) if own_modulation else None

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        if self.modulation is None:
            both = self.scale_shift_table + embedded[:, None]
        else:
            both = self.modulation(F.silu(embedded)).unflatten(-1, (2, -1))
        shift, scale = both.chunk(2, dim=1)
        projected: Tensor = self.linear(modulate(self.norm(x), shift, scale))
        return projected


class ExpertTransformer(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Diffusion transformer: x (batch, C, H, W) to an output (batch, out_channels, H, W).

    It takes squares, H = W = ``sample_size``.
    `VelocityField` holds the output's meaning (noise, velocity, …). With ``text_dim`` every block attends to
    ``encoder_hidden_states``; with ``num_classes`` an embedding of ``class_labels`` is added to that of time,
    and label ``num_classes`` is the null class of classifier-free guidance. By default parameters are named
    as in the Paris release.

    Args:
        sample_size: side of the square input, a multiple of ``patch_size``.
        in_channels: channels C.
        patch_size, hidden_size, depth, num_heads: sizes of the DiT.
        num_classes: number of classes, None for no class condition.
        text_dim: width of the text encoder's tokens, None for no text.
        modulation: "single" (AdaLN-Single) or "zero" (adaLN-Zero, a matrix for every block).
        modulation_rank: with "single", rank of each block's residual to the shared modulation: 0 for none,
            ``hidden_size`` for a full matrix. Only experts of earlier versions have one.
        final_modulation: with "single", "table" or "linear" in the final layer; "zero" implies linear.
        norm_eps: epsilon of the layer norms.
        mlp_norm_eps: epsilon of the norms before MLPs; None for ``norm_eps`` (diffusers' DiT differs).
        frequency_shift: see `sinusoid`: 0, as in DiT, or 1, as in diffusers' DiT.
        out_channels: output channels, where not C, as with a learned variance.
        rotary: add rotary positions to queries and keys, beside the positions that are added to patches.
        interval: take an interval of time too, for mean velocities over it (MeanFlow, arXiv:2505.13447): its
            embedding, zero at first, is added to that of time, and both are smooth.

    Raises `HddmError` for heads that do not divide the width, and for values other than those named above.
    Sources: DiT (arXiv:2212.09748), PixArt-α (arXiv:2310.00426).
    """

    _supports_gradient_checkpointing = True

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
        modulation: str = "single",
        modulation_rank: int = 0,
        final_modulation: str = "table",
        norm_eps: float = LAYER_NORM_EPS,
        mlp_norm_eps: float | None = None,
        frequency_shift: int = 0,
        out_channels: int | None = None,
        rotary: bool = False,
        interval: bool = False,
    ) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        for name, value, known in (
            ("modulation", modulation, ("single", "zero")),
            ("final_modulation", final_modulation, ("table", "linear")),
            ("frequency_shift", frequency_shift, (0, 1)),
        ):
            if value not in known:
                raise HddmError(
                    f"{name} is {str(value)[:40]}, and must be {known[0]} or {known[1]}"
                )
        zero = modulation == "zero"
        side = sample_size // patch_size
        self.patch_embed = PatchEmbedding(in_channels, hidden_size, patch_size, side)
        self.pos_embed = nn.Parameter(square_positions(hidden_size, side))
        self.time_embed = TimeEmbedding(hidden_size, frequency_shift, smooth=interval)
        self.interval_embed = (
            TimeEmbedding(hidden_size, frequency_shift, smooth=True) if interval else None
        )
        if self.interval_embed is not None:
            nn.init.zeros_(cast(Tensor, self.interval_embed.mlp[-1].weight))
        self.t_block = (
            None
            if zero
            else nn.Sequential(nn.SiLU(), linear(hidden_size, 6 * hidden_size, std=0.02))
        )
        self.class_embed = nn.Embedding(num_classes + 1, hidden_size) if num_classes else None
        if self.class_embed is not None:
            nn.init.normal_(self.class_embed.weight, std=0.02)
        self.text_proj = linear(text_dim, hidden_size) if text_dim else None
        self.layers = nn.ModuleList(ExpertBlock(self.config) for _ in range(depth))
        patch_channels = patch_size**2 * (in_channels if out_channels is None else out_channels)
        own_final = zero or final_modulation == "linear"
        self.final_layer = FinalLayer(hidden_size, patch_channels, own_final, norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        class_labels: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        interval: Tensor | None = None,
    ) -> Tensor:
        """Output (batch, out_channels, H, W) for ``hidden_states`` (batch, C, H, W).

        ``timestep`` (batch,) is in the unit of training. With ``num_classes``, integer ``class_labels``
        (batch,) are required; with ``text_dim``, ``encoder_hidden_states`` (batch, tokens, text_dim).
        ``interval`` (batch,) is in t, from 0 to 1.
        """
        patch, side = self.config.patch_size, self.patch_embed.side
        x = self.patch_embed(hidden_states) + self.pos_embed
        embedded = self.time_embed(timestep)
        if self.interval_embed is not None and interval is not None:
            embedded = embedded + self.interval_embed(INTERVAL_SCALE * interval)
        if self.class_embed is not None:
            embedded = embedded + self.class_embed(class_labels)
        text = None
        if self.text_proj is not None:
            assert encoder_hidden_states is not None, "this network attends to text"
            text = self.text_proj(encoder_hidden_states.to(x.dtype))
        rotations = None
        if self.config.rotary:
            rotations = square_rotations(self.config.hidden_size // self.config.num_heads, side, x)
        shared = _six(self.t_block(embedded)) if self.t_block is not None else None
        activated = F.silu(embedded)
        for layer in self.layers:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = self._gradient_checkpointing_func(layer, x, shared, activated, text, rotations)
            else:
                x = layer(x, shared, activated, text, rotations)
        layout, patches = "b (h w) (p q c) -> b c (h p) (w q)", self.final_layer(x, embedded)
        image: Tensor = rearrange(patches, layout, h=side, p=patch, q=patch)
        return image


class RouterBlock(nn.Module):
    """Self-attention, cross-attention where there is text, and MLP, with adaLN-Zero.

    Each block has its own modulation. Cross-attention has no norm and no gate, as in `ExpertBlock`.
    """

    def __init__(self, hidden_size: int, num_heads: int, reads_text: bool = False) -> None:
        super().__init__()
        self.norm = layer_norm(hidden_size)
        self.attn = Attention(hidden_size, num_heads)
        self.cross_attn = Attention(hidden_size, num_heads, silent=True) if reads_text else None
        self.mlp = mlp(hidden_size)
        self.adaLN_modulation = nn.Sequential(
            nn.SiLU(), linear(hidden_size, 6 * hidden_size, std=0)
        )

    def forward(
        self, x: Tensor, embedded: Tensor, only_first: bool = False, text: Tensor | None = None
    ) -> Tensor:
        """Tokens (batch, tokens, hidden_size), or only the first of them."""
        six = self.adaLN_modulation(embedded)[:, None].chunk(6, dim=-1)
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = six
        normed = modulate(self.norm(x), shift_attn, scale_attn)
        if only_first:
            x = add_gated(x[:, :1], gate_attn, self.attn(normed[:, :1], normed))
        else:
            x = add_gated(x, gate_attn, self.attn(normed))
        if self.cross_attn is not None:
            x = x + self.cross_attn(x, text)
        return add_gated(x, gate_mlp, self.mlp(modulate(self.norm(x), shift_mlp, scale_mlp)))


class RouterTransformer(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Classifier of (x_t, t), and of a condition, over ``num_experts`` shards, from a CLS token.

    It is trained on the common path x_t = (1 - t) x_0 + t eps, whatever the experts' schedules. It sees a
    condition as `ExpertTransformer` does: with ``num_classes`` an embedding of ``class_labels`` is added to
    that of time, and label ``num_classes`` is no class; with ``text_dim`` every block attends to
    ``encoder_hidden_states``. The CLS token has no position. Parameters are named as in the Paris release;
    B/2 with 8 experts and no condition has 129.14M of them. Sources: DDM (arXiv:2501.05450), section 3.3;
    Paris (arXiv:2510.03434).
    """

    _supports_gradient_checkpointing = True
    record: Record | None = None
    """Of its folder, `hddm.experts.records.RouterRecord`, where it was read from one."""
    null_text: Tensor | None = None
    """Tokens (tokens, text_dim) of the empty prompt, where it was read from a folder and sees text."""

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
        num_classes: int | None = None,
        text_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        side, reads_text = sample_size // patch_size, text_dim is not None
        self.patch_embed = PatchEmbedding(in_channels, hidden_size, patch_size, side)
        self.pos_embed = nn.Parameter(square_positions(hidden_size, side))
        self.cls_token = nn.Parameter(torch.randn(1, 1, hidden_size) * 0.02)
        self.time_embed = TimeEmbedding(hidden_size)
        self.layers = nn.ModuleList(
            RouterBlock(hidden_size, num_heads, reads_text) for _ in range(depth)
        )
        self.head = nn.Sequential(
            linear(hidden_size, hidden_size),
            nn.GELU(approximate="tanh"),
            nn.LayerNorm(hidden_size, eps=LAYER_NORM_EPS),
            nn.GELU(approximate="tanh"),
            linear(hidden_size, num_experts, std=0),
        )
        # Last, so that all else begins as in a router without a condition.
        self.class_embed = nn.Embedding(num_classes + 1, hidden_size) if num_classes else None
        if self.class_embed is not None:
            nn.init.normal_(self.class_embed.weight, std=0.02)
        self.text_proj = linear(text_dim, hidden_size) if text_dim is not None else None

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        class_labels: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
    ) -> Tensor:
        """Logits (batch, num_experts) of x_t (batch, C, H, W) at ``timestep`` (batch,).

        With ``num_classes``, integer ``class_labels`` (batch,) are required; with ``text_dim``,
        ``encoder_hidden_states`` (batch, tokens, text_dim).
        """
        patches = self.patch_embed(hidden_states) + self.pos_embed
        x = torch.cat([self.cls_token.expand(len(patches), -1, -1), patches], dim=1)
        embedded = self.time_embed(timestep)
        if self.class_embed is not None:
            embedded = embedded + self.class_embed(class_labels)
        text = None
        if self.text_proj is not None:
            assert encoder_hidden_states is not None, "this router attends to text"
            text = self.text_proj(encoder_hidden_states.to(x.dtype))
        for index, layer in enumerate(self.layers, 1):
            # The head reads the CLS token alone, so the last block makes no other.
            last = index == len(self.layers)
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = self._gradient_checkpointing_func(layer, x, embedded, last, text)
            else:
                x = layer(x, embedded, only_first=last, text=text)
        logits: Tensor = self.head(x[:, 0])
        return logits
