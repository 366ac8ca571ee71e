"""What a Stable Diffusion pipeline calls no text: its CLIP encoder's tokens for the empty prompt.

An expert carries them as the null value of ``encoder_hidden_states``: guidance has something to guide from,
and native samples can be drawn without any text encoder at hand. The encoder is built from checked facts of
its config, not by a loader that takes orders from it. An empty prompt needs no tokenizer: it is begin, end,
then padding.
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
    "bos_token_id",
    "eos_token_id",
)
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
    return lambda: _encode(folder, name, config, _padding(pipeline, config))


def _encode(folder: Path, name: str, config: dict[str, Any], padding: int) -> Tensor:
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
    length = model.config.max_position_embeddings
    for owner, buffer in [
        (m, n) for m in model.modules() for n, b in m.named_buffers(recurse=False) if b.is_meta
    ]:
        owner.register_buffer(buffer, torch.arange(length)[None], persistent=False)
    tokens = [model.config.bos_token_id, model.config.eos_token_id] + [padding] * (length - 2)
    with torch.no_grad():
        encoded: Tensor = model.train(False)(torch.tensor([tokens]))[0][0]
    if not encoded.isfinite().all():
        raise HddmError(f"{path}: its tokens for the empty prompt are not finite; take the weights anew")
    return encoded


def _padding(pipeline: Path, config: dict[str, Any]) -> int:
    """Number of the padding token: the tokenizer's, which is not the config's."""
    token = read_json(inside(pipeline, "tokenizer/tokenizer_config.json")).get("pad_token")
    token = token.get("content") if isinstance(token, dict) else token
    number = read_json(inside(pipeline, "tokenizer/vocab.json")).get(str(token))
    if not isinstance(number, int) or not 0 <= number < int(config.get("vocab_size", 49408)):
        raise HddmError(f"{pipeline / 'tokenizer'}: pad_token {token!r} is not in vocab.json")
    return number
