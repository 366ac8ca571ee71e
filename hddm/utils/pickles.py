"""PyTorch checkpoints: refused unless allowed, rehearsed before torch reads them, never fully unpickled.

`torch.load` with ``weights_only`` runs no foreign code, but it has no bound on memory, reads overlapping
storages, hashes tuples of any depth until the interpreter crashes, and leaves tensors of the format before
torch 1.6 uninitialised if the file does not list them. So Python's own unpickler first rehearses the pickle
with few opcodes, a bound on each cost, and stand-ins for all permitted imports; only then torch loads it.
"""

import argparse
import io
import pickle
import pickletools
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from hddm.utils.errors import HddmError, one_line
from hddm.utils.files import Kind, kind_of, refuse_pickle

LARGEST_PICKLE = 8 * 2**20
"""Bytes of the largest pickle scanned; without its tensors, thousands take one MB or two."""
MOST_OPCODES = 600_000
"""Per pickle; a checkpoint of thousands of tensors with optimiser state has 200,000."""
_MOST_CALLS = 100_000
"""Objects that a pickle makes; a tensor is about three."""
_TALLEST = 100_000
_MOST_MARKS = 1000
_DEEPEST = 64


class RefusedPickleError(Exception):
    """A pickle that is broken or does what weights never need, as the text describes."""


def _require(fine: bool, problem: str) -> None:
    if not fine:
        raise RefusedPickleError(problem)


def _read_archive(path: Path) -> tuple[bytes, dict[str, int]]:
    """Pickle of an archive, and the bytes of each record by its name below the archive's folder."""
    with zipfile.ZipFile(path) as archive:
        records = _checked(archive.infolist(), path.stat().st_size)
        data = archive.read(records["data.pkl"])
        # torch does not verify checksums of mapped files.
        damaged = archive.testzip()
        _require(damaged is None, f"record {damaged!r} is damaged")
    # A crafted file may show two readers different directories; torch must see the one checked here.
    reader = torch._C.PyTorchFileReader(str(path))
    is_same = sorted(reader.get_all_records()) == sorted(records) and reader.get_record("data.pkl") == data
    _require(is_same, "has two directories that differ")
    return data, {name: record.file_size for name, record in records.items()}


def _checked(entries: list[zipfile.ZipInfo], size: int) -> dict[str, zipfile.ZipInfo]:
    records: dict[str, zipfile.ZipInfo] = {}
    for entry in entries:
        name = entry.orig_filename
        folder, _, below = name.partition("/")
        is_inside = folder and below and ".." not in name.split("/") and not {"\\", "\0"} & set(name)
        _require(bool(is_inside), f"record {name!r} points outside the archive")
        is_first = below not in records and folder == entries[0].orig_filename.partition("/")[0]
        _require(is_first, f"record {name!r} is there twice or in a second folder")
        is_stored = entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size
        _require(is_stored, f"record {name!r} is compressed, as torch.save never writes")
        records[below] = entry
    total = sum(entry.file_size for entry in entries)
    _require(total <= size, f"its records make {total} bytes, more than the file has")
    _require("constants.pkl" not in records, "is a TorchScript program, not weights")
    pickles = [name for name in records if name.split("/")[-1] == "data.pkl"]
    _require(pickles == ["data.pkl"], f"holds {len(pickles)} records data.pkl, not one at its top")
    length = records["data.pkl"].file_size
    _require(length <= LARGEST_PICKLE, f"its data.pkl has {length} bytes, more than {LARGEST_PICKLE}")
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

_OPCODES = {
    *("PROTO", "STOP", "MARK", "GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "BINPERSID"),
    *("BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT"),
    *("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS", "SETITEM", "SETITEMS"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINSTRING"),
}
"""Opcodes that torch's weights-only unpickler knows, except sets."""
_KEYS = (str, int, float, bool, type(None))
"""Types of a dictionary's keys; hashing a tuple of tuples overflows the C stack."""


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


class _Rehearsal(pickle._Unpickler):
    """Unpickler that imports nothing; ``storages`` gets the bytes of each storage by its key.

    It takes only `_OPCODES`, and refuses a pickle that would cost torch much.
    """

    stack: list[Any]
    metastack: list[list[Any]]
    proto: int

    def __init__(self, stream: IO[bytes], storages: dict[str, int]) -> None:
        super().__init__(stream, fix_imports=False, encoding="latin1")
        self._storages, self._opcodes, self._calls = storages, 0, 0

    def load(self) -> Any:
        value = super().load()
        _require(not self.stack and not self.metastack, "is a broken pickle (more than one value)")
        return value

    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get(f"{module} {name}")
        _require(known is not None, f"would import {f'{module}.{name}'[:80]!r}, which weights never need")
        return known

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

    def before(self, name: str) -> None:
        """Count the opcode ``name``, and refuse what it must not do to the values on the stack."""
        self._opcodes += 1
        self._calls += name in ("REDUCE", "NEWOBJ", "BINPERSID")
        too_many = f"has more than {MOST_OPCODES} opcodes, which weights never need"
        _require(self._opcodes <= MOST_OPCODES, too_many)
        _require(self._calls <= _MOST_CALLS, f"makes more than {_MOST_CALLS} objects")
        if name in ("SETITEM", "SETITEMS"):
            keys = self.stack[-2:-1] if name == "SETITEM" else self.stack[::2]
            _require(all(type(key) in _KEYS for key in keys), "has odd keys")
        elif name == "BUILD":
            # Others, such as `_Global`, have a __setstate__ that would change this module's own objects.
            fits = type(self.stack[-2]) in (_Dict, _Namespace) and type(self.stack[-1]) is dict
            _require(fits, "gives an object a state that is not a dictionary")

    def after(self) -> None:
        """Refuse a pickle of another protocol, and a stack that grows too large."""
        _require(self.proto in (0, 2), f"has protocol {self.proto}, which torch.save never writes")
        _require(len(self.stack) <= _TALLEST, f"puts more than {_TALLEST} values on its stack")
        _require(len(self.metastack) <= _MOST_MARKS, f"is nested deeper than {_MOST_MARKS}")


def _step(opcode: pickletools.OpcodeInfo) -> Callable[[Any], None]:
    name = opcode.name
    run: Callable[[Any], None] = pickle._Unpickler.dispatch[ord(opcode.code)]

    def bounded(rehearsal: _Rehearsal) -> None:
        rehearsal.before(name)
        run(rehearsal)
        rehearsal.after()

    def refused(rehearsal: _Rehearsal) -> None:
        raise RefusedPickleError(f"has opcode {name}, which weights never need")

    return bounded if name in _OPCODES else refused


_Rehearsal.dispatch = {ord(opcode.code): _step(opcode) for opcode in pickletools.opcodes}


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
    # Broken pickles raise any error of the codecs, integers and objects that they misuse, broken archives
    # struct.error, NotImplementedError, RuntimeError and others.
    except Exception as error:
        is_whole = isinstance(error, RefusedPickleError)
        problem = str(error) if is_whole else f"is a broken pickle ({one_line(error)})"
        raise HddmError(f"{path}: {problem}; fetch it again or use a safetensors version") from error
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
        data, records = _read_archive(path)
        _Rehearsal(io.BytesIO(data), storages).load()
        for key, size in storages.items():
            is_there = records.get(f"data/{key}") == size
            _require(is_there, f"wants {size} bytes of storage {key!r}, which are not there")
        return
    with path.open("rb") as file:
        stream = io.BytesIO(file.read(LARGEST_PICKLE))
    head = [_Rehearsal(stream, {}).load() for _ in range(2)]
    expected = [torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION]
    _require(head == expected, "is a pickle that torch.save did not write")
    _Rehearsal(stream, {}).load()
    _Rehearsal(stream, storages).load()
    keys = _Rehearsal(stream, {}).load()
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
