"""PixArt-α (arXiv:2310.00426) and PixArt-Σ (arXiv:2403.04692), PixArtTransformer2DModel."""

import torch
from torch import Generator, Tensor

from hddm.condition_names import TEXT, TEXT_MASK
from hddm.networks.families.family import Config, Family, Pipeline, Taken, count
from hddm.networks.identity import TextEncoderRecord
from hddm.networks.sample_sizes import SampleSizes

_ALPHA = Pipeline("PixArtAlphaPipeline", has_text=True, t5_tokens=120)
_SIGMA = Pipeline("PixArtSigmaPipeline", has_text=True, t5_tokens=300)
_LARGE = 128
"""Side of a sample from which PixArt-α takes sizes."""


class PixArt(Family):
    """A transformer with text of T5; some take the size of the picture as well."""

    name = "PixArtTransformer2DModel"
    layout = "diffusers-pixart"
    former_norm = "ada_norm_single"
    blocks = ("BasicTransformerBlock",)
    computed = ("pos_embed.pos_embed",)
    pipelines = (_ALPHA, _SIGMA)
    text_key = "caption_channels"
    nested = ("resolution", "aspect_ratio")
    settings = nested

    def conditions(self, config: Config) -> Taken:
        text = (TEXT, TEXT_MASK)
        return Taken((*text, *self.nested) if _takes_sizes(config) else text)

    def sizes(self, config: Config) -> SampleSizes | None:
        # One that takes the size as a condition gets it from the caller.
        patch = count(config, "patch_size") or 1
        return None if _takes_sizes(config) else SampleSizes(multiple=patch)

    def example(
        self, name: str, config: Config, num_classes: int | None, noise: Generator
    ) -> Tensor:
        match name:
            case "resolution":
                return torch.tensor([[64.0, 64.0]])
            case "aspect_ratio":
                return torch.tensor([[1.0]])
        return super().example(name, config, num_classes, noise)

    def pipeline(
        self, arguments: Config, text_encoder: TextEncoderRecord | None = None
    ) -> Pipeline:
        # The pipelines differ in two things: α's alone passes sizes, and each has its own number of tokens.
        if _takes_sizes(arguments):
            return _ALPHA
        if text_encoder is None:
            side = arguments.get("sample_size")
            return _SIGMA if isinstance(side, int) and side >= _LARGE else _ALPHA
        named = {one.name: one for one in self.pipelines}
        if text_encoder.kind in named:
            return named[text_encoder.kind]
        return _SIGMA if text_encoder.tokens > (_ALPHA.t5_tokens or 0) else _ALPHA


def _takes_sizes(config: Config) -> bool:
    """True if the network takes the size of the picture, as PixArt-α for 1024 pixels."""
    stated = config.get("use_additional_conditions")
    return config.get("sample_size") == _LARGE if stated is None else bool(stated)


PIXART = PixArt()
