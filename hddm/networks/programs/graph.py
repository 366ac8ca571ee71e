"""The graph of a program: inputs, nodes and output, parsed from torch's JSON into a few types of our own.

Of torch's schema (``torch/_export/serde/schema.py``, version 8) the parts are read that say what is computed;
the rest, as names of modules, guards and trees of arguments, which torch evaluates as code, is not looked at.
Every value has one name and is defined before it is used, so a graph ends.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hddm.networks.programs.operators import CHECKS, misuse, operator_of
from hddm.utils.documents import parse_object
from hddm.utils.errors import HddmError, one_line

SCHEMA = 8
MOST_NODES = 100_000
MOST_VALUES = 400_000
_MOST_ITEMS = 4096
"""Items of one argument."""
LARGEST_SIZE = 2**32
"""Elements of a weight."""
_DIMENSIONS = 8
_BATCH = re.compile(r"Symbol\('[su]\d{1,6}', positive=True, integer=True\)")
_WORDS = re.compile(
    r"Symbol|Integer|Mul|Add|Pow|FloorDiv|Mod|PythonMod|Max|Min|positive|nonnegative|integer|True|'[su]\d{1,6}'"
    r"|-?\d{1,18}|[(),= ]"
)
_LONGEST_EXPRESSION = 1000
_DTYPES = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    10: torch.complex64,
    11: torch.complex128,
    12: torch.bool,
    13: torch.bfloat16,
}
"""Dtypes by their numbers in torch's schema."""
_FORMATS = {
    1: torch.contiguous_format,
    2: torch.channels_last,
    4: torch.preserve_format,
}
_STRIDED = 7
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


@dataclass(frozen=True)
class Ref:
    """A value by its name."""

    name: str


class Here:
    """Stands for the device that the program runs on, whatever device it was made on."""

    def __repr__(self) -> str:
        return "Here()"

    def __deepcopy__(self, memo: object) -> "Here":
        return self

    def __reduce__(self) -> Any:
        return (_here, ())


HERE = Here()


def _here() -> Here:
    return HERE


@dataclass(frozen=True)
class TensorKind:
    """Shape and dtype of a tensor; of an input without its batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Weight:
    """A tensor that the program takes from the weights file."""

    name: str
    kind: TensorKind
    is_parameter: bool


@dataclass(frozen=True)
class GraphNode:
    """One call of an operator.

    ``results`` are names of its results, in a tuple where it returns several; ``done`` are values that no
    later step needs.
    """

    target: str
    arguments: Mapping[str, Any]
    results: str | tuple[str, ...]
    done: tuple[str, ...] = ()


@dataclass(frozen=True)
class Graph:
    """What a program computes: of weights, by the names of values, and of inputs, in their order."""

    weights: Mapping[str, Weight]
    inputs: Mapping[str, TensorKind]
    steps: tuple[GraphNode, ...]
    output: str

    def __deepcopy__(self, memo: object) -> "Graph":
        return self


def parse_graph(text: bytes) -> Graph:
    """The graph of a JSON text.

    Raises `HddmError`, in one line, for a text of another form or version, an operator outside the closed
    list, arguments of other types than the operator's, a value that is not defined, and sizes beyond bounds.
    """
    return _Parser(parse_object(text, "its graph")).graph()


def _quoted(value: object) -> str:
    return one_line(repr(value), 80)


def _of(value: Any, key: str, kind: type | tuple[type, ...]) -> Any:
    """``value[key]``, which must be of this kind."""
    found = value.get(key) if isinstance(value, dict) else None
    is_bool = isinstance(found, bool) and kind is not bool
    if not isinstance(found, kind) or is_bool:
        raise HddmError(f"{key} is {_quoted(found)}")
    return found


def _only(value: Any, what: str) -> tuple[str, Any]:
    """The key and value of an object that has one of several."""
    if not isinstance(value, dict) or len(value) != 1:
        raise HddmError(f"{what} is {_quoted(value)}")
    return next(iter(value.items()))


def _name(value: Any) -> str:
    found: str = _of(value, "name", str)
    return found


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**63:
        raise HddmError(f"a whole number is {_quoted(value)}")
    return value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise HddmError(f"a truth value is {_quoted(value)}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 200:
        raise HddmError(f"a text is {_quoted(value)}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, str) and value in _FLOATS:
        return _FLOATS[value]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise HddmError(f"a number is {_quoted(value)}")
    return float(value)


def _items(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > _MOST_ITEMS:
        raise HddmError(f"a list is {_quoted(value)}")
    return value


def check_expression(text: object) -> None:
    """Refuse the text of a symbolic size unless it is made of the words of sums and products alone.

    hddm computes sizes by the graph's nodes, and never from such texts; a text of any other kind can only be
    meant for a loader that evaluates it.
    """
    is_known = isinstance(text, str) and len(text) <= _LONGEST_EXPRESSION
    if not is_known or _WORDS.sub("", str(text)):
        raise HddmError(f"the expression of a size is {_quoted(text)}")


class _Parser:
    """Reads a document part by part, and keeps what is defined so far."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        version = _of(content, "schema_version", dict)
        if _of(version, "major", int) != SCHEMA:
            raise HddmError(
                f"its schema has version {_quoted(version['major'])}, of {SCHEMA} alone"
            )
        module = _of(content, "graph_module", dict)
        self._graph = _of(module, "graph", dict)
        self._signature = _of(module, "signature", dict)
        self._kinds = _of(self._graph, "tensor_values", dict)
        self._tensors = set[str]()
        self._sizes = set[str]()

    def graph(self) -> Graph:
        nodes = _of(self._graph, "nodes", list)
        if len(nodes) > MOST_NODES or len(self._kinds) > MOST_VALUES:
            raise HddmError(f"it has {len(nodes)} nodes, of {MOST_NODES} at most")
        self._check_expressions()
        weights, inputs = self._inputs()
        steps = []
        for node in nodes:
            step = self._step(node)
            if step is not None:
                steps.append(step)
        output = self._output()
        return Graph(weights, inputs, _needed(steps, output), output)

    def _check_expressions(self) -> None:
        for kind in self._kinds.values():
            for key in ("sizes", "strides"):
                for size in _items(_of(kind, key, list)):
                    self._check_size(size)
            self._check_size(_of(kind, "storage_offset", dict))
        for key in ("sym_int_values", "sym_bool_values", "sym_float_values"):
            for value in (self._graph.get(key) or {}).values():
                self._check_size(value)

    def _check_size(self, size: Any) -> None:
        key, value = _only(size, "a size")
        if key == "as_expr":
            check_expression(_of(value, "expr_str", str))
        elif key == "as_int":
            _whole(value)
        elif key != "as_bool":
            raise HddmError(f"a size is {_quoted(size)}")

    def _inputs(self) -> tuple[dict[str, Weight], dict[str, TensorKind]]:
        weights, inputs = dict[str, Weight](), dict[str, TensorKind]()
        names = set[str]()
        for spec in _of(self._signature, "input_specs", list):
            key, content = _only(spec, "an input")
            if key == "user_input":
                kind, value = _only(_of(content, "arg", dict), "an input")
                if kind != "as_tensor":
                    raise HddmError(f"an input is {_quoted(content)}, and no tensor")
                name = self._defined(_name(value), self._tensors)
                inputs[name] = self._kind(name, has_batch=True)
                continue
            if key not in ("parameter", "buffer", "tensor_constant"):
                raise HddmError(f"an input is of the kind {_quoted(key)}")
            own = _of(content, f"{key}_name", str)
            name = self._defined(_name(_of(content, "arg", dict)), self._tensors)
            if re.fullmatch(r"\w{1,100}(\.\w{1,100}){0,50}", own) is None or own in names:
                raise HddmError(f"a weight is called {_quoted(own)}")
            names.add(own)
            weights[name] = Weight(own, self._kind(name), key == "parameter")
        return weights, inputs

    def _defined(self, name: str, known: set[str]) -> str:
        if name in self._tensors or name in self._sizes:
            raise HddmError(f"the value {_quoted(name)} is defined twice")
        known.add(name)
        return name

    def _kind(self, name: str, has_batch: bool = False) -> TensorKind:
        meta = self._kinds.get(name)
        sizes = list(_items(_of(meta, "sizes", list)))
        number = _of(meta, "dtype", int)
        if number not in _DTYPES:
            raise HddmError(f"the value {_quoted(name)} has dtype {_quoted(number)}")
        if has_batch:
            key, first = _only(sizes.pop(0) if sizes else None, "a batch")
            text = _of(first, "expr_str", str) if key == "as_expr" else ""
            if _BATCH.fullmatch(text) is None:
                raise HddmError(f"the input {_quoted(name)} has a batch that is not free")
        shape = []
        for size in sizes:
            key, value = _only(size, "a size")
            if key != "as_int" or not 0 <= _whole(value) < LARGEST_SIZE:
                raise HddmError(f"the value {_quoted(name)} has a size {_quoted(value)}")
            shape.append(value)
        if len(shape) > _DIMENSIONS or math.prod(shape) > LARGEST_SIZE:
            raise HddmError(f"the value {_quoted(name)} has the shape {_quoted(shape)}")
        return TensorKind(tuple(shape), _DTYPES[number])

    def _step(self, node: Any) -> GraphNode | None:
        target = _of(node, "target", str)
        if target in CHECKS:
            return None
        found = operator_of(target)
        if found is None:
            raise HddmError(f"the operator {_quoted(target)} is not one of those that hddm runs")
        arguments = dict[str, Any]()
        for one in _items(_of(node, "inputs", list)):
            name = _name(one)
            if name in arguments:
                raise HddmError(f"{target} has its argument {_quoted(name)} twice")
            type_ = "int" if found.is_of_sizes else found.types.get(name, "")
            arguments[name] = self._argument(_of(one, "arg", dict), type_, f"{target} {name}")
        problem = misuse(found, arguments)
        if problem is not None:
            raise HddmError(f"{target} {problem}")
        return GraphNode(target, arguments, self._results(node, target))

    def _argument(self, argument: Any, type_: str, where: str) -> Any:
        key, value = _only(argument, where)
        is_optional = type_.startswith("Optional[")
        plain = type_[len("Optional[") : -1] if is_optional else type_
        if key == "as_none":
            if not is_optional:
                raise HddmError(f"{where} is none")
            return None
        reader = _READERS.get(key)
        if reader is None or plain not in reader.types:
            raise HddmError(f"{where} is {_quoted(argument)}, and must be {one_line(type_, 40)}")
        return reader.read(self, value)

    def tensor(self, value: Any) -> Ref:
        name = _name(value)
        if name not in self._tensors:
            raise HddmError(f"the value {_quoted(name)} is used before it is defined")
        return Ref(name)

    def tensors(self, value: Any) -> tuple[Ref, ...]:
        return tuple(map(self.tensor, _items(value)))

    def optional_tensors(self, value: Any) -> tuple[Ref | None, ...]:
        found: list[Ref | None] = []
        for one in _items(value):
            key, content = _only(one, "a tensor")
            found.append(None if key == "as_none" else self.tensor(content))
        return tuple(found)

    def size(self, value: Any) -> int | Ref:
        key, content = _only(value, "a size")
        if key == "as_int":
            return _whole(content)
        if key != "as_name" or content not in self._sizes:
            raise HddmError(f"the size {_quoted(content)} is used before it is defined")
        return Ref(content)

    def _results(self, node: Any, target: str) -> str | tuple[str, ...]:
        outputs = _items(_of(node, "outputs", list))
        names = []
        for one in outputs:
            key, value = _only(one, f"a result of {target}")
            if key == "as_tensor":
                names.append(self._defined(_name(value), self._tensors))
            elif key in ("as_sym_int", "as_sym_bool") and len(outputs) == 1:
                return self._defined(_of(value, "as_name", str), self._sizes)
            elif key == "as_tensors" and len(outputs) == 1:
                listed = []
                for item in _items(value):
                    listed.append(self._defined(_name(item), self._tensors))
                return tuple(listed)
            else:
                raise HddmError(f"a result of {target} is {_quoted(one)}")
        if not names:
            raise HddmError(f"{target} has no result")
        return names[0] if len(names) == 1 else tuple(names)

    def _output(self) -> str:
        specs = _items(_of(self._signature, "output_specs", list))
        if len(specs) != 1:
            raise HddmError(
                f"it has {len(specs)} outputs, and an expert has one and changes nothing else"
            )
        key, content = _only(specs[0], "an output")
        kind, value = _only(_of(content, "arg", dict), "an output")
        if key != "user_output" or kind != "as_tensor":
            raise HddmError(f"its output is {_quoted(specs[0])}")
        return self.tensor(value).name


@dataclass(frozen=True)
class _Reader:
    """How an argument is read, and the types that it may have in an operator's schema."""

    types: frozenset[str]
    read: Callable[[_Parser, Any], Any]


def _reader(types: str, read: Callable[[_Parser, Any], Any]) -> _Reader:
    return _Reader(frozenset(types.split()), read)


def _plain(read: Callable[[Any], Any]) -> Callable[[_Parser, Any], Any]:
    return lambda parser, value: read(value)


def _several(read: Callable[[Any], Any]) -> Callable[[_Parser, Any], Any]:
    return lambda parser, value: tuple(map(read, _items(value)))


def _dtype(value: Any) -> torch.dtype:
    if _whole(value) not in _DTYPES:
        raise HddmError(f"a dtype is {_quoted(value)}")
    return _DTYPES[value]


def _memory_format(value: Any) -> torch.memory_format:
    if _whole(value) not in _FORMATS:
        raise HddmError(f"a memory format is {_quoted(value)}")
    return _FORMATS[value]


def _layout(value: Any) -> torch.layout:
    if value != _STRIDED:
        raise HddmError(f"a layout is {_quoted(value)}")
    return torch.strided


_READERS = {
    "as_tensor": _reader("Tensor", _Parser.tensor),
    "as_tensors": _reader("List[Tensor]", _Parser.tensors),
    "as_optional_tensors": _reader("List[Optional[Tensor]]", _Parser.optional_tensors),
    "as_int": _reader("int number float Tensor", _plain(_whole)),
    "as_ints": _reader("List[int]", _several(_whole)),
    "as_sym_int": _reader("int number Tensor", _Parser.size),
    "as_sym_ints": _reader(
        "List[int]", lambda parser, value: tuple(map(parser.size, _items(value)))
    ),
    "as_float": _reader("float number Tensor", _plain(_number)),
    "as_floats": _reader("List[float]", _several(_number)),
    "as_bool": _reader("bool number", _plain(_truth)),
    "as_bools": _reader("List[bool]", _several(_truth)),
    "as_string": _reader("str", _plain(_text)),
    "as_scalar_type": _reader("int", _plain(_dtype)),
    "as_memory_format": _reader("int", _plain(_memory_format)),
    "as_layout": _reader("int", _plain(_layout)),
    "as_device": _reader("Device", lambda parser, value: HERE),
}


def _needed(steps: Sequence[GraphNode], output: str) -> tuple[GraphNode, ...]:
    """The steps that the output depends on, each with the values that are no longer needed after it."""
    wanted = {output}
    kept = []
    for step in reversed(steps):
        results = {step.results} if isinstance(step.results, str) else set(step.results)
        if not results & wanted:
            continue
        used = set(references(step.arguments.values()))
        last = (used | results) - wanted
        wanted |= used
        kept.append(GraphNode(step.target, step.arguments, step.results, tuple(sorted(last))))
    return tuple(reversed(kept))


def references(values: Any) -> list[str]:
    """Names of the values that these arguments refer to."""
    found = []
    for one in values:
        if isinstance(one, Ref):
            found.append(one.name)
        elif isinstance(one, tuple):
            found += references(one)
    return found
