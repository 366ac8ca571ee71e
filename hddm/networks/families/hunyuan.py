"""HunyuanDiT (arXiv:2405.08748): HunyuanDiT2DModel, with text of BERT and mT5.

Places of patches are rotary embeddings on a grid of 32×32, whatever the size of a sample. Up to version 1.1
the network also takes the size of the picture and a style, of which there is one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import ModelMixin
from diffusers.models.embeddings import get_2d_rotary_pos_embed
from torch import Generator, Tensor

from hddm import condition_names
from hddm.condition_names import TEXT, TEXT_MASK
from hddm.networks.encoders import T5, TextEncoderClass, TokenizerClass
from hddm.networks.families.family import Config, Family, Pipeline, Prompts, Taken, Tensors, count
from hddm.networks.sample_sizes import SampleSizes
from hddm.utils.errors import HddmError

_BERT = TextEncoderClass(
    "BertModel",
    TokenizerClass("BertTokenizer", ("vocab.txt",)),
    "num_hidden_layers",
    (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "type_vocab_size",
        "hidden_act",
        "layer_norm_eps",
    ),
    "BERT",
    is_masked=True,
    # What it makes of the first token, which pipelines do not read.
    options={"add_pooling_layer": False},
    # A constant, and the layer of that.
    unused=("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"),
)
_BERT_MASK = "text_embedding_mask"
"""What the network calls `TEXT_MASK`."""
_T5_TEXT, _T5_MASK = "encoder_hidden_states_t5", "text_embedding_mask_t5"
_SIZE, _STYLE = "image_meta_size", "style"
_SKIPS = "controlnet_block_samples"
_PIXELS = 8
"""Pixels of a picture to one side of a sample's."""
_TRAINED = 1024.0
"""Side of the pictures that it was trained on, in pixels; diffusers' default."""
_GRID = 512 // _PIXELS
"""Side of the grid of places, in numbers of a sample."""
_HEADS = 8
"""Heads that read T5's tokens for the one vector of a text, which the class fixes."""


@dataclass(frozen=True)
class BertAndT5(Prompts):
    """Prompts as tokens of BERT and of T5, each with a mask."""

    bert_tokens: int = 77

    @property
    def conditions(self) -> tuple[str, ...]:
        return (TEXT, TEXT_MASK, _T5_TEXT, _T5_MASK)

    def length(self, kind: TextEncoderClass) -> int | None:
        return self.bert_tokens if kind == _BERT else super().length(kind)

    def shape(self, tokens: Sequence[int], widths: Sequence[int]) -> tuple[int, int]:
        return self.bert_tokens, widths[0]

    def encode(
        self, pipe: Any, texts: list[str], device: torch.device, is_negative: bool
    ) -> dict[str, Tensor]:
        found = dict[str, Tensor]()
        names = ((TEXT, TEXT_MASK), (_T5_TEXT, _T5_MASK))
        for number, (text, mask) in enumerate(names):
            found[text], _, found[mask], _ = pipe.encode_prompt(
                texts,
                device,
                do_classifier_free_guidance=False,
                max_sequence_length=self.length(self.encoders[number]),
                text_encoder_index=number,
            )
        return found


_PROMPTS = BertAndT5((_BERT, T5), t5_tokens=256)
_UNCHECKED = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}


class Hunyuan(Family):
    """A transformer with long skips, and text of BERT and T5.

    It casts what it embeds to the dtype of its times, so these get that of its weights, as in diffusers.
    """

    name = "HunyuanDiT2DModel"
    layout = "diffusers-hunyuandit"
    blocks = ("HunyuanDiTBlock",)
    pipelines = (
        Pipeline("HunyuanDiTPipeline", prompts=_PROMPTS, has_text=True, options=_UNCHECKED),
    )
    multiplied = (TEXT, _T5_TEXT)
    settings = (_SIZE, _STYLE)
    residuals = (_SKIPS,)
    exact_layers = r"time_extra_emb\.pooler\..+"
    text_key = "cross_attention_dim"

    def conditions(self, config: Config) -> Taken:
        if problems := _problems(config):
            raise HddmError(f"{'; '.join(problems)}; correct the config")
        return Taken((*_PROMPTS.conditions, *(self.settings if _takes_size(config) else ())))

    def has_variance_head(self, config: Config) -> bool:
        return bool(config.get("learn_sigma", True))

    def sizes(self, config: Config) -> SampleSizes:
        return SampleSizes(multiple=count(config, "patch_size") or 1)

    def call(self, model: ModelMixin, x: Tensor, timestep: Tensor, conditions: Tensors) -> Tensor:
        given: dict[str, Any] = dict(conditions)
        text = given[TEXT]
        mask = given.pop(TEXT_MASK, None)
        given[_BERT_MASK] = text.new_ones(text.shape[:2]) if mask is None else mask
        if _SIZE in given:
            # The network views it, which rows that share memory forbid.
            given[_SIZE] = given[_SIZE].contiguous()
        if _SKIPS in given:
            # The network takes them off the end of a list.
            given[_SKIPS] = list(given[_SKIPS])
        given["image_rotary_emb"] = _places(model.config, x)
        return super().call(model, x, timestep.to(x.dtype), given)

    def read_call(self, state: Tensor, given: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        rest = {name: one for name, one in given.items() if name != "image_rotary_emb"}
        if _BERT_MASK in rest:
            rest[TEXT_MASK] = rest.pop(_BERT_MASK)
        return state, rest

    def ignored(self, config: Config) -> tuple[str, ...]:
        return () if _takes_size(config) else self.settings

    def example(
        self, name: str, config: Config, num_classes: int | None, noise: Generator
    ) -> Tensor:
        t5_tokens: int = config["text_len_t5"]
        match name:
            case condition_names.TEXT:
                shape = (1, config["text_len"], config["cross_attention_dim"])
                return torch.randn(shape, generator=noise)
            case "encoder_hidden_states_t5":
                shape = (1, t5_tokens, config["cross_attention_dim_t5"])
                return torch.randn(shape, generator=noise)
            case "text_embedding_mask_t5":
                return (torch.arange(t5_tokens) < t5_tokens // 2).long()[None]
            case "image_meta_size":
                return torch.tensor([[64.0, 64.0, 64.0, 64.0, 0.0, 0.0]])
            case "style":
                return torch.tensor([0])
        return super().example(name, config, num_classes, noise)

    def defaults(
        self, names: Sequence[str], sample_shape: tuple[int, int, int]
    ) -> dict[str, Tensor]:
        if _SIZE not in names:
            return {}
        # The pipeline's: an original of the trained size, this size in pixels, and no crop.
        height, width = _PIXELS * sample_shape[1], _PIXELS * sample_shape[2]
        size = torch.tensor([_TRAINED, _TRAINED, float(height), float(width), 0.0, 0.0])
        return {_SIZE: size, _STYLE: torch.tensor(0)}


def _takes_size(config: Config) -> bool:
    return bool(config.get("use_style_cond_and_image_meta_size", True))


def _problems(config: Config) -> list[str]:
    """Numbers of a config that build a network which cannot run."""
    found = []
    layers, heads = count(config, "num_layers") or 0, count(config, "num_attention_heads") or 0
    head, width = count(config, "attention_head_dim") or 0, count(config, "hidden_size")
    t5_width = count(config, "cross_attention_dim_t5") or 0
    if layers < 2 or layers % 2:
        found.append(f"num_layers is {layers}, and skips join pairs of layers")
    if head < 4 or head % 4:
        found.append(f"attention_head_dim is {head}, and places take a multiple of 4")
    if width != heads * head:
        found.append(
            f"hidden_size is {width}, and num_attention_heads × attention_head_dim is {heads * head}"
        )
    if t5_width < _HEADS or t5_width % _HEADS:
        found.append(f"cross_attention_dim_t5 is {t5_width}, and is divided by {_HEADS} heads")
    for key, tokens in (("text_len", _BERT), ("text_len_t5", T5)):
        if count(config, key) != (wanted := _PROMPTS.length(tokens)):
            found.append(f"{key} is {config.get(key)}, and prompts have {wanted} tokens")
    if (count(config, "patch_size") or 0) < 1:
        found.append(f"patch_size is {config.get('patch_size')}, and must be 1 or more")
    return found


def _places(config: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (HW/p², head) of the places of the patches of ``x``, in float32.

    The patches lie evenly in the middle of the square grid, and the longer side fills it.
    """
    patch = config["patch_size"]
    patches, square = (x.shape[-2] // patch, x.shape[-1] // patch), _GRID // patch
    starts, ends = [], []
    for number in patches:
        side = round(square / max(patches) * number)
        starts.append(round((square - side) / 2))
        ends.append(starts[-1] + side)
    found: tuple[Tensor, Tensor] = get_2d_rotary_pos_embed(
        config["attention_head_dim"], (starts, ends), patches, device=x.device
    )
    return found


HUNYUAN = Hunyuan()
