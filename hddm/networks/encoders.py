"""Classes of VAEs, text encoders and tokenizers that hddm reads, and all that differs between them.

torch is not imported with them. A VAE is added here alone; a text encoder here, or in the file of the family
whose prompts it reads. How pipelines encode prompts is a fact of their families (`hddm.networks.families`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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


TRANSFORMERS = "transformers"
_ANY_TOKENIZER = "TokenizersBackend"
"""What transformers 5 may call a tokenizer of any class, whose files are in tokenizer.json."""


@dataclass(frozen=True)
class TokenizerClass:
    """One class of tokenizers. A config may name it with "Fast" at the end."""

    name: str
    files: tuple[str, ...]
    """What it reads, which tokenizer.json may replace; without any, it reads that alone."""
    library: str = TRANSFORMERS
    """As the index of a pipeline names it: transformers, or a package of ``diffusers.pipelines``."""
    package: str = ""
    """What it needs beside the packages of hddm; empty for nothing."""
    extra: str = ""
    """The extra of hddm that installs that."""
    keys: tuple[str, ...] = ()
    """Keys of its config besides those that all tokenizers have, which name no file and run nothing."""

    others: tuple[str, ...] = ()
    """Other classes that read the same files in the same way."""

    @property
    def names(self) -> tuple[str, ...]:
        """What a config may call it."""
        return (self.name, *self.others)

    def accepts(self, name: str) -> bool:
        """True if a pipeline that needs this class may call it so."""
        return name.removesuffix("Fast") in (*self.names, _ANY_TOKENIZER)


@dataclass(frozen=True)
class TextEncoderClass:
    """One class of text encoders: how it is built of its files, and what reads its words.

    That of several families, or of a pipeline with nothing else, is in this module. Any other one is in the
    file of the family whose prompts it reads.
    """

    name: str
    tokenizer: TokenizerClass
    layers: str
    """Key of its config that holds its number of layers."""
    sizes: tuple[str, ...]
    """Keys of its config that are read. All others are left out."""
    label: str
    """What messages call it."""
    library: str = TRANSFORMERS
    """Where it is, as for a tokenizer."""
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

    @property
    def names(self) -> tuple[str, ...]:
        """What a config may call it."""
        return (self.name, *self.around)

    def accepts(self, name: str) -> bool:
        """True if a pipeline that needs this class may call it so."""
        return name in self.names


_POSITIONS = "embeddings.position_ids"
CLIP_TOKENIZER = TokenizerClass("CLIPTokenizer", ("vocab.json", "merges.txt"))
T5_TOKENIZER = TokenizerClass("T5Tokenizer", ("spiece.model",), others=("MT5Tokenizer",))
CLIP = TextEncoderClass(
    "CLIPTextModel",
    CLIP_TOKENIZER,
    "num_hidden_layers",
    (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "hidden_act",
        "layer_norm_eps",
        "projection_dim",
    ),
    "CLIP",
    # A constant, and what makes its projected output.
    unused=(_POSITIONS, "text_projection.weight"),
    prefix="text_model.",
    around=("CLIPTextModelWithProjection",),
)
"""It is read without its projection."""
CLIP_PROJECTED = replace(CLIP, name=CLIP.around[0], around=(CLIP.name,), unused=(_POSITIONS,))
"""The same with its projection, which some pipelines need."""
T5 = TextEncoderClass(
    "T5EncoderModel",
    T5_TOKENIZER,
    "num_layers",
    (
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
    ),
    "T5",
    is_masked=True,
    # A second name of its shared.weight.
    unused=("encoder.embed_tokens.weight",),
)
ALONE = (CLIP, T5)
"""Text encoders that a pipeline can have as its only one."""
