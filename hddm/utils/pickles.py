"""PyTorch checkpoints: refused unless allowed, loaded by a child process first, never fully unpickled.

`torch.load` with ``weights_only`` runs no foreign code, but a crafted file can make it take all memory or
crash the interpreter. So a child process with bounded memory and time loads it first, and checks the content;
only what passes is loaded here.
"""

import argparse
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from hddm.utils.errors import HddmError, an, one_line
from hddm.utils.files import file_kind, identity_of, refuse_pickle

SAFE_TORCH = "2.10"
"""First torch whose weights-only unpickler has no known hole (CVE-2025-32434, CVE-2026-24747)."""
MEMORY = 2**30
"""Bytes that loading may take beside the mapped file; thousands of tensors take a few million."""
_SECONDS, _BYTES_PER_SECOND = 60, 20_000_000
_DEEPEST = 64


def read_pickle(path: Path, allow_pickle: bool) -> dict[str, Any]:
    """Read the dictionary in a checkpoint: tensors, dictionaries, lists, plain values, Namespaces.

    Tensors are mapped from disk. Raises as `read_any`, and for anything but a dictionary of names.
    """
    content = read_any(path, allow_pickle)
    if not isinstance(content, dict):
        raise HddmError(
            f"{path}: holds a list, not a dictionary of names; if it is a LoRA, pass `base`, the expert that "
            "it changes"
        )
    return content


def read_any(path: Path, allow_pickle: bool) -> dict[str, Any] | list[Any]:
    """Read the dictionary or list in a checkpoint.

    Tensors are mapped from disk. Raises `HddmError` without ``allow_pickle``, with a torch that has known
    holes, for the format before torch 1.6, and for a file that is damaged, imports anything off torch's list,
    or costs much more than it holds.
    """
    refuse_pickle(path, allow_pickle)
    if file_kind(path) == "gguf":
        text = "is a GGUF file, which hddm reads where it holds a network to convert; use safetensors here"
        raise HddmError(f"{path}: {text}")
    before = identity_of(path)
    problem = _known_problem(path) or _problem(path)
    if problem:
        raise HddmError(f"{path}: {problem}")
    content: dict[str, Any] | list[Any] = _load(path)
    if identity_of(path) != before:
        raise HddmError(
            f"{path}: changed while it was read; wait until it is complete, and try again"
        )
    return content


def _known_problem(path: Path) -> str:
    """Why the file is not loaded at all; empty if nothing is known of it."""
    if TorchVersion(torch.__version__) < SAFE_TORCH:
        known = f"torch>={SAFE_TORCH}, whose unpickler has no known holes, and this is {torch.__version__}"
        return f"reading pickles needs {known}; upgrade torch or use a safetensors version"
    # torch.load would go by this suffix, not by the content.
    if path.suffix == ".safetensors":
        return "is a pickle under the name of safetensors; rename it to .pt"
    # Tensors that such a file uses but does not list would stay uninitialised.
    if file_kind(path) == "pickle":
        again = "read it with torch.load(…, weights_only=True) and write it again by torch.save"
        return f"is no archive, as torch has written since 1.6; {again}"
    return ""


def _problem(path: Path) -> str:
    """What stops a child process from loading the file, and the remedy; empty if nothing does."""
    # The working folder, which the file may have come with, is not searched for modules.
    places = [one for one in sys.path if Path(one).is_absolute()]
    code = f"import sys; sys.path[:] = {places!r}; "
    code += "from hddm.utils.pickles import try_to_load; sys.exit(try_to_load(sys.argv[1]))"
    command, seconds = [sys.executable, "-c", code, str(path)], 10 * _seconds(path)
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"takes more than {seconds} seconds to load"
    crash = f"ends a process that loads it (code {child.returncode})"
    return (
        f"{child.stdout or crash}; fetch it again or use a safetensors version"
        if child.returncode
        else ""
    )


def _seconds(path: Path) -> int:
    """Time of a processor that the file may take, to start Python included."""
    return _SECONDS + path.stat().st_size // _BYTES_PER_SECOND


def try_to_load(name: str) -> bool:
    """Load and check a file with bounded memory and time; if that fails, print why and return true."""
    path = Path(name)
    try:
        _limit(path)
        with zipfile.ZipFile(path) as archive:
            # torch maps records as they are, and does not verify their checksums.
            for one in archive.infolist():
                if one.compress_type != zipfile.ZIP_STORED:
                    raise HddmError(f"record {one.filename!r} is compressed")
            damaged = archive.testzip()
            if damaged:
                raise HddmError(f"record {damaged!r} is damaged")
        content = _load(path)
        has_names = isinstance(content, dict) and all(isinstance(key, str) for key in content)
        if not has_names and not isinstance(content, list):
            raise HddmError(f"holds {an(type(content).__name__)}, not a dictionary of names")
        _check(content)
    except HddmError as error:
        print(error, end="")
        return True
    except BaseException as error:
        # Around the reason, torch advises to load the file without weights_only.
        parts = re.split(r"WeightsUnpickler error:|trusted source\.", str(error))
        reason = next((part.strip() for part in reversed(parts) if part.strip()), "")
        reason = reason.partition("\n\n")[0].partition(". Please")[0]
        print(f"torch cannot load it ({one_line(f'{type(error).__name__}: {reason}')})", end="")
        return True
    return False


def _limit(path: Path) -> None:
    """Limit what this process may take: time, and memory where the system says how much it has by now."""
    # Not on Windows, where pickles are therefore refused.
    import resource

    limits, status = {resource.RLIMIT_CPU: _seconds(path)}, Path("/proc/self/status")
    if status.exists():
        lines = status.read_text().splitlines()
        (line,) = [line for line in lines if line.startswith("VmData")]
        used = line.split()[1]
        limits[resource.RLIMIT_DATA] = int(used) * 1024 + path.stat().st_size + MEMORY
    for kind, most in limits.items():
        _, largest = resource.getrlimit(kind)
        resource.setrlimit(
            kind, (most if largest == resource.RLIM_INFINITY else min(most, largest), largest)
        )


def _load(path: Path) -> Any:
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _check(value: object, key: str = "", depth: int = 0) -> None:
    """Refuse a kilobyte that would become a gigabyte as soon as it is cast, and bottomless nesting."""
    if isinstance(value, Tensor):
        is_plain = type(value) in (Tensor, torch.nn.Parameter) and not value.is_quantized
        if not is_plain or value.layout is not torch.strided or value.device.type != "cpu":
            raise HddmError(
                f"{key!r} is sparse, quantized or without numbers, which weights never are"
            )
        size, stored = value.numel() * value.itemsize, value.untyped_storage().nbytes()
        if size > stored:
            raise HddmError(
                f"{key!r} of shape {tuple(value.shape)} is {size} bytes made of {stored}"
            )
    elif isinstance(value, argparse.Namespace | dict | list | tuple):
        if depth == _DEEPEST:
            raise HddmError(f"{key!r} is nested too deep, which weights never are")
        value = vars(value) if isinstance(value, argparse.Namespace) else value
        for name, one in value.items() if isinstance(value, dict) else enumerate(value):
            _check(one, f"{key}.{name}" if key else str(name), depth + 1)
