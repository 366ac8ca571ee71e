"""The CLIP tokenizer of a pipeline, opened by transformers from checked local files alone."""

from pathlib import Path
from typing import TYPE_CHECKING

from hddm.components.files import read_config
from hddm.errors import HddmError, did_you_mean
from hddm.paths import inside

if TYPE_CHECKING:
    from transformers import CLIPTokenizer

CLASSES = ("CLIPTokenizer", "CLIPTokenizerFast")
# The loader hands every key to the class, and some name files or positional arguments.
_KEYS = {
    "__type",
    "add_prefix_space",
    "added_tokens_decoder",
    "additional_special_tokens",
    "backend",
    "bos_token",
    "clean_up_tokenization_spaces",
    "do_lower_case",
    "eos_token",
    "errors",
    "extra_special_tokens",
    "is_local",
    "local_files_only",
    "max_length",
    "model_input_names",
    "model_max_length",
    "name_or_path",
    "pad_to_multiple_of",
    "pad_token",
    "pad_token_type_id",
    "padding_side",
    "processor_class",
    "special_tokens_map_file",
    "split_special_tokens",
    "stride",
    "tokenizer_class",
    "truncation_side",
    "truncation_strategy",
    "unk_token",
}


def read_tokenizer(folder: Path) -> "CLIPTokenizer":
    """The tokenizer in ``folder``, from ``tokenizer.json`` or from ``vocab.json`` and ``merges.txt``.

    Raises:
        HddmError: for missing files, entries that lead out of the folder, another class, a config key that
            is not known to be harmless, and files that make no tokenizer.
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
    except Exception as error:  # whatever it makes of broken files
        text = " ".join(str(error).split())[:300]
        raise HddmError(f"{folder}: no tokenizer can be made of its files ({text})") from error
    return tokenizer
