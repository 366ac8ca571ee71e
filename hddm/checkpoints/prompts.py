"""The text encoder and tokenizer of a pipeline: their identity, and CLIP's tokens of the empty prompt.

An expert stores these tokens as the null value of ``encoder_hidden_states``, so that guidance and native
samples need no text encoder. An empty prompt (begin, end, padding) needs only the tokenizer's files. The
encoder's config also numbers these tokens, often wrongly.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hddm.networks.identity import TextEncoderRecord
from hddm.networks.text_encoder import (
    CLIP,
    STEM,
    T5,
    kind_of,
    prompt_length,
    read_text_encoder,
    text_encoder_facts,
)
from hddm.networks.vae import find_weights
from hddm.utils.errors import HddmError
from hddm.utils.files import inside, read_json

_TOKENS = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
"""Special tokens of the tokenizer's class, for files that name none."""
_MAP = "special_tokens_map.json"
_FAST, _SLOW = "tokenizer.json", "vocab.json"
"""Either numbers the tokens; the loader prefers the first, the only one that transformers 5 saves."""


@dataclass(frozen=True)
class PipelineText:
    """Text encoder, with weights of ``variant``, and tokenizer of the pipeline in ``folder``."""

    folder: Path | None = None
    variant: str | None = None

    def missing(self) -> str:
        """Reason why they cannot be read; empty where there is one encoder with its tokenizer."""
        if self.folder is None:
            return "no pipeline with a text encoder lies around it"
        encoder, tokenizer = self.folder / "text_encoder", self.folder / "tokenizer"
        if not (encoder / "config.json").exists():
            return "there is no text_encoder/config.json beside"
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
        if not any((tokenizer / name).exists() for name in (_FAST, _SLOW)):
            return f"there is neither tokenizer/{_FAST} nor tokenizer/{_SLOW} beside"
        return ""

    def record(self) -> TextEncoderRecord | None:
        """Identity of the encoder, None where it is `missing`; `HddmError` for bad config or weights."""
        if self.folder is None or self.missing():
            return None
        limit = read_json(inside(self.folder, "tokenizer/tokenizer_config.json")).get("model_max_length")
        return text_encoder_facts(self.folder / "text_encoder", limit, self.variant)

    def empty_prompt(self) -> Tensor | None:
        """Text tokens (tokens, width) of the empty prompt; None and errors as in `record`.

        None for T5, of whose tokens the padding is masked: a pipeline encodes the empty prompt itself.
        """
        if self.folder is None or self.missing():
            return None
        folder = self.folder / "text_encoder"
        if kind_of(read_json(folder / "config.json")) == T5:
            return None
        encoder = read_text_encoder(folder, variant=self.variant)
        tokens = _empty_tokens(
            self.folder / "tokenizer", encoder.config.vocab_size, encoder.config.max_position_embeddings
        )
        with torch.no_grad():
            encoded: Tensor = encoder(torch.tensor([tokens]))[0][0]
        if not encoded.isfinite().all():
            raise HddmError(
                f"{folder}: its tokens for the empty prompt are not finite; take the weights anew"
            )
        return encoded


def _empty_tokens(folder: Path, vocabulary: int, positions: int) -> list[int]:
    """Token numbers of the empty prompt by the tokenizer in ``folder``, padded as in a pipeline."""
    config = named = read_json(inside(folder, "tokenizer_config.json"))
    # As the loader has it: a config that lists its added tokens is of a format after the map of tokens.
    if (folder / _MAP).exists() and "added_tokens_decoder" not in config:
        named = config | read_json(inside(folder, _MAP))
    file = _FAST if (folder / _FAST).exists() else _SLOW
    content = read_json(inside(folder, file))
    numbers = _numbers(content) if file == _FAST else content
    found = []
    for key, usual in _TOKENS.items():
        token = named.get(key, usual)
        token = token.get("content") if isinstance(token, dict) else token
        number = numbers.get(token) if isinstance(token, str) else None
        if not isinstance(number, int) or not 0 <= number < vocabulary:
            raise HddmError(
                f"{folder}: {key} {str(token)[:40]!r} has no number below {vocabulary} in {file}; "
                "take the tokenizer that belongs to the text encoder"
            )
        found.append(number)
    begin, end, padding = found
    length = prompt_length(config.get("model_max_length"), positions)
    return [begin, end, *[padding] * (length - 2)][:length]


def _numbers(content: Mapping[str, Any]) -> dict[Any, Any]:
    """The number of each token in a ``tokenizer.json``, unchecked."""
    model, added = content.get("model"), content.get("added_tokens")
    words = model.get("vocab") if isinstance(model, dict) else None
    listed = [one for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    # A token that the model has too keeps its number there.
    numbers = {one["content"]: one.get("id") for one in listed if isinstance(one.get("content"), str)}
    return numbers | (words if isinstance(words, dict) else {})
