"""Kolors: the pipeline of a UNet like Stable Diffusion XL's, with text of ChatGLM3 in place of CLIP's.

Its network is of the same class (`hddm.networks.families.stable_diffusion`), and projects the tokens of the
text to the width of its attention first. Weights and code: github.com/Kwai-Kolors/Kolors.
"""

from hddm.condition_names import TEXT_EMBEDS
from hddm.networks.encoders import TextEncoderClass, TokenizerClass
from hddm.networks.families.family import PaddedPrompts, Pipeline

_LIBRARY = "kolors"
"""The package of diffusers that has its own classes of what ChatGLM's files name as code of their authors."""
_CHATGLM = TextEncoderClass(
    "ChatGLMModel",
    TokenizerClass(
        "ChatGLMTokenizer", ("tokenizer.model",), _LIBRARY, package="sentencepiece", extra="kolors"
    ),
    "num_layers",
    (
        "padded_vocab_size",
        "hidden_size",
        "ffn_hidden_size",
        "kv_channels",
        "num_layers",
        "num_attention_heads",
        "multi_query_attention",
        "multi_query_group_num",
        "layernorm_epsilon",
        "rmsnorm",
        "post_layer_norm",
        "apply_residual_connection_post_layernorm",
        "add_bias_linear",
        "add_qkv_bias",
        "fp32_residual_connection",
        "original_rope",
    ),
    "ChatGLM",
    library=_LIBRARY,
    is_masked=True,
    # Otherwise it allocates its tensors, also where torch should not (the device "meta").
    options={"empty_init": False},
    divided=("num_attention_heads", "multi_query_group_num"),
)
KOLORS = Pipeline(
    "KolorsPipeline",
    network="unet",
    # Padded on the left, which the network sees, and its last state at the last token. The empty negative
    # prompt is encoded, whatever the pipeline's index says of zeros: with these it fails.
    prompts=PaddedPrompts((_CHATGLM,), TEXT_EMBEDS, tokens=256),
    has_text=True,
    has_single_file=False,
)
