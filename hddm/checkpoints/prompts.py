"""The text encoders of a pipeline: their identity, and tokens of the empty prompt.

An expert stores these tokens as the null value of ``encoder_hidden_states``, so that guidance and native
samples need no text encoder.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hddm.networks.identity import TextEncoderRecord
from hddm.networks.prompts import family_in, parts_of, prompts_facts, refuse_other_parts, zeros_in
from hddm.networks.text_encoder import (
    CLIP,
    STEM,
    T5,
    embed,
    kind_of,
    read_text_encoder,
    read_tokenizer,
    text_encoder_facts,
)
from hddm.networks.vae import find_weights
from hddm.utils.errors import HddmError
from hddm.utils.files import inside, read_json


@dataclass(frozen=True)
class PipelineText:
    """Text encoders, with weights of ``variant``, and tokenizers of the pipeline in ``folder``."""

    folder: Path | None = None
    variant: str | None = None

    @functools.cached_property
    def missing(self) -> str:
        """Reason why they cannot be read; empty where they can."""
        if self.folder is None:
            return "no pipeline with a text encoder lies around it"
        encoder, tokenizer = self.folder / "text_encoder", self.folder / "tokenizer"
        if not (encoder / "config.json").exists():
            return "there is no text_encoder/config.json beside"
        if (pipeline := family_in(self.folder)) is not None:
            if gone := [name for name in parts_of(pipeline) if not (self.folder / name).is_dir()]:
                return f"there is no {gone[0]} beside"
            try:
                refuse_other_parts(self.folder, pipeline)
            except HddmError as error:
                return error.message
            return ""
        if (self.folder / "text_encoder_2").exists():
            return (
                "there is a text_encoder_2 beside: one encoder is not the whole of what the network is given"
            )
        config = read_json(inside(self.folder, "text_encoder/config.json"))
        if kind_of(config) is None:
            return f"the one beside is {str(config.get('architectures'))[:60]}, not a {CLIP} or {T5}"
        if find_weights(encoder, STEM, self.variant) is None:
            return f"there is no text_encoder/{STEM}.safetensors beside"
        if not (tokenizer / "tokenizer_config.json").exists():
            return "there is no tokenizer/tokenizer_config.json beside"
        if not any((tokenizer / name).exists() for name in ("tokenizer.json", "vocab.json")):
            return "there is neither tokenizer/tokenizer.json nor tokenizer/vocab.json beside"
        return ""

    @functools.cached_property
    def record(self) -> TextEncoderRecord | None:
        """Identity of the encoder, None where it is `missing`; `HddmError` for bad config or weights."""
        if self.folder is None or self.missing:
            return None
        if family_in(self.folder) is not None:
            return prompts_facts(self.folder, self.variant)
        limit = read_json(inside(self.folder, "tokenizer/tokenizer_config.json")).get("model_max_length")
        return text_encoder_facts(self.folder / "text_encoder", limit, self.variant)

    @property
    def components(self) -> dict[str, Path]:
        """Folders that an expert keeps to read prompts with, by name; see `hddm.networks.prompts`."""
        if self.folder is None or self.missing:
            return {}
        if family_in(self.folder) is not None:
            return {"text_encoder": self.folder}
        return {name: self.folder / name for name in ("text_encoder", "tokenizer")}

    def empty_prompt(self) -> Tensor | None:
        """Text tokens (tokens, width) of the empty prompt; None and errors as in `record`.

        None for T5, of whose tokens the padding is masked: a pipeline encodes the empty prompt itself. Zeros
        where the pipeline takes these.
        """
        if self.folder is None or self.missing:
            return None
        if family_in(self.folder) is not None:
            facts = self.record if zeros_in(self.folder) else None
            return None if facts is None else torch.zeros(facts.tokens, facts.width)
        folder = self.folder / "text_encoder"
        if kind_of(read_json(folder / "config.json")) == T5:
            return None
        encoder, tokenizer = read_text_encoder(folder, variant=self.variant), self.folder / "tokenizer"
        try:
            return embed(encoder, read_tokenizer(tokenizer), [""]).tokens[0]
        except HddmError as error:
            raise HddmError(f"{self.folder}: makes no tokens of the empty prompt: {error}") from error
