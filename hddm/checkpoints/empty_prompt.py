"""What a Stable Diffusion pipeline calls no text: its CLIP encoder's tokens for the empty prompt.

An expert carries them as the null value of ``encoder_hidden_states``: guidance has something to guide from,
and native samples can be drawn without any text encoder at hand. The encoder is built from checked facts of
its config, not by a loader that takes orders from it. An empty prompt needs no tokenizer, only its files: it
is begin, end, then padding. The encoder's config numbers these tokens too, often wrongly.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hddm.errors import HddmError
from hddm.files import read_json
from hddm.network_configs import differences
from hddm.weight_files import inside, read_safetensors

_ARCHITECTURES = (["CLIPTextModel"], ["CLIPTextModelWithProjection"])
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "hidden_act",
    "layer_norm_eps",
)
_TOKENS = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
"""The special tokens of the tokenizer's class, where its files name none."""
_MAP = "special_tokens_map.json"
_PREFIX = "text_model."
_UNUSED = ("embeddings.position_ids", "text_projection.weight")


def empty_prompt(pipeline: Path, variant: str | None) -> Callable[[], Tensor] | None:
    """Reads the tokens (tokens, width) when called; None for a pipeline without a CLIP text encoder on disk.

    Raises:
        HddmError: when called, for an encoder whose config or weights cannot be trusted.
    """
    folder = pipeline / "text_encoder"
    names = [f"model.{variant}.safetensors", "model.safetensors"] if variant else ["model.safetensors"]
    name = next((name for name in names if (folder / name).exists()), None)
    if name is None or not (folder / "config.json").exists() or (pipeline / "text_encoder_2").exists():
        return None
    config = read_json(inside(folder, "config.json"))
    tokenizer = [pipeline / "tokenizer" / name for name in ("tokenizer_config.json", "vocab.json")]
    if config.get("architectures") not in _ARCHITECTURES or not all(path.exists() for path in tokenizer):
        return None
    return lambda: _encode(folder, name, config)


def _encode(folder: Path, name: str, config: dict[str, Any]) -> Tensor:
    # Imported here: it takes seconds, and few sources need it.
    from transformers import CLIPTextConfig, CLIPTextModel

    path = folder / name
    weights = {
        key.removeprefix(_PREFIX): tensor.float()
        for key, tensor in read_safetensors(inside(folder, name)).items()
        if key.removeprefix(_PREFIX) not in _UNUSED
    }
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int) or layers > len(weights):
        raise HddmError(
            f"{folder / 'config.json'}: num_hidden_layers is {layers!r} for {len(weights)} tensors"
        )
    try:
        with torch.device("meta"):
            model = CLIPTextModel(CLIPTextConfig(**{key: config[key] for key in _SIZES if key in config}))
    except Exception as error:  # whatever a constructor makes of foreign values
        raise HddmError(
            f"{folder / 'config.json'}: no text encoder can be built from it ({error})"
        ) from error
    expected = {key.removeprefix(_PREFIX): (key, value) for key, value in model.state_dict().items()}
    expected = {key: pair for key, pair in expected.items() if key not in _UNUSED}
    problems = differences({key: value for key, (_, value) in expected.items()}, weights)
    if problems:
        raise HddmError(f"{path}: does not fit its config.json: {'; '.join(problems)}")
    model.load_state_dict({expected[key][0]: tensor for key, tensor in weights.items()}, assign=True)
    positions = model.config.max_position_embeddings
    for owner, buffer in [
        (m, n) for m in model.modules() for n, b in m.named_buffers(recurse=False) if b.is_meta
    ]:
        owner.register_buffer(buffer, torch.arange(positions)[None], persistent=False)
    tokens = _tokens(folder.parent / "tokenizer", model.config.vocab_size, positions)
    with torch.no_grad():
        encoded: Tensor = model.train(False)(torch.tensor([tokens]))[0][0]
    if not encoded.isfinite().all():
        raise HddmError(f"{path}: its tokens for the empty prompt are not finite; take the weights anew")
    return encoded


def _tokens(folder: Path, vocabulary: int, positions: int) -> list[int]:
    """What the tokenizer in ``folder`` makes of no text, padded as a pipeline pads it."""
    config = read_json(inside(folder, "tokenizer_config.json"))
    named = config
    # As the loader has it: a config that lists its added tokens is of a format after the map of tokens.
    if (folder / _MAP).exists() and "added_tokens_decoder" not in config:
        named = config | read_json(inside(folder, _MAP))
    numbers = read_json(inside(folder, "vocab.json"))
    begin, end, padding = (_number(folder, key, named, numbers, vocabulary) for key in _TOKENS)
    limit = config.get("model_max_length")
    # Tokenizers without a limit say 10^30.
    length = min(limit, positions) if isinstance(limit, int) and limit >= 2 else positions
    return [begin, end, *[padding] * (length - 2)][:length]


def _number(folder: Path, key: str, named: dict[str, Any], numbers: dict[str, Any], vocabulary: int) -> int:
    token = named.get(key, _TOKENS[key])
    token = token.get("content") if isinstance(token, dict) else token
    number = numbers.get(token) if isinstance(token, str) else None
    if not isinstance(number, int) or not 0 <= number < vocabulary:
        raise HddmError(
            f"{folder}: {key} {str(token)[:40]!r} has no number below {vocabulary} in vocab.json; "
            "take the tokenizer that belongs to the text encoder"
        )
    return number
