"""Stable Diffusion 1, 2 and XL (arXiv:2112.10752, 2307.01952) and Kolors: UNet2DConditionModel."""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from hddm import condition_names
from hddm.condition_names import TEXT, TEXT_EMBEDS
from hddm.networks.encoders import CLIP, CLIP_PROJECTED
from hddm.networks.families.family import Config, Pipeline, Prompts, Taken, count
from hddm.networks.families.kolors import KOLORS
from hddm.networks.families.unet import Unet
from hddm.networks.identity import TextEncoderRecord
from hddm.networks.sample_sizes import SampleSizes
from hddm.utils.errors import HddmError

_XL = Pipeline(
    "StableDiffusionXLPipeline",
    network="unet",
    prompts=Prompts((CLIP, CLIP_PROJECTED), TEXT_EMBEDS, has_zeros_key=True),
    has_text=True,
    options={"add_watermarker": False},
)
_SUPPORTED: Config = {
    "addition_embed_type": (None, "text_time"),
    "encoder_hid_dim_type": (None, "text_proj"),
    "time_cond_proj_dim": (None,),
}
"""Values of keys that name further conditions."""
_BESIDE = {"encoder_hid_dim_type": ": it takes pictures beside its text (an IP-Adapter?)"}
"""What other values of these keys mean."""
_PROJECTED = "encoder_hid_dim"
"""Key: the width of text that a network projects to that of its attention; without one it does not."""
_VECTORS = "projection_class_embeddings_input_dim"
"""Key: the width of ``text_embeds`` and of the embedded ``time_ids`` together."""


class StableDiffusion(Unet):
    """A UNet with text; XL's also takes one vector of the text, and the size and crop of the picture."""

    name = "UNet2DConditionModel"
    layout = "diffusers-unet2d-condition"
    blocks = ("BasicTransformerBlock",)
    pipelines = (Pipeline("StableDiffusionPipeline", network="unet", has_text=True), _XL, KOLORS)
    text_key = "cross_attention_dim"
    nested = (TEXT_EMBEDS, "time_ids")
    settings = ("time_ids",)
    residuals = ("down_block_additional_residuals", "mid_block_additional_residual")
    keeps_empty_prompt = True

    def refuse(self, config: Config) -> None:
        for key, allowed in _SUPPORTED.items():
            if config.get(key) not in allowed:
                why = _BESIDE.get(key, "")
                raise HddmError(f"{key} {config[key]!r} of {self.name} is not supported{why}")
        projected = count(config, _PROJECTED)
        if (config.get("encoder_hid_dim_type") or projected is not None) and (projected or 0) < 1:
            raise HddmError(
                f"{_PROJECTED} is {projected}, and the text that {self.name} projects has a width of 1 or "
                "more; set it in the config"
            )

    def conditions(self, config: Config) -> Taken:
        self.refuse(config)
        labels = super().conditions(config)
        added = self.nested if config.get("addition_embed_type") else ()
        if added and _vector_width(config) < 1:
            raise HddmError(
                f"{_VECTORS} {config[_VECTORS]} of {self.name} leaves no room for text_embeds"
            )
        names = (TEXT, *labels.conditions, *added)
        return Taken(names, labels.num_classes)

    def text_width(self, config: Config) -> int | None:
        projected = count(config, _PROJECTED)
        return super().text_width(config) if projected is None else projected

    def sizes(self, config: Config) -> SampleSizes:
        # Unlike that without text, it brings odd sides back on the way up.
        return SampleSizes()

    def example(
        self, name: str, config: Config, num_classes: int | None, noise: Generator
    ) -> Tensor:
        match name:
            case condition_names.TEXT_EMBEDS:
                return torch.randn(1, _vector_width(config), generator=noise)
            case "time_ids":
                return torch.tensor([[64.0, 64.0, 0.0, 0.0, 64.0, 64.0]])
        return super().example(name, config, num_classes, noise)

    def defaults(
        self, names: Sequence[str], sample_shape: tuple[int, int, int]
    ) -> dict[str, Tensor]:
        if "time_ids" not in names:
            return {}
        # The size, no crop, and the size again, in pixels.
        height, width = 8.0 * sample_shape[1], 8.0 * sample_shape[2]
        return {"time_ids": torch.tensor([height, width, 0.0, 0.0, height, width])}

    def null_vectors(self, config: Config) -> dict[str, Tensor]:
        is_xl = config.get("addition_embed_type") is not None
        return {TEXT_EMBEDS: torch.zeros(_vector_width(config))} if is_xl else {}

    def pipeline(
        self, arguments: Config, text_encoder: TextEncoderRecord | None = None
    ) -> Pipeline:
        if arguments.get("addition_embed_type") != "text_time":
            return self.pipelines[0]
        return _XL if arguments.get(_PROJECTED) is None else KOLORS


def _vector_width(config: Config) -> int:
    """Width of ``text_embeds``, which is embedded together with the six numbers of ``time_ids``."""
    sizes = []
    for key in (_VECTORS, "addition_time_embed_dim"):
        size = count(config, key)
        if size is None:
            raise HddmError(
                f"{key} is missing, which addition_embed_type text_time needs; set it in the config"
            )
        sizes.append(size)
    return sizes[0] - 6 * sizes[1]


STABLE_DIFFUSION = StableDiffusion()
