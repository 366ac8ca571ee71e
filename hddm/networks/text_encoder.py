"""Text encoders, which turn the words of a prompt into tokens (`hddm.networks.encoders`).

They are read from local files that are checked before transformers opens them.
"""

import contextlib
import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers.utils import logging as diffusers_logging
from torch import Tensor

from hddm.condition_names import TEXT, TEXT_MASK
from hddm.networks.clip_reading import PromptReading, read_states
from hddm.networks.components import Held, class_in, read_config, read_weights
from hddm.networks.encoders import ADAPTED, ALONE, CLIP, PIPELINE, T5, TextEncoderClass
from hddm.networks.families import pipelines, text_encoders
from hddm.networks.families.family import Pipeline
from hddm.networks.folders import refuse_other_tensors
from hddm.networks.identity import TextEncoderRecord, UnreadTextEncoder, fingerprint
from hddm.networks.tokenizer import cuts, imported, refuse_half_characters, tokenized
from hddm.utils.errors import HddmError, an, in_words, one_line
from hddm.utils.tensors import refuse_non_finite

STEM = "model"
LARGE = 10**9
"""Weights of a text encoder that takes more memory than most networks: T5-XXL has 4.7 × 10^9."""
T5_TOKENS = 300
"""Tokens of a prompt for T5, which has no limit of its own: as of PixArt-Σ. Padding is masked."""
_VOCABULARY = 49408
ZERO_WORD = "!"
"""The word 0 of CLIP's vocabulary, with which open_clip pads."""
END_OF_TEXT = "<|endoftext|>"


def read_text_encoder(
    place: Path | Held,
    dtype: torch.dtype = torch.float32,
    variant: str | None = None,
    kind: TextEncoderClass | None = None,
    widens: bool = True,
) -> Any:
    """Read the text encoder in a folder or file, in evaluation mode: CLIP, T5, or another by its ``kind``.

    Only checked sizes of its config are used. Files of CLIP may have the prefix ``text_model.`` and a
    projection, which is used with the ``kind`` `hddm.networks.encoders.CLIP_PROJECTED`; by default the kind
    is the config's, without projection. The file of ``variant`` is preferred. Without ``widens``, one of more
    than `LARGE` weights in a half type stays in it, mapped from its file, where ``dtype`` is float32. Raises
    `HddmError` for a file that is missing or leaves the folder, another class, and tensors that are missing,
    left over, misshapen or not finite.
    """
    known, empty, weights, path = _open(place, variant, kind)
    refuse_non_finite(path, weights)
    if not widens and dtype == torch.float32:
        dtype = _half_type(weights) or dtype
    with quiet():
        # No folder is passed, so transformers reads only the checked sizes and tensors.
        model, report = type(empty).from_pretrained(
            None,
            config=empty.config,
            state_dict=weights,
            dtype=dtype,
            output_loading_info=True,
            **known.options,
        )
    if unfilled := report["missing_keys"] or report["mismatched_keys"]:
        raise HddmError(
            f"{path}: transformers did not fill {sorted(unfilled)[0]}; use another version of it"
        )
    return model.requires_grad_(False)


def _half_type(weights: Mapping[str, Tensor]) -> torch.dtype | None:
    """The half type that all of more than `LARGE` weights have; None for any others."""
    types = {one.dtype for one in weights.values()}
    number = sum(one.numel() for one in weights.values())
    half = types <= {torch.float16, torch.bfloat16} and len(types) == 1
    return types.pop() if half and number > LARGE else None


def text_encoder_record_of(
    place: Path | Held,
    tokens: object,
    variant: str | None = None,
    kind: TextEncoderClass | None = None,
    pad: str | None = None,
) -> TextEncoderRecord:
    """Identity of the text encoder in ``place``, read as ``kind``; raises as `read_text_encoder`.

    ``tokens`` is its tokenizer's ``model_max_length``, as for `prompt_length`, and ``pad`` the word that it
    pads with, None where that is not known.
    """
    known, model, weights, _ = _open(place, variant, kind)
    mark = fingerprint(weights)
    config = place.config if isinstance(place, Held) else read_config(place)
    adapted = config.get(ADAPTED)
    if adapted is not None:
        # A fingerprint covers no large tensor, and these alone were changed.
        mark = hashlib.sha256(f"{mark} {adapted}".encode()).hexdigest()[:16]
    return TextEncoderRecord(
        kind=getattr(model.config, PIPELINE, type(model).__name__),
        fingerprint=mark,
        tokens=prompt_length(tokens, model.config),
        width=model.config.hidden_size,
        padding="" if pad in (None, _usual_padding(known, model)) else str(pad),
    )


def _usual_padding(known: TextEncoderClass, model: Any) -> str | None:
    """The word that prompts of an encoder are padded with; None where padding is masked, as T5's.

    OpenAI's CLIP pads with the end of the text, and open_clip, which the activation tells, with its word 0.
    """
    if known.is_masked:
        return None
    return ZERO_WORD if model.config.hidden_act == "gelu" else END_OF_TEXT


def unread_text_encoder(folder: Path, reason: str, variant: str | None = None) -> UnreadTextEncoder:
    """What can be known of the text encoder in ``folder``, which cannot be read for this ``reason``."""
    named, found = None, None
    with contextlib.suppress(HddmError):
        named = read_config(folder).get("architectures")
    with contextlib.suppress(HddmError):
        _, stored = read_weights(folder, STEM, variant)
        prefix = CLIP.prefix
        found = fingerprint({key.removeprefix(prefix): one for key, one in stored.items()})
    kind = named[0] if isinstance(named, list) and len(named) == 1 else named
    return UnreadTextEncoder(
        kind=one_line(kind, 60), reason=one_line(reason, 300), fingerprint=found
    )


class Embedded(NamedTuple):
    """Encoded prompts: ``conditions`` by keyword of a network, and one vector each, ``pooled`` (N, width).

    Of one encoder these are its last hidden states, ``encoder_hidden_states`` (N, tokens, width), and of T5
    also ``encoder_attention_mask`` (N, tokens), 1 for tokens of the prompt, and as many of padding as its
    pipeline shows the network, and 0 for the rest; CLIP's padding counts. ``pooled`` is CLIP's state at the
    end of the text, and of T5 the mean over the tokens of 1.
    """

    conditions: dict[str, Tensor]
    pooled: Tensor

    @property
    def tokens(self) -> Tensor:
        """Hidden states (N, tokens, width)."""
        return self.conditions[TEXT]


PLAIN = PromptReading()
READS_ALL = "; `long_prompt` reads all of it"


def embed(
    text_encoder: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    warns: bool = True,
    reading: PromptReading = PLAIN,
) -> Embedded:
    """Encode prompts, padded to `prompt_length` tokens.

    Longer ones are cut, with a warning that names what was left out, unless ``reading`` divides them. A T5
    reads them as its pipeline does (`Pipeline`). Raises `HddmError` for tokens that the encoder lacks, and
    for a ``reading`` that it does not take.
    """
    if not reading.is_plain:
        return _embed_by(reading, text_encoder, tokenizer, prompts)
    length = prompt_length(tokenizer.model_max_length, text_encoder.config)
    pipeline = _pipeline_of_t5(text_encoder.config)
    if pipeline is not None and not pipeline.keeps_case:
        prompts = [prompt.lower().strip() for prompt in prompts]
    for prompt in prompts:
        refuse_half_characters(prompt, one_line(repr(prompt), 60))
    hint = "" if hasattr(text_encoder, "shared") else READS_ALL
    for _, cut in cuts(tokenizer, prompts, length) if warns else ():
        warnings.warn(cut + hint, UserWarning, stacklevel=2)
    words = tokenized(tokenizer, prompts, length)
    ids, mask = words["input_ids"], words["attention_mask"]
    refuse_other_words(int(ids.max()), text_encoder)
    is_clip, device = not hasattr(text_encoder, "shared"), text_encoder.device
    masked = {} if is_clip else {"attention_mask": mask.to(device)}
    with torch.no_grad():
        tokens: Tensor = text_encoder(ids.to(device), **masked)[0]
    if is_clip:
        ends = end_of_text(ids, tokenizer).to(device)
        return checked_embedding(Embedded({TEXT: tokens}, tokens[torch.arange(len(ids)), ends]))
    seen = mask.to(device)
    if pipeline is not None and pipeline.seen_padding:
        ends = seen.sum(1, keepdim=True) + pipeline.seen_padding
        seen = (torch.arange(length, device=device) < ends).to(seen.dtype)
    return checked_embedding(Embedded({TEXT: tokens, TEXT_MASK: seen}, mean_of_text(tokens, seen)))


def _embed_by(
    reading: PromptReading, text_encoder: Any, tokenizer: Any, prompts: Sequence[str]
) -> Embedded:
    """As `embed`, of one CLIP, whose last norm follows the layer that is read."""
    if hasattr(text_encoder, "shared"):
        refuse_for_others(reading, (T5,))
    states = read_states(text_encoder, tokenizer, prompts, reading, layer=0, norm=True)
    ends = end_of_text(states.ids, tokenizer).to(states.hidden.device)
    pooled = states.hidden[torch.arange(len(prompts)), ends]
    return checked_embedding(Embedded({TEXT: states.hidden}, pooled))


def refuse_for_others(reading: PromptReading, kinds: Sequence[TextEncoderClass]) -> None:
    """Raise an `HddmError` for a ``reading`` other than the plain one, which only CLIP has.

    ``kinds`` are the classes of the other text encoders.
    """
    name = "clip_skip" if reading.clip_skip else "long_prompt"
    readers = in_words([kind.label for kind in kinds])
    raise HddmError(
        f"`{name}`: is for networks of CLIP alone, and this one reads prompts by {readers}; drop it"
    )


def refuse_other_words(largest: int, text_encoder: Any) -> None:
    """Raise an `HddmError` for a token, the ``largest`` of a tokenizer's, that the text encoder lacks."""
    vocabulary = text_encoder.config.vocab_size
    if largest >= vocabulary:
        text = f"and the text encoder has {vocabulary}; use the tokenizer that belongs to it"
        raise HddmError(f"the tokenizer gives token {largest}, {text}")


def end_of_text(ids: Tensor, tokenizer: Any) -> Tensor:
    """Places (n,) of the first end of each text among its tokens' ``ids`` (n, tokens), as CLIP pools them."""
    # Padding may be of the same token.
    is_end: Tensor = ids == tokenizer.eos_token_id
    return is_end.int().argmax(1)


def mean_of_text(tokens: Tensor, mask: Tensor) -> Tensor:
    """Means (n, width) over the text of the hidden states ``tokens`` (n, tokens, width), as T5 is pooled."""
    weights = mask.to(tokens)[..., None]
    return (tokens * weights).sum(1) / weights.sum(1)


def checked_embedding(embedded: Embedded) -> Embedded:
    """The same encoded prompts; `HddmError` for hidden states or vectors with NaN or Inf."""
    for name, one in (("tokens", embedded.tokens), ("vectors of prompts", embedded.pooled)):
        if not one.isfinite().all():
            raise HddmError(f"the text encoder's {name} hold NaN or Inf; run it in float32")
    return embedded


def prompt_length(limit: object, config: Any) -> int:
    """Tokens per prompt for the encoder of a ``config``.

    They are those of its pipeline, whatever the tokenizer says, where its config names one (`PIPELINE`), and
    else the tokenizer's ``limit`` (``model_max_length``), at most the encoder's positions.
    """
    pipeline = _pipeline_of_t5(config)
    if pipeline is not None and pipeline.t5_tokens is not None:
        return pipeline.t5_tokens
    positions: int = getattr(config, "max_position_embeddings", None) or T5_TOKENS
    # Tokenizers without a limit say 10^30.
    return min(limit, positions) if isinstance(limit, int) and limit >= 2 else positions


def _pipeline_of_t5(config: Any) -> Pipeline | None:
    """The pipeline that the config of a T5 names (`PIPELINE`); None where it names none."""
    return pipelines().get(str(getattr(config, PIPELINE, "")))


def text_encoder_config(folder: Path) -> dict[str, Any]:
    """Config of a text encoder; the one T5 of a pipeline has, or gets, the key `PIPELINE`."""
    config = read_config(folder)
    pipeline = config.pop(PIPELINE, class_in(folder.parent))
    known = pipelines().get(str(pipeline))
    return config if known is None or known.t5_tokens is None else config | {PIPELINE: pipeline}


def text_encoder_class(config: Mapping[str, Any]) -> TextEncoderClass | None:
    """Class that reads the text encoder of a config; None for one that hddm does not know."""
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and len(named) == 1 else None
    return text_encoders().get(name) if isinstance(name, str) else None


def class_stated(config: Mapping[str, Any]) -> str:
    """What the config of a text encoder says of its class, in words."""
    named = config.get("architectures")
    return "names no class (architectures)" if named is None else f"holds {one_line(named, 60)}"


def _open(
    place: Path | Held, variant: str | None, wanted: TextEncoderClass | None = None
) -> tuple[TextEncoderClass, Any, dict[str, Tensor], Path]:
    """The class in ``place``, its empty encoder, its tensors without the prefix, and the weights file."""
    if isinstance(place, Held):
        origin, config = place.path, dict(place.config)
    else:
        origin, config = place / "config.json", text_encoder_config(place)
    allowed = ALONE if wanted is None else (wanted,)
    stated = text_encoder_class(config)
    known = next((one for one in allowed if stated is not None and stated.name in one.names), None)
    if known is None:
        names = " or ".join(an(one.name) for one in allowed)
        hint = ""
        if stated is not None and wanted is None:
            hint = "; name the folder of the pipeline that it belongs to, with model_index.json"
        raise HddmError(f"{origin}: {class_stated(config)}, not {names}{hint}")
    if isinstance(place, Held):
        path, stored = place.path, place.weights
    else:
        path, stored = read_weights(place, STEM, variant)
    layers = config.get(known.layers)
    weights = {key.removeprefix(known.prefix): value for key, value in stored.items()}
    weights = {key: value for key, value in weights.items() if key not in known.unused}
    # Modules cost time and memory even on the meta device.
    if not isinstance(layers, int) or layers > len(weights):
        raise HddmError(
            f"{origin}: {known.layers} is {str(layers)[:40]} for {len(weights)} tensors"
        )
    sizes = {key: config[key] for key in known.sizes if key in config}
    others = _assumed(known, config, origin)
    owner = imported(known)
    try:
        for key, one in sizes.items():
            if isinstance(one, int) and not isinstance(one, bool) and one < 1:
                raise ValueError(f"{key} is {one}")
        if known.divided is not None:
            whole, part = (sizes.get(key, 1) for key in known.divided)
            if whole % part:
                raise ValueError(f"{known.divided[0]} is {whole}, not divided by {part}")
        if CLIP.name in known.names:
            # The end chooses the pooled output, which fails without one; CLIP's is the last of its words.
            end, words = config.get("eos_token_id"), sizes.get("vocab_size", _VOCABULARY)
            end = end if type(end) is int and 0 <= end < words else words - 1
            sizes |= {"bos_token_id": None, "pad_token_id": None, "eos_token_id": end}
        with torch.device("meta"):
            model: Any = owner(owner.config_class(**sizes, **others), **known.options)
    except Exception as error:  # a constructor may raise anything for foreign values
        reason = one_line(error, 300)
        raise HddmError(f"{origin}: no text encoder can be built from it ({reason})") from error
    expected = {key.removeprefix(known.prefix): value for key, value in model.state_dict().items()}
    refuse_other_tensors(
        {key: one for key, one in expected.items() if key not in known.unused}, weights, path
    )
    return known, model, weights, path


def _assumed(known: TextEncoderClass, config: Mapping[str, Any], origin: Path) -> dict[str, object]:
    """Arguments of a class beside its sizes; `HddmError` for values that hddm does not read."""
    for key, value in known.assumed.items():
        if config.get(key, value) != value:
            raise HddmError(
                f"{origin}: {key} is {one_line(config[key], 60)}, and hddm reads {known.label} with {value} "
                "alone; use another version of it"
            )
    if not known.is_rotary:
        return {}
    stated = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta")}
    theta = stated.get("rope_theta") if isinstance(stated, Mapping) else None
    others = {**stated, "rope_theta": theta, "rope_type": None} if theta else {}
    is_plain = others.keys() == {"rope_theta", "rope_type"} and stated.get("rope_type") in _PLAIN
    if not is_plain or not isinstance(theta, int | float) or not 1 <= theta <= 1e12:
        raise HddmError(
            f"{origin}: its rotary embeddings are {one_line(stated, 100)}, and hddm reads plain ones with a "
            "rope_theta of 1 or more; use another version of it"
        )
    return {"rope_parameters": {"rope_type": "default", "rope_theta": float(theta)}}


_PLAIN = (None, "default")
"""Types of rotary embeddings without scales."""


@contextmanager
def quiet() -> Iterator[None]:
    """Hold back transformers' progress bars, and warnings of it and of diffusers, which would repeat ours."""
    from transformers.utils import logging as of_transformers

    logs = (diffusers_logging, of_transformers)
    levels = [log.get_verbosity() for log in logs]
    has_bars = of_transformers.is_progress_bar_enabled()
    for log in logs:
        log.set_verbosity_error()
    of_transformers.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.set_verbosity(level)
        if has_bars:
            of_transformers.enable_progress_bar()  # type: ignore[no-untyped-call]
