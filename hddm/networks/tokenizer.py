"""Tokenizers, which divide prompts into the words of a text encoder (`hddm.networks.text_encoder`).

They are read from local files that are checked before transformers opens them.
"""

import importlib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hddm.networks.chat_template import TEMPLATE, has_template
from hddm.networks.components import read_config
from hddm.networks.encoders import CLIP_TOKENIZER, TRANSFORMERS, TextEncoderClass, TokenizerClass
from hddm.networks.families import tokenizers
from hddm.utils.errors import HddmError, an, did_you_mean, one_line, optional
from hddm.utils.files import inside, read_json

# The loader hands every key of both files to the class, and some name files or positional arguments.
_KEYS = {
    *("__type", "add_prefix_space", "added_tokens_decoder", "additional_special_tokens", "backend"),
    *("bos_token", "clean_up_tokenization_spaces", "do_lower_case", "eos_token", "errors"),
    *("extra_special_tokens", "is_local", "local_files_only", "max_length", "model_input_names"),
    *("model_max_length", "name_or_path", "pad_to_multiple_of", "pad_token", "pad_token_type_id"),
    *(
        "padding_side",
        "processor_class",
        "special_tokens_map_file",
        "split_special_tokens",
        "stride",
    ),
    *("tokenizer_class", "truncation_side", "truncation_strategy", "unk_token"),
    *("extra_ids", "legacy", "sp_model_kwargs"),
    *("cls_token", "do_basic_tokenize", "mask_token", "never_split", "sep_token", "strip_accents"),
    *("tokenize_chinese_chars", "encode_special_tokens", "remove_space"),
    *("add_bos_token", "chat_template"),
}
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_SPECIAL_KEYS = {
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
    *_LISTS,
}
LARGEST_VOCABULARY = 128 * 2**20
"""Bytes of the largest tokenizer.json; that of Gemma 2 has 34 million."""
MOST_ADDED = 1000
"""Tokens that a tokenizer adds to its vocabulary at most; T5 adds 100."""
_INPUTS = ("input_ids", "attention_mask")


def check_tokenizer(
    folder: Path, wanted: TokenizerClass | None = None, writes_chats: bool = False
) -> TokenizerClass:
    """Class of the tokenizer in ``folder``, whose files are checked, and not opened by transformers.

    Args:
        folder: with ``tokenizer.json``, or the files of its class.
        wanted: the class that a pipeline needs; without it, any known one.
        writes_chats: True if the pipeline writes prompts with its chat template.

    Raises:
        HddmError: for missing files, entries that leave the folder, another class, a key of the config or the
            special tokens that is not known to be harmless, and a chat template that is to write prompts and
            is missing or not known.
    """
    settings, special = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    if not settings.exists() and (folder / "tokenizer" / settings.name).exists():
        raise HddmError(f"{folder}: is no tokenizer's folder; name {folder / 'tokenizer'}")
    config = read_config(folder, settings.name)
    kind = _class_stated(config, settings, wanted)
    # All folders below: chat templates are read from one.
    for entry in folder.rglob("*"):
        inside(folder, entry.relative_to(folder).as_posix())
    tokens = read_config(folder, special.name) if special.exists() else {}
    _refuse_many(folder, config, tokens)
    allowed = _KEYS.union(kind.keys)
    for path, keys, known in ((settings, config, allowed), (special, tokens, _SPECIAL_KEYS)):
        for key in keys:
            if key not in known:
                hint = did_you_mean(key, known)
                raise HddmError(
                    f"{path}: has an unknown key {key!r}{hint}; if it changes nothing of how texts are "
                    "divided, delete it there"
                )
    if writes_chats and not has_template(folder, config):
        raise HddmError(
            f"{folder}: has no chat template, which says how prompts are written; fetch "
            "tokenizer_config.json or chat_template.jinja anew, whichever of them has it there"
        )
    missing = [name for name in kind.files if not (folder / name).is_file()]
    has_files = kind.files and not missing
    # Without any of these, the class makes a tokenizer of three words.
    if not has_files and not (folder / "tokenizer.json").is_file():
        names = " and no ".join([*missing, "tokenizer.json"])
        raise HddmError(f"{folder}: no {names}; fetch what is missing")
    return kind


def read_tokenizer(
    folder: Path, wanted: TokenizerClass | None = None, writes_chats: bool = False
) -> Any:
    """Read the tokenizer in ``folder``; arguments are those of `check_tokenizer`.

    Its chat template is left out, unless it writes prompts. Raises `HddmError` as `check_tokenizer`, and for
    a missing package and files that make no tokenizer.
    """
    kind = check_tokenizer(folder, wanted, writes_chats)
    if kind.package:
        optional(kind.package, f"{folder}: {an(kind.name)}", kind.extra)
    try:
        tokenizer = imported(kind).from_pretrained(str(folder), local_files_only=True)
        tokenizer.chat_template = TEMPLATE if writes_chats else None
        # It keeps settings of any kind, and fails on them at the first prompt.
        cuts(tokenizer, ["a"], length=2)
        found = tokenized(tokenizer, ["a"], 2)
    except Exception as error:  # it may raise anything for broken files
        reason = one_line(error, 300)
        raise HddmError(f"{folder}: its files do not make a tokenizer ({reason})") from error
    if missing := [name for name in _INPUTS if name not in found]:
        settings = folder / "tokenizer_config.json"
        stated = one_line(read_config(folder, settings.name).get("model_input_names"), 60)
        raise HddmError(
            f"{settings}: model_input_names is {stated}, without {missing[0]}; delete it there"
        )
    return tokenizer


def _refuse_many(folder: Path, config: Mapping[str, Any], special: Mapping[str, Any]) -> None:
    """Refuse very many tokens beside the vocabulary: adding them takes time that grows as their square."""
    lists = [config.get(key) for key in _LISTS]
    lists += [special.get(key) for key in _LISTS]
    lists.append(config.get("added_tokens_decoder"))
    for name, key in (("added_tokens.json", None), ("tokenizer.json", "added_tokens")):
        if (folder / name).exists():
            content = read_json(inside(folder, name), LARGEST_VOCABULARY)
            lists.append(content if key is None else content.get(key))
    number = sum(len(one) for one in lists if isinstance(one, list | dict))
    extra = config.get("extra_ids")
    if isinstance(extra, int):
        if extra < 0:
            raise HddmError(
                f"{folder}: extra_ids of its tokenizer_config.json is {extra}; set 0 or more there"
            )
        number += extra
    if number > MOST_ADDED:
        text = f"adds {number:,} tokens to its vocabulary, of {MOST_ADDED:,} at most"
        raise HddmError(f"{folder}: {text}; delete those that no prompt needs")


def imported(kind: TextEncoderClass | TokenizerClass) -> Any:
    """The class itself; its library is imported here, which takes seconds."""
    is_transformers = kind.library == TRANSFORMERS
    place = TRANSFORMERS if is_transformers else f"diffusers.pipelines.{kind.library}"
    with warnings.catch_warnings():
        # Of torch, for what diffusers' ChatGLM does on import.
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)
        return getattr(importlib.import_module(place), kind.name)


def padding_of(tokenizer: Path) -> str | None:
    """The word that the tokenizer in a folder pads with, by its files; None where they do not say."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if not (tokenizer / name).exists():
            continue
        stated = read_config(tokenizer, name).get("pad_token")
        if isinstance(stated, Mapping):
            stated = stated.get("content")
        if isinstance(stated, str):
            return stated
    return None


def tokenized(tokenizer: Any, prompts: Sequence[str], length: int) -> Any:
    """Inputs of an encoder by name, each (N, length)."""
    return tokenizer(
        list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    )


def refuse_half_characters(text: str, name: str) -> None:
    """Raise an `HddmError`, beginning with ``name``, for a text that is no Unicode: no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise HddmError(
            f"{name}: has half a character ({half}), as of a broken encoding; write it anew"
        ) from error


def cuts(tokenizer: Any, prompts: Sequence[str], length: int) -> list[tuple[int, str]]:
    """Indices of the ``prompts`` of more than ``length`` tokens; warns of what each loses."""
    tokens: list[list[int]] = tokenizer(list(prompts), verbose=False).input_ids
    marks, found = tokenizer.special_tokens_map, []
    ends = [marks[name] for name in ("eos_token", "sep_token") if name in marks]
    for index, (prompt, ids) in enumerate(zip(prompts, tokens, strict=True)):
        if len(ids) > length:
            # The last token may be the end, which a prompt that is cut keeps.
            has_end = tokenizer.convert_ids_to_tokens(ids[-1]) in ends
            cut = tokenizer.decode(ids[length - 1 : -1] if has_end else ids[length:])
            lost = one_line(repr(cut), 80)
            warning = (
                f"a prompt of {len(ids)} tokens is cut to {length}: {prompt[:40]!r} … loses {lost}"
            )
            found.append((index, warning))
    return found


def tokenizer_class(folder: Path) -> TokenizerClass:
    """Class that reads the tokenizer in a folder; `HddmError` for one that hddm does not know."""
    name = "tokenizer_config.json"
    return _class_stated(read_config(folder, name), folder / name)


def _class_stated(
    config: Mapping[str, Any], origin: Path, wanted: TokenizerClass | None = None
) -> TokenizerClass:
    """Class that a config, read from ``origin``, states; the ``wanted`` one, or any known one."""
    allowed = tokenizers() if wanted is None else {wanted.name: wanted}
    known = " or ".join(an(one) for one in dict.fromkeys(kind.name for kind in allowed.values()))
    stated = config.get("tokenizer_class", CLIP_TOKENIZER.name)
    if stated is None:
        raise HddmError(f"{origin}: names no class (tokenizer_class), of {known}")
    name = str(stated)
    if wanted is not None and wanted.accepts(name):
        return wanted
    kind = allowed.get(name.removesuffix("Fast"))
    if kind is None:
        raise HddmError(f"{origin}: holds {an(one_line(name, 60))}, not {known}")
    return kind
