"""Reading safetensors files: tensors are mapped from disk, headers are bounded before anything is taken.

The library (0.4.5 to 0.8) checks the header's length against the file and 100 MB, the nesting of its JSON,
ranges that overlap, leave holes or do not cover the file, and shapes against ranges, with overflow. Left
for here are files of another kind, dtypes that torch lacks and the form of errors.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from hddm.errors import HddmError
from hddm.weight_files.kinds import kind_of, one_line

DTYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in a header, the wide ones first: in this order every tensor is aligned."""


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file, mapped: memory grows by the pages that are touched, and writes stay private.

    Raises:
        HddmError: for a file of another kind and for a header that does not fit its file.
    """
    read_header(path)
    try:
        return load_file(path)
    # The bindings also raise TypeError, RuntimeError and KeyError for headers that torch cannot take.
    except Exception as error:
        raise _unreadable(path, error) from error


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Shapes and dtypes by tensor name, and the metadata; no tensor is made.

    Raises:
        HddmError: as `read_safetensors`.
    """
    kind = kind_of(path)
    if kind != "safetensors":
        raise HddmError(
            f"{path}: cannot be read as safetensors (it is a pickle, {kind}); take a safetensors version"
        )
    tensors = {}
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            for name in file.keys():  # noqa: SIM118 - no mapping
                entry = file.get_slice(name)
                dtype = DTYPES.get(entry.get_dtype())
                if dtype is None:
                    raise HddmError(f"{path}: {name!r} has dtype {entry.get_dtype()}; convert it to F32")
                tensors[name] = TensorInfo(tuple(entry.get_shape()), dtype)
    except HddmError:
        raise
    except Exception as error:
        raise _unreadable(path, error) from error
    return tensors, metadata


def _unreadable(path: Path, error: Exception) -> HddmError:
    return HddmError(f"{path}: cannot be read as safetensors ({one_line(error)}); fetch it again")
