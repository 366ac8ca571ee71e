"""Stable Diffusion 3 (arXiv:2403.03206): SD3Transformer2DModel."""

from collections.abc import Mapping

from hddm.condition_names import POOLED, TEXT
from hddm.networks.encoders import CLIP_PROJECTED, T5
from hddm.networks.families.family import (
    Config,
    Family,
    ForeignLayer,
    Pipeline,
    Prompts,
    Taken,
    count,
)
from hddm.utils.errors import HddmError


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
