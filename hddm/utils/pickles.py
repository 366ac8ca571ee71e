"""Names of tensors in files of former versions of diffusers, which its own loader still renames.

The zip archives of `torch.save`, checked before torch opens them.

What a file of weights is, by its first bytes and never by its name.

A machine that follows the opcodes of a pickle with stand-ins for objects, and runs none of it.

Its opcodes are those that torch's weights-only unpickler knows, with fewer calls.

A rehearsal of pickles: what one would import, call and load is accounted for before torch reads it.

PyTorch checkpoints: refused unless asked for, scanned before torch reads them, never unpickled in full.
"""

import argparse
import io
import os
import pickletools
import stat
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from hddm.utils.errors import HddmError

# Attention before 0.15.
_ATTENTION = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}


def former_name(name: str) -> str:
    """What diffusers called the tensor ``name`` once; ``name`` itself where it never changed."""
    for new, old in _ATTENTION.items():
        if new in name:
            return name.replace(new, old)
    return name


def stored_names(names: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
    """The name in a file, which holds ``stored``, of each tensor that a network calls by ``names``."""
    held = set(stored)
    return {
        name: former_name(name) if name not in held and former_name(name) in held else name for name in names
    }


LARGEST_PICKLE = 8 * 2**20
"""Bytes of the largest pickle that is scanned; the tensors lie outside, thousands in one MB or two."""

_PIECE = 2**20


def read_archive(path: Path) -> tuple[bytes, dict[str, int]]:
    """The pickle of an archive, and the bytes of each record by its name below the archive's folder.

    Raises:
        HddmError: for a damaged archive (sums are checked), compressed or encrypted records, records that
            overlap, names that leave the archive, and any number of pickles but one.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = _checked(path, archive.infolist())
            data = archive.read(records["data.pkl"])
            for record in records.values():
                _check_sum(archive, record)
        sizes = {name: record.file_size for name, record in records.items()}
        _compare(path, sizes, data)
    except HddmError:
        raise
    # zipfile also raises struct.error, NotImplementedError, RuntimeError and others on damaged archives.
    except Exception as error:
        raise HddmError(
            f"{path}: cannot be read as a PyTorch archive ({one_line(error)}); fetch it again"
        ) from error
    return data, sizes


def _checked(path: Path, entries: list[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
    records: dict[str, zipfile.ZipInfo] = {}
    total = 0
    for entry in entries:
        name = entry.orig_filename
        folder, _, below = name.partition("/")
        parts = name.split("/")
        if not folder or not below or ".." in parts or "\\" in name or "\0" in name:
            raise HddmError(f"{path}: record {name!r} leaves the archive; refused")
        if below in records or folder != entries[0].orig_filename.partition("/")[0]:
            raise HddmError(f"{path}: record {name!r} is there twice or in a second folder; refused")
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise HddmError(f"{path}: record {name!r} is compressed, as torch.save never writes; refused")
        total += entry.file_size
        records[below] = entry
    if total > path.stat().st_size:
        raise HddmError(f"{path}: its records make {total} bytes, more than the file has; refused")
    if "constants.pkl" in records:
        raise HddmError(f"{path}: is a TorchScript program, not weights; save the model's state_dict instead")
    pickles = [name for name in records if name.split("/")[-1] == "data.pkl"]
    if pickles != ["data.pkl"]:
        raise HddmError(f"{path}: holds {len(pickles)} records data.pkl, not one at its top; refused")
    if records["data.pkl"].file_size > LARGEST_PICKLE:
        size = records["data.pkl"].file_size
        raise HddmError(f"{path}: its data.pkl has {size} bytes, more than {LARGEST_PICKLE}; refused")
    return records


def _check_sum(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    # torch checks no sums of what it maps; zipfile raises at the end of a record.
    with archive.open(record) as file:
        while file.read(_PIECE):
            pass


def _compare(path: Path, sizes: dict[str, int], data: bytes) -> None:
    # Two readers may find two directories in one crafted file; torch must see what was checked here.
    reader = torch._C.PyTorchFileReader(str(path))
    if sorted(reader.get_all_records()) != sorted(sizes) or reader.get_record("data.pkl") != data:
        raise HddmError(f"{path}: has two directories that differ; refused")


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


_STORAGES = {
    "torch DoubleStorage": 8,
    "torch FloatStorage": 4,
    "torch HalfStorage": 2,
    "torch BFloat16Storage": 2,
    "torch LongStorage": 8,
    "torch IntStorage": 4,
    "torch ShortStorage": 2,
    "torch CharStorage": 1,
    "torch ByteStorage": 1,
    "torch BoolStorage": 1,
    "torch ComplexFloatStorage": 8,
    "torch ComplexDoubleStorage": 16,
    "torch.storage UntypedStorage": 1,
}
"""Bytes of one element by storage class."""

_DTYPE_NAMES = [
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
]
_DTYPES = {f"torch {name}" for name in _DTYPE_NAMES}

_CALLS = {
    "collections OrderedDict": ((), "dict"),
    "torch Size": ((tuple,), "size"),
    "torch._utils _rebuild_tensor": (("storage", int, tuple, tuple), "tensor"),
    "torch._utils _rebuild_tensor_v2": (("storage", int, tuple, tuple, bool, "dict"), "tensor"),
    "torch._utils _rebuild_tensor_v3": (("storage", int, tuple, tuple, bool, "dict", "global"), "tensor"),
    "torch._utils _rebuild_parameter": (("tensor", bool, "dict"), "tensor"),
}
"""What may be called: the kinds of its arguments and of its result."""

ALLOWED = {*_STORAGES, *_DTYPES, *_CALLS, "argparse Namespace"}
"""All that may be imported, as ``module name``."""

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING"}
_KEYS = (str, int, float, bytes, type(None))


class RefusedPickleError(Exception):
    """A pickle that is broken or does what weights never need; the text says what."""


@dataclass(frozen=True, eq=False, slots=True)
class _Thing:
    """The stand-in of an object; ``name`` is that of a global."""

    kind: str
    name: str = ""


# One stand-in for all objects of a kind: a million dictionaries take a byte each in a pickle.
_THINGS = {kind: _Thing(kind) for kind in ("dict", "size", "tensor", "storage", "namespace")}
_GLOBALS = {name: _Thing("global", name) for name in ALLOWED}

_DEEPEST_OBJECT = 1000
_TALLEST = 100_000
_MOST_CALLS = 100_000
"""Of objects that a pickle makes; a tensor is about three."""


class Machine:
    """The state of one pickle: ``stack`` ends with its value, ``storages`` gets bytes by storage key."""

    def __init__(self, storages: dict[str, int]) -> None:
        self.storages = storages
        self.stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._calls = 0
        self._methods: dict[str, Callable[[], None] | None] = {}

    def step(self, opcode: str, value: Any, position: int | None) -> None:
        """Follow one opcode but STOP.

        Raises:
            RefusedPickleError: for one that weights do not need, or a use of it.
            IndexError, KeyError: where a broken pickle takes what is not there.
        """
        if opcode in _VALUES:
            self.stack.append(value)
        elif opcode in _CONSTANTS:
            self.stack.append(_CONSTANTS[opcode])
        elif opcode in ("BINGET", "LONG_BINGET"):
            self.stack.append(self._memo[value])
        elif opcode in ("BINPUT", "LONG_BINPUT"):
            self._memo[value] = self.stack[-1]
        elif opcode == "GLOBAL" and value in ALLOWED:
            self.stack.append(_GLOBALS[value])
        elif opcode != "PROTO" or value != 2:
            if opcode not in self._methods:
                self._methods[opcode] = getattr(self, f"_{opcode.lower()}", None)
            method = self._methods[opcode]
            if method is None:
                shown = f"PROTO {value}" if opcode == "PROTO" else opcode
                raise RefusedPickleError(f"has opcode {shown} at byte {position}, which weights never need")
            method()
        _require(len(self.stack) <= _TALLEST, f"puts more than {_TALLEST} values on its stack")

    def result(self) -> Any:
        """What the pickle holds, at its end."""
        value = self.stack.pop()
        _require(not self.stack and not self._below, "is a broken pickle (more than one value)")
        return value

    def _mark(self) -> None:
        _require(len(self._below) < _DEEPEST_OBJECT, f"is nested deeper than {_DEEPEST}")
        self._below.append(self.stack)
        self.stack = []

    def _popped(self) -> list[Any]:
        items, self.stack = self.stack, self._below.pop()
        return items

    def _empty_tuple(self) -> None:
        self.stack.append(())

    def _empty_list(self) -> None:
        self.stack.append([])

    def _empty_dict(self) -> None:
        self.stack.append(_THINGS["dict"])

    def _tuple(self) -> None:
        items = self._popped()
        self.stack.append(tuple(items))

    def _tuple1(self) -> None:
        self._last(1)

    def _tuple2(self) -> None:
        self._last(2)

    def _tuple3(self) -> None:
        self._last(3)

    def _last(self, num: int) -> None:
        items = [self.stack.pop() for _ in range(num)]
        self.stack.append(tuple(reversed(items)))

    def _append(self) -> None:
        self._extend([self.stack.pop()])

    def _appends(self) -> None:
        self._extend(self._popped())

    def _extend(self, items: list[Any]) -> None:
        _require(isinstance(self.stack[-1], list), "appends to what is no list")
        self.stack[-1].extend(items)

    def _setitem(self) -> None:
        value = self.stack.pop()
        self._set([self.stack.pop(), value])

    def _setitems(self) -> None:
        self._set(self._popped())

    def _set(self, items: list[Any]) -> None:
        _require(_is(self.stack[-1], "dict"), "sets items of what is no dictionary")
        # Hashing a tuple nested a million times deep would overflow the stack.
        _require(len(items) % 2 == 0 and all(isinstance(key, _KEYS) for key in items[::2]), "has odd keys")

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack.pop()
        _require(_is(function, "global") and function.name in _CALLS, "calls what is no known function")
        kinds, result = _CALLS[function.name]
        fits = isinstance(arguments, tuple) and len(arguments) == len(kinds)
        _require(
            fits and all(map(_is, arguments, kinds)), f"calls {function.name.split()[1]} with odd arguments"
        )
        self._made(result)

    def _made(self, kind: str) -> None:
        self._calls += 1
        _require(self._calls <= _MOST_CALLS, f"makes more than {_MOST_CALLS} objects")
        self.stack.append(_THINGS[kind])

    def _newobj(self) -> None:
        arguments = self.stack.pop()
        made = self.stack.pop()
        known = _is(made, "global") and made.name == "argparse Namespace" and arguments == ()
        _require(known, "makes an object of no known class")
        self._made("namespace")

    def _build(self) -> None:
        state = self.stack.pop()
        built = _is(self.stack[-1], "namespace") or _is(self.stack[-1], "dict")
        _require(built and _is(state, "dict"), "sets the state of an object of no known class")

    def _binpersid(self) -> None:
        match self.stack.pop():
            # The sixth value, of the old format, would make a view.
            case ("storage", _Thing(kind="global", name=name), str(key), str(), int(num), *rest) if (
                name in _STORAGES and num >= 0 and rest in ([], [None])
            ):
                size = num * _STORAGES[name]
                _require(self.storages.setdefault(key, size) == size, f"gives storage {key!r} two sizes")
                self._made("storage")
            case _:
                raise RefusedPickleError("loads by an id that is no storage's")


def _is(value: Any, kind: str | type) -> bool:
    if isinstance(kind, type):
        return isinstance(value, kind)
    return isinstance(value, _Thing) and value.kind == kind


def _require(fine: bool, problem: str) -> None:
    if not fine:
        raise RefusedPickleError(problem)


MOST_OPCODES = 600_000
"""Of one pickle. A checkpoint of thousands of tensors with its optimiser's state has 200,000."""
_MOST_NAMES = 1000


def refused_globals(stream: IO[bytes]) -> set[str]:
    """The names off the fixed list that the next pickle of ``stream`` imports, as ``module.name``.

    Raises:
        RefusedPickleError: for a broken pickle.
    """
    found: set[str] = set()
    texts = ["?", "?"]
    for opcode, value, _ in _opcodes(stream):
        if len(found) == _MOST_NAMES:
            break
        if opcode == "STACK_GLOBAL":
            # The two names may come from anywhere; the last strings are those of every ordinary pickle.
            found.add(" ".join(texts))
        elif opcode in ("GLOBAL", "INST") and (opcode == "INST" or value not in ALLOWED):
            found.add(value)
        elif isinstance(value, str):
            texts = [texts[1], value]
    return {name.replace(" ", ".") for name in found}


def rehearse(stream: IO[bytes], storages: dict[str, int]) -> Any:
    """The next pickle of ``stream`` with stand-ins; adds the bytes of each storage it loads to ``storages``.

    Raises:
        RefusedPickleError: at the first opcode, call or persistent id that weights do not need.
    """
    machine = Machine(storages)
    try:
        for opcode, value, position in _opcodes(stream):
            if opcode == "STOP":
                return machine.result()
            machine.step(opcode, value, position)
    except (IndexError, KeyError) as error:
        raise RefusedPickleError(f"is a broken pickle ({type(error).__name__} at byte {position})") from error
    raise RefusedPickleError("is a broken pickle (without an end)")


def _opcodes(stream: IO[bytes]) -> Iterator[tuple[str, Any, int | None]]:
    try:
        for number, (opcode, value, position) in enumerate(pickletools.genops(stream)):
            if number == MOST_OPCODES:
                raise RefusedPickleError(f"has more than {MOST_OPCODES} opcodes, which weights never need")
            yield opcode.name, value, position
    except RefusedPickleError:
        raise
    # genops raises ValueError, and what codecs and integers raise on broken arguments.
    except Exception as error:
        raise RefusedPickleError(f"is a broken pickle ({one_line(error)})") from error


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
