"""Kolors: the pipeline of a UNet like Stable Diffusion XL's, with text of ChatGLM3 in place of CLIP's.

Its network is of the same class (`hddm.networks.families.stable_diffusion`), and projects the tokens of the
text to the width of its attention first. Weights and code: github.com/Kwai-Kolors/Kolors.
"""

from hddm.condition_names import TEXT_EMBEDS
from hddm.networks.encoders import CHATGLM
from hddm.networks.families.family import PaddedPrompts, Pipeline

KOLORS = Pipeline(
    "KolorsPipeline",
    network="unet",
    # Padded on the left, which the network sees, and its last state at the last token. The empty negative
    # prompt is encoded, whatever the pipeline's index says of zeros: with these it fails.
    prompts=PaddedPrompts((CHATGLM,), TEXT_EMBEDS, tokens=256),
    has_text=True,
    has_single_file=False,
)
