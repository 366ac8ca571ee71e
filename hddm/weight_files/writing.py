"""Writing safetensors as a stream, one tensor at a time."""

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from hddm.errors import HddmError
from hddm.weight_files.safetensors_files import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = {dtype: index for index, dtype in enumerate(_NAMES)}
_PIECE = 4 * 2**20
"""Bytes that are checked and written at once: about what a cache holds, so memory is passed once."""


@dataclass(frozen=True)
class Planned:
    """A tensor to write: its place in the header is known before it is read.

    ``origin`` says in errors where ``read`` takes it from.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    origin: str = ""


def write_safetensors(
    path: Path,
    tensors: Sequence[Planned],
    metadata: Mapping[str, str] | None = None,
    check_finite: bool = False,
) -> None:
    """Write a new file; each tensor is read when its turn comes and let go before the next.

    Wide dtypes come first, then names, so that every tensor is aligned. A failure leaves no file.

    Raises:
        HddmError: for an existing file, a dtype that the format lacks, a name twice, a tensor that is not
            as planned, a full disk, and with ``check_finite`` for NaN or Inf.
    """
    header, ordered = _header(path, tensors, metadata or {})
    try:
        with path.open("xb") as file:
            try:
                file.write(header)
                for planned in ordered:
                    _write(file, planned, path, check_finite)
                # What is still in the buffer may meet a full disk too.
                file.flush()
            except BaseException:
                path.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise HddmError(f"{path}: cannot be written ({error.strerror or error})") from error


def _header(
    path: Path, tensors: Sequence[Planned], metadata: Mapping[str, str]
) -> tuple[bytes, list[Planned]]:
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for planned in tensors:
        if planned.dtype not in _NAMES:
            raise HddmError(f"{path}: {planned.name!r} is {planned.dtype}, which safetensors lacks; cast it")
    ordered = sorted(tensors, key=lambda planned: (_ORDER[planned.dtype], planned.name))
    start = 0
    for planned in ordered:
        if planned.name in entries or planned.name == "__metadata__":
            raise HddmError(f"{path}: two tensors would be {planned.name!r}; rename one")
        end = start + torch.Size(planned.shape).numel() * planned.dtype.itemsize
        entries[planned.name] = {
            "dtype": _NAMES[planned.dtype],
            "shape": list(planned.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, ordered


def _write(file: IO[bytes], planned: Planned, path: Path, check_finite: bool) -> None:
    tensor = planned.read().detach()
    if tuple(tensor.shape) != planned.shape or tensor.dtype != planned.dtype:
        raise HddmError(
            f"{planned.origin or path}: {planned.name!r} is {tuple(tensor.shape)} in {tensor.dtype}, "
            f"not {planned.shape} in {planned.dtype} as planned; is the file being changed?"
        )
    for piece in _pieces(tensor):
        if check_finite and not _is_finite(piece):
            raise HddmError(
                f"{planned.origin or path}: {planned.name!r} holds NaN or Inf; take the weights anew"
            )
        file.write(piece.view(torch.uint8).numpy().data)


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Flat slices; the whole is copied only where it is not contiguous or not on the CPU."""
    flat = tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return iter(flat.split(_PIECE // tensor.itemsize))


def _is_finite(piece: Tensor) -> bool:
    if not (piece.is_floating_point() or piece.is_complex()):
        return True
    if piece.itemsize == 1:
        piece = piece.float()
    # A sum is finite only of finite numbers; one that overflows needs the longer look.
    return bool(piece.sum().isfinite()) or bool(piece.isfinite().all())
