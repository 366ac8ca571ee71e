"""Conditions of a pipeline's calls: prompts, class labels and embeddings by network keyword."""

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hddm.conditions import LABELS, Conditions, Labels, check_labels, class_indices
from hddm.experts.model_index import numbered
from hddm.networks.text_encoder import Embedded, embed
from hddm.networks.wrappers import TEXT_CONDITIONS
from hddm.pipelines.offloading import Offloading
from hddm.routers import PromptRouter
from hddm.utils.errors import HddmError
from hddm.utils.records import composed

_TEXT, _MASK, *_ = TEXT_CONDITIONS


class Encoding(Offloading):
    """Encoder of a pipeline's prompts and class labels."""

    ensemble: Any

    def encode(
        self,
        prompt: str | Sequence[str] | None = None,
        class_labels: Labels | None = None,
        negative_prompt: str | Sequence[str] | None = None,
        guided: bool = False,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        conditions: Mapping[str, Tensor] | None = None,
        negative_conditions: Mapping[str, Tensor] | None = None,
    ) -> Conditions:
        """Conditions by network keyword, and p(k | prompt), one row per prompt or class.

        Arguments are those of a call; ``guided`` says whether there will be a negative branch. Each text
        expert gets the tokens of its own text encoder. A class expert gets the longest class name that the
        prompt contains, and has p = 0 where it contains none that it knows; without a topic its part of those
        prompts is its share of the images.

        Raises:
            HddmError: for prompts without a text encoder, or arguments that exclude each other.
        """
        if prompt is not None and not all(isinstance(one, str) for one in prompt):
            raise HddmError("prompt is a text or a list of texts; classes are passed as class_labels=")
        given, against, prior = dict(conditions or {}), dict(negative_conditions or {}), None
        if class_labels is not None:
            if LABELS in given:
                raise HddmError("class_labels is among the conditions too; pass it once")
            given[LABELS] = class_indices(class_labels, self.ensemble.classes)
        check_labels(given, self.ensemble.classes)
        if negative_prompt is not None and prompt is None:
            raise HddmError("a negative_prompt needs a prompt beside it")
        has_negative = negative_prompt is not None or negative_prompt_embeds is not None or _TEXT in against
        if not guided:
            negative_prompt = None
        elif prompt is not None and not has_negative:
            negative_prompt = ""
        texts = None if prompt is None else [prompt] if isinstance(prompt, str) else list(prompt)
        if isinstance(negative_prompt, str):
            negative_prompt = [negative_prompt] * len(texts or ())
        for name, wanted, tokens, into in (
            ("prompt", texts, prompt_embeds, given),
            ("negative_prompt", negative_prompt, negative_prompt_embeds, against),
        ):
            if wanted is not None and tokens is not None:
                raise HddmError(f"pass a {name} or {name}_embeds, not both")
            if _TEXT in into and not (wanted is None and tokens is None):
                kind = "conditions" if into is given else "negative conditions"
                raise HddmError(f"{_TEXT} is among the {kind} too; pass it once")
            if tokens is not None:
                into[_TEXT] = tokens
            if wanted is not None:
                embedded = {number: self._embed(number, wanted) for number in sorted(self.readers)}
                into |= self._tokens(embedded)
                if into is given:
                    labels, prior = self._routed(wanted, LABELS in given, embedded)
                    given |= {} if labels is None else {LABELS: labels}
        widths = {
            record.text_encoder.width
            for record, number in zip(self.experts.facts, self._numbers, strict=True)
            if record.text_encoder and number == 0
        }
        if prompt_embeds is not None and widths - {prompt_embeds.shape[-1]}:
            raise HddmError(
                f"prompt_embeds are {tuple(prompt_embeds.shape)}, and these experts take tokens of "
                f"{' and '.join(map(str, sorted(widths)))} numbers"
            )
        return Conditions(given, against, prior)

    @property
    def _numbers(self) -> Sequence[int]:
        """Number of each expert's text encoder."""
        return self.experts.encoders.texts

    @property
    def readers(self) -> set[int]:
        """Numbers of the text encoders that a prompt needs: those of experts of text, and of their topics."""
        of_text = {
            number
            for record, number in zip(self.experts.facts, self._numbers, strict=True)
            if _TEXT in record.conditions
        }
        found = of_text | (set() if self._topics is None else {self._topics})
        # Names of classes need none.
        return found or (set() if self._takes_classes.any() else {0})

    @property
    def _topics(self) -> int | None:
        """Number of the text encoder that tells experts apart by prompts; None for one expert alone."""
        number: int | None = self.experts.topics
        return number if len(self.experts.facts) > 1 else None

    @property
    def _takes_classes(self) -> Tensor:
        """Which experts are asked for the class that a prompt names (K,)."""
        conditions = (one.conditions for one in self.experts.facts)
        return torch.tensor([LABELS in given and _TEXT not in given for given in conditions])

    def can_read(self, number: int) -> bool:
        """True with the text encoder of that number, and its tokenizer."""
        names = (numbered("text_encoder", number), numbered("tokenizer", number))
        return all(getattr(self, name, None) is not None for name in names)

    def _embed(self, number: int, texts: Sequence[str]) -> Embedded:
        if not self.can_read(number):
            raise HddmError(
                "a prompt needs a text encoder and a tokenizer, and this ensemble has none"
                f"{f' of number {number + 1}' if number else ''}; give it both "
                "(hddm assemble ENSEMBLE --text-encoder FOLDER --tokenizer FOLDER), or pass prompt_embeds"
            )
        tokenizer = getattr(self, numbered("tokenizer", number))
        with self.present(getattr(self, numbered("text_encoder", number))) as text_encoder:
            return embed(text_encoder, tokenizer, texts)

    def _tokens(self, embedded: Mapping[int, Embedded]) -> dict[str, Tensor]:
        """Tokens and masks for all experts of text, by the names of the ensemble's conditions."""
        found, declared = dict[str, Tensor](), self.ensemble.conditions
        for number, made in embedded.items():
            for keyword, value in ((_TEXT, made.tokens), (_MASK, made.mask)):
                name = numbered(keyword, number)
                if value is not None and (declared is None or name in declared):
                    found[name] = value
        return found

    def _routed(
        self, texts: Sequence[str], has_labels: bool, embedded: Mapping[int, Embedded]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The classes that prompts name, for experts that take no text, and p(k | prompt).

        ``embedded`` has the texts by the number of their encoder. With ``has_labels`` no class is looked for.
        """
        ensemble, topics, takes_classes = self.ensemble, self._topics, self._takes_classes
        if topics is None and not takes_classes.any():
            return None, None
        rows, is_described = ensemble.prior.expand(len(texts), -1), torch.zeros(len(takes_classes)).bool()
        if topics is not None:
            known = [one.topic for one in self.experts.experts]
            rows = PromptRouter(known, ensemble.prior.tolist())(embedded[topics].pooled)
            is_described = torch.tensor([topic is not None for topic in known])
        if not takes_classes.any() or has_labels:
            return None, rows
        labels = torch.tensor([_named_in(text, ensemble.classes) for text in texts])
        is_named = (labels < len(ensemble.classes))[:, None]
        by_class = ensemble.prior_of(len(texts), {LABELS: labels}) * is_named * takes_classes
        # Experts of classes without a topic share their part of the images among those that know the class.
        named = by_class * ~is_described
        part = (ensemble.prior * takes_classes * ~is_described).sum() * (named.sum(1, keepdim=True) > 0)
        named = part * named / named.sum(1, keepdim=True).clamp_min(1e-300)
        rows = torch.where(takes_classes, rows * is_described * (by_class > 0), rows)
        # Topics may hold those who know the class for impossible; the class is what was asked for.
        rows = torch.where(rows.sum(1, keepdim=True) > 0, rows, by_class * is_described)
        rows = named + (1 - part) * rows / rows.sum(1, keepdim=True).clamp_min(1e-300)
        if not (rows.sum(1) > 0).all():
            unread = next(text for text, row in zip(texts, rows, strict=True) if not row.any())
            some = ", ".join(ensemble.classes[:5])
            raise HddmError(
                f"prompt {unread[:60]!r}: these experts take classes, and it names none of {some}, …"
            )
        return labels, rows if rows.shape[1] > 1 else None


def _named_in(text: str, classes: Sequence[str]) -> int:
    """Number of the longest class name in a text; the number of classes where it has none."""
    text = composed(text)
    found = [name for name in classes if re.search(rf"\b{re.escape(name)}\b", text, re.IGNORECASE)]
    longest = max(found, key=len, default="")
    if others := [name for name in found if name.lower() not in longest.lower()]:
        warnings.warn(f"prompt {text[:60]!r}: taken as {longest}, not {' and '.join(others)}", stacklevel=2)
    return classes.index(longest) if found else len(classes)


def repeated(asked: Conditions, times: int, batch: int | None = None) -> tuple[Conditions, int]:
    """Repeat each row of the conditions ``times`` times; also return the resulting number of images.

    A single row is expanded to the number of rows of the others, and to ``batch`` rows where provided.
    """
    if times < 1 or (batch is not None and batch < 1):
        raise HddmError(f"num_images_per_prompt and batch_size start at 1, not {times} and {batch}")
    rows = {name: len(value) for name, value in asked.given.items()}
    rows |= {} if asked.prior is None else {"prompt": len(asked.prior)}
    rows |= {f"negative {name}": len(value) for name, value in asked.negative.items()}
    rows |= {} if batch is None else {"batch_size": batch}
    found = max(rows.values(), default=1)
    if not set(rows.values()) <= {1, found} or found == 0:
        raise HddmError(f"conditions have no rows, or different numbers of them: {rows}")

    def spread(value: Tensor) -> Tensor:
        value = value.expand(found, *value.shape[1:]) if len(value) == 1 else value
        return value.repeat_interleave(times, dim=0)

    return asked.map(spread), found * times
