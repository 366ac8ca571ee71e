"""Conditions of a pipeline's calls: prompts, class labels and embeddings by network keyword."""

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hddm.conditions import LABELS, Conditions, Labels, check_labels, class_indices
from hddm.experts.ensemble_folders import numbered
from hddm.networks.prompts import PromptEncoders
from hddm.networks.text_encoder import embed
from hddm.networks.wrappers import TEXT_CONDITIONS
from hddm.pipelines.parts import Offloading
from hddm.routers import PromptRouter
from hddm.utils.errors import HddmError
from hddm.utils.records import composed

_TEXT = TEXT_CONDITIONS[0]


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

        Arguments are those of a call; ``guided`` tells that guidance uses a negative branch. Each text expert
        gets the tokens of its own text encoder. A class expert gets the longest class name in the prompt, and
        p = 0 for prompts that name no class of its own; without a topic, its share of the other prompts is
        its share of all images.

        Raises:
            HddmError: for prompts that the model cannot read, and arguments that exclude each other.
        """
        if prompt is not None and not self.readers and not self._takes_classes.any():
            raise HddmError("`prompt`: the model is unconditional; drop the option")
        if negative_prompt is not None and not guided:
            raise HddmError("`negative_prompt`: needs a `guidance_scale` other than 1, by condition")
        if negative_prompt is not None and prompt is None:
            raise HddmError("a negative_prompt needs a prompt too")
        given, prior = with_text(conditions, prompt_embeds), None
        against = with_text(negative_conditions, negative_prompt_embeds)
        if class_labels is not None:
            _add(given, {LABELS: class_indices(class_labels, self.ensemble.classes)})
        check_labels(given, self.ensemble.classes)
        if prompt is not None:
            texts = [prompt] if isinstance(prompt, str) else list(prompt)
            tokens, pooled = self._embed(texts)
            _add(given, tokens)
            labels, prior = self._routed(texts, LABELS in given, pooled)
            given |= {} if labels is None else {LABELS: labels}
            if negative_prompt is None and guided and _TEXT not in against:
                negative_prompt = ""
            if negative_prompt is not None:
                if isinstance(negative_prompt, str):
                    negative_prompt = [negative_prompt] * len(texts)
                _add(against, self._embed(negative_prompt, is_negative=True)[0])
        return Conditions(given, against, prior)

    @property
    def readers(self) -> set[int]:
        """Numbers of the text encoders that a prompt needs: for text experts, and for topics."""
        numbers = zip(self.experts.facts, self.ensemble.texts, strict=True)
        found = {number for record, number in numbers if _TEXT in record.conditions}
        found |= set() if self._topics is None else {self._topics}
        # Experts that declare no conditions may take text.
        return found or ({0} if self.ensemble.conditions is None else set())

    @property
    def takes_prompts(self) -> bool:
        """True if an expert takes text, and all text encoders for it are there."""
        is_read = any(_TEXT in record.conditions for record in self.experts.facts)
        return is_read and all(self._reader(number) is not None for number in self.readers)

    @property
    def _topics(self) -> int | None:
        """Number of the text encoder that tells experts apart by prompts; None for one expert alone."""
        number: int | None = self.experts.topics
        return number if len(self.experts.facts) > 1 else None

    @property
    def _takes_classes(self) -> Tensor:
        """Which experts get the class that a prompt names (K,)."""
        conditions = (one.conditions for one in self.experts.facts)
        return torch.tensor([LABELS in given and _TEXT not in given for given in conditions])

    def _reader(self, number: int) -> tuple[Any, Any] | None:
        """Text encoder and tokenizer of that number, None where one is missing; some have theirs inside."""
        names = (numbered("text_encoder", number), numbered("tokenizer", number))
        encoder, words = (getattr(self, name, None) for name in names)
        is_whole = isinstance(encoder, PromptEncoders) or None not in (encoder, words)
        return (encoder, words) if is_whole else None

    def _embed(
        self, texts: Sequence[str], is_negative: bool = False
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Conditions by the ensemble's names of them, and embeddings that topics compare."""
        found, pooled, declared = dict[str, Tensor](), None, self.ensemble.conditions
        for number in sorted(self.readers):
            if (reader := self._reader(number)) is None:
                names = f"{numbered('text_encoder', number)} and {numbered('tokenizer', number)}"
                raise HddmError(
                    f"`prompt`: needs {names}; add them (hddm assemble --text-encoder FOLDER --tokenizer "
                    "FOLDER; to Paris as folders of these names), or pass `conditions` or prompt_embeds"
                )
            with self.present(reader[0]) as present:
                is_whole = isinstance(present, PromptEncoders)
                made = present.embed(texts, is_negative) if is_whole else embed(present, reader[1], texts)
            pooled = made.pooled if number == self._topics else pooled
            for keyword, value in made.conditions.items():
                name = numbered(keyword, number)
                if declared is None or name in declared:
                    found[name] = value
        return found, pooled

    def _routed(
        self, texts: Sequence[str], has_labels: bool, pooled: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The classes that prompts name, for experts that take no text, and p(k | prompt).

        ``pooled`` are the prompts' embeddings for topics. With ``has_labels`` the classes are known already.
        """
        ensemble, takes_classes = self.ensemble, self._takes_classes
        if pooled is None and not takes_classes.any():
            return None, None
        rows, is_described = ensemble.prior.expand(len(texts), -1), torch.zeros(len(takes_classes)).bool()
        if pooled is not None:
            known = [one.topic for one in self.experts.experts]
            rows = PromptRouter(known, ensemble.prior.tolist())(pooled)
            is_described = torch.tensor([topic is not None for topic in known])
        if not takes_classes.any() or has_labels:
            return None, rows
        labels = torch.tensor([_named_in(text, ensemble.classes) for text in texts])
        is_named = (labels < len(ensemble.classes))[:, None]
        by_class = ensemble.prior_of(len(texts), {LABELS: labels}) * is_named * takes_classes
        # Class experts without a topic share their part of the images among those that know the class.
        named = by_class * ~is_described
        part = (ensemble.prior * takes_classes * ~is_described).sum() * (named.sum(1, keepdim=True) > 0)
        named = part * named / named.sum(1, keepdim=True).clamp_min(1e-300)
        rows = torch.where(takes_classes, rows * is_described * (by_class > 0), rows)
        # Topics may give p = 0 to all experts that know the class; the class was requested, so it wins.
        rows = torch.where(rows.sum(1, keepdim=True) > 0, rows, by_class * is_described)
        rows = named + (1 - part) * rows / rows.sum(1, keepdim=True).clamp_min(1e-300)
        if not (rows.sum(1) > 0).all():
            text = next(text for text, row in zip(texts, rows, strict=True) if not row.any())
            some = ", ".join(ensemble.classes[:5])
            raise HddmError(
                f"prompt {text[:60]!r}: these experts take classes, and it names none of {some}, …"
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


def _add(into: dict[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Add conditions; raises an `HddmError` for one that is there already."""
    if twice := into.keys() & new.keys():
        raise HddmError(f"{min(twice)} has two sources (prompt, embeddings, labels, conditions): pass one")
    into |= new


def with_text(conditions: Mapping[str, Tensor] | None, embeds: Tensor | None) -> dict[str, Tensor]:
    """Conditions with a prompt's embeddings (batch, tokens, width)."""
    found = dict(conditions or {})
    _add(found, {} if embeds is None else {_TEXT: embeds})
    return found


def repeated(asked: Conditions, times: int, batch: int | None = None) -> tuple[Conditions, int]:
    """Repeat each row of the conditions ``times`` times; also return the resulting number of images.

    Single rows are expanded to the number of rows of the others, and to ``batch`` rows if provided.
    """
    values = [*asked.given.values(), *asked.negative.values()]
    values += [] if asked.prior is None else [asked.prior]
    found = max(map(len, values), default=1) if batch is None else batch
    if min(times, found) < 1:
        raise HddmError(
            f"{found} prompts, labels or conditions, {times} images each: need one or more of both"
        )

    def spread(value: Tensor) -> Tensor:
        value = value.expand(found, *value.shape[1:]) if len(value) == 1 else value
        return value.repeat_interleave(times, dim=0)

    return asked.map(spread), found * times
