"""Chroma: ChromaTransformer2DModel, Flux with one T5 and a small network in place of all modulations.

The small network (``distilled_guidance_layer``) makes the modulation of every block from the time alone:
there is no vector of the text, and no embedded guidance.

The mask of the text is extended by ones for the rows of the picture. diffusers' pipelines pass it as numbers,
which attention adds: a pair of tokens of the text or the picture gets 1 more than a pair with padding. This
is kept, as pictures differ without it. A mask of booleans is passed as such, and hides padding.
"""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import ModelMixin
from torch import Tensor

from hddm.condition_names import TEXT, TEXT_MASK
from hddm.networks.families.family import (
    Config,
    ForeignLayer,
    Pipeline,
    SingleFile,
    Taken,
    Tensors,
    count,
)
from hddm.networks.families.flux import Flux
from hddm.utils.errors import HddmError
from hddm.utils.tensors import count_blocks, shape_of

_SMALL = "distilled_guidance_layer"
"""The network of the modulations; diffusers and the authors' code call it alike."""


class Chroma(Flux):
    """A transformer with text of T5 and its mask; times and rows are Flux's."""

    name = "ChromaTransformer2DModel"
    layout = "diffusers-chroma"
    depths = (("num_layers", "num_single_layers", "approximator_layers"),)
    computed = ("time_text_embed.mod_proj",)
    blocks = ("ChromaTransformerBlock", "ChromaSingleTransformerBlock")
    # One token of padding stays visible, as in training.
    pipelines = (
        Pipeline("ChromaPipeline", has_text=True, t5_tokens=512, keeps_case=True, seen_padding=1),
    )
    # github.com/lodestone-rock/flow, src/models/chroma/model.py.
    single_file = SingleFile(
        "chroma",
        (f"{_SMALL}.in_proj.weight", "single_blocks.0.linear1.weight"),
        scale=0.3611,
        shift=0.1159,
        sample_size=128,
    )
    settings = ()

    def conditions(self, config: Config) -> Taken:
        super().conditions(config)
        width = count(config, "approximator_num_channels")
        if width is None or width < 4 or width % 4:
            raise HddmError(
                f"approximator_num_channels is {width}, and must be a multiple of 4: time, guidance and "
                "place are embedded in it side by side"
            )
        return Taken((TEXT, TEXT_MASK))

    def buffer(self, name: str, arguments: Config) -> Tensor:
        # It has a row for each modulation of each layer, so a network without layers has another one.
        with torch.device("meta"):
            network = self.build(arguments)
        embedding: Any = network.time_text_embed
        channels = network.config["approximator_num_channels"] // 4
        found: Tensor = type(embedding)(channels, len(embedding.mod_proj)).mod_proj
        return found

    def call(self, model: ModelMixin, x: Tensor, timestep: Tensor, conditions: Tensors) -> Tensor:
        given = dict(conditions)
        mask = given.pop(TEXT_MASK, None)
        if mask is not None:
            rows = x.shape[-2] * x.shape[-1] // 4
            seen = mask if mask.dtype == torch.bool else mask.to(x.dtype)
            given["attention_mask"] = torch.cat([seen, seen.new_ones(len(seen), rows)], dim=1)
        return super().call(model, x, timestep, given)

    def read_call(self, state: Tensor, given: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        state, rest = super().read_call(state, given)
        mask = rest.pop("attention_mask", None)
        if mask is not None:
            rest[TEXT_MASK] = mask[:, : rest[TEXT].shape[1]]
        return state, rest

    def foreign_layers(self, config: Config) -> Mapping[str, ForeignLayer]:
        found = dict(super().foreign_layers(config))
        for name in (f"{_SMALL}.in_proj", f"{_SMALL}.out_proj"):
            found[name] = ForeignLayer((name,))
        for n in range(config["approximator_layers"]):
            layer = f"{_SMALL}.layers.{n}"
            found[f"{layer}.in_layer"] = ForeignLayer((f"{layer}.linear_1",))
            found[f"{layer}.out_layer"] = ForeignLayer((f"{layer}.linear_2",))
        return found

    def foreign_tensors(self, config: Config) -> Mapping[str, str]:
        found = dict(super().foreign_tensors(config))
        for n in range(config["approximator_layers"]):
            norm = f"{_SMALL}.norms.{n}"
            found[f"{norm}.scale"] = f"{norm}.weight"
        return found

    def file_arguments(self, weights: Tensors, origin: str) -> dict[str, Any]:
        hidden, channels = shape_of(weights, f"{_SMALL}.in_proj.weight", 2, origin)
        return {
            **self.block_arguments(weights, origin),
            "approximator_num_channels": channels,
            "approximator_hidden_dim": hidden,
            "approximator_layers": count_blocks(weights, f"{_SMALL}.layers"),
        }


CHROMA = Chroma()
