"""What a file of weights is, by its first bytes and never by its name."""

import os
import stat
from pathlib import Path
from typing import Literal

from hddm.errors import HddmError

Kind = Literal["safetensors", "torch-zip", "pickle"]

_LARGEST_HEADER = 100_000_000
"""Bytes of the largest safetensors header that the library takes."""


def kind_of(path: Path) -> Kind:
    """``"safetensors"``, ``"torch-zip"`` (what `torch.save` writes) or ``"pickle"`` (before torch 1.6).

    Raises:
        HddmError: for a missing, empty or unknown file, and for anything but a regular one.
    """
    head = read_head(path)
    if head.startswith(b"PK\x03\x04"):
        return "torch-zip"
    pickled = head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    # The length of a safetensors header may begin with the bytes of a pickle.
    if head[8:9] == b"{" and not (pickled and int.from_bytes(head[:8], "little") > _LARGEST_HEADER):
        return "safetensors"
    if pickled:
        return "pickle"
    if head.startswith(b"version https"):
        raise HddmError(f"{path}: is a Git LFS pointer, not the weights; fetch them with git lfs pull")
    if head.lstrip().startswith(b"{"):
        raise HddmError(f"{path}: is JSON, not weights; name the folder that it belongs to")
    raise HddmError(
        f"{path}: is neither safetensors nor a PyTorch checkpoint (begins with {head[:8]!r}); fetch it again"
    )


def read_head(path: Path) -> bytes:
    """The first 16 bytes of a regular file that is not empty.

    Raises:
        HddmError: for anything else.
    """
    try:
        mode = os.stat(path).st_mode
        # Opening a pipe would wait for ever.
        if not stat.S_ISREG(mode):
            raise HddmError(f"{path}: is no regular file; name a file of weights")
        with path.open("rb") as file:
            head = file.read(16)
    except FileNotFoundError:
        raise HddmError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        if isinstance(error, HddmError):
            raise
        raise HddmError(f"{path}: cannot be read ({error})") from error
    if not head:
        raise HddmError(f"{path}: is empty; fetch it again")
    return head


def one_line(error: Exception) -> str:
    """What an error of a library says, as a short part of one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"
