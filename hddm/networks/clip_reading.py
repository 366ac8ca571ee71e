"""How CLIP reads prompts: in chunks, if they are longer than it reads at once, and by which of its layers.

A prompt of more than 75 tokens is read in chunks of 75, each between its own marks of begin and end and
padded to 77; the network gets the hidden states of all chunks, one after the other. No word is divided,
unless it is longer than a chunk. Tools of the community do this (AUTOMATIC1111's web UI, ComfyUI), and
networks that were trained on 77 tokens take more. The vector of a prompt is that of its first chunk, as in
ComfyUI.

With ``clip_skip`` n, the last n layers are left out, as by diffusers' argument of this name; the web UI
counts from 1, so its "Clip skip 2" is 1 here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hddm.utils.errors import HddmError

_MARKS = 2
"""Of the begin and the end of a chunk."""
_WORD_END = "</w>"
"""At the end of the last token of a word, in CLIP's vocabulary."""


@dataclass(frozen=True)
class PromptReading:
    """How the prompts of one call are read.

    Args:
        long_prompt: prompts are read in chunks; otherwise they are cut to one.
        clip_skip: layers of CLIP, from the last, that are left out.
        chunks: number of chunks of every prompt of the call, the shorter ones padded.
    """

    long_prompt: bool = False
    clip_skip: int = 0
    chunks: int = 1

    @property
    def is_plain(self) -> bool:
        """True if prompts are read as the pipelines of diffusers do without further arguments."""
        return self.chunks == 1 and self.clip_skip == 0

    def of_all(self, encoder: Any, tokenizer: Any, prompts: Sequence[str]) -> "PromptReading":
        """The same with chunks enough for all ``prompts``."""
        if not self.long_prompt:
            return self
        length = _length_of(encoder, tokenizer)
        needed = [len(_divided(tokenizer, prompt, length)) for prompt in prompts]
        return replace(self, chunks=max([self.chunks, *needed]))


class States(NamedTuple):
    """What an encoder makes of chunks.

    ``hidden`` (N, chunks · length, width); ``ids`` (N, length) of the first chunk; ``first`` is the
    encoder's whole output for it.
    """

    hidden: Tensor
    ids: Tensor
    first: Any


def read_states(
    encoder: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    reading: PromptReading,
    layer: int,
    norm: bool,
) -> States:
    """Hidden states of ``prompts``, of ``layer`` as counted from the last (0) less those that are skipped.

    With ``norm``, CLIP's last norm is applied to them. Raises `HddmError` if no layer is left.
    """
    layer += reading.clip_skip
    depth = encoder.config.num_hidden_layers
    if layer >= depth:
        most = depth - 1 - layer + reading.clip_skip
        raise HddmError(
            f"`clip_skip` {reading.clip_skip}: a text encoder has {depth} layers; pass at most {most}"
        )
    length, chunks, rows = _length_of(encoder, tokenizer), reading.chunks, len(prompts)
    ids = _ids_of(tokenizer, prompts, chunks, length)
    with torch.no_grad():
        found = encoder(ids.flatten(0, 1).to(encoder.device), output_hidden_states=True)
    hidden = found.hidden_states[-1 - layer]
    if norm:
        hidden = getattr(encoder, "text_model", encoder).final_layer_norm(hidden)
    hidden = hidden.reshape(rows, chunks * length, hidden.shape[-1])
    return States(hidden, ids[:, 0], found)


def _length_of(encoder: Any, tokenizer: Any) -> int:
    """Tokens that are read at once. Tokenizers without a limit say 10^30."""
    return int(min(tokenizer.model_max_length, encoder.config.max_position_embeddings))


def _ids_of(tokenizer: Any, prompts: Sequence[str], chunks: int, length: int) -> Tensor:
    """Tokens (N, chunks, length) of the prompts, each chunk between marks and padded."""
    found = []
    for prompt in prompts:
        parts = _divided(tokenizer, prompt, length)[:chunks]
        parts += [[] for _ in range(chunks - len(parts))]
        rows = []
        for part in parts:
            row = [tokenizer.bos_token_id, *part, tokenizer.eos_token_id]
            rows.append(row + [tokenizer.pad_token_id] * (length - len(row)))
        found.append(rows)
    return torch.tensor(found)


def _divided(tokenizer: Any, prompt: str, length: int) -> list[list[int]]:
    """Tokens of a prompt, in parts that each fit a chunk of this ``length``."""
    ids: list[int] = tokenizer(prompt, add_special_tokens=False, verbose=False).input_ids
    room = length - _MARKS
    parts = []
    while len(ids) > room:
        end = room
        words = tokenizer.convert_ids_to_tokens(ids[:room])
        while end > 0 and not words[end - 1].endswith(_WORD_END):
            end -= 1
        # A word longer than a chunk is divided where the chunk ends.
        end = end or room
        parts.append(ids[:end])
        ids = ids[end:]
    return [*parts, ids]
