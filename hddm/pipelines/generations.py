"""Which images a call of a stand-in goes on with (`Generation`), and which prompts they are of.

A pipeline calls its network with states and tokens alone. What holds from the first to the last call of an
image, such as its expert, follows from the first state; the text of a prompt, from what the pipeline's text
encoder was called with (`EncodedPrompts`).
"""

import hashlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from hddm.condition_names import POOLED, TEXT, TEXT_EMBEDS, TEXT_MASK
from hddm.networks.families import text_conditions
from hddm.networks.text_encoder import end_of_text, mean_of_text

TURNS = 64
"""Generations of one step that are remembered, in case one of them goes on."""
_ENCODED = 8
"""Calls of a text encoder that are remembered: of prompts, negative prompts, and other generations."""


@dataclass
class Generation:
    """What holds from the first to the last call of one generation."""

    timesteps: object
    """The scheduler's tensor of timesteps, which each call of a pipeline makes anew."""
    start: float
    """Time of the first call."""
    signs: Tensor
    """(images, …) signs of the states of the first call, without branches of guidance."""
    prior: Tensor | None = None
    """(images, K) p(k | prompt), where it is known."""
    expert: Tensor | None = None
    """(images,) the experts that were drawn."""
    has_left: bool = False
    """True once a call was below ``start``."""
    others: tuple[Tensor, ...] = ()
    """``signs`` of the earlier generations that also began at ``start`` and did not leave it."""

    @property
    def images(self) -> int:
        """Number of images."""
        return len(self.signs)

    @property
    def places(self) -> Tensor:
        """(images,) numbers in [0, 1) that choose experts."""
        places = []
        for row in self.signs:
            digest = hashlib.sha256(row.numpy().tobytes()).digest()
            places.append(int.from_bytes(digest[:6], "big") / 2**48)
        return torch.tensor(places, dtype=torch.float64)

    def of_branches(self, values: Tensor, num: int) -> Tensor:
        """``values`` (images, …) for ``num`` states, the images' branches one after the other."""
        return values[torch.arange(num) % self.images]

    def is_of_another(self, signs: Tensor) -> bool:
        """True if a state, soon after the first call, is more like the beginning of another generation."""
        own = _likeness(signs, self.signs)
        return any(_likeness(signs, other) > own for other in self.others)


def _likeness(signs: Tensor, others: Tensor) -> float:
    """Share of equal signs; 0 for states of another shape."""
    return float((signs == others).double().mean()) if signs.shape == others.shape else 0.0


def _is_repeated(x: Tensor, num: int) -> bool:
    """True if a batch consists of ``num`` equal parts."""
    if len(x) % num:
        return False
    first = x.chunk(num)[0]
    return all(first.equal(part) for part in x.chunk(num))


def signs_of(x: Tensor) -> Tensor:
    """Signs of the images of a batch whose rows may be repeated, once per branch of guidance."""
    branches = next(num for num in (2, 3, 1) if _is_repeated(x, num))
    # A scheduler scales its states; signs stay.
    return (x[: len(x) // branches] > 0).cpu()


class EncodedPrompts:
    """Prompts that a pipeline has encoded lately, by the tokens that its text encoder made of them."""

    def __init__(self, pipe: DiffusionPipeline) -> None:
        self._encoded: deque[tuple[Tensor, Tensor]] = deque(maxlen=_ENCODED)
        self._tokenizer = getattr(pipe, "tokenizer", None)
        encoder = getattr(pipe, "text_encoder", None)
        if isinstance(encoder, nn.Module) and self._tokenizer is not None:
            encoder.register_forward_hook(self._keep, with_kwargs=True)

    def _keep(self, encoder: nn.Module, inputs: Any, named: Mapping[str, Any], output: Any) -> None:
        ids = inputs[0] if inputs else named.get("input_ids")
        if isinstance(ids, Tensor) and isinstance(output[0], Tensor):
            self._encoded.append((ids.cpu(), output[0].detach()))

    def pooled(self, conditions: Mapping[str, Tensor]) -> Tensor | None:
        """Embeddings (N, width) of these prompts, as `hddm.networks.text_encoder.embed` pools them.

        None for tokens that the pipeline's text encoder did not make.
        """
        own = {name: conditions[name] for name in text_conditions() if name in conditions}
        tokens = own[TEXT]
        for name in (POOLED, TEXT_EMBEDS):
            if name in own:
                return own[name]
        if TEXT_MASK in own:
            return mean_of_text(tokens, own[TEXT_MASK])
        rows = [self._row(one) for one in tokens]
        found = [row for row in rows if row is not None]
        return torch.stack(found) if len(found) == len(rows) else None

    def _row(self, tokens: Tensor) -> Tensor | None:
        for ids, made in self._encoded:
            if made.shape[1:] != tokens.shape:
                continue
            for own, states in zip(ids, made.to(tokens), strict=True):
                if states.equal(tokens):
                    place = int(end_of_text(own[None], self._tokenizer))
                    end: Tensor = states[place]
                    return end
        return None
