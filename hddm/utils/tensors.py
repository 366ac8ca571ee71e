"""Tensor helpers, and weights as safetensors, mapped from disk when read and streamed when written.

The safetensors library (0.4.5 to 0.8) checks the header's length against the file and 100 MB, the nesting of
its JSON, ranges that overlap, leave holes or do not cover the file, and shapes against ranges, with overflow.
This module adds checks for files of another kind and dtypes that torch lacks, and the form of errors.
"""

import functools
import hashlib
import json
import logging
import math
import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hddm.utils.errors import HddmError, one_line
from hddm.utils.files import opened, writing
from hddm.utils.processes import is_first
from hddm.utils.weights_headers import stated_tensors, unreadable

log = logging.getLogger(__name__)


def append_dims(values: Tensor, ndim: int) -> Tensor:
    """View ``values`` of shape (batch,) as (batch, 1, …, 1) with ``ndim`` dimensions."""
    return values.reshape(values.shape[0], *[1] * (ndim - 1))


def to_float64(values: Tensor) -> Tensor:
    """``values`` in float64, on the CPU if the device has none (MPS)."""
    if values.device.type == "mps":
        values = values.cpu()
    return values.to(torch.float64)


def promoted(*dtypes: torch.dtype) -> torch.dtype:
    """As `torch.promote_types`, which does not take float8: float8 counts as float32."""
    wide = []
    for dtype in dtypes:
        is_float8 = dtype.is_floating_point and dtype.itemsize == 1
        wide.append(torch.float32 if is_float8 else dtype)
    return functools.reduce(torch.promote_types, wide)


def sent(values: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """``values``, on the CPU or there already, on ``device``, without waiting for what that is doing."""
    # MPS may read memory of the CPU that is free again by then; CUDA has copied it.
    return values.to(device, dtype or values.dtype, non_blocking=device.type != "mps")


def parameter_dtype(network: object) -> torch.dtype | None:
    """Dtype of a module's floating parameters; None if it has none, and for plain functions."""
    return next((p.dtype for p in _parameters(network) if p.is_floating_point()), None)


def device_of(network: object) -> torch.device:
    """Device of a module's parameters; the CPU if it has none, and for plain functions."""
    return next((p.device for p in _parameters(network)), torch.device("cpu"))


AUTO = "auto"
"""Name of the device or dtype that is best here."""


def available_device(name: str | torch.device) -> torch.device:
    """Device of this name; ``auto`` is a GPU if there is one, else the CPU.

    Raises `HddmError` for an unknown or missing device.
    """
    if name == AUTO:
        if torch.cuda.is_available():
            name = "cuda"
        elif torch.backends.mps.is_available():
            name = "mps"
        else:
            name = "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except Exception as error:  # torch has one of its own for every kind of absence
        raise HddmError(
            f"`device` {name}: is not available here ({one_line(error, 120)})"
        ) from error
    return device


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has computed all that it was told; the CPU is never behind."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def best_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where ``device`` computes it in hardware, else float32."""
    has_bfloat16 = False
    if device.type == "cuda":
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "xpu":
        has_bfloat16 = torch.xpu.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_bfloat16 else torch.float32


def dtype_on(device: torch.device, name: str) -> torch.dtype:
    """The dtype of this name; ``auto`` is the `best_dtype` of ``device``."""
    found: torch.dtype = best_dtype(device) if name == AUTO else getattr(torch, name)
    return found


def report_choice(option: str, chosen: str, device: torch.device) -> None:
    """Log what ``auto`` chose for an option of numbers; nothing of float32 on a CPU, which is no choice."""
    is_usual = device.type == "cpu" and chosen in ("float32", "no")
    if not is_usual and is_first():
        log.info("`%s` auto: chose %s on %s", option, chosen, device)


def _parameters(network: object) -> Iterator[Tensor]:
    # A network with offloaded weights has an empty tensor on the device where they will be.
    placement = getattr(network, "placement", None)
    if isinstance(placement, Tensor):
        return iter((placement,))
    return network.parameters() if isinstance(network, nn.Module) else iter(())


def refuse_non_finite(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Refuse weights of the file ``path`` with NaN or Inf; the error names the first such tensor."""
    for key, value in weights.items():
        if not all(map(_is_finite, _pieces(value))):
            raise HddmError(f"{path}: {key!r} holds NaN or Inf; get the weights again")


def refuse_other_kinds(
    path: Path, tensors: Mapping[str, Tensor], kinds: Mapping[str, tuple[torch.dtype, int]]
) -> None:
    """Refuse tensors of the file ``path`` unlike ``kinds``: dtype and dimensions by name, all as long."""
    found = {name: (value.dtype, value.ndim) for name, value in tensors.items()}
    if found != kinds or len({len(value) for value in tensors.values()}) > 1:
        listed = []
        for name, value in tensors.items():
            listed.append(f"{name} {tuple(value.shape)} in {value.dtype}")
        held = one_line(", ".join(listed))
        raise HddmError(f"{path}: is not what was written (holds {held}); remove it")


SAFETENSORS_DTYPES = {
    **{"U64": torch.uint64, "I64": torch.int64, "F64": torch.float64, "C64": torch.complex64},
    **{"F32": torch.float32, "U32": torch.uint32, "I32": torch.int32},
    **{"BF16": torch.bfloat16, "F16": torch.float16, "U16": torch.uint16, "I16": torch.int16},
    **{"F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool},
}
"""Dtypes by header name, wide ones first, which aligns every tensor."""


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype that a header declares."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read every tensor, memory-mapped: memory grows by the pages touched, and writes stay private.

    Raises `HddmError` for a file of another kind and for a header that does not fit its file.
    """
    read_header(path)
    try:
        return load_file(path)
    # The bindings also raise TypeError, RuntimeError and KeyError for headers that torch cannot take.
    except Exception as error:
        raise unreadable(path, error) from error


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Shapes and dtypes by tensor name, and metadata, without tensors; raises as `read_safetensors`."""
    stated, metadata = stated_tensors(path)
    tensors = {}
    for name, one in stated.items():
        if one.dtype not in SAFETENSORS_DTYPES:
            raise unreadable(path, f"torch has no dtype {one.dtype}")
        tensors[name] = TensorInfo(one.shape, SAFETENSORS_DTYPES[one.dtype])
    return tensors, metadata


def shape_of(
    tensors: "Mapping[str, Tensor | TensorInfo]", name: str, ndim: int, origin: str
) -> tuple[int, ...]:
    """Shape of a tensor that sizes are read from; it must have ``ndim`` dimensions, none empty."""
    shape = tuple(tensors[name].shape) if name in tensors else ()
    if len(shape) != ndim or 0 in shape:
        raise HddmError(f"{origin}: missing {name} of {ndim} dimensions (its shape is {shape})")
    return shape


def count_blocks(names: Collection[str], prefix: str) -> int:
    """Count blocks: one more than the highest index after ``prefix``, limited to the number of tensors."""
    highest = -1
    for name in names:
        match = re.match(rf"{re.escape(prefix)}\.([0-9]{{1,6}})\.", name)
        if match:
            highest = max(highest, int(match[1]))
    return min(1 + highest, len(names))


DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
_ORDER = {dtype: index for index, dtype in enumerate(DTYPE_NAMES)}
_PIECE = 4 * 2**20
"""Bytes checked and written at once: about a cache's size, so memory is read once."""
_FEW = 2**17
"""Numbers that are checked at once: their bits are copied for it, and the copy stays in the cache."""
_UNSIGNED = {2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


@dataclass(frozen=True)
class Planned:
    """A tensor to write, whose place in the header is known before it is read.

    ``origin`` names the source of ``read`` in errors.
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
    on_tensor: Callable[[int], None] = lambda count: None,
) -> str:
    """Write a new file tensor by tensor, wide dtypes first, then by name, so that all are aligned.

    Returns its SHA-256, for which a large file need not be read again.

    A failure leaves no file. Raises `HddmError` for an existing file, a tensor unlike its plan, a full disk,
    and with ``check_finite`` for NaN or Inf.
    """
    header, ordered = _header(tensors, metadata or {})
    digest = hashlib.sha256(header)
    with writing(path), path.open("xb") as file:
        try:
            file.write(header)
            for planned in ordered:
                for piece in _checked_pieces(planned, path, check_finite):
                    file.write(piece)
                    digest.update(piece)
                on_tensor(1)
            # Flushing the buffer may fail on a full disk too.
            file.flush()
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    return digest.hexdigest()


def has_header_of(
    path: Path, tensors: Sequence[Planned], metadata: Mapping[str, str] | None = None
) -> bool:
    """True if the file ``path`` begins as `write_safetensors` would, so that only its numbers may differ."""
    header, _ = _header(tensors, metadata or {})
    with opened(path) as file:
        return file.read(len(header)) == header


def holds_exactly(
    path: Path,
    tensors: Sequence[Planned],
    metadata: Mapping[str, str] | None = None,
    check_finite: bool = False,
    on_tensor: Callable[[int], None] = lambda count: None,
) -> bool:
    """True if the file ``path`` is, byte by byte, what `write_safetensors` would write.

    Raises `HddmError` as `write_safetensors`, and `read_safetensors`.
    """
    if not has_header_of(path, tensors, metadata):
        return False
    held = read_safetensors(path)
    for planned in tensors:
        there = _pieces(held[planned.name])
        for piece in _checked_pieces(planned, path, check_finite):
            if not _are_equal(piece, next(there).view(torch.uint8).numpy().data):
                return False
        on_tensor(1)
    return True


def _are_equal(one: memoryview, other: memoryview) -> bool:
    """Compare bytes, eight at a time where that is possible."""
    kind = np.uint64 if one.nbytes % 8 == 0 else np.uint8
    return np.array_equal(np.frombuffer(one, kind), np.frombuffer(other, kind))


def _header(tensors: Sequence[Planned], metadata: Mapping[str, str]) -> tuple[bytes, list[Planned]]:
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    ordered = sorted(tensors, key=lambda planned: (_ORDER[planned.dtype], planned.name))
    start = 0
    for planned in ordered:
        end = start + torch.Size(planned.shape).numel() * planned.dtype.itemsize
        kind = {"dtype": DTYPE_NAMES[planned.dtype], "shape": list(planned.shape)}
        entries[planned.name] = kind | {"data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, ordered


def _checked_pieces(planned: Planned, path: Path, check_finite: bool) -> Iterator[memoryview]:
    """Bytes of a tensor, piece by piece."""
    tensor = planned.read().detach()
    name, stated = (
        f"{planned.origin or path}: {planned.name!r}",
        f"{planned.shape} in {planned.dtype}",
    )
    if (found := f"{tuple(tensor.shape)} in {tensor.dtype}") != stated:
        raise HddmError(f"{name} is {found}, not {stated} as planned; is the file being changed?")
    for piece in _pieces(tensor):
        if check_finite and not _is_finite(piece):
            raise HddmError(f"{name} holds NaN or Inf; get the weights again")
        yield piece.view(torch.uint8).numpy().data


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Flat slices; the tensor is copied only if it is not contiguous or not on the CPU."""
    flat = tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return iter(flat.split(_PIECE // tensor.itemsize))


def _is_finite(piece: Tensor) -> bool:
    """True for a flat piece on the CPU without NaN and Inf.

    Only these have an exponent of ones alone, so without the sign bit their bits are the largest numbers.
    That takes a third of the time of torch's own check, whose threads wait for one another.
    """
    if piece.is_complex():
        piece = torch.view_as_real(piece).reshape(-1)
    if not piece.is_floating_point():
        return True
    if piece.itemsize == 1:
        return bool(piece.float().isfinite().all())
    infinite = torch.tensor(math.inf, dtype=piece.dtype).view(_UNSIGNED[piece.itemsize])
    least = int(infinite.numpy()) << 1
    bits = piece.view(_UNSIGNED[piece.itemsize]).numpy()
    return all(
        np.left_shift(bits[start : start + _FEW], 1).max() < least
        for start in range(0, len(bits), _FEW)
    )


def within(labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Whether each label is a class in 0 … ``num_classes`` - 1, and the labels, 0 where it is none."""
    is_class = (labels >= 0) & (labels < num_classes)
    return is_class, labels.long().where(is_class, 0)
