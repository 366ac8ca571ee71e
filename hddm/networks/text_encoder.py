"""CLIP text encoder and tokenizer of a pipeline: they turn prompts into the tokens that experts take.

Both are read from local files that are checked before transformers opens them.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hddm.networks.folders import refuse_other_tensors
from hddm.networks.identity import TextEncoderRecord, fingerprint
from hddm.networks.vae import read_config, read_weights
from hddm.utils.errors import HddmError, did_you_mean, one_line
from hddm.utils.files import inside
from hddm.utils.tensors import refuse_non_finite

if TYPE_CHECKING:
    from transformers import CLIPTextModel, CLIPTokenizer

STEM = "model"
KIND = "CLIPTextModel"
ARCHITECTURES = ([KIND], ["CLIPTextModelWithProjection"])
CLASSES = ("CLIPTokenizer", "CLIPTokenizerFast")
# The loader hands every key to the class, and some name files or positional arguments.
_KEYS = {
    *("__type", "add_prefix_space", "added_tokens_decoder", "additional_special_tokens", "backend"),
    *("bos_token", "clean_up_tokenization_spaces", "do_lower_case", "eos_token", "errors"),
    *("extra_special_tokens", "is_local", "local_files_only", "max_length", "model_input_names"),
    *("model_max_length", "name_or_path", "pad_to_multiple_of", "pad_token", "pad_token_type_id"),
    *("padding_side", "processor_class", "special_tokens_map_file", "split_special_tokens", "stride"),
    *("tokenizer_class", "truncation_side", "truncation_strategy", "unk_token"),
}
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "hidden_act", "layer_norm_eps"),
)
_NUMBERS = ("bos_token_id", "eos_token_id", "pad_token_id")
_VOCABULARY = 49408
_PREFIX = "text_model."
_UNUSED = ("embeddings.position_ids", "text_projection.weight")


def read_tokenizer(folder: Path) -> "CLIPTokenizer":
    """Read the tokenizer in ``folder`` from ``tokenizer.json``, or from ``vocab.json`` and ``merges.txt``.

    Raises `HddmError` for missing files, entries that leave the folder, another class, a config key not known
    to be harmless, and files that make no tokenizer.
    """
    # Imported here: it takes seconds.
    from transformers import CLIPTokenizer

    config, path = read_config(folder, "tokenizer_config.json"), folder / "tokenizer_config.json"
    kind = config.get("tokenizer_class", CLASSES[0])
    if kind not in CLASSES:
        raise HddmError(f"{path}: holds a {str(kind)[:40]}, not a {CLASSES[0]}")
    for key in config:
        if key not in _KEYS:
            raise HddmError(f"{path}: has an unknown key {key!r}{did_you_mean(key, _KEYS)}; delete it there")
    for entry in folder.iterdir():
        inside(folder, entry.name)
    missing = [name for name in ("vocab.json", "merges.txt") if not (folder / name).is_file()]
    # Without any of these, the class makes a tokenizer of three words.
    if missing and not (folder / "tokenizer.json").is_file():
        raise HddmError(f"{folder}: no {' and no '.join(missing)}, and no tokenizer.json; fetch them")
    try:
        tokenizer: CLIPTokenizer = CLIPTokenizer.from_pretrained(str(folder), local_files_only=True)
        # It keeps settings of any kind, and fails on them at the first prompt.
        cuts(tokenizer, ["a"], length=2)
        tokenizer(["a"], padding="max_length", max_length=2, truncation=True, return_tensors="pt")
    except Exception as error:  # it may raise anything for broken files
        reason = one_line(error, 300)
        raise HddmError(f"{folder}: no tokenizer can be made of its files ({reason})") from error
    return tokenizer


def read_text_encoder(
    folder: Path, dtype: torch.dtype = torch.float32, variant: str | None = None
) -> "CLIPTextModel":
    """Read the CLIP text encoder in ``folder``, in evaluation mode.

    Only checked sizes of its config are used. Files may have the prefix ``text_model.`` and an (unused)
    projection; the file of ``variant`` is preferred. Raises `HddmError` for a file that is missing or leaves
    the folder, another class, and tensors that are missing, left over, of another shape or not finite.
    """
    model, weights, path = _open(folder, variant)
    refuse_non_finite(path, weights)
    names = {key.removeprefix(_PREFIX): key for key in model.state_dict()}
    model.load_state_dict({names[key]: value.to(dtype) for key, value in weights.items()}, assign=True)
    positions = model.config.max_position_embeddings
    on_meta = [(m, n) for m in model.modules() for n, b in m.named_buffers(recurse=False) if b.is_meta]
    for owner, buffer in on_meta:
        owner.register_buffer(buffer, torch.arange(positions)[None], persistent=False)
    model.requires_grad_(False)
    model.train(False)
    return model


def text_encoder_facts(folder: Path, tokens: object, variant: str | None = None) -> TextEncoderRecord:
    """Identity of the text encoder in ``folder``; raises as `read_text_encoder`.

    ``tokens`` is its tokenizer's ``model_max_length``, as for `prompt_length`.
    """
    model, weights, _ = _open(folder, variant)
    return TextEncoderRecord(
        kind=KIND,
        fingerprint=fingerprint(weights),
        tokens=prompt_length(tokens, model.config.max_position_embeddings),
        width=model.config.hidden_size,
    )


def encode(text_encoder: "CLIPTextModel", tokenizer: "CLIPTokenizer", prompts: Sequence[str]) -> Tensor:
    """Last hidden states (len(prompts), tokens, width), the conditions of Stable Diffusion 1 and 2.

    Prompts are padded to `prompt_length` tokens, and padding is not masked. Longer ones are cut, with a
    warning that names what was left out. Raises `HddmError` without prompts, and for tokens that the encoder
    lacks.
    """
    if isinstance(prompts, str) or not prompts:
        raise HddmError(f"prompts must be a list of one text or more, not {prompts!r}")
    length = prompt_length(tokenizer.model_max_length, text_encoder.config.max_position_embeddings)
    for _, cut in cuts(tokenizer, prompts, length):
        warnings.warn(cut, UserWarning, stacklevel=2)
    return hidden_states(text_encoder, tokenizer, prompts)


def hidden_states(
    text_encoder: "CLIPTextModel", tokenizer: "CLIPTokenizer", prompts: Sequence[str]
) -> Tensor:
    """`encode` without its warnings."""
    length = prompt_length(tokenizer.model_max_length, text_encoder.config.max_position_embeddings)
    tokens = tokenizer(
        list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    ).input_ids
    vocabulary = text_encoder.config.vocab_size
    if tokens.max() >= vocabulary:
        raise HddmError(
            f"the tokenizer gives token {tokens.max().item()}, and the text encoder has {vocabulary}; take "
            "the tokenizer that belongs to it"
        )
    with torch.no_grad():
        encoded: Tensor = text_encoder(tokens.to(text_encoder.device))[0]
    if not encoded.isfinite().all():
        raise HddmError("the text encoder's tokens hold NaN or Inf; run it in float32")
    return encoded


def cuts(tokenizer: "CLIPTokenizer", prompts: Sequence[str], length: int) -> list[tuple[int, str]]:
    """Indices of the ``prompts`` of more than ``length`` tokens; warns of what each loses."""
    tokens: list[list[int]] = tokenizer(
        list(prompts), padding=False, truncation=False, verbose=False
    ).input_ids
    found = []
    for index, (prompt, ids) in enumerate(zip(prompts, tokens, strict=True)):
        if len(ids) > length:
            # The last token is the end, which a prompt that is cut keeps.
            cut = tokenizer.decode(ids[length - 1 : -1])
            warning = f"a prompt of {len(ids)} tokens is cut to {length}: {prompt[:40]!r} … loses {cut!r}"
            found.append((index, warning))
    return found


def prompt_length(limit: object, positions: int) -> int:
    """Tokens per prompt: the tokenizer's ``model_max_length``, limited by the encoder's positions."""
    # Tokenizers without a limit say 10^30.
    return min(limit, positions) if isinstance(limit, int) and limit >= 2 else positions


def _open(folder: Path, variant: str | None) -> tuple["CLIPTextModel", dict[str, Tensor], Path]:
    """The empty encoder in ``folder``, its tensors without the prefix, and the weights file."""
    # Imported here: it takes seconds, and few sources need it.
    from transformers import CLIPTextConfig, CLIPTextModel

    origin, config = folder / "config.json", read_config(folder)
    if config.get("architectures") not in ARCHITECTURES:
        raise HddmError(f"{origin}: holds {str(config.get('architectures'))[:60]}, not a {KIND}")
    path, stored = read_weights(folder, STEM, variant)
    weights = {key.removeprefix(_PREFIX): value for key, value in stored.items()}
    if len(weights) != len(stored):
        raise HddmError(f"{path}: holds tensors twice, with and without {_PREFIX!r}; take the weights anew")
    weights = {key: value for key, value in weights.items() if key not in _UNUSED}
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int) or layers > len(weights):
        raise HddmError(f"{origin}: num_hidden_layers is {layers!r} for {len(weights)} tensors")
    try:
        with torch.device("meta"):
            sizes = {key: config[key] for key in _SIZES if key in config}
            model = CLIPTextModel(CLIPTextConfig(**sizes, **_special_tokens(config)))
    except Exception as error:  # a constructor may raise anything for foreign values
        reason = one_line(error, 300)
        raise HddmError(f"{origin}: no text encoder can be built from it ({reason})") from error
    expected = {key.removeprefix(_PREFIX): value for key, value in model.state_dict().items()}
    refuse_other_tensors({k: v for k, v in expected.items() if k not in _UNUSED}, weights, path)
    return model, weights, path


def _special_tokens(config: dict[str, Any]) -> dict[str, Any]:
    """The config's numbers of special tokens, if within the vocabulary."""
    # They choose the pooled output alone, which no expert is given; without an end, CLIP's last, it fails.
    size = config.get("vocab_size", _VOCABULARY)
    valid = {key: n for key in _NUMBERS if type(n := config.get(key)) is int and 0 <= n < size}
    return {**dict.fromkeys(_NUMBERS), "eos_token_id": size - 1, **valid}
