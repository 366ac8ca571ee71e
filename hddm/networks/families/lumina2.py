"""Lumina-Image 2.0 (arXiv:2503.21758): Lumina2Transformer2DModel, with text of Gemma 2.

The network counts time from noise, and its output points to the data:

    v(x, t) = - network(x, 1 - t)

A prompt is read behind a sentence that says what the model is for, and a negative prompt without it. One that
has ``<Prompt Start>`` brings its own sentence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import ModelMixin
from torch import Tensor

from hddm.condition_names import TEXT, TEXT_MASK
from hddm.networks.encoders import TextEncoderClass, TokenizerClass
from hddm.networks.families.family import (
    Config,
    Family,
    ForeignLayer,
    PaddedPrompts,
    Pipeline,
    SingleFile,
    Taken,
    Tensors,
    count,
)
from hddm.networks.families.places import problems_of_places
from hddm.networks.sample_sizes import LARGEST_SIDE, SampleSizes
from hddm.utils.errors import HddmError
from hddm.utils.tensors import count_blocks, shape_of

_GEMMA2 = TextEncoderClass(
    "Gemma2Model",
    TokenizerClass(
        "GemmaTokenizer",
        (),
        keys=("add_eos_token", "spaces_between_special_tokens", "use_default_system_prompt"),
    ),
    "num_hidden_layers",
    (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "hidden_activation",
        "rms_norm_eps",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "sliding_window",
        "layer_types",
        "use_bidirectional_attention",
    ),
    "Gemma 2",
    is_masked=True,
    # What makes words of its states.
    unused=("lm_head.weight",),
    prefix="model.",
    around=("Gemma2ForCausalLM",),
    assumed={"attention_bias": False, "rope_scaling": None},
    is_rotary=True,
)
_SYSTEM = (
    "You are an assistant designed to generate superior images with the superior degree of image-text "
    "alignment based on textual prompts or user prompts."
)
"""What comes before a prompt that says nothing else."""
_BEGIN = " <Prompt Start> "
"""What divides the two."""
_AXES = (32, 32, 32)
"""Numbers of a head that stand for each axis of a place (text, row, column), which no tensor shows."""
_PLACES = (300, 512, 512)
"""Places on each axis, in the files of its authors."""


@dataclass(frozen=True)
class PromptsBehindATask(PaddedPrompts):
    """Prompts behind a sentence, and negative ones as they are, with a mask."""

    def written(self, tokenizer: Any, texts: list[str], is_negative: bool) -> list[str]:
        return texts if is_negative else [_BEGIN.join(_divided(text)) for text in texts]

    def encode(
        self, pipe: Any, texts: list[str], device: torch.device, is_negative: bool
    ) -> dict[str, Tensor]:
        size = {"device": device, "max_sequence_length": self.tokens}
        if is_negative:
            # Something that is encoded already, in place of prompts.
            known = torch.zeros(len(texts), 1, 1)
            *_, tokens, mask = pipe.encode_prompt(
                None, True, texts, prompt_embeds=known, prompt_attention_mask=known[..., 0], **size
            )
            return {TEXT: tokens, TEXT_MASK: mask}
        found: dict[int, tuple[Tensor, Tensor]] = {}
        pairs = [_divided(text) for text in texts]
        for sentence in dict.fromkeys(sentence for sentence, _ in pairs):
            rows = [row for row, pair in enumerate(pairs) if pair[0] == sentence]
            own = [pairs[row][1] for row in rows]
            tokens, mask, *_ = pipe.encode_prompt(own, False, system_prompt=sentence, **size)
            found.update(zip(rows, zip(tokens, mask, strict=True), strict=True))
        ordered = [found[row] for row in range(len(texts))]
        return {
            TEXT: torch.stack([tokens for tokens, _ in ordered]),
            TEXT_MASK: torch.stack([mask for _, mask in ordered]),
        }


def _divided(text: str) -> tuple[str, str]:
    """The sentence before a prompt, and the prompt."""
    sentence, mark, prompt = text.partition(_BEGIN.strip())
    return (sentence.strip(), prompt.strip()) if mark else (_SYSTEM, text)


_PROMPTS = PromptsBehindATask((_GEMMA2,), tokens=256)


class Lumina2(Family):
    """A transformer over text and patches in one sequence."""

    name = "Lumina2Transformer2DModel"
    layout = "diffusers-lumina2"
    depths = (("num_layers", "num_refiner_layers"),)
    blocks = ("Lumina2TransformerBlock",)
    pipelines = (
        Pipeline(
            "Lumina2Pipeline",
            former_names=("Lumina2Text2ImgPipeline",),
            prompts=_PROMPTS,
            has_text=True,
        ),
    )
    # github.com/Alpha-VLLM/Lumina-Image-2.0; queries, keys and values are one layer.
    single_file = SingleFile(
        "lumina2",
        ("layers.0.attention.qkv.weight", "layers.0.adaLN_modulation.1.weight"),
        scale=0.3611,
        shift=0.1159,
        sample_size=128,
    )
    unread = ("norm_final.weight",)
    time_factor = 1000.0
    lora_layers = rf"{Family.lora_layers}|(.+\.)?feed_forward\.linear_[123]"
    text_key = "cap_feat_dim"

    def complete(self, network: ModelMixin) -> None:
        # Tables of places are no buffers. Their size is checked first.
        self.conditions(network.config)
        places: Any = network.get_submodule("rope_embedder")
        tables = places._precompute_freqs_cis(places.axes_dim, places.axes_lens, places.theta)
        places.freqs_cis = tables

    def sizes(self, config: Config) -> SampleSizes:
        patch, places = config["patch_size"], config["axes_lens"]
        return SampleSizes(multiple=patch, most=min(LARGEST_SIDE, patch * min(places[1:])))

    def conditions(self, config: Config) -> Taken:
        if problems := _problems(config):
            raise HddmError(f"{'; '.join(problems)}; correct the config")
        return Taken(_PROMPTS.conditions)

    def call(self, model: ModelMixin, x: Tensor, timestep: Tensor, conditions: Tensors) -> Tensor:
        text, mask = conditions[TEXT], conditions.get(TEXT_MASK)
        if mask is None:
            mask = torch.ones(text.shape[:2], device=text.device)
        # It counts tokens by sums.
        found: Tensor = model(x, 1 - timestep, text, mask.long(), return_dict=False)[0]
        return -found

    def read_call(self, state: Tensor, given: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        return state, given | {"timestep": 1 - given["timestep"]}

    def as_output(self, state: Tensor, config: Config) -> Tensor:
        return -state

    def foreign_layers(self, config: Config) -> Mapping[str, ForeignLayer]:
        found = {name: ForeignLayer((own,)) for name, own in _OUTER.items()}
        numbers = {"layers": config["num_layers"]}
        refiners = ("noise_refiner", "context_refiner")
        numbers |= dict.fromkeys(refiners, config["num_refiner_layers"])
        for part, number in numbers.items():
            # The time does not modulate what refines the text.
            first = _PLAIN_NORM if part == refiners[1] else _MODULATED_NORM
            for n in range(number):
                for name, ours in {**_BLOCK, **first}.items():
                    own = tuple(f"{part}.{n}.{one}" for one in ours)
                    found[f"{part}.{n}.{name}"] = ForeignLayer(own)
        return found

    def file_arguments(self, weights: Tensors, origin: str) -> dict[str, Any]:
        width, numbers = shape_of(weights, "x_embedder.weight", 2, origin)
        rows = shape_of(weights, "final_layer.linear.weight", 2, origin)[0]
        head = shape_of(weights, "layers.0.attention.q_norm.weight", 1, origin)[0]
        if head != sum(_AXES) or width % head:
            raise HddmError(
                f"{origin}: its heads have {head} numbers of {width}; the places of Lumina 2 are known for "
                f"{sum(_AXES)}"
            )
        joint = shape_of(weights, "layers.0.attention.qkv.weight", 2, origin)[0]
        return {
            "patch_size": 2,
            "in_channels": numbers // 4,
            "out_channels": rows // 4,
            "hidden_size": width,
            "num_layers": count_blocks(weights, "layers"),
            "num_refiner_layers": count_blocks(weights, "noise_refiner"),
            "num_attention_heads": width // head,
            "num_kv_heads": (joint - width) // (2 * head),
            "cap_feat_dim": shape_of(weights, "cap_embedder.1.weight", 2, origin)[1],
            "axes_dim_rope": list(_AXES),
            "axes_lens": list(_PLACES),
        }

    def file_scheduler(self, arguments: Config) -> dict[str, Any]:
        steps = {"num_train_timesteps": 1000, "shift": 6.0}
        return {"_class_name": "FlowMatchEulerDiscreteScheduler", **steps}


_EMBEDDER = "time_caption_embed"
_OUTER = {
    "x_embedder": "x_embedder",
    "cap_embedder.0": f"{_EMBEDDER}.caption_embedder.0",
    "cap_embedder.1": f"{_EMBEDDER}.caption_embedder.1",
    "t_embedder.mlp.0": f"{_EMBEDDER}.timestep_embedder.linear_1",
    "t_embedder.mlp.2": f"{_EMBEDDER}.timestep_embedder.linear_2",
    "final_layer.adaLN_modulation.1": "norm_out.linear_1",
    "final_layer.linear": "norm_out.linear_2",
}
_BLOCK = {
    "attention.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "attention.out": ("attn.to_out.0",),
    "attention.q_norm": ("attn.norm_q",),
    "attention.k_norm": ("attn.norm_k",),
    "attention_norm2": ("norm2",),
    "ffn_norm1": ("ffn_norm1",),
    "ffn_norm2": ("ffn_norm2",),
    "feed_forward.w1": ("feed_forward.linear_1",),
    "feed_forward.w2": ("feed_forward.linear_2",),
    "feed_forward.w3": ("feed_forward.linear_3",),
}
_PLAIN_NORM = {"attention_norm1": ("norm1",)}
_MODULATED_NORM = {"attention_norm1": ("norm1.norm",), "adaLN_modulation.1": ("norm1.linear",)}
"""Layers of the network and of a block, by their names in the code of its authors."""


def _problems(config: Config) -> list[str]:
    """What a config says of a network that cannot run as its pipeline runs it."""
    # A text, and one place more for the patches.
    least = _PROMPTS.tokens + 1
    keys = ("hidden_size", "num_attention_heads", "axes_dim_rope", "axes_lens")
    found = problems_of_places(config, *keys, least)
    heads, groups = count(config, keys[1]) or 0, count(config, "num_kv_heads") or 0
    if groups < 1 or heads % groups:
        found.append(f"num_kv_heads is {groups}, and divides num_attention_heads, {heads}")
    return found


LUMINA2 = Lumina2()
