"""Kolors: the pipeline of a UNet like Stable Diffusion XL's, with text of ChatGLM3 in place of CLIP's.

Its network is of the same class (`hddm.networks.families.stable_diffusion`), and projects the tokens of the
text to the width of its attention first. Weights and code: github.com/Kwai-Kolors/Kolors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hddm.condition_names import TEXT_EMBEDS
from hddm.networks.encoders import CHATGLM
from hddm.networks.families.family import Pipeline, Prompts


@dataclass(frozen=True)
class ChatGLMPrompts(Prompts):
    """Prompts as tokens of ChatGLM, padded on the left, and its last state at the last of them.

    The network sees the tokens of padding too. Its pipeline encodes the empty negative prompt, whatever
    its index says of zeros: with these it fails.
    """

    chatglm_tokens: int = 256

    def length(self, kind: str) -> int | None:
        return self.chatglm_tokens

    def shape(self, tokens: Sequence[int], widths: Sequence[int]) -> tuple[int, int]:
        return self.chatglm_tokens, widths[0]


KOLORS = Pipeline(
    "KolorsPipeline",
    network="unet",
    prompts=ChatGLMPrompts((CHATGLM,), TEXT_EMBEDS),
    has_text=True,
    has_single_file=False,
)
