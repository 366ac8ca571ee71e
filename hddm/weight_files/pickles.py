"""PyTorch checkpoints: refused unless asked for, scanned before torch reads them, never unpickled in full."""

import argparse
import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from hddm.errors import HddmError
from hddm.weight_files.archives import LARGEST_PICKLE, read_archive
from hddm.weight_files.kinds import Kind, kind_of, one_line
from hddm.weight_files.pickle_machine import RefusedPickleError
from hddm.weight_files.pickle_scan import refused_globals, rehearse

SAFE_TORCH = "2.10"
"""The first torch whose weights-only unpickler has no known hole (CVE-2025-32434, CVE-2026-24747)."""

_DEEPEST = 64
_LEAVES = (str, int, float, bytes, type(None), torch.dtype, torch.Size)


def read_pickle(path: Path, allow_pickle: bool) -> dict[str, Any]:
    """The dictionary in a checkpoint: tensors on the CPU, dictionaries, lists, plain values, Namespaces.

    Tensors of the zip format are mapped from disk; those of the format before torch 1.6 are read to memory.

    Raises:
        HddmError: without ``allow_pickle``, with a torch that has known holes, and for a file that is
            damaged, imports anything off a fixed list, or declares more than it holds.
    """
    kind = kind_of(path)
    if kind == "safetensors":
        raise HddmError(f"{path}: is safetensors, not a pickle")
    if not allow_pickle:
        raise HddmError(
            f"{path}: is a pickle ({kind}), which can carry code; take the safetensors version, "
            "or pass --allow-pickle to read its tensors and nothing else"
        )
    if TorchVersion(torch.__version__) < SAFE_TORCH:
        raise HddmError(
            f"{path}: reading pickles needs torch>={SAFE_TORCH}, whose unpickler has no known holes, "
            f"and this is {torch.__version__}; upgrade torch or take a safetensors version"
        )
    # torch.load goes by this name and would not read it as what it is.
    if path.suffix == ".safetensors":
        raise HddmError(f"{path}: is a pickle ({kind}) under the name of safetensors; rename it to .pt")
    try:
        _scan(path, kind)
    except RefusedPickleError as error:
        raise HddmError(f"{path}: {error}; refused, take a safetensors version") from error
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=kind == "torch-zip")
    except Exception as error:
        raise HddmError(f"{path}: torch cannot load it ({one_line(error)}); fetch it again") from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise HddmError(f"{path}: holds a {type(content).__name__}, not a dictionary of names; save one")
    _check(path, content)
    return content


def _scan(path: Path, kind: Kind) -> None:
    storages: dict[str, int] = {}
    if kind == "torch-zip":
        data, records = read_archive(path)
        stream = io.BytesIO(data)
        _refuse_globals(stream, 1)
        rehearse(stream, storages)
        for key, size in storages.items():
            if records.get(f"data/{key}") != size:
                raise RefusedPickleError(f"wants {size} bytes of storage {key!r}, which are not there")
        return
    with path.open("rb") as file:
        stream = io.BytesIO(file.read(LARGEST_PICKLE))
    head = [rehearse(stream, {}) for _ in range(2)]
    if head != [torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION]:
        raise RefusedPickleError("is a pickle that torch.save did not write")
    _refuse_globals(stream, 3)
    rehearse(stream, {})
    rehearse(stream, storages)
    keys = rehearse(stream, {})
    listed = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    if not listed or sorted(keys) != sorted(storages):
        raise RefusedPickleError("lists other storages than it uses")
    # Each storage follows with its length; torch would take its memory before it looks for them.
    wanted = stream.tell() + sum(8 + size for size in storages.values())
    if wanted > path.stat().st_size:
        raise RefusedPickleError(f"wants {wanted} bytes and has {path.stat().st_size}")


def _refuse_globals(stream: io.BytesIO, num: int) -> None:
    start = stream.tell()
    found: set[str] = set()
    for _ in range(num):
        found |= refused_globals(stream)
    stream.seek(start)
    if found:
        shown = ", ".join(name[:80] for name in sorted(found)[:10]) + (
            f" … and {len(found) - 10} more" if len(found) > 10 else ""
        )
        raise RefusedPickleError(f"would import {shown!r}, which weights never need")


def _check(path: Path, content: dict[str, Any]) -> None:
    seen: set[int] = set()
    waiting: list[tuple[str, Any, int]] = [("", content, 0)]
    while waiting:
        key, value, depth = waiting.pop()
        if isinstance(value, Tensor):
            _check_tensor(path, key, value)
        elif isinstance(value, _LEAVES) or id(value) in seen:
            continue
        elif isinstance(value, argparse.Namespace | dict | list | tuple) and depth < _DEEPEST:
            seen.add(id(value))
            parts = vars(value) if isinstance(value, argparse.Namespace) else value
            pairs = parts.items() if isinstance(parts, dict) else enumerate(parts)
            waiting.extend((f"{key}.{name}" if key else str(name), part, depth + 1) for name, part in pairs)
        else:
            problem = "is nested too deep" if depth == _DEEPEST else f"is a {type(value).__name__}"
            raise HddmError(
                f"{path}: {key!r} {problem}, which weights never need; take a safetensors version"
            )


def _check_tensor(path: Path, key: str, value: Tensor) -> None:
    plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
    if not plain or value.is_quantized or value.device.type != "cpu":
        raise HddmError(f"{path}: {key!r} is no dense tensor of plain numbers; save it as one")
    size, stored = value.numel() * value.itemsize, value.untyped_storage().nbytes()
    if size > stored:
        raise HddmError(
            f"{path}: {key!r} of shape {tuple(value.shape)} is {size} bytes made of {stored}; "
            "save a contiguous copy"
        )
