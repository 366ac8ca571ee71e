"""PixArt-α (arXiv:2310.00426) and PixArt-Σ (arXiv:2403.04692), PixArtTransformer2DModel."""

import torch
from torch import Generator, Tensor

from hddm.condition_names import TEXT, TEXT_MASK
from hddm.networks.families.family import Config, Family, Pipeline, Taken


class PixArt(Family):
    """A transformer with text of T5; some take the size of the picture as well."""

    name = "PixArtTransformer2DModel"
    layout = "diffusers-pixart"
    former_norm = "ada_norm_single"
    blocks = ("BasicTransformerBlock",)
    computed = ("pos_embed.pos_embed",)
    pipelines = (
        Pipeline("PixArtAlphaPipeline", has_text=True, t5_tokens=120),
        Pipeline("PixArtSigmaPipeline", has_text=True, t5_tokens=300),
    )
    text_key = "caption_channels"
    nested = ("resolution", "aspect_ratio")
    settings = nested

    def conditions(self, config: Config) -> Taken:
        text = (TEXT, TEXT_MASK)
        sizes = config.get("use_additional_conditions")
        if sizes is None:
            sizes = config.get("sample_size") == 128
        return Taken((*text, *(self.nested if sizes else ())))

    def example(self, name: str, config: Config, num_classes: int | None, noise: Generator) -> Tensor:
        match name:
            case "resolution":
                return torch.tensor([[64.0, 64.0]])
            case "aspect_ratio":
                return torch.tensor([[1.0]])
        return super().example(name, config, num_classes, noise)


PIXART = PixArt()
