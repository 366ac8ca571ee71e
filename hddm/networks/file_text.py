"""CLIP text encoders that are part of a larger file, which holds no vocabulary.

The vocabulary is a tokenizer folder's, or that of the package open-clip-torch, which is CLIP's own. Both
encoders of Stable Diffusion XL take it, and differ in their padding: OpenAI's CLIP pads with the end of the
text, and open_clip with its word 0, ``!``.
"""

import functools
import gzip
import importlib.util
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hddm.networks.components import Held
from hddm.networks.encoders import CLIP_TOKENIZER
from hddm.networks.identity import TextEncoderRecord, UnreadTextEncoder
from hddm.networks.prompts import encoders_in, index_content, joint_record, tokenizer_of
from hddm.networks.text_encoder import (
    END_OF_TEXT,
    ZERO_WORD,
    embed,
    read_text_encoder,
    text_encoder_record_of,
)
from hddm.networks.tokenizer import read_tokenizer
from hddm.utils.errors import HddmError, Unstated
from hddm.utils.files import write_json
from hddm.utils.records import MODEL_INDEX

_VOCABULARY = "bpe_simple_vocab_16e6.txt.gz"
_BEGIN, _END = "<|startoftext|>", END_OF_TEXT
_TOKENS = 77
_MERGES = 49408 - 2 * 256 - 2
"""Merges in CLIP's vocabulary, beside each byte within and at the end of a word, and two marks."""
_EXTRA = "hddm-diffusion[clip]"


@dataclass(frozen=True)
class HeldTokenizer:
    """A tokenizer that is in no folder yet."""

    tokenizer: Any

    def write(self, folder: Path) -> None:
        """Write it into the new ``folder``."""
        self.tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class HeldPrompts:
    """Text encoders and tokenizers of a ``pipeline`` with several, named as in its folder of prompts."""

    pipeline: str
    parts: Mapping[str, Held | HeldTokenizer]
    empty_is_zero: bool = True

    def write(self, folder: Path) -> None:
        """Write the folder of prompts."""
        folder.mkdir(parents=True)
        for name, part in self.parts.items():
            part.write(folder / name)
        write_json(folder / MODEL_INDEX, index_content(self.pipeline, self.empty_is_zero))


@dataclass(frozen=True)
class FileText:
    """The text encoders of one file, as `hddm.networks.prompts.PipelineText` has those of a folder.

    Args:
        path: the file.
        encoders: by name, as in a pipeline.
        zero_padded: names of those that are padded with the word 0.
        pipeline: the class of the pipeline where there are several.
        vocabulary: folder of a tokenizer; None for the one of open-clip-torch.
        left_out: text encoders in the file that are not read.
    """

    path: Path
    encoders: Mapping[str, Held] = field(default_factory=dict)
    zero_padded: Sequence[str] = ()
    pipeline: str | None = None
    vocabulary: Path | None = None
    left_out: UnreadTextEncoder | None = None

    @property
    def held(self) -> tuple[str, ...]:
        """Names of those that lie in the file."""
        return tuple(self.encoders)

    @property
    def missing(self) -> str:
        """Reason why there are none; empty where there are."""
        if self.left_out is not None:
            return f"those of the file are left out: {self.left_out.reason}"
        return "" if self.encoders else "the file holds none"

    @property
    def unread(self) -> UnreadTextEncoder | None:
        """What is recorded of text encoders in the file that are not read."""
        return self.left_out

    def require(self) -> None:
        """Raise `Unstated` where the vocabulary is needed and nowhere, `HddmError` for one that misfits."""
        if self.encoders:
            _ = self._tokenizers

    @functools.cached_property
    def _tokenizers(self) -> dict[str, Any]:
        """Tokenizers by the name of their encoder."""
        found = {}
        for name, encoder in self.encoders.items():
            tokenizer = _clip_tokenizer(self.vocabulary, self.path)
            origin = self.vocabulary or "the vocabulary of open-clip-torch"
            size = encoder.config["vocab_size"]
            if len(tokenizer) > size:
                raise HddmError(
                    f"{origin}: has {len(tokenizer):,} words, and a text encoder in {self.path} "
                    f"{size:,}; pass `tokenizer` with the folder that belongs to it"
                )
            pad = tokenizer.eos_token
            if name in self.zero_padded:
                pad = ZERO_WORD
                if tokenizer.convert_tokens_to_ids(ZERO_WORD) != 0:
                    raise HddmError(
                        f"{origin}: its word 0 is not {ZERO_WORD!r}, with which a text encoder of "
                        f"{self.path} is padded; pass `tokenizer` with CLIP's own"
                    )
            if tokenizer.pad_token != pad:
                tokenizer.pad_token = pad
            found[name] = tokenizer
        return found

    def _encoder(self, name: str) -> Held:
        """An encoder whose config knows its tokenizer's marks."""
        encoder, tokenizer = self.encoders[name], self._tokenizers[name]
        marks = {
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        return replace(encoder, config={**encoder.config, **marks})

    @functools.cached_property
    def record(self) -> TextEncoderRecord | None:
        """Identity of the encoders; None without any."""
        if not self.encoders:
            return None
        kinds = {} if self.pipeline is None else encoders_in(self.pipeline)
        records = []
        for name, tokenizer in self._tokenizers.items():
            limit = tokenizer.model_max_length
            held = self.encoders[name]
            kind, pad = kinds.get(name), tokenizer.pad_token
            records.append(text_encoder_record_of(held, limit, kind=kind, pad=pad))
        if self.pipeline is None:
            return records[0]
        return joint_record(self.pipeline, records, empty_is_zero=True)

    @functools.cached_property
    def components(self) -> dict[str, Held | HeldTokenizer | HeldPrompts]:
        """What an expert keeps to read prompts with, by name."""
        parts: dict[str, Held | HeldTokenizer] = {}
        for name in self.encoders:
            parts[name] = self._encoder(name)
            parts[tokenizer_of(name)] = HeldTokenizer(self._tokenizers[name])
        if not parts or self.pipeline is None:
            return dict(parts)
        return {"text_encoder": HeldPrompts(self.pipeline, parts)}

    def empty_prompt(self) -> Tensor | None:
        """Text tokens (tokens, width) of the empty prompt, which are zeros for several encoders."""
        record = self.record
        if record is None:
            return None
        if self.pipeline is not None:
            return torch.zeros(record.tokens, record.width)
        (name,) = self.encoders
        encoder = read_text_encoder(self._encoder(name))
        return embed(encoder, self._tokenizers[name], [""]).tokens[0]


def _clip_tokenizer(folder: Path | None, origin: Path) -> Any:
    """CLIP's tokenizer in ``folder``, by default of open-clip-torch; `Unstated` where that is not there."""
    if folder is not None:
        tokenizer = read_tokenizer(folder)
        if not type(tokenizer).__name__.startswith(CLIP_TOKENIZER.name):
            raise HddmError(
                f"`tokenizer`: {folder} holds a {type(tokenizer).__name__}, and the text encoders of "
                f"{origin} take a {CLIP_TOKENIZER.name}"
            )
        return tokenizer
    file = _open_clip_file()
    if file is None:
        text = (
            "holds a text encoder, and no single file holds its vocabulary: pass `tokenizer`, the folder "
            f"tokenizer/ of any Stable Diffusion, or run pip install '{_EXTRA}'"
        )
        raise Unstated(origin, text, "tokenizer")
    with tempfile.TemporaryDirectory() as place:
        _write_vocabulary(file, Path(place))
        return read_tokenizer(Path(place))


def _open_clip_file() -> Path | None:
    """The vocabulary in the package open-clip-torch, whose code is not imported; None without it."""
    found = importlib.util.find_spec("open_clip")
    for folder in (found.submodule_search_locations or ()) if found else ():
        if (Path(folder) / _VOCABULARY).is_file():
            return Path(folder) / _VOCABULARY
    return None


def _write_vocabulary(file: Path, folder: Path) -> None:
    """Write CLIP's list of merges as a tokenizer folder.

    Words are numbered in this order: bytes, bytes at the end of a word, merges, begin and end of a text.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    with gzip.open(file, "rt", encoding="utf-8") as lines:
        merges = lines.read().split("\n")[1 : 1 + _MERGES]
    # The stand-ins of bytes: printable ones come first, in both orders.
    letters = sorted(ByteLevel.alphabet())
    words = [*letters, *(f"{letter}</w>" for letter in letters)]
    words += [merge.replace(" ", "") for merge in merges]
    words += [_BEGIN, _END]
    (folder / "vocab.json").write_text(
        json.dumps({word: number for number, word in enumerate(words)}), encoding="utf-8"
    )
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]), encoding="utf-8")
    stated = {"tokenizer_class": CLIP_TOKENIZER.name, "model_max_length": _TOKENS}
    marks = {"bos_token": _BEGIN, "eos_token": _END, "unk_token": _END, "pad_token": _END}
    write_json(folder / "tokenizer_config.json", stated | marks)
