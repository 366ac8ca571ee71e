"""Z-Image (arXiv:2511.22699): ZImageTransformer2DModel, with text of Qwen3.

The network takes lists: a state (C, 1, H, W) and the tokens of a text for each sample, as many as the text
has. It counts time from noise, and its output points to the data:

    v(x, t) = - network(x, 1 - t)

Tokens of the text and patches are one sequence, padded to a multiple of 32 by vectors that were trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import ModelMixin
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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
)
from hddm.networks.families.places import problems_of_places
from hddm.networks.sample_sizes import LARGEST_SIDE, SampleSizes
from hddm.utils.errors import HddmError
from hddm.utils.tensors import count_blocks, shape_of

_QWEN3 = TextEncoderClass(
    "Qwen3Model",
    TokenizerClass("Qwen2Tokenizer", ("vocab.json", "merges.txt")),
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
        "hidden_act",
        "rms_norm_eps",
    ),
    "Qwen3",
    is_masked=True,
    # What makes words of its states.
    unused=("lm_head.weight",),
    prefix="model.",
    around=("Qwen3ForCausalLM",),
    assumed={"attention_bias": False, "use_sliding_window": False, "rope_scaling": None},
    is_rotary=True,
)
_PATCH = 2
_PATCHES = {"all_patch_size": _PATCH, "all_f_patch_size": 1}
"""Keys of its config, each a list of the one size that its pipeline asks for."""
_KIND_OF_PATCH = f"{_PATCH}-1"
"""What the class calls the embedder and the last layer of these patches."""
_AXES = (32, 48, 48)
"""Numbers of a head that stand for each axis of a place (text, row, column), which no tensor shows."""
_PLACES = (1536, 512, 512)
"""Places on each axis, in the files of its authors."""
_LEAST_SIDE = 12
"""Half a sample's patches of this side are no multiple of 32, so that padding is compared too."""


@dataclass(frozen=True)
class ChatPrompts(PaddedPrompts):
    """Prompts as the tokens of one text encoder that reads turns of a chat, with a mask."""

    def written(self, tokenizer: Any, texts: list[str], is_negative: bool) -> list[str]:
        found = []
        for text in texts:
            turn = [{"role": "user", "content": text}]
            found.append(
                tokenizer.apply_chat_template(
                    turn, tokenize=False, add_generation_prompt=True, enable_thinking=True
                )
            )
        return found

    def encode(
        self, pipe: Any, texts: list[str], device: torch.device, is_negative: bool
    ) -> dict[str, Tensor]:
        # It writes into the list that it gets.
        tokens, _ = pipe.encode_prompt(
            list(texts),
            device=device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.tokens,
        )
        found = _padded(tokens)
        room = self.tokens - found[TEXT].shape[1]
        found[TEXT] = torch.nn.functional.pad(found[TEXT], (0, 0, 0, room))
        found[TEXT_MASK] = torch.nn.functional.pad(found[TEXT_MASK], (0, room))
        return found


_PROMPTS = ChatPrompts((_QWEN3,), tokens=512, writes_chats=True)


class ZImage(Family):
    """A transformer over text and patches in one sequence."""

    name = "ZImageTransformer2DModel"
    layout = "diffusers-z-image"
    depths = (("n_layers", "n_refiner_layers"),)
    blocks = ("ZImageTransformerBlock",)
    pipelines = (Pipeline("ZImagePipeline", prompts=_PROMPTS, has_text=True),)
    # github.com/Tongyi-MAI/Z-Image; ComfyUI's files have queries, keys and values in one layer.
    single_file = SingleFile(
        "z-image",
        ("layers.0.attention.qkv.weight", "layers.0.adaLN_modulation.0.weight", "x_pad_token"),
        scale=0.3611,
        shift=0.1159,
        sample_size=128,
    )
    unread = ("norm_final.weight",)
    time_factor = 1000.0
    prompts_first = True
    lora_layers = rf"{Family.lora_layers}|(.+\.)?feed_forward\.w[123]"
    text_key = "cap_feat_dim"
    states_size = False

    def patch(self, config: Config) -> int | None:
        return _PATCH

    def sizes(self, config: Config) -> SampleSizes:
        places = config.get("axes_lens", _PLACES)
        return SampleSizes(multiple=_PATCH, most=min(LARGEST_SIDE, _PATCH * min(places[1:])))

    def compared_size(self, config: Config, size: tuple[int, int]) -> tuple[int, int]:
        height, width = size
        return min(height, _LEAST_SIDE), min(width, _LEAST_SIDE)

    def conditions(self, config: Config) -> Taken:
        if problems := _problems(config):
            raise HddmError(f"{'; '.join(problems)}; correct the config")
        return Taken(_PROMPTS.conditions)

    def call(self, model: ModelMixin, x: Tensor, timestep: Tensor, conditions: Tensors) -> Tensor:
        text, mask = conditions[TEXT], conditions.get(TEXT_MASK)
        texts = list(text)
        if mask is not None:
            texts = [one[seen] for one, seen in zip(text, mask.bool(), strict=True)]
        found = model(list(x.unsqueeze(2)), 1 - timestep, texts, return_dict=False)[0]
        return -torch.stack(found).squeeze(2)

    def read_call(self, state: Any, given: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        rest = dict(given)
        rest["timestep"] = 1 - rest.pop("t")
        rest |= _padded(rest.pop("cap_feats"))
        return torch.stack(list(state)).squeeze(2), rest

    def as_output(self, state: Tensor, config: Config) -> Tensor:
        # The pipeline takes the samples of a list one by one, and so of a tensor.
        return -state.unsqueeze(2)

    def foreign_layers(self, config: Config) -> Mapping[str, ForeignLayer]:
        found = {}
        for name in ("cap_embedder.0", "cap_embedder.1", "t_embedder.mlp.0", "t_embedder.mlp.2"):
            found[name] = ForeignLayer((name,))
        found["x_embedder"] = ForeignLayer((f"all_x_embedder.{_KIND_OF_PATCH}",))
        for name in ("linear", "adaLN_modulation.1"):
            found[f"final_layer.{name}"] = ForeignLayer(
                (f"all_final_layer.{_KIND_OF_PATCH}.{name}",)
            )
        numbers = {"layers": config["n_layers"]}
        numbers |= dict.fromkeys(("noise_refiner", "context_refiner"), config["n_refiner_layers"])
        for part, number in numbers.items():
            for n in range(number):
                for name, ours in _BLOCK.items():
                    own = tuple(f"{part}.{n}.{one}" for one in ours)
                    found[f"{part}.{n}.{name}"] = ForeignLayer(own)
        return found

    def foreign_tensors(self, config: Config) -> Mapping[str, str]:
        return {name: name for name in ("x_pad_token", "cap_pad_token")}

    def file_arguments(self, weights: Tensors, origin: str) -> dict[str, Any]:
        width, numbers = shape_of(weights, "x_embedder.weight", 2, origin)
        head = shape_of(weights, "layers.0.attention.q_norm.weight", 1, origin)[0]
        if head != sum(_AXES) or width % head:
            raise HddmError(
                f"{origin}: its heads have {head} numbers of {width}; the places of Z-Image are known for "
                f"{sum(_AXES)}"
            )
        return {
            "all_patch_size": [_PATCH],
            "all_f_patch_size": [1],
            "in_channels": numbers // _PATCH**2,
            "dim": width,
            "n_layers": count_blocks(weights, "layers"),
            "n_refiner_layers": count_blocks(weights, "noise_refiner"),
            "n_heads": width // head,
            "n_kv_heads": width // head,
            "cap_feat_dim": shape_of(weights, "cap_embedder.1.weight", 2, origin)[1],
            "axes_dims": list(_AXES),
            "axes_lens": list(_PLACES),
        }

    def file_scheduler(self, arguments: Config) -> dict[str, Any]:
        steps = {"num_train_timesteps": 1000, "shift": 3.0}
        return {"_class_name": "FlowMatchEulerDiscreteScheduler", **steps}


_SAME = ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2", "adaLN_modulation.0")
_BLOCK = {
    **{name: (name,) for name in (*_SAME, *(f"feed_forward.w{n}" for n in (1, 2, 3)))},
    "attention.qkv": ("attention.to_q", "attention.to_k", "attention.to_v"),
    "attention.out": ("attention.to_out.0",),
    "attention.q_norm": ("attention.norm_q",),
    "attention.k_norm": ("attention.norm_k",),
}
"""Layers of a block, by their names in the code of its authors."""


def _padded(texts: Sequence[Tensor]) -> dict[str, Tensor]:
    """The conditions of texts (tokens, width) of different lengths."""
    lengths = torch.tensor([len(one) for one in texts], device=texts[0].device)
    found = pad_sequence(list(texts), batch_first=True)
    places = torch.arange(found.shape[1], device=found.device)
    return {TEXT: found, TEXT_MASK: (places < lengths[:, None]).long()}


def _problems(config: Config) -> list[str]:
    """What a config says of a network that cannot run as its pipeline runs it."""
    found = []
    for key, side in _PATCHES.items():
        sides = config.get(key)
        if not isinstance(sides, Sequence) or list(sides) != [side]:
            found.append(f"{key} is {str(sides)[:40]}, and is read as [{side}] alone")
    if config.get("siglip_feat_dim") is not None:
        found.append("siglip_feat_dim is given, and networks that see pictures are not supported")
    if (scale := config.get("t_scale", 1000.0)) != 1000.0:
        found.append(f"t_scale is {str(scale)[:40]}, and must be 1000")
    if not _is_positive(theta := config.get("rope_theta", 256.0)):
        found.append(f"rope_theta is {str(theta)[:40]}, and must be a number above 0")
    # A text and its padding, and one place more.
    least = _PROMPTS.tokens + 2
    return found + problems_of_places(config, "dim", "n_heads", "axes_dims", "axes_lens", least)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < float("inf")


Z_IMAGE = ZImage()
