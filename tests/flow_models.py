"""Tiny networks of SD3, Flux, Chroma, Z-Image and Lumina 2, and what they mean, written down by hand."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    ChromaTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    FluxTransformer2DModel,
    Lumina2Transformer2DModel,
    ModelMixin,
    SD3Transformer2DModel,
    ZImageTransformer2DModel,
)
from torch import Tensor

from tests.checkpoint_files import pipeline, randomised

SIDE = 8
SD3 = {
    "sample_size": SIDE,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 12,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 10,
    "pos_embed_max_size": 6,
}
SD35 = {"qk_norm": "rms_norm", "dual_attention_layers": (0,)}
FLUX = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "pooled_projection_dim": 10,
    "axes_dims_rope": (4, 6, 6),
}
CHROMA = {
    **{name: value for name, value in FLUX.items() if name != "pooled_projection_dim"},
    "approximator_num_channels": 16,
    "approximator_hidden_dim": 24,
    "approximator_layers": 2,
}
Z_IMAGE = {
    "in_channels": 4,
    "dim": 32,
    "n_layers": 3,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": 24,
    "axes_dims": [4, 6, 6],
    "axes_lens": [1024, 64, 64],
}
LUMINA2 = {
    "sample_size": SIDE,
    "in_channels": 4,
    "hidden_size": 32,
    "num_layers": 3,
    "num_refiner_layers": 1,
    "num_attention_heads": 2,
    "num_kv_heads": 1,
    "multiple_of": 16,
    "cap_feat_dim": 24,
    "axes_dim_rope": [4, 6, 6],
    "axes_lens": [300, 64, 64],
}
WITH_SIDE = ("--sample-size", SIDE)


def sd3(seed: int = 0, **changes: Any) -> SD3Transformer2DModel:
    return randomised(SD3Transformer2DModel(**SD3 | changes), seed)


def flux(seed: int = 0, **changes: Any) -> FluxTransformer2DModel:
    return randomised(FluxTransformer2DModel(**FLUX | changes), seed)


def chroma(seed: int = 0, **changes: Any) -> ChromaTransformer2DModel:
    return randomised(ChromaTransformer2DModel(**CHROMA | changes), seed)


def z_image(seed: int = 0, **changes: Any) -> ZImageTransformer2DModel:
    return randomised(ZImageTransformer2DModel(**Z_IMAGE | changes), seed)


def lumina2(seed: int = 0, **changes: Any) -> Lumina2Transformer2DModel:
    return randomised(Lumina2Transformer2DModel(**LUMINA2 | changes), seed)


def flow_pipeline(folder: Path, network: ModelMixin, **settings: Any) -> Path:
    """A pipeline folder with a flow-match scheduler of these settings."""
    return pipeline(folder, network, FlowMatchEulerDiscreteScheduler(**settings))


def text(network: ModelMixin, rows: int = 2) -> dict[str, Tensor]:
    """Conditions that the network takes."""
    noise = torch.Generator().manual_seed(3)
    given = {"encoder_hidden_states": torch.randn(rows, 5, 12, generator=noise)}
    if isinstance(network, ChromaTransformer2DModel):
        given["encoder_attention_mask"] = (torch.arange(5) < 3).long().expand(rows, -1)
        return given
    given["pooled_projections"] = torch.randn(rows, 10, generator=noise)
    if network.config.get("guidance_embeds"):
        given["guidance"] = torch.linspace(1, 4, rows)
    return given


def _cells(
    channels: int, height: int, width: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, int]]]:
    """Where each number of a state (c, y, x) lies in its rows: row y W/2 + x, channel 4c + 2 dy + dx."""
    for c, y, x in itertools.product(range(channels), range(height), range(width)):
        yield (c, y, x), ((y // 2) * (width // 2) + x // 2, 4 * c + 2 * (y % 2) + x % 2)


def rows_by_hand(x: Tensor) -> Tensor:
    """A state as rows, a number at a time."""
    batch, channels, height, width = x.shape
    rows = torch.zeros(batch, height * width // 4, 4 * channels, dtype=x.dtype)
    for (c, y, z), (row, at) in _cells(channels, height, width):
        rows[:, row, at] = x[:, c, y, z]
    return rows


def state_by_hand(rows: Tensor, height: int, width: int) -> Tensor:
    """The way back."""
    x = torch.zeros(len(rows), rows.shape[2] // 4, height, width, dtype=rows.dtype)
    for (c, y, z), (row, at) in _cells(x.shape[1], height, width):
        x[:, c, y, z] = rows[:, row, at]
    return x


def places_by_hand(height: int, width: int) -> Tensor:
    """(0, y, x) of every row."""
    return torch.tensor([[0.0, y, z] for y in range(height // 2) for z in range(width // 2)])


@torch.no_grad()
def velocity_by_hand(network: ModelMixin, x: Tensor, t: Tensor, given: dict[str, Tensor]) -> Tensor:
    """What the network says at times t of [0, 1], as eps - x_0.

    Those of Z-Image and Lumina 2 count time from noise, and their output is x_0 - eps.
    """
    if isinstance(network, SD3Transformer2DModel):
        return network(x, timestep=1000 * t, return_dict=False, **given)[0]
    if isinstance(network, ZImageTransformer2DModel):
        texts = []
        for one, mask in zip(
            given["encoder_hidden_states"], given["encoder_attention_mask"], strict=True
        ):
            texts.append(one[mask > 0])
        rows = network([one[:, None] for one in x], 1 - t, texts, return_dict=False)[0]
        return -torch.stack([one[:, 0] for one in rows])
    if isinstance(network, Lumina2Transformer2DModel):
        text, mask = given["encoder_hidden_states"], given["encoder_attention_mask"].long()
        return -network(x, 1 - t, text, mask, return_dict=False)[0]
    height, width = x.shape[-2:]
    inputs: dict[str, Tensor] = {}
    for name, one in given.items():
        inputs[name] = one
    if "encoder_attention_mask" in inputs:
        text_mask = inputs.pop("encoder_attention_mask").to(x.dtype)
        inputs["attention_mask"] = torch.ones(len(x), 5 + height * width // 4, dtype=x.dtype)
        inputs["attention_mask"][:, :5] = text_mask
    inputs |= {"img_ids": places_by_hand(height, width), "txt_ids": torch.zeros(5, 3)}
    rows = network(rows_by_hand(x), timestep=t, return_dict=False, **inputs)[0]
    return state_by_hand(rows, height, width)
