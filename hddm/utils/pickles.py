"""PyTorch checkpoints: refused unless allowed, scanned before torch reads them, never fully unpickled.

`torch.load` with ``weights_only`` runs no foreign code, but it has no bound on memory, reads overlapping
storages, hashes tuples of any depth until the interpreter crashes, and leaves tensors of the format before
torch 1.6 uninitialised if the file does not list them. So the opcodes are counted first, then Python's own
unpickler rehearses the pickle with stand-ins for all permitted imports, and only then torch loads it.
"""

import argparse
import io
import pickle
import pickletools
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from hddm.utils.errors import HddmError, one_line, shown
from hddm.utils.files import Kind, kind_of, refuse_pickle

LARGEST_PICKLE = 8 * 2**20
"""Bytes of the largest pickle scanned; without its tensors, thousands take one MB or two."""


def read_archive(path: Path) -> tuple[bytes, dict[str, int]]:
    """Pickle of an archive, and the bytes of each record by its name below the archive's folder.

    Raises `HddmError` for a damaged archive (checksums are checked), compressed or encrypted records, records
    that overlap, names that leave the archive, and any number of pickles but one.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = _checked(path, archive.infolist())
            data = archive.read(records["data.pkl"])
            # torch does not verify checksums of mapped files.
            if (damaged := archive.testzip()) is not None:
                raise HddmError(f"{path}: record {damaged!r} is damaged; fetch it again")
        # A crafted file may show two readers different directories; torch must see the one checked here.
        reader = torch._C.PyTorchFileReader(str(path))
        if sorted(reader.get_all_records()) != sorted(records) or reader.get_record("data.pkl") != data:
            raise HddmError(f"{path}: has two directories that differ; use a safetensors version")
    except HddmError:
        raise
    # zipfile also raises struct.error, NotImplementedError, RuntimeError and others on damaged archives.
    except Exception as error:
        raise HddmError(
            f"{path}: cannot be read as a PyTorch archive ({one_line(error)}); fetch it again"
        ) from error
    return data, {name: record.file_size for name, record in records.items()}


def _checked(path: Path, entries: list[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
    records: dict[str, zipfile.ZipInfo] = {}
    total = 0
    for entry in entries:
        name = entry.orig_filename
        folder, _, below = name.partition("/")
        if not folder or not below or ".." in name.split("/") or "\\" in name or "\0" in name:
            raise HddmError(f"{path}: record {name!r} points outside the archive; use a safetensors version")
        if below in records or folder != entries[0].orig_filename.partition("/")[0]:
            raise HddmError(
                f"{path}: record {name!r} is there twice or in a second folder; use a safetensors version"
            )
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise HddmError(
                f"{path}: record {name!r} is compressed, as torch.save never writes; use a "
                f"safetensors version"
            )
        total += entry.file_size
        records[below] = entry
    if total > path.stat().st_size:
        raise HddmError(
            f"{path}: its records make {total} bytes, more than the file has; use a safetensors version"
        )
    if "constants.pkl" in records:
        raise HddmError(f"{path}: is a TorchScript program, not weights; save the model's state_dict instead")
    pickles = [name for name in records if name.split("/")[-1] == "data.pkl"]
    if pickles != ["data.pkl"]:
        raise HddmError(
            f"{path}: holds {len(pickles)} records data.pkl, not one at its top; use a safetensors version"
        )
    size = records["data.pkl"].file_size
    if size > LARGEST_PICKLE:
        raise HddmError(
            f"{path}: its data.pkl has {size} bytes, more than {LARGEST_PICKLE}; use a safetensors version"
        )
    return records


_SIZES = {
    1: ("Bool", "Byte", "Char"),
    2: ("BFloat16", "Half", "Short"),
    4: ("Float", "Int"),
    8: ("ComplexFloat", "Double", "Long"),
    16: ("ComplexDouble",),
}
_STORAGES = {f"torch {kind}Storage": size for size, kinds in _SIZES.items() for kind in kinds}
_STORAGES["torch.storage UntypedStorage"] = 1
"""Bytes of one element by storage class."""

_DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
]

_PLAIN = {
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINSTRING"),
}
"""Opcodes of plain values, the only keys allowed."""
_OPCODES = _PLAIN | {
    *("PROTO", "STOP", "MARK", "GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "BINPERSID"),
    *("BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT"),
    *("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS", "SETITEM", "SETITEMS"),
}
"""Opcodes that torch's weights-only unpickler knows, except sets."""

MOST_OPCODES = 600_000
"""Per pickle; a checkpoint of thousands of tensors with optimiser state has 200,000."""
_MOST_CALLS = 100_000
"""Objects that a pickle makes; a tensor is about three."""
_TALLEST = 100_000
_MOST_MARKS = 1000
_MOST_NAMES = 1000
_DEEPEST = 64


class RefusedPickleError(Exception):
    """A pickle that is broken or does what weights never need, as the text describes."""


# Stand-ins for objects that a pickle makes.
class _Tensor:
    __slots__ = ()


class _Storage:
    __slots__ = ()


class _Dict(dict[Any, Any]): ...


class _Namespace: ...


@dataclass(frozen=True, slots=True)
class _Global:
    """Stand-in for an import of a pickle; called with arguments of ``kinds``, it returns a new ``made``."""

    name: str
    kinds: tuple[type, ...] | None = None
    made: type = object

    def __call__(self, *arguments: object) -> object:
        _require(self.kinds is not None, "calls an unknown function")
        fits = len(arguments) == len(self.kinds or ()) and all(map(isinstance, arguments, self.kinds or ()))
        _require(fits, f"calls {self.name.split()[1]} with odd arguments")
        return self.made()


_VIEW = (_Storage, int, tuple, tuple)
_KNOWN: dict[str, Any] = {name: _Global(name) for name in (*_STORAGES, *(f"torch {one}" for one in _DTYPES))}
_KNOWN |= {
    name: _Global(name, kinds, made)
    for name, kinds, made in (
        ("collections OrderedDict", (), _Dict),
        ("torch Size", (tuple,), tuple),
        ("torch._utils _rebuild_tensor", _VIEW, _Tensor),
        ("torch._utils _rebuild_tensor_v2", (*_VIEW, bool, dict), _Tensor),
        ("torch._utils _rebuild_tensor_v3", (*_VIEW, bool, dict, _Global), _Tensor),
        ("torch._utils _rebuild_parameter", (_Tensor, bool, dict), _Tensor),
    )
}
_KNOWN["argparse Namespace"] = _Namespace
"""Stand-ins for all permitted imports, by ``module name``."""


class _Rehearsal(pickle.Unpickler):
    """Unpickler that imports nothing; ``storages`` gets the bytes of each storage by its key."""

    def __init__(self, stream: IO[bytes], storages: dict[str, int]) -> None:
        super().__init__(stream, fix_imports=False, encoding="latin1")
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        return _KNOWN[f"{module} {name}"]

    def persistent_load(self, pid: Any) -> _Storage:
        match pid:
            # The sixth value, of the old format, would make a view.
            case ("storage", _Global(name=name), str(key), str(), int(num), *rest) if (
                name in _STORAGES and num >= 0 and rest in ([], [None])
            ):
                size = num * _STORAGES[name]
                _require(self._storages.setdefault(key, size) == size, f"gives storage {key!r} two sizes")
                return _Storage()
        raise RefusedPickleError("loads something that is not a storage")


def _require(fine: bool, problem: str) -> None:
    if not fine:
        raise RefusedPickleError(problem)


def _refuse_globals(stream: IO[bytes]) -> None:
    """Refuse the next pickle of ``stream`` if it imports anything off the list."""
    found, texts = set[str](), ["?", "?"]
    for opcode, value, _ in _opcodes(stream):
        if len(found) == _MOST_NAMES:
            break
        if opcode.name == "STACK_GLOBAL":
            # The two names may come from anywhere; in every ordinary pickle they are the last strings.
            found.add(" ".join(texts))
        elif opcode.name in ("GLOBAL", "INST") and (opcode.name == "INST" or value not in _KNOWN):
            found.add(value)
        elif isinstance(value, str):
            texts = [texts[1], value]
    names = ", ".join(shown([name.replace(" ", ".")[:80] for name in sorted(found)], 10))
    _require(not found, f"would import {names!r}, which weights never need")


def _rehearse(stream: IO[bytes], storages: dict[str, int]) -> Any:
    """Load the next pickle of ``stream`` with stand-ins; ``storages`` gets the bytes of each storage."""
    start = stream.tell()
    _refuse_globals(stream)
    stream.seek(start)
    left = _bound(stream)
    stream.seek(start)
    value = _Rehearsal(stream, storages).load()
    _require(not left, "is a broken pickle (more than one value)")
    return value


def _bound(stream: IO[bytes]) -> int:
    """Refuse a next pickle that costs too much; returns the number of values left on its stack.

    Tuples nested a million deep take a byte a level, and as a key overflow the C stack.
    """
    stack: list[bool] = []
    """True for each value that may be a key."""
    marks = [0]
    memo: dict[int, bool] = {}
    calls = 0
    for opcode, value, position in _opcodes(stream):
        name = opcode.name
        known = name in _OPCODES and (name != "PROTO" or value == 2)
        text = f"{name} {value}" if name == "PROTO" else name
        _require(known, f"has opcode {text} at byte {position}, which weights never need")
        if name == "MARK":
            marks.append(len(stack))
            _require(len(marks) <= _MOST_MARKS, f"is nested deeper than {_DEEPEST}")
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[value])
        elif name in ("BINPUT", "LONG_BINPUT"):
            # Python's unpickler allocates a list of that length.
            _require(value < MOST_OPCODES, f"numbers a value {value}, which weights never need")
            memo[value] = stack[-1]
        else:
            taken = sum(kind not in _MARKED for kind in opcode.stack_before)
            start = (len(stack) if taken == len(opcode.stack_before) else marks.pop()) - taken
            if start < marks[-1]:
                raise IndexError(f"nothing on the stack at byte {position}")
            if name in ("SETITEM", "SETITEMS"):
                _require(all(stack[start + 1 :: 2]), "has odd keys")
            stack[start:] = [name in _PLAIN] * len(opcode.stack_after)
            calls += name in ("REDUCE", "NEWOBJ", "BINPERSID")
            _require(calls <= _MOST_CALLS, f"makes more than {_MOST_CALLS} objects")
        _require(len(stack) <= _TALLEST, f"puts more than {_TALLEST} values on its stack")
    return len(stack)


_MARKED = (pickletools.markobject, pickletools.stackslice)


def _opcodes(stream: IO[bytes]) -> Iterator[tuple[pickletools.OpcodeInfo, Any, int | None]]:
    for number, found in enumerate(pickletools.genops(stream)):
        _require(number < MOST_OPCODES, f"has more than {MOST_OPCODES} opcodes, which weights never need")
        yield found


SAFE_TORCH = "2.10"
"""First torch whose weights-only unpickler has no known hole (CVE-2025-32434, CVE-2026-24747)."""

_LEAVES = (str, int, float, bytes, type(None), torch.dtype, torch.Size)


def read_pickle(path: Path, allow_pickle: bool) -> dict[str, Any]:
    """Read the dictionary in a checkpoint: tensors on the CPU, dictionaries, lists, plain values, Namespaces.

    Tensors of the zip format are mapped from disk; those of the format before torch 1.6 are read to memory.
    Raises `HddmError` without ``allow_pickle``, with a torch that has known holes, and for a file that is
    damaged, imports anything off a fixed list, or declares more than it holds.
    """
    kind = kind_of(path)
    if kind == "safetensors":
        raise HddmError(f"{path}: is safetensors, not a pickle")
    refuse_pickle(path, allow_pickle)
    if TorchVersion(torch.__version__) < SAFE_TORCH:
        raise HddmError(
            f"{path}: reading pickles needs torch>={SAFE_TORCH}, whose unpickler has no known holes, "
            f"and this is {torch.__version__}; upgrade torch or use a safetensors version"
        )
    # torch.load would go by this suffix, not by the content.
    if path.suffix == ".safetensors":
        raise HddmError(f"{path}: is a pickle ({kind}) under the name of safetensors; rename it to .pt")
    try:
        _scan(path, kind)
    except HddmError:
        raise
    # Broken pickles raise any error of the codecs, integers and objects that they misuse.
    except Exception as error:
        is_whole = isinstance(error, RefusedPickleError)
        problem = str(error) if is_whole else f"is a broken pickle ({one_line(error)})"
        raise HddmError(f"{path}: {problem}; use a safetensors version") from error
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
        _rehearse(io.BytesIO(data), storages)
        for key, size in storages.items():
            is_there = records.get(f"data/{key}") == size
            _require(is_there, f"wants {size} bytes of storage {key!r}, which are not there")
        return
    with path.open("rb") as file:
        stream = io.BytesIO(file.read(LARGEST_PICKLE))
    head = [_rehearse(stream, {}) for _ in range(2)]
    expected = [torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION]
    _require(head == expected, "is a pickle that torch.save did not write")
    _rehearse(stream, {})
    _rehearse(stream, storages)
    keys = _rehearse(stream, {})
    listed = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    _require(listed and sorted(keys) == sorted(storages), "lists other storages than it uses")
    # Each storage follows with its length; torch would allocate memory before looking for them.
    wanted = stream.tell() + sum(8 + size for size in storages.values())
    held = path.stat().st_size
    _require(wanted <= held, f"wants {wanted} bytes and has {held}")


def _check(path: Path, content: dict[str, Any]) -> None:
    seen: set[int] = set()
    waiting: list[tuple[str, Any, int]] = [("", content, 0)]
    while waiting:
        key, value, depth = waiting.pop()
        if isinstance(value, Tensor):
            size, stored = value.numel() * value.itemsize, value.untyped_storage().nbytes()
            if size > stored:
                raise HddmError(
                    f"{path}: {key!r} of shape {tuple(value.shape)} is {size} bytes made of {stored}; "
                    "save a contiguous copy"
                )
        elif isinstance(value, _LEAVES) or id(value) in seen:
            continue
        elif isinstance(value, argparse.Namespace | dict | list | tuple) and depth < _DEEPEST:
            seen.add(id(value))
            held = vars(value) if isinstance(value, argparse.Namespace) else value
            pairs = held.items() if isinstance(held, dict) else enumerate(held)
            waiting.extend((f"{key}.{name}" if key else str(name), one, depth + 1) for name, one in pairs)
        else:
            problem = "is nested too deep" if depth == _DEEPEST else f"is a {type(value).__name__}"
            raise HddmError(f"{path}: {key!r} {problem}, which weights never need; use a safetensors version")
