"""Which files a Paris release holds, and the shapes in their headers; nothing leads out of its folder."""

import os
import re
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from hddm.errors import HddmError
from hddm.paths import inside
from hddm.weight_files import read_header

ROUTER = "router"

_NAMES = ("diffusion_pytorch_model.safetensors", "pytorch_model.safetensors")
_PICKLES = {".pt", ".pth", ".bin", ".ckpt"}
_MOST_ENTRIES = 10_000
"""Files in a folder and tensors in a file. An expert of Paris has 378 tensors."""


def expert_folders(folder: Path) -> list[str]:
    """Folders ``expert_<number>`` in order of their numbers, which may have gaps."""
    names = [name for name in _entries(folder) if re.fullmatch(r"expert_(0|[1-9]\d{0,3})", name, re.ASCII)]
    return sorted((name for name in names if (folder / name).is_dir()), key=_number)


def numbered(folder: Path) -> list[str]:
    """The experts' folders.

    Raises:
        HddmError: where there is none, or one is missing.
    """
    names = expert_folders(folder)
    if not names:
        raise HddmError(f"{folder}: has no expert_0/; name the folder of the whole release")
    missing = [f"expert_{k}" for k in range(_number(names[-1])) if f"expert_{k}" not in names]
    if missing:
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        raise HddmError(
            f"{folder}: has {names[-1]} and lacks {', '.join(missing[:10])}{more}; fetch the whole release"
        )
    return names


def weights_of(folder: Path, part: str) -> Path:
    """The one safetensors file in a part's folder; of several, the one with the release's name.

    Raises:
        HddmError: for links that lead out of ``folder``, pickles alone, several files, or none.
    """
    # A linked folder is checked before it is listed.
    names = _entries(inside(folder, part))
    found = [name for name in names if name.endswith(".safetensors")]
    chosen = [name for name in _NAMES if name in found][:1] or found
    if len(chosen) > 1:
        raise HddmError(f"{folder / part}: holds {', '.join(chosen[:10])}; leave one of them there")
    if chosen:
        inside(folder, f"{part}/{chosen[0]}")
        # The name in the folder, not the hash behind a link, is what messages should say.
        return folder / part / chosen[0]
    pickles = [name for name in names if Path(name).suffix in _PICKLES]
    if pickles:
        raise HddmError(
            f"{folder / part}: holds no safetensors, only {', '.join(pickles[:10])}; read it with "
            "hddm.weight_files.read_pickle, which runs no code, and write it with safetensors.torch.save_file"
        )
    raise HddmError(f"{folder / part}: holds no {_NAMES[part == ROUTER]}; fetch the whole release")


def shapes_in(path: Path) -> dict[str, Tensor]:
    """What a file holds, as tensors without memory.

    Raises:
        HddmError: as `hddm.weight_files.read_header`, and for empty tensors or more than 10,000.
    """
    header, _ = read_header(path)
    if len(header) > _MOST_ENTRIES:
        raise HddmError(
            f"{path}: holds {len(header)} tensors, and no network of Paris so many; fetch it again"
        )
    for name, info in header.items():
        if 0 in info.shape:
            raise HddmError(f"{path}: {name!r} is empty, of shape {info.shape}; fetch it again")
    return {name: torch.empty(i.shape, dtype=i.dtype, device="meta") for name, i in header.items()}


def _entries(folder: Path) -> list[str]:
    """Names in a folder, sorted."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, _MOST_ENTRIES + 1)]
    except OSError as error:
        raise HddmError(f"{folder}: cannot be read ({error.strerror}); name the release's folder") from error
    if len(names) > _MOST_ENTRIES:
        raise HddmError(f"{folder}: holds more than {_MOST_ENTRIES} files; that is not the Paris release")
    return sorted(names)


def _number(name: str) -> int:
    return int(name.removeprefix("expert_"))
