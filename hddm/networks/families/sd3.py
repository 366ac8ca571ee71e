"""Stable Diffusion 3 (arXiv:2403.03206): SD3Transformer2DModel."""

import math
from collections.abc import Mapping
from typing import Any

from hddm.condition_names import POOLED, TEXT
from hddm.networks.encoders import CLIP_PROJECTED, T5
from hddm.networks.families.family import (
    Config,
    Family,
    ForeignLayer,
    Pipeline,
    Prompts,
    SingleFile,
    Taken,
    Tensors,
    count,
)
from hddm.networks.sample_sizes import SampleSizes
from hddm.utils.errors import HddmError
from hddm.utils.tensors import count_blocks, shape_of


class Sd3(Family):
    """A transformer with text of two CLIPs and T5."""

    name = "SD3Transformer2DModel"
    layout = "diffusers-sd3"
    blocks = ("JointTransformerBlock",)
    pipelines = (
        Pipeline(
            "StableDiffusion3Pipeline",
            prompts=Prompts(
                (CLIP_PROJECTED, CLIP_PROJECTED, T5), POOLED, t5_tokens=256, joins=True
            ),
            has_text=True,
        ),
    )
    # github.com/Stability-AI/sd3.5, mmditx.py and sd3_impls.py.
    single_file = SingleFile(
        "sd3",
        ("joint_blocks.0.x_block.attn.qkv.weight", "pos_embed", "context_embedder.weight"),
        scale=1.5305,
        shift=0.0609,
        sample_size=128,
    )
    text_key = "joint_attention_dim"
    residuals = ("block_controlnet_hidden_states",)

    def conditions(self, config: Config) -> Taken:
        # The tensor of positions has the largest side; a sample takes its middle.
        patches = count(config, "pos_embed_max_size") or 0
        most = patches * (count(config, "patch_size") or 0)
        side = config.get("sample_size")
        if isinstance(side, int) and side > most:
            raise HddmError(f"sample_size is {side}, and {self.name} has positions for {most}")
        return Taken((TEXT, POOLED))

    def sizes(self, config: Config) -> SampleSizes:
        # Positions of a sample are the middle of a table.
        patch, patches = count(config, "patch_size") or 1, count(config, "pos_embed_max_size") or 1
        return SampleSizes(multiple=patch, most=patch * patches)

    def foreign_layers(self, config: Config) -> Mapping[str, ForeignLayer]:
        found = {name: ForeignLayer((ours,)) for name, ours in _OUTER.items()}
        found["final_layer.adaLN_modulation.1"] = ForeignLayer(("norm_out.linear",), True)
        last = config["num_layers"] - 1
        for n in range(config["num_layers"]):
            for name, ours in _JOINT.items():
                layers = tuple(f"transformer_blocks.{n}.{one}" for one in ours)
                # The last block's text is only read: its modulation is like the final layer's.
                is_read = n == last and name == "context_block.adaLN_modulation.1"
                found[f"joint_blocks.{n}.{name}"] = ForeignLayer(layers, is_read)
        return found

    def foreign_tensors(self, config: Config) -> Mapping[str, str]:
        found = {"pos_embed": "pos_embed.pos_embed"}
        for n in range(config["num_layers"]):
            for name, ours in _NORMS.items():
                own = f"transformer_blocks.{n}.{ours}.weight"
                found[f"joint_blocks.{n}.{name}.weight"] = own
        return found

    def file_arguments(self, weights: Tensors, origin: str) -> dict[str, Any]:
        width, in_channels, patch, _ = shape_of(weights, "x_embedder.proj.weight", 4, origin)
        num_layers = count_blocks(weights, "joint_blocks")
        dual = []
        for n in range(num_layers):
            if f"joint_blocks.{n}.x_block.attn2.qkv.weight" in weights:
                dual.append(n)
        has_norms = "joint_blocks.0.x_block.attn.ln_q.weight" in weights
        positions = shape_of(weights, "pos_embed", 3, origin)[1]
        text, text_width = shape_of(weights, "context_embedder.weight", 2, origin)
        out = shape_of(weights, "final_layer.linear.weight", 2, origin)[0]
        if width % _HEAD_WIDTH or math.isqrt(positions) ** 2 != positions:
            raise HddmError(
                f"{origin}: is {width} wide with {positions} positions; Stable Diffusion 3 has heads of "
                f"{_HEAD_WIDTH} numbers and positions in a square"
            )
        return {
            "patch_size": patch,
            "in_channels": in_channels,
            "out_channels": out // patch**2,
            "num_layers": num_layers,
            "attention_head_dim": _HEAD_WIDTH,
            "num_attention_heads": width // _HEAD_WIDTH,
            "joint_attention_dim": text_width,
            "caption_projection_dim": text,
            "pooled_projection_dim": shape_of(weights, "y_embedder.mlp.0.weight", 2, origin)[1],
            "pos_embed_max_size": math.isqrt(positions),
            "dual_attention_layers": dual,
            "qk_norm": "rms_norm" if has_norms else None,
        }

    def file_scheduler(self, arguments: Config) -> dict[str, Any]:
        name = "FlowMatchEulerDiscreteScheduler"
        return {"_class_name": name, "num_train_timesteps": 1000, "shift": 3.0}


_HEAD_WIDTH = 64
"""Numbers of a head, which the authors' code fixes."""
_NORMS = {
    "x_block.attn.ln_q": "attn.norm_q",
    "x_block.attn.ln_k": "attn.norm_k",
    "x_block.attn2.ln_q": "attn2.norm_q",
    "x_block.attn2.ln_k": "attn2.norm_k",
    "context_block.attn.ln_q": "attn.norm_added_q",
    "context_block.attn.ln_k": "attn.norm_added_k",
}
_OUTER = {
    "x_embedder.proj": "pos_embed.proj",
    "context_embedder": "context_embedder",
    "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
    "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
    "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
    "final_layer.linear": "proj_out",
}
"""Layers outside of the blocks, by their names in Stability AI's code."""
_JOINT = {
    "x_block.adaLN_modulation.1": ("norm1.linear",),
    "x_block.attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "x_block.attn.proj": ("attn.to_out.0",),
    "x_block.attn2.qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
    "x_block.attn2.proj": ("attn2.to_out.0",),
    "x_block.mlp.fc1": ("ff.net.0.proj",),
    "x_block.mlp.fc2": ("ff.net.2",),
    "context_block.adaLN_modulation.1": ("norm1_context.linear",),
    "context_block.attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "context_block.attn.proj": ("attn.to_add_out",),
    "context_block.mlp.fc1": ("ff_context.net.0.proj",),
    "context_block.mlp.fc2": ("ff_context.net.2",),
}


SD3 = Sd3()
