"""Text encoders that make the conditions of a prompt by diffusers' own ``encode_prompt``, mostly several.

A folder of them is a pipeline's without network, VAE and scheduler:

    FOLDER/model_index.json    class of the pipeline, and of each part
    FOLDER/text_encoder/       and tokenizer/, text_encoder_2/, tokenizer_2/, …

All classes are of fixed lists, so nothing in a folder decides which code runs.

`PipelineText` also knows pipelines of one CLIP or T5. An expert stores the tokens that it makes of the
empty prompt as the null value of ``encoder_hidden_states``, so that guidance and native samples need no text
encoder.
"""

import functools
import hashlib
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from hddm.condition_names import TEXT, TEXT_MASK
from hddm.networks.clip_reading import PromptReading, read_states
from hddm.networks.components import class_in, find_weights, read_config
from hddm.networks.encoders import ALONE, T5, TextEncoderClass, TokenizerClass
from hddm.networks.families import Family, pipelines
from hddm.networks.families.family import Prompts
from hddm.networks.identity import TextEncoderRecord, UnreadTextEncoder
from hddm.networks.text_encoder import (
    PLAIN,
    READS_ALL,
    STEM,
    Embedded,
    checked_embedding,
    class_stated,
    embed,
    mean_of_text,
    quiet,
    read_text_encoder,
    refuse_for_others,
    refuse_other_words,
    text_encoder_class,
    text_encoder_record_of,
    unread_text_encoder,
)
from hddm.networks.tokenizer import (
    check_tokenizer,
    cuts,
    padding_of,
    read_tokenizer,
    refuse_half_characters,
)
from hddm.utils.errors import HddmError, UsageError, an, in_words, one_line
from hddm.utils.files import inside, read_json, write_json
from hddm.utils.records import MODEL_INDEX
from hddm.utils.tensors import append_dims

ZEROS = "force_zeros_for_empty_prompt"
"""Key of `MODEL_INDEX`: True where the negative prompt "" becomes zeros."""


def prompts_of(pipeline: str) -> Prompts:
    """How a pipeline of several text encoders encodes prompts."""
    prompts = pipelines()[pipeline].prompts
    assert prompts is not None
    return prompts


def encoders_in(pipeline: str) -> dict[str, TextEncoderClass]:
    """The text encoders of a pipeline's folder of prompts, by their names there."""
    found = {}
    for number, kind in enumerate(prompts_of(pipeline).encoders):
        found[f"text_encoder_{number + 1}" if number else "text_encoder"] = kind
    return found


def tokenizer_of(encoder: str) -> str:
    """Name of the tokenizer of a text encoder, by the name of that: ``tokenizer_2`` of ``text_encoder_2``."""
    return encoder.replace("text_encoder", "tokenizer")


def parts_in(pipeline: str) -> dict[str, TextEncoderClass | TokenizerClass]:
    """Text encoders and tokenizers of a pipeline's folder of prompts, each by its name there."""
    found: dict[str, TextEncoderClass | TokenizerClass] = {}
    for name, kind in encoders_in(pipeline).items():
        found[name] = kind
        found[tokenizer_of(name)] = kind.tokenizer
    return found


def several_in(folder: Path) -> str | None:
    """The `class_in` a folder if that is a pipeline with `Prompts`, mostly several encoders, else None."""
    known = pipelines().get(class_in(folder) or "")
    return None if known is None or known.prompts is None else known.name


def text_parts(family: Family | None, conditions: Collection[str]) -> tuple[str, ...]:
    """The components that read prompts for a network of a ``family`` with these conditions.

    Where several text encoders make them, that is one folder of prompts, with tokenizers inside.
    """
    for one in () if family is None else family.pipelines:
        if one.prompts is not None and set(one.prompts.conditions) <= set(conditions):
            return ("text_encoder",)
    return ("text_encoder", "tokenizer")


def refuse_without_tokenizer(text_encoder: Path | None, tokenizer: Path | None) -> None:
    """Raise a `UsageError` for one without the other; a folder of prompts has tokenizers inside."""
    is_whole = text_encoder is not None and several_in(text_encoder) is not None
    if not is_whole and (text_encoder is None) != (tokenizer is None):
        raise UsageError("`text_encoder` and `tokenizer` go together; pass both, or none")


def refuse_other_parts(folder: Path, pipeline: str) -> None:
    """Raise an `HddmError` that names a text encoder or tokenizer which is missing or of another class."""
    writes_chats = prompts_of(pipeline).writes_chats
    index = read_config(folder, MODEL_INDEX)
    for name, kind in parts_in(pipeline).items():
        stated = index.get(name)
        named = stated[1] if isinstance(stated, list) and len(stated) == 2 else ""
        if not kind.accepts(str(named)):
            found = "missing" if stated is None else one_line(stated, 60)
            raise HddmError(
                f"{folder / MODEL_INDEX}: {name} is {found}, and must be {an(kind.name)}"
            )
        place = inside(folder, name)
        if isinstance(kind, TokenizerClass):
            check_tokenizer(place, kind, writes_chats)
            continue
        own = text_encoder_class(read_config(place))
        if own is None or not kind.accepts(own.name):
            raise HddmError(f"{place}/config.json: is of no {kind.name}")


class PromptEncoders(nn.Module):
    """The text encoders and tokenizers of a ``pipeline`` whose family has `Prompts`.

    ``parts`` are named as in `parts_in`. With ``empty_is_zero`` the negative prompt "" becomes zeros.
    """

    def __init__(self, pipeline: str, parts: Mapping[str, Any], empty_is_zero: bool) -> None:
        super().__init__()
        self.prompts = prompts_of(pipeline)
        self.pipeline, self.empty_is_zero = pipeline, empty_is_zero
        modules = {name: one for name, one in parts.items() if isinstance(one, nn.Module)}
        self.encoders = nn.ModuleDict(modules)
        self.tokenizers = {name: one for name, one in parts.items() if name not in self.encoders}
        known = pipelines()[pipeline]
        absent = dict.fromkeys(("vae", "scheduler", known.network))
        self._pipe = getattr(diffusers, pipeline)(**parts, **absent, **known.options)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that they run in."""
        found: torch.dtype = next(self.parameters()).dtype
        return found

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return next(self.parameters()).device

    @torch.no_grad()
    def embed(
        self,
        prompts: Sequence[str],
        is_negative: bool = False,
        warns: bool = True,
        reading: PromptReading = PLAIN,
    ) -> Embedded:
        """Encode prompts as the pipeline does, padded to its number of tokens.

        Longer ones are cut; with ``warns`` each kind of encoder warns of it. Raises `HddmError` for what is
        not finite, and for a ``reading`` that these encoders do not take.
        """
        family, texts = self.prompts, list(prompts)
        for text in texts:
            refuse_half_characters(text, one_line(repr(text), 60))
        if not reading.is_plain and family.other_readers:
            refuse_for_others(reading, family.other_readers)
        if not reading.is_plain:
            return self._embed_by(reading, texts, is_negative)
        # Several CLIPs cut alike.
        names = [kind.name for kind in family.encoders]
        readers = dict(zip(names, self.tokenizers.values(), strict=True))
        by_label = {kind.label: kind for kind in family.encoders}
        for label, kind in by_label.items() if warns else ():
            words, limit = readers[kind.name], family.length(kind)
            written = family.written(words, texts, is_negative)
            for _, cut in cuts(words, written, words.model_max_length if limit is None else limit):
                text = f"{label}: {cut}" if family.other_readers else cut + READS_ALL
                warnings.warn(text, UserWarning, stacklevel=2)
        for encoder, words in zip(self.encoders.values(), self.tokenizers.values(), strict=True):
            written = family.written(words, texts, is_negative)
            tokens = words(written, verbose=False).input_ids
            refuse_other_words(max(max(ids, default=0) for ids in tokens), encoder)
        with quiet():
            conditions = family.encode(self._pipe, texts, self.device, is_negative)
        return self._embedded(conditions, texts, is_negative)

    def _embed_by(
        self, reading: PromptReading, texts: Sequence[str], is_negative: bool
    ) -> Embedded:
        """As `embed`, of CLIPs whose states before the last layer lie side by side."""
        found = []
        for name, encoder in self.encoders.items():
            words = self.tokenizers[tokenizer_of(name)]
            found.append(read_states(encoder, words, texts, reading, layer=1, norm=False))
        tokens = torch.cat([one.hidden for one in found], -1)
        vectors = found[-1].first[0].view(len(texts), reading.chunks, -1)
        conditions = {TEXT: tokens, self.prompts.pooled: vectors[:, 0]}
        return self._embedded(conditions, texts, is_negative)

    def _embedded(
        self, conditions: dict[str, Tensor], texts: Sequence[str], is_negative: bool
    ) -> Embedded:
        """Conditions of prompts, where empty negative ones may be zeros."""
        if is_negative and self.empty_is_zero:
            given = torch.tensor([bool(text) for text in texts], device=conditions[TEXT].device)
            for name, one in conditions.items():
                conditions[name] = one * append_dims(given, one.ndim)
        pooled = conditions.get(self.prompts.pooled)
        if pooled is None:
            pooled = mean_of_text(conditions[TEXT], conditions[TEXT_MASK])
        return checked_embedding(Embedded(conditions, pooled))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the parts into ``folder``."""
        for name, part in (*self.encoders.items(), *self.tokenizers.items()):
            part.save_pretrained(Path(folder) / name)
        write_json(Path(folder) / MODEL_INDEX, index_content(self.pipeline, self.empty_is_zero))


def index_content(pipeline: str, empty_is_zero: bool) -> dict[str, Any]:
    """What ``model_index.json`` says of a pipeline's prompts."""
    own = {ZEROS: empty_is_zero} if prompts_of(pipeline).has_zeros_key else {}
    classes = {name: [kind.library, kind.name] for name, kind in parts_in(pipeline).items()}
    return {"_class_name": pipeline, **own, **classes}


def zeros_in(folder: Path) -> bool:
    """True where the negative prompt "" becomes zeros; the default of a family whose index has `ZEROS`."""
    pipeline = several_in(folder)
    has_key = pipeline is not None and prompts_of(pipeline).has_zeros_key
    return has_key and bool(read_config(folder, MODEL_INDEX).get(ZEROS, True))


def read_texts(folder: Path, dtype: torch.dtype = torch.float32, widens: bool = True) -> Any:
    """Read the text encoder in ``folder``, or the folder of prompts, as `read_text_encoder` does.

    Raises `HddmError` as `hddm.networks.text_encoder` does, and for parts that do not belong together.
    """
    if (pipeline := several_in(folder)) is None:
        return read_text_encoder(folder, dtype, widens=widens)
    refuse_other_parts(folder, pipeline)
    parts: dict[str, Any] = {}
    writes_chats = prompts_of(pipeline).writes_chats
    for name, kind in encoders_in(pipeline).items():
        parts[name] = read_text_encoder(folder / name, dtype, kind=kind, widens=widens)
        words = tokenizer_of(name)
        parts[words] = read_tokenizer(folder / words, kind.tokenizer, writes_chats)
    return PromptEncoders(pipeline, parts, zeros_in(folder))


def texts_record_of(
    folder: Path, tokenizer: Path | None = None, variant: str | None = None
) -> TextEncoderRecord:
    """Identity of a text encoder with its ``tokenizer``, or of a folder of prompts; raises as `read_texts`.

    The kind of a folder of prompts is the class of the pipeline.
    """
    if (pipeline := several_in(folder)) is None:
        assert tokenizer is not None
        words = read_tokenizer(tokenizer)
        return text_encoder_record_of(folder, words.model_max_length, variant, pad=words.pad_token)
    refuse_other_parts(folder, pipeline)
    records = []
    for name, kind in encoders_in(pipeline).items():
        words = folder / tokenizer_of(name)
        limit = read_config(words, "tokenizer_config.json").get("model_max_length")
        pad = padding_of(words)
        records.append(text_encoder_record_of(folder / name, limit, variant, kind, pad))
    return joint_record(pipeline, records, zeros_in(folder))


def joint_record(
    pipeline: str, records: Sequence[TextEncoderRecord], empty_is_zero: bool
) -> TextEncoderRecord:
    """Identity of the text encoders of a ``pipeline`` with several, of their ``records`` in order."""
    family = prompts_of(pipeline)
    of_empty = str(empty_is_zero) if family.has_zeros_key else ""
    marks = [f"{one.fingerprint}{one.padding}" for one in records]
    joined = ("".join(marks) + of_empty).encode()
    tokens, width = family.shape([one.tokens for one in records], [one.width for one in records])
    return TextEncoderRecord(
        kind=pipeline,
        fingerprint=hashlib.sha256(joined).hexdigest()[:16],
        tokens=tokens,
        width=width,
    )


@dataclass(frozen=True)
class PipelineText:
    """Text encoders, with weights of ``variant``, and tokenizers of the pipeline in ``folder``."""

    folder: Path | None = None
    variant: str | None = None

    @functools.cached_property
    def missing(self) -> str:
        """Reason why they cannot be read; empty where they can. `HddmError` for one outside the folder."""
        if self.folder is None:
            return "no pipeline with a text encoder lies around it"
        encoder = self.folder / "text_encoder"
        name, pipeline = class_in(self.folder), several_in(self.folder)
        if not (encoder / "config.json").exists():
            return "there is no text_encoder/config.json beside"
        config = read_json(inside(self.folder, "text_encoder/config.json"))
        encoded = [name for name, one in pipelines().items() if one.has_text]
        known = ", ".join(encoded)
        if name == "":
            return f"its {MODEL_INDEX} names no class (_class_name); hddm can encode prompts of {known}"
        if pipeline is None and name not in (None, *encoded):
            return f"{one_line(name, 60)} is no class whose prompts hddm can encode (those are {known})"
        if pipeline is None and text_encoder_class(config) not in ALONE:
            names = " or ".join(an(kind.name) for kind in ALONE)
            return f"the one beside {class_stated(config)}, not {names}"
        if pipeline is None and find_weights(encoder, STEM, self.variant) is None:
            return f"there is no text_encoder/{STEM}.safetensors beside"
        inside(self.folder, "tokenizer")
        try:
            if pipeline is None:
                read_tokenizer(self.folder / "tokenizer")
            else:
                refuse_other_parts(self.folder, pipeline)
        except HddmError as error:
            return error.message
        lost = [] if pipeline is None else self._without_weights(pipeline)
        return f"there is no {in_words(lost)} beside" if lost else ""

    def _without_weights(self, pipeline: str) -> list[str]:
        """Weights files that are missing in the folders of a pipeline's several text encoders."""
        assert self.folder is not None
        lost = []
        for name in encoders_in(pipeline):
            if find_weights(self.folder / name, STEM, self.variant) is None:
                lost.append(f"{name}/{STEM}.safetensors")
        return lost

    @functools.cached_property
    def unread(self) -> UnreadTextEncoder | None:
        """The text encoder that is there and cannot be read; None without one, and where it can."""
        if self.folder is None or not self.missing:
            return None
        place = self.folder / "text_encoder"
        if not place.is_dir():
            return None
        several = several_in(self.folder)
        if several is not None:
            # What is known of the first does not tell all of them from others.
            return UnreadTextEncoder(kind=several, reason=one_line(self.missing, 300))
        return unread_text_encoder(place, self.missing, self.variant)

    @property
    def held(self) -> tuple[str, ...]:
        """None: those in a folder are among the components."""
        return ()

    def require(self) -> None:
        """Do nothing: in a folder, nothing is missing that an option could state."""

    @functools.cached_property
    def record(self) -> TextEncoderRecord | None:
        """Identity of the encoder, None where it is `missing`; `HddmError` for bad config or weights."""
        found = self.components
        if not found:
            return None
        return texts_record_of(found["text_encoder"], found.get("tokenizer"), self.variant)

    @property
    def components(self) -> dict[str, Path]:
        """Folders that an expert keeps to read prompts with, by name; see `hddm.networks.prompts`."""
        if self.folder is None or self.missing:
            return {}
        if several_in(self.folder) is not None:
            return {"text_encoder": self.folder}
        return {name: self.folder / name for name in ("text_encoder", "tokenizer")}

    def empty_prompt(self) -> Tensor | None:
        """Text tokens (tokens, width) of the empty prompt; None and errors as in `record`.

        None for T5, of whose tokens the padding is masked: a pipeline encodes the empty prompt itself. Zeros
        where the pipeline takes these.
        """
        if self.folder is None or self.missing:
            return None
        if several_in(self.folder) is not None:
            record = self.record if zeros_in(self.folder) else None
            return None if record is None else torch.zeros(record.tokens, record.width)
        folder = self.folder / "text_encoder"
        if text_encoder_class(read_json(folder / "config.json")) == T5:
            return None
        encoder = read_text_encoder(folder, variant=self.variant)
        return embed(encoder, read_tokenizer(self.folder / "tokenizer"), [""]).tokens[0]
