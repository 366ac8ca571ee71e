"""Conditions of a pipeline's calls: prompts, class labels and embeddings by network keyword."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hddm.classes import Labels, class_indices
from hddm.networks.text_encoder import encode
from hddm.pipelines.offloading import Offloading
from hddm.utils.errors import HddmError

_TEXT = "encoder_hidden_states"


class Encoding(Offloading):
    """Encoder of a pipeline's prompts and class labels."""

    tokenizer: Any
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
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Conditions and negative conditions by network keyword, one row per prompt or class.

        Arguments are those of a call; ``guided`` says whether there will be a negative branch.

        Raises:
            HddmError: for prompts without a text encoder, or arguments that exclude each other.
        """
        if prompt is not None and not all(isinstance(one, str) for one in prompt):
            raise HddmError("prompt is a text or a list of texts; classes are passed as class_labels=")
        given, against = dict(conditions or {}), dict(negative_conditions or {})
        if class_labels is not None:
            if "class_labels" in given:
                raise HddmError("class_labels is among the conditions too; pass it once")
            given["class_labels"] = class_indices(class_labels, self.ensemble.classes)
        if negative_prompt is not None and prompt is None:
            raise HddmError("a negative_prompt needs a prompt beside it")
        has_negative = negative_prompt is not None or negative_prompt_embeds is not None or _TEXT in against
        if not guided:
            negative_prompt = None
        elif prompt is not None and not has_negative:
            negative_prompt = ""
        num = 1 if isinstance(prompt, str) else len(prompt or ())
        for name, texts, tokens, into in (
            ("prompt", prompt, prompt_embeds, given),
            ("negative_prompt", negative_prompt, negative_prompt_embeds, against),
        ):
            if texts is not None and tokens is not None:
                raise HddmError(f"pass a {name} or {name}_embeds, not both")
            if _TEXT in into and not (texts is None and tokens is None):
                kind = "conditions" if into is given else "negative conditions"
                raise HddmError(f"{_TEXT} is among the {kind} too; pass it once")
            if texts is not None:
                tokens = self._embed([texts] * num if isinstance(texts, str) else list(texts))
            if tokens is not None:
                into[_TEXT] = tokens
        widths = {record.text_encoder.width for record in self.experts.facts if record.text_encoder}
        if prompt_embeds is not None and widths - {prompt_embeds.shape[-1]}:
            raise HddmError(
                f"prompt_embeds are {tuple(prompt_embeds.shape)}, and these experts take tokens of "
                f"{' and '.join(map(str, sorted(widths)))} numbers"
            )
        return given, against

    def _embed(self, texts: Sequence[str]) -> Tensor:
        if self.text_encoder is None or self.tokenizer is None:
            raise HddmError(
                "a prompt needs a text encoder and a tokenizer, and this ensemble has none; give it both "
                "(hddm assemble ENSEMBLE --text-encoder FOLDER --tokenizer FOLDER), or pass prompt_embeds"
            )
        with self.present(self.text_encoder) as text_encoder:
            return encode(text_encoder, self.tokenizer, texts)


def repeated(
    given: Mapping[str, Tensor], against: Mapping[str, Tensor], times: int, batch: int | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Repeat each row of the conditions ``times`` times; also return the resulting number of images.

    A single row is expanded to the number of rows of the others, and to ``batch`` rows where given.
    """
    if times < 1 or (batch is not None and batch < 1):
        raise HddmError(f"num_images_per_prompt and batch_size start at 1, not {times} and {batch}")
    rows = {name: len(value) for name, value in given.items()}
    rows |= {f"negative {name}": len(value) for name, value in against.items()}
    rows |= {} if batch is None else {"batch_size": batch}
    batch = max(rows.values(), default=1)
    if not set(rows.values()) <= {1, batch} or batch == 0:
        raise HddmError(f"conditions have no rows, or different numbers of them: {rows}")

    def spread(value: Tensor) -> Tensor:
        value = value.expand(batch, *value.shape[1:]) if len(value) == 1 else value
        return value.repeat_interleave(times, dim=0)

    return (
        {name: spread(value) for name, value in given.items()},
        {name: spread(value) for name, value in against.items()},
        batch * times,
    )
