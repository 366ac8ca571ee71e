"""VAE and text encoders in a whole file of Stable Diffusion, and the names that their tensors have there.

    first_stage_model.                   the VAE
    cond_stage_model.transformer.        CLIP of Stable Diffusion 1, under the names of transformers
    cond_stage_model.model.              CLIP of Stable Diffusion 2, under the names of open_clip
    conditioner.embedders.0.transformer.    both of Stable Diffusion XL
    conditioner.embedders.1.model.

Names are mapped by diffusers' own functions, which get tensors of a few numbers in place of the file's: which
of them comes out under which name is the table. It is used strictly: a tensor that has no place in diffusers'
class is refused, unless it is on a list here of what no network needs. Sizes are read from shapes.
"""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hddm.checkpoints.sources import KeyTable, Pair, Weights
from hddm.networks.components import STEM, Held
from hddm.networks.encoders import CLIP, CLIP_PROJECTED, KL, TextEncoderClass
from hddm.networks.text_encoder import STEM as TEXT_STEM
from hddm.utils.errors import HddmError
from hddm.utils.tensors import count_blocks, shape_of

VAE, TEXT, SECOND_TEXT = "vae", "text_encoder", "text_encoder_2"
_VAE = "first_stage_model."
_GROUPS = 32
"""Of the norms of latent diffusion's VAE, which its code fixes."""
_HEAD_WIDTH = 64
"""Of the text encoders of CLIP and open_clip."""
_FUSED = re.compile(r".*\.in_proj_(?:weight|bias)")
_LAST_LAYER = 23
"""Layer of the text encoder of Stable Diffusion 2 whose output its code does not use."""
_PROJECTION = "text_projection"
_NOT_NEEDED = {
    "logit_scale": "compares texts with pictures",
    "attn_mask": "computed anew",
    "transformer.text_model.embeddings.position_ids": "computed anew",
    "text_model.embeddings.position_ids": "computed anew",
    "embeddings.position_ids": "computed anew",
}
"""Tensors beside a text encoder that it does not need, without its prefix, with the reason."""


@dataclass(frozen=True)
class FilePart:
    """One component in a file: its table of names, and what it is in a folder.

    ``kept`` are tensors that no network needs, for the way back.
    """

    table: KeyTable
    held: Held
    kept: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class _TextEncoderNames:
    """A text encoder in a file: its ``name`` in a pipeline, and the names of its tensors."""

    name: str
    prefix: str
    is_open_clip: bool
    has_unused: bool = False
    """True if neither its last layer nor its projection is used."""
    kind: TextEncoderClass = CLIP


_ENCODERS = (
    _TextEncoderNames(TEXT, "cond_stage_model.transformer.", is_open_clip=False),
    _TextEncoderNames(TEXT, "cond_stage_model.model.", is_open_clip=True, has_unused=True),
    _TextEncoderNames(TEXT, "conditioner.embedders.0.transformer.", is_open_clip=False),
    _TextEncoderNames(
        SECOND_TEXT, "conditioner.embedders.1.model.", is_open_clip=True, kind=CLIP_PROJECTED
    ),
)


def parts_of(others: Weights, latents: Mapping[str, Any], path: Path) -> dict[str, FilePart]:
    """The VAE and text encoders in ``others``, by name: all tensors of a file beside its network and buffers.

    ``latents`` are the keys of the VAE's config on its latents. Raises `HddmError` for a tensor of no part.
    """
    found: dict[str, FilePart] = {}
    rest = dict(others)
    vae = _taken(rest, _VAE)
    if vae:
        found[VAE] = vae_part(vae, _VAE, latents, path)
    for encoder in _ENCODERS:
        weights = _taken(rest, encoder.prefix)
        if weights and encoder.name in found:
            raise HddmError(f"{path}: holds two text encoders in place of one; save it with one")
        if weights:
            found[encoder.name] = _text_encoder(weights, encoder, path)
    # What lies beside an encoder rather than in it.
    beside = {}
    for name in [*rest]:
        if re.sub(r"^(cond_stage_model|conditioner\.embedders\.\d)\.", "", name) in _NOT_NEEDED:
            beside[name] = rest.pop(name)
    if rest:
        KeyTable([]).to_ours(rest, str(path))
    if SECOND_TEXT in found and TEXT not in found:
        raise HddmError(f"{path}: holds the second text encoder without the first; fetch it again")
    for name in (TEXT, SECOND_TEXT):
        if beside and name in found:
            part = found[name]
            found[name] = FilePart(part.table, part.held, {**part.kept, **beside})
            break
    return found


def zero_padded(others: Weights) -> tuple[str, ...]:
    """Names of the text encoders that are open_clip's, which pads with its word 0."""
    found = []
    for encoder in _ENCODERS:
        if encoder.is_open_clip and any(name.startswith(encoder.prefix) for name in others):
            found.append(encoder.name)
    return tuple(found)


def _taken(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Take the tensors that begin with ``prefix`` out of ``weights``; they are named without it."""
    names = [name for name in weights if name.startswith(prefix)]
    return {name.removeprefix(prefix): weights.pop(name) for name in names}


def _part(
    weights: Weights,
    prefix: str,
    pairs: list[Pair],
    benign: Mapping[str, str],
    config: Mapping[str, Any],
    path: Path,
    stem: str,
) -> FilePart:
    """The component whose tensors are ``weights`` in the file, without their ``prefix``."""
    named = []
    for pair in pairs:
        foreign = tuple(f"{prefix}{name}" for name in pair.foreign)
        named.append(Pair(foreign, pair.ours, pair.is_transposed, pair.ones))
    table = KeyTable(named, {f"{prefix}{name}": reason for name, reason in benign.items()})
    whole = {f"{prefix}{name}": tensor for name, tensor in weights.items()}
    planned, kept = table.to_ours(whole, str(path))
    held = Held(config, {one.name: one.read() for one in planned}, path, stem)
    return FilePart(table, held, kept)


def vae_part(
    weights: dict[str, Tensor], prefix: str, latents: Mapping[str, Any], path: Path
) -> FilePart:
    """The VAE whose tensors are ``weights`` in the file, without their ``prefix``; ``latents`` as above."""
    # Imports all schedulers of diffusers, which folders need not wait for.
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    origin = f"{path}: its VAE ({prefix})"
    config = {**_vae_config(weights, origin), **latents}
    convert = functools.partial(convert_ldm_vae_checkpoint, config=config)
    return _part(weights, prefix, _probed(weights, convert), {}, config, path, STEM)


def _vae_config(weights: Weights, origin: str) -> dict[str, Any]:
    """Config of diffusers' class, by shapes."""
    levels = count_blocks(weights, "encoder.down")
    widths = []
    for level in range(levels):
        name = f"encoder.down.{level}.block.0.conv1.weight"
        widths.append(shape_of(weights, name, 4, origin)[0])
    odd = [width for width in widths if width % _GROUPS]
    if odd or not widths:
        raise HddmError(
            f"{origin} has widths {widths}, and latent diffusion's are multiples of {_GROUPS}"
        )
    return {
        "_class_name": KL,
        "in_channels": shape_of(weights, "encoder.conv_in.weight", 4, origin)[1],
        "out_channels": shape_of(weights, "decoder.conv_out.weight", 4, origin)[0],
        "latent_channels": shape_of(weights, "decoder.conv_in.weight", 4, origin)[1],
        "block_out_channels": widths,
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "layers_per_block": count_blocks(weights, "encoder.down.0.block"),
        "norm_num_groups": _GROUPS,
        "mid_block_add_attention": "encoder.mid.attn_1.q.weight" in weights,
        "use_quant_conv": "quant_conv.weight" in weights,
        "use_post_quant_conv": "post_quant_conv.weight" in weights,
    }


def _text_encoder(weights: dict[str, Tensor], encoder: _TextEncoderNames, path: Path) -> FilePart:
    from diffusers.loaders.single_file_utils import (
        convert_ldm_clip_checkpoint,
        convert_open_clip_checkpoint,
    )

    origin = f"{path}: its text encoder ({encoder.prefix})"
    benign = {name: reason for name, reason in _NOT_NEEDED.items() if name in weights}
    if encoder.has_unused:
        benign |= _unused(weights)
    used = {name: one for name, one in weights.items() if name not in benign}
    if encoder.is_open_clip:
        # Its width is asked for where the projection does not state it; a probe's is 1.
        stand_in = SimpleNamespace(config=SimpleNamespace(hidden_size=1))
        convert = functools.partial(convert_open_clip_checkpoint, stand_in, prefix="")
    else:
        prefix = encoder.prefix
        used = {f"{prefix}{name}": one for name, one in used.items()}
        convert = convert_ldm_clip_checkpoint
    pairs = []
    for pair in _probed(used, convert):
        foreign = pair.foreign[0] if encoder.is_open_clip else pair.foreign[0].removeprefix(prefix)
        pairs.append(Pair((foreign,), pair.ours, pair.is_transposed, pair.ones))
    renamed = {}
    for pair in pairs:
        if len(pair.ours) == 1:
            tensor = weights[pair.foreign[0]]
            renamed[pair.ours[0].removeprefix("text_model.")] = (
                tensor.mT if pair.is_transposed else tensor
            )
    config = _text_config(renamed, encoder, origin)
    return _part(weights, encoder.prefix, pairs, benign, config, path, TEXT_STEM)


def _unused(weights: Weights) -> dict[str, str]:
    """Tensors of open_clip's text encoder that Stable Diffusion 2 does not use, with the reason.

    Files that came from diffusers have lost both the projection and the last layer.
    """
    blocks = "transformer.resblocks"
    last = count_blocks(weights, blocks) - 1
    found = {}
    for name in weights:
        is_last = name.startswith(f"{blocks}.{last}.")
        if is_last and (_PROJECTION in weights or last == _LAST_LAYER):
            found[name] = "of the last layer, whose output is not used"
    if _PROJECTION in weights:
        found[_PROJECTION] = "compares texts with pictures"
    return found


def _text_config(weights: Weights, encoder: _TextEncoderNames, origin: str) -> dict[str, Any]:
    """Config of transformers' class, by shapes; heads and activation are those of CLIP and open_clip."""
    words, width = shape_of(weights, "embeddings.token_embedding.weight", 2, origin)
    if width > _HEAD_WIDTH and width % _HEAD_WIDTH:
        raise HddmError(
            f"{origin} has the width {width}; CLIP's is a multiple of {_HEAD_WIDTH}, of a head each"
        )
    config = {
        "architectures": [encoder.kind.name],
        "model_type": "clip_text_model",
        "vocab_size": words,
        "hidden_size": width,
        "intermediate_size": shape_of(weights, "encoder.layers.0.mlp.fc1.weight", 2, origin)[0],
        "num_hidden_layers": count_blocks(weights, "encoder.layers"),
        "num_attention_heads": max(width // _HEAD_WIDTH, 1),
        "max_position_embeddings": shape_of(
            weights, "embeddings.position_embedding.weight", 2, origin
        )[0],
        "hidden_act": "gelu" if encoder.is_open_clip else "quick_gelu",
        "layer_norm_eps": 1e-5,
    }
    if encoder.kind == CLIP_PROJECTED:
        config["projection_dim"] = shape_of(weights, f"{_PROJECTION}.weight", 2, origin)[0]
    return config


def _probed(
    weights: Weights, convert: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
) -> list[Pair]:
    """Pairs of names that ``convert`` maps on each other, asked by tensors of few numbers.

    A tensor that it has no place for is in no pair. Queries, keys and values that are fused become three.
    """
    foreign, probes = list(weights), {}
    for number, name in enumerate(foreign):
        ndim, rows = weights[name].ndim, 3 if _FUSED.fullmatch(name) else 1
        marks = 3.0 * number + torch.arange(rows, dtype=torch.float64)
        if ndim == 0:
            probes[name] = marks[0]
            continue
        # Two columns tell whether it is transposed.
        shape = (rows, 2, *(1,) * (ndim - 2)) if ndim > 1 else (rows,)
        probes[name] = marks.reshape(rows, *(1,) * (ndim - 1)).expand(shape)
    parts: dict[str, dict[int, str]] = {}
    ones: dict[str, int] = {}
    transposed = set()
    for ours, probe in convert(dict(probes)).items():
        number, part = divmod(int(probe.flatten()[0]), 3)
        name = foreign[number]
        parts.setdefault(name, {})[part] = ours
        ones[name] = probes[name].ndim - probe.ndim
        if probe.ndim > 1 and probe.shape[0] == 2:
            transposed.add(name)
    pairs = []
    for name, found in parts.items():
        own = tuple(found[part] for part in sorted(found))
        pairs.append(Pair((name,), own, name in transposed, ones[name]))
    return pairs
