"""Classes of VAEs, text encoders and tokenizers that hddm reads, and all that differs between them.

A class is added here alone. torch is not imported with them. How pipelines with several text encoders encode
prompts is a fact of their families (`hddm.networks.families`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PIPELINE = "pipeline"
"""Key that an expert keeps in the config of the one T5 of a pipeline: the class of that pipeline."""

ADAPTED = "hddm_adapted"
"""Key of the config of a text encoder that a LoRA was merged into: a hash of the weights that it changed."""

HELD_CODE = re.compile(r"(configuration|modeling|tokenization)_chatglm\.ChatGLM\w*")
"""Code of authors that their configs name (``auto_map``), and of which a library has its own."""


@dataclass(frozen=True)
class VaeClass:
    """One class of VAEs of diffusers."""

    name: str
    default_scale: float
    """Of latents, where a config states none."""
    is_read: bool = True
    """False if only its scale is known."""
    has_deviation: bool = False
    """True if it encodes an image to a mean and a standard deviation of its latents."""
    derived: tuple[str, ...] = ()
    """Keys that its config has besides the arguments, and that follow from them."""
    replaces: tuple[str, ...] = ()
    """Classes that it is distilled from: it takes their latents, by a scale of its own."""


_KL = VaeClass("AutoencoderKL", 0.18215, has_deviation=True)
_TINY = VaeClass("AutoencoderTiny", 1.0, derived=("block_out_channels",), replaces=(_KL.name,))
_VQ = VaeClass("VQModel", _KL.default_scale, is_read=False)
VAES: Mapping[str, VaeClass] = {one.name: one for one in (_KL, _TINY, _VQ)}
"""Known classes by name."""
READ_VAES = tuple(one.name for one in VAES.values() if one.is_read)
"""Classes of VAEs that hddm reads."""
KL = _KL.name
"""The class of the VAEs of Stable Diffusion."""
STABLE_DIFFUSION_SCALE = _KL.default_scale
"""Scale of the latents of Stable Diffusion 1 and 2, on which DiT and PixArt-α were trained too."""


def has_deviation(kind: str) -> bool:
    """True if VAEs of this class encode an image to a mean and a standard deviation."""
    return kind in VAES and VAES[kind].has_deviation


def replaced_by(kind: str) -> tuple[str, ...]:
    """Classes whose latents VAEs of the class ``kind`` take too, by a scale of their own."""
    return VAES[kind].replaces if kind in VAES else ()


@dataclass(frozen=True)
class TextEncoderClass:
    """One class of text encoders of transformers."""

    name: str
    tokenizer: str
    """Class of its tokenizer."""
    layers: str
    """Key of its config that holds its number of layers."""
    sizes: tuple[str, ...]
    """Keys of its config that are read. All others are left out."""
    label: str
    """What messages call it."""
    is_masked: bool = False
    """True if the word that pads does not matter: it sees no padding, or its tokenizer's class has one."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the class."""
    unused: tuple[str, ...] = ()
    """Tensors of its files that are left out."""
    divided: tuple[str, str] | None = None
    """Keys of its config of which the second divides the first."""
    prefix: str = ""
    """What names of tensors may begin with, in files of a larger model around it."""
    around: tuple[str, ...] = ()
    """Classes of such models, which a config or an index may name in its place."""
    assumed: Mapping[str, Any] = field(default_factory=dict)
    """Keys of its config that change what it computes, with the only values that are read."""
    is_rotary: bool = False
    """True if its places are plain rotary embeddings, whose base its config holds."""
    reads_chats: bool = False
    """True if its tokenizer writes a prompt as a turn of a chat (`hddm.networks.chat_template`)."""


CLIP, CLIP_PROJECTED, T5 = "CLIPTextModel", "CLIPTextModelWithProjection", "T5EncoderModel"
BERT, CHATGLM, QWEN3 = "BertModel", "ChatGLMModel", "Qwen3Model"
CLIP_TOKENIZER, T5_TOKENIZER, BERT_TOKENIZER = "CLIPTokenizer", "T5Tokenizer", "BertTokenizer"
CHATGLM_TOKENIZER, QWEN_TOKENIZER = "ChatGLMTokenizer", "Qwen2Tokenizer"
TOKENIZERS: Mapping[str, tuple[str, ...]] = {
    CLIP_TOKENIZER: ("vocab.json", "merges.txt"),
    T5_TOKENIZER: ("spiece.model",),
    BERT_TOKENIZER: ("vocab.txt",),
    CHATGLM_TOKENIZER: ("tokenizer.model",),
    QWEN_TOKENIZER: ("vocab.json", "merges.txt"),
}
"""Files of the classes that read a tokenizer, which tokenizer.json may replace.

A config may name the classes with "Fast" at the end.
"""
TRANSFORMERS = "transformers"
_LIBRARIES: Mapping[str, str] = dict.fromkeys((CHATGLM, CHATGLM_TOKENIZER), "kolors")
NEEDED_PACKAGES: Mapping[str, tuple[str, str]] = {CHATGLM_TOKENIZER: ("sentencepiece", "kolors")}
"""The package that a class of tokenizers needs beside those of hddm, with the extra that installs it."""


def library_of(kind: str) -> str:
    """Library of a class of text encoders or tokenizers, as the index of a pipeline names it.

    It is transformers, or a package of ``diffusers.pipelines``.
    """
    return _LIBRARIES.get(kind, TRANSFORMERS)


_CLIP_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "hidden_act",
    "layer_norm_eps",
    "projection_dim",
)
_T5_SIZES = (
    "vocab_size",
    "d_model",
    "d_kv",
    "d_ff",
    "num_layers",
    "num_heads",
    "layer_norm_epsilon",
    PIPELINE,
    "relative_attention_num_buckets",
    "relative_attention_max_distance",
    "feed_forward_proj",
)
_BERT_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "type_vocab_size",
    "hidden_act",
    "layer_norm_eps",
)
_CHATGLM_SIZES = (
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
)
_QWEN3_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "hidden_act",
    "rms_norm_eps",
)
_CLIP_CLASS = TextEncoderClass(
    CLIP, CLIP_TOKENIZER, "num_hidden_layers", _CLIP_SIZES, "CLIP", prefix="text_model."
)
_T5_CLASS = TextEncoderClass(T5, T5_TOKENIZER, "num_layers", _T5_SIZES, "T5", is_masked=True)
_BERT_CLASS = TextEncoderClass(
    BERT,
    BERT_TOKENIZER,
    "num_hidden_layers",
    _BERT_SIZES,
    "BERT",
    is_masked=True,
    # What it makes of the first token, which pipelines do not read.
    options={"add_pooling_layer": False},
    unused=("pooler.dense.weight", "pooler.dense.bias"),
)
_CHATGLM_CLASS = TextEncoderClass(
    CHATGLM,
    CHATGLM_TOKENIZER,
    "num_layers",
    _CHATGLM_SIZES,
    "ChatGLM",
    is_masked=True,
    # Otherwise it allocates its tensors, also where torch should not (the device "meta").
    options={"empty_init": False},
    divided=("num_attention_heads", "multi_query_group_num"),
)
_QWEN3_CLASS = TextEncoderClass(
    QWEN3,
    QWEN_TOKENIZER,
    "num_hidden_layers",
    _QWEN3_SIZES,
    "Qwen3",
    is_masked=True,
    # What makes words of its states.
    unused=("lm_head.weight",),
    prefix="model.",
    around=("Qwen3ForCausalLM",),
    assumed={"attention_bias": False, "use_sliding_window": False, "rope_scaling": None},
    is_rotary=True,
    reads_chats=True,
)
TEXT_ENCODERS: Mapping[str, TextEncoderClass] = {
    CLIP: _CLIP_CLASS,
    # Read without its projection, unless a pipeline needs it.
    CLIP_PROJECTED: _CLIP_CLASS,
    T5: _T5_CLASS,
    BERT: _BERT_CLASS,
    CHATGLM: _CHATGLM_CLASS,
    **dict.fromkeys((QWEN3, *_QWEN3_CLASS.around), _QWEN3_CLASS),
}
"""The class that reads a text encoder, by the class that its config names."""
READ_TEXT_ENCODERS = (CLIP, T5)
"""Classes by which a text encoder is read that is a pipeline's only one."""
