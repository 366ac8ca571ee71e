"""Weights that were stored in few bits for less memory, read as the numbers that they stand for, in float32.

ComfyUI's fp8 files hold a layer's weights in float8 beside one number, or one for each row:

    LAYER.weight          float8
    LAYER.scale_weight    or LAYER.weight_scale: the weights are float8 × this
    LAYER.scale_input     or LAYER.input_scale: of the layer's inputs, for products in float8; not needed
    scaled_fp8            an empty tensor in float8, which marks such a file
    LAYER.comfy_quant     JSON as bytes: {"format": "float8_e4m3fn"}

(github.com/comfyanonymous/ComfyUI, QUANTIZATION.md.) GGUF files hold blocks of numbers with scales of their
own, which the package gguf knows; city96's converter (github.com/city96/ComfyUI-GGUF) gives tensors the names
of the original single files, and keeps the shape of reshaped ones as ``comfy.gguf.orig_shape.NAME``.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hddm.networks.components import read_file
from hddm.utils.errors import HddmError, UsageError, one_line
from hddm.utils.files import file_kind

_SCALES = (".scale_weight", ".weight_scale")
_OF_INPUTS = (".scale_input", ".input_scale")
_MARKER, _FORMAT = "scaled_fp8", ".comfy_quant"
_FORMATS = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
_LONGEST_FORMAT = 1000
"""Bytes of a tensor that states a layer's format."""
_ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
_EXTRA = "hddm-diffusion[gguf]"


@dataclass(frozen=True)
class Dequantised:
    """Content of a weights file, its tensors as the numbers that they stand for, and notes for the user."""

    content: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def read_dequantised(
    path: Path, allow_pickle: bool, unread: Callable[[Collection[str]], Collection[str]]
) -> Dequantised:
    """The content of a weights file; sets of weights nested in a pickle stay as they are.

    ``unread`` says which of these names nobody reads: their tensors stay as they are too, whatever they hold.
    """
    if file_kind(path) == "gguf":
        return read_gguf(path)
    content = read_file(path, allow_pickle)
    tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    left = set(unread(tensors))
    read, others = dict[str, Tensor](), dict[str, Any]()
    for name, value in content.items():
        if name in tensors and name not in left:
            read[name] = value
        else:
            others[name] = value
    found = dequantised(read, path)
    return Dequantised({**found.content, **others}, found.notes)


def dequantised(weights: Mapping[str, Tensor], path: Path) -> Dequantised:
    """``weights`` of one file without their scales, in float32 where they had one.

    Raises `HddmError` for a scale without its weights or of another shape, and for another stated format.
    """
    plain = dict(weights)
    scales: dict[str, Tensor] = {}
    for name in weights:
        if name.rpartition(".")[2] == _MARKER or name.endswith(_OF_INPUTS):
            del plain[name]
        elif name.endswith(_FORMAT):
            _refuse_format(plain.pop(name), name, path)
        elif name.endswith(_SCALES):
            layer = name.rpartition(".")[0]
            if f"{layer}.weight" in scales:
                raise HddmError(f"{path}: {layer} has two scales; fetch it again")
            scales[f"{layer}.weight"] = plain.pop(name)
    if scales.keys() - plain.keys():
        missing = sorted(scales.keys() - plain.keys())[0]
        raise HddmError(f"{path}: holds a scale for {missing!r}, which it lacks; fetch it again")
    for name, scale in scales.items():
        plain[name] = _scaled(plain[name], scale, name, path)
    if not scales:
        return Dequantised(plain)
    note = f"{path}: {len(scales)} tensors in float8 with a scale each are read in float32"
    return Dequantised(plain, (note,))


def _scaled(weight: Tensor, scale: Tensor, name: str, path: Path) -> Tensor:
    """float8 weights × their scale, a number or one for each row."""
    if weight.dtype not in _FORMATS.values():
        kind = str(weight.dtype).removeprefix("torch.")
        raise HddmError(
            f"{path}: holds quantised weights ({name!r} in {kind} with a scale), and hddm reads "
            f"{' and '.join(_FORMATS)}; use the version in float16 or float32"
        )
    rows = (weight.shape[0], *(1,) * (weight.ndim - 1)) if weight.ndim else ()
    if scale.numel() == 1:
        factor = scale.float().reshape(())
    elif scale.numel() == rows[0] and scale.shape in (rows, rows[:1]):
        factor = scale.float().reshape(rows)
    else:
        raise HddmError(
            f"{path}: the scale of {name!r} {tuple(weight.shape)} has the shape {tuple(scale.shape)}; hddm "
            "reads one number, or one for each row; use the version in float16 or float32"
        )
    return weight.float() * factor


def _refuse_format(stated: Tensor, name: str, path: Path) -> None:
    """Raise an `HddmError` for a layer's format that is not float8 with one scale."""
    found: Any = None
    if stated.dtype == torch.uint8 and stated.ndim == 1 and len(stated) <= _LONGEST_FORMAT:
        try:
            found = json.loads(bytes(stated.tolist()))
        except ValueError:
            found = None
    kind = found.get("format") if isinstance(found, dict) else None
    if kind not in _FORMATS:
        raise HddmError(
            f"{path}: holds quantised weights ({name!r} says {one_line(kind, 40)}), and hddm reads "
            f"{' and '.join(_FORMATS)}; use the version in float16 or float32"
        )


def read_gguf(path: Path) -> Dequantised:
    """Tensors of a GGUF file in float32.

    Raises `UsageError` without the package gguf, and `HddmError` for a broken file and an unknown kind of
    blocks.
    """
    try:
        import gguf
    except ImportError:
        text = f"is a GGUF file; run pip install '{_EXTRA}' to read it"
        raise UsageError(f"{path}: {text}") from None
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError, OverflowError) as error:
        text = f"is no sound GGUF file ({one_line(error, 100)}); fetch it again"
        raise HddmError(f"{path}: {text}") from None
    tensors: dict[str, Tensor] = {}
    kinds = set()
    for stored in reader.tensors:
        kind = stored.tensor_type
        try:
            values = gguf.quants.dequantize(stored.data, kind)
        except NotImplementedError:
            raise HddmError(
                f"{path}: holds {stored.name!r} as {kind.name}, which the package gguf does not read; use "
                "another version"
            ) from None
        kept = reader.get_field(f"{_ORIGINAL_SHAPE}{stored.name}")
        # GGUF lists the last dimension first.
        shape = [int(size) for size in reversed(stored.shape)]
        if kept is not None:
            shape = [int(kept.parts[part][0]) for part in kept.data]
        if math.prod(shape) != values.size:
            raise HddmError(
                f"{path}: {stored.name!r} has {values.size:,} numbers, not those of {shape}; fetch it again"
            )
        tensors[str(stored.name)] = torch.from_numpy(values.copy()).reshape(shape)
        kinds.add(kind.name)
    return Dequantised(tensors, (f"{path}: {', '.join(sorted(kinds))} of GGUF, read in float32",))
