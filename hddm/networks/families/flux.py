"""Flux.1: FluxTransformer2DModel, which takes and returns patches of 2×2 as rows.

(batch, C, H, W)  ↔  (batch, HW/4, 4C)      row y W/2 + x holds patch (y, x), channel 4c + 2 dy + dx
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import ModelMixin
from einops import rearrange
from torch import Generator, Tensor

from hddm.condition_names import EMBEDDED_GUIDANCE, POOLED, TEXT
from hddm.networks.encoders import CLIP, T5
from hddm.networks.families.family import (
    Config,
    Family,
    ForeignLayer,
    Pipeline,
    Prompts,
    SingleFile,
    Taken,
    Tensors,
)
from hddm.networks.sample_sizes import SampleSizes
from hddm.utils.errors import HddmError
from hddm.utils.tensors import count_blocks, shape_of

GUIDANCE = 3.5
"""Guidance that is embedded into the network, as of FLUX.1 [dev]; diffusers' default."""


class Flux(Family):
    """A transformer with text of CLIP and T5, and perhaps embedded guidance.

    It casts times to its own dtype before embedding them, and was trained that way.
    """

    name = "FluxTransformer2DModel"
    layout = "diffusers-flux"
    depths: tuple[tuple[str, ...], ...] = (("num_layers", "num_single_layers"),)
    blocks = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
    pipelines = (
        Pipeline(
            "FluxPipeline",
            prompts=Prompts((CLIP, T5), POOLED, t5_tokens=512, encodes_negatives=False),
            has_text=True,
        ),
    )
    # github.com/black-forest-labs/flux, src/flux/util.py.
    single_file = SingleFile(
        "flux",
        ("double_blocks.0.img_mod.lin.weight", "single_blocks.0.linear1.weight"),
        scale=0.3611,
        shift=0.1159,
        sample_size=128,
    )
    time_factor = 1000.0
    settings: tuple[str, ...] = (EMBEDDED_GUIDANCE,)
    residuals = ("controlnet_block_samples", "controlnet_single_block_samples")
    lora_layers = rf"{Family.lora_layers}|single_transformer_blocks\.\d+\.proj_(mlp|out)"
    text_key = "joint_attention_dim"
    states_size = False

    def patch(self, config: Config) -> int | None:
        return 2

    def channels(self, config: Config) -> int:
        return super().channels(config) // 4

    def has_variance_head(self, config: Config) -> bool:
        return False

    def sizes(self, config: Config) -> SampleSizes:
        return SampleSizes(multiple=2)

    def conditions(self, config: Config) -> Taken:
        if (patch := config.get("patch_size")) != 1:
            raise HddmError(
                f"patch_size {str(patch)[:40]} of {self.name} is not supported; its rows are packed"
            )
        # No tensor bounds these, and they take memory once the network runs.
        axes, width = config.get("axes_dims_rope"), config.get("attention_head_dim")
        given = axes if isinstance(axes, Sequence) and len(axes) == 3 else ()
        are_even = all(isinstance(one, int) and one >= 2 and one % 2 == 0 for one in given)
        if not given or not are_even or sum(given) != width:
            text = f"it is three even numbers that sum to attention_head_dim, {str(width)[:40]}"
            raise HddmError(f"axes_dims_rope is {str(axes)[:40]}: {text}")
        guidance = (EMBEDDED_GUIDANCE,) if config.get("guidance_embeds") else ()
        return Taken((TEXT, POOLED, *guidance))

    def call(self, model: ModelMixin, x: Tensor, timestep: Tensor, conditions: Tensors) -> Tensor:
        given: dict[str, Any] = dict(conditions)
        text = conditions.get(TEXT)
        given["img_ids"] = positions(x.shape[-2], x.shape[-1], x.device)
        # Text has no place: all of it lies at (0, 0, 0).
        given["txt_ids"] = torch.zeros(0 if text is None else text.shape[1], 3, device=x.device)
        rows: Tensor = model(pack(x), timestep=timestep, return_dict=False, **given)[0]
        return unpack(rows, x.shape[-2])

    def read_call(self, state: Tensor, given: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        rest = {name: one for name, one in given.items() if name not in ("txt_ids", "img_ids")}
        places = given["img_ids"][..., 1:].flatten(0, -2)
        height, width = (places.amax(0) + 1).long().tolist()
        if height * width != state.shape[1]:
            raise HddmError(
                f"{state.shape[1]} rows are no picture of {height}×{width} patches of 2×2"
            )
        return unpack(state, 2 * height), rest

    def as_output(self, state: Tensor, config: Config) -> Tensor:
        return pack(state)

    def example(
        self, name: str, config: Config, num_classes: int | None, noise: Generator
    ) -> Tensor:
        if name == EMBEDDED_GUIDANCE:
            return torch.tensor([GUIDANCE])
        return super().example(name, config, num_classes, noise)

    def defaults(
        self, names: Sequence[str], sample_shape: tuple[int, int, int]
    ) -> dict[str, Tensor]:
        return {EMBEDDED_GUIDANCE: torch.tensor(GUIDANCE)} if EMBEDDED_GUIDANCE in names else {}

    def foreign_layers(self, config: Config) -> Mapping[str, ForeignLayer]:
        found = {name: ForeignLayer((ours,)) for name, ours in _OUTER.items()}
        found["final_layer.adaLN_modulation.1"] = ForeignLayer(("norm_out.linear",), True)
        for n in range(config["num_layers"]):
            for name, ours in _DOUBLE.items():
                layers = tuple(f"transformer_blocks.{n}.{one}" for one in ours)
                found[f"double_blocks.{n}.{name}"] = ForeignLayer(layers)
        for n in range(config["num_single_layers"]):
            for name, ours in _SINGLE.items():
                layers = tuple(f"single_transformer_blocks.{n}.{one}" for one in ours)
                found[f"single_blocks.{n}.{name}"] = ForeignLayer(layers)
        return found

    def foreign_tensors(self, config: Config) -> Mapping[str, str]:
        found = {}
        for n in range(config["num_layers"]):
            for name, ours in _DOUBLE_NORMS.items():
                found[f"double_blocks.{n}.{name}.scale"] = f"transformer_blocks.{n}.{ours}.weight"
        for n in range(config["num_single_layers"]):
            for name, ours in _SINGLE_NORMS.items():
                own = f"single_transformer_blocks.{n}.{ours}.weight"
                found[f"single_blocks.{n}.{name}.scale"] = own
        return found

    def file_arguments(self, weights: Tensors, origin: str) -> dict[str, Any]:
        return {
            **self.block_arguments(weights, origin),
            "pooled_projection_dim": shape_of(weights, "vector_in.in_layer.weight", 2, origin)[1],
            "guidance_embeds": "guidance_in.in_layer.weight" in weights,
        }

    def block_arguments(self, weights: Tensors, origin: str) -> dict[str, Any]:
        """Arguments of the blocks and of what they take, as `file_arguments`."""
        head = shape_of(weights, "double_blocks.0.img_attn.norm.query_norm.scale", 1, origin)[0]
        width, in_channels = shape_of(weights, "img_in.weight", 2, origin)
        if head != sum(_AXES) or width % head:
            raise HddmError(
                f"{origin}: its heads have {head} numbers of {width}; the positions of Flux are known for "
                f"{sum(_AXES)}"
            )
        return {
            "patch_size": 1,
            "in_channels": in_channels,
            "num_layers": count_blocks(weights, "double_blocks"),
            "num_single_layers": count_blocks(weights, "single_blocks"),
            "attention_head_dim": head,
            "num_attention_heads": width // head,
            "joint_attention_dim": shape_of(weights, "txt_in.weight", 2, origin)[1],
            "axes_dims_rope": list(_AXES),
        }

    def file_scheduler(self, arguments: Config) -> dict[str, Any]:
        scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000}
        if not arguments.get("guidance_embeds"):
            # FLUX.1 [schnell], which is sampled on an even grid.
            return {**scheduler, "shift": 1.0}
        by_size = {"base_image_seq_len": 256, "max_image_seq_len": 4096}
        shifts = {"base_shift": 0.5, "max_shift": 1.15, "use_dynamic_shifting": True}
        return {**scheduler, "shift": 3.0, **by_size, **shifts}


_EMBEDDERS = {
    "time_in": "timestep_embedder",
    "vector_in": "text_embedder",
    "guidance_in": "guidance_embedder",
}
_OUTER = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "final_layer.linear": "proj_out",
    **{f"{one}.in_layer": f"time_text_embed.{name}.linear_1" for one, name in _EMBEDDERS.items()},
    **{f"{one}.out_layer": f"time_text_embed.{name}.linear_2" for one, name in _EMBEDDERS.items()},
}
"""Layers outside of the blocks, by their names in Black Forest Labs' code."""
_DOUBLE = {
    "img_mod.lin": ("norm1.linear",),
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "img_attn.proj": ("attn.to_out.0",),
    "img_mlp.0": ("ff.net.0.proj",),
    "img_mlp.2": ("ff.net.2",),
    "txt_mod.lin": ("norm1_context.linear",),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "txt_attn.proj": ("attn.to_add_out",),
    "txt_mlp.0": ("ff_context.net.0.proj",),
    "txt_mlp.2": ("ff_context.net.2",),
}
_DOUBLE_NORMS = {
    "img_attn.norm.query_norm": "attn.norm_q",
    "img_attn.norm.key_norm": "attn.norm_k",
    "txt_attn.norm.query_norm": "attn.norm_added_q",
    "txt_attn.norm.key_norm": "attn.norm_added_k",
}
_SINGLE_NORMS = {"norm.query_norm": "attn.norm_q", "norm.key_norm": "attn.norm_k"}
_AXES = (16, 56, 56)
"""Numbers of a head that stand for each axis of a position, which no tensor shows."""
_SINGLE = {
    "modulation.lin": ("norm.linear",),
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "linear2": ("proj_out",),
}


def pack(x: Tensor) -> Tensor:
    """Rows (batch, HW/4, 4C) of a state (batch, C, H, W) of even sides."""
    return rearrange(x, "b c (h p) (w q) -> b (h w) (c p q)", p=2, q=2)


def unpack(rows: Tensor, height: int) -> Tensor:
    """The state (batch, C, H, W) of rows (batch, HW/4, 4C), H = ``height``."""
    return rearrange(rows, "b (h w) (c p q) -> b c (h p) (w q)", h=height // 2, p=2, q=2)


def positions(height: int, width: int, device: torch.device) -> Tensor:
    """Position (0, y, x) of every row, (HW/4, 3); float32, since half types round large numbers."""
    sides = []
    for size in (1, height // 2, width // 2):
        sides.append(torch.arange(size, device=device, dtype=torch.float32))
    return torch.cartesian_prod(*sides)


FLUX = Flux()
