"""What the CLIP text encoder of a pipeline is, and what it makes of no text.

An expert carries the tokens for the empty prompt as the null value of ``encoder_hidden_states``: guidance has
something to guide from, and native samples can be drawn without any text encoder at hand. An empty prompt
needs no tokenizer, only its files: it is begin, end, then padding. The encoder's config numbers these tokens
too, often wrongly.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hddm.networks.identity import TextEncoderRecord
from hddm.networks.text_encoder import (
    ARCHITECTURES,
    KIND,
    STEM,
    prompt_length,
    read_text_encoder,
    text_encoder_facts,
)
from hddm.networks.vae import find_weights
from hddm.utils.errors import HddmError
from hddm.utils.files import inside, read_json

_TOKENS = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
"""The special tokens of the tokenizer's class, where its files name none."""
_MAP = "special_tokens_map.json"
_FAST, _SLOW = "tokenizer.json", "vocab.json"
"""Either numbers the tokens; the loader prefers the first, the only one that transformers 5 saves."""


def empty_prompt(pipeline: Path, variant: str | None) -> Callable[[], Tensor] | None:
    """Reads the tokens (tokens, width) when called; None for a pipeline without a CLIP text encoder on disk.

    Raises:
        HddmError: when called, for an encoder whose config or weights cannot be trusted.
    """
    return None if no_text_encoder(pipeline, variant) else lambda: _encode(pipeline, variant)


def text_encoder_of(pipeline: Path, variant: str | None) -> Callable[[], TextEncoderRecord] | None:
    """Reads what tells the one CLIP text encoder from others; None and raises as `empty_prompt`."""
    if no_text_encoder(pipeline, variant):
        return None
    return lambda: text_encoder_facts(
        pipeline / "text_encoder",
        read_json(inside(pipeline, "tokenizer/tokenizer_config.json")).get("model_max_length"),
        variant,
    )


def no_text_encoder(pipeline: Path, variant: str | None) -> str:
    """Why no text encoder of a pipeline is known, or nothing where its one CLIP encoder is."""
    folder, tokenizer = pipeline / "text_encoder", pipeline / "tokenizer"
    if not (folder / "config.json").exists():
        return "there is no text_encoder/config.json beside"
    if (pipeline / "text_encoder_2").exists():
        return "there is a text_encoder_2 beside: one encoder is not the whole of what the network is given"
    stated = read_json(inside(pipeline, "text_encoder/config.json")).get("architectures")
    if stated not in ARCHITECTURES:
        return f"the one beside is {str(stated)[:60]}, not a {KIND}"
    if find_weights(folder, STEM, variant) is None:
        return f"there is no text_encoder/{STEM}.safetensors beside"
    if not (tokenizer / "tokenizer_config.json").exists():
        return "there is no tokenizer/tokenizer_config.json beside"
    if not any((tokenizer / name).exists() for name in (_FAST, _SLOW)):
        return f"there is neither tokenizer/{_FAST} nor tokenizer/{_SLOW} beside"
    return ""


def _encode(pipeline: Path, variant: str | None) -> Tensor:
    folder = pipeline / "text_encoder"
    encoder = read_text_encoder(folder, variant=variant)
    config = encoder.config
    tokens = _tokens(pipeline / "tokenizer", config.vocab_size, config.max_position_embeddings)
    with torch.no_grad():
        encoded: Tensor = encoder(torch.tensor([tokens]))[0][0]
    if not encoded.isfinite().all():
        raise HddmError(f"{folder}: its tokens for the empty prompt are not finite; take the weights anew")
    return encoded


def _tokens(folder: Path, vocabulary: int, positions: int) -> list[int]:
    """What the tokenizer in ``folder`` makes of no text, padded as a pipeline pads it."""
    config = read_json(inside(folder, "tokenizer_config.json"))
    named = config
    # As the loader has it: a config that lists its added tokens is of a format after the map of tokens.
    if (folder / _MAP).exists() and "added_tokens_decoder" not in config:
        named = config | read_json(inside(folder, _MAP))
    numbers = _numbers(folder)
    begin, end, padding = (_number(folder, key, named, numbers, vocabulary) for key in _TOKENS)
    length = prompt_length(config.get("model_max_length"), positions)
    return [begin, end, *[padding] * (length - 2)][:length]


def _numbers(folder: Path) -> dict[Any, Any]:
    """The number of each token, unchecked."""
    if not (folder / _FAST).exists():
        return read_json(inside(folder, _SLOW))
    content = read_json(inside(folder, _FAST))
    model, added = content.get("model"), content.get("added_tokens")
    words = model.get("vocab") if isinstance(model, dict) else None
    listed = [one for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    # A token that the model has too keeps its number there.
    numbers = {one["content"]: one.get("id") for one in listed if isinstance(one.get("content"), str)}
    return numbers | (words if isinstance(words, dict) else {})


def _number(folder: Path, key: str, named: dict[str, Any], numbers: dict[str, Any], vocabulary: int) -> int:
    token = named.get(key, _TOKENS[key])
    token = token.get("content") if isinstance(token, dict) else token
    number = numbers.get(token) if isinstance(token, str) else None
    if not isinstance(number, int) or not 0 <= number < vocabulary:
        name = _FAST if (folder / _FAST).exists() else _SLOW
        raise HddmError(
            f"{folder}: {key} {str(token)[:40]!r} has no number below {vocabulary} in {name}; "
            "take the tokenizer that belongs to the text encoder"
        )
    return number
