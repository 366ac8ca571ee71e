"""A machine that follows the opcodes of a pickle with stand-ins for objects, and runs none of it.

Its opcodes are those that torch's weights-only unpickler knows, with fewer calls.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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

_DEEPEST = 1000
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
        _require(len(self._below) < _DEEPEST, f"is nested deeper than {_DEEPEST}")
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
