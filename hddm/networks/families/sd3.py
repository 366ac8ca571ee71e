"""Stable Diffusion 3 (arXiv:2403.03206): SD3Transformer2DModel."""

from hddm.condition_names import POOLED, TEXT
from hddm.networks.encoders import CLIP_PROJECTED, T5
from hddm.networks.families.family import Config, Family, Pipeline, Prompts, Taken, count
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


SD3 = Sd3()
