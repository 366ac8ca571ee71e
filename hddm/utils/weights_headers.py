"""Headers of safetensors files: what tensors they hold, without torch, which takes seconds to import."""

from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from hddm.utils.errors import HddmError, one_line
from hddm.utils.files import file_kind


@dataclass(frozen=True)
class StatedTensor:
    """Shape and dtype of a tensor, as a header states them; dtypes are called ``F32``, ``BF16`` and so on."""

    shape: tuple[int, ...]
    dtype: str


def stated_tensors(path: Path) -> tuple[dict[str, StatedTensor], dict[str, str]]:
    """The tensors of a safetensors file by name, and its metadata; no tensor is read.

    Raises `HddmError` for a file of another kind and for a header that does not fit its file.
    """
    kind = file_kind(path)
    if kind != "safetensors":
        found = "GGUF" if kind == "gguf" else "a pickle"
        raise HddmError(
            f"{path}: cannot be read as safetensors (it is {found}); use a safetensors version"
        )
    tensors = {}
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            for name in file.keys():  # noqa: SIM118 - no mapping
                entry = file.get_slice(name)
                tensors[name] = StatedTensor(tuple(entry.get_shape()), entry.get_dtype())
    # The bindings raise errors of many kinds.
    except Exception as error:
        raise unreadable(path, error) from error
    return tensors, metadata


def unreadable(path: Path, error: object) -> HddmError:
    """The error for a file whose header or tensors cannot be read."""
    return HddmError(f"{path}: cannot be read as safetensors ({one_line(error)}); fetch it again")
