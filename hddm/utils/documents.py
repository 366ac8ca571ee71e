"""JSON and YAML as plain values, which nothing downstream has to fear.

A document is refused if it has a key twice, if it is nested too deeply to be walked, if a whole number
is too large for a machine, if a text is not Unicode (half of a surrogate pair, which can be neither written
nor printed), and, of YAML, if aliases make it much larger than its file.

YAML is read by the core schema of YAML 1.2.2 (https://yaml.org/spec/1.2.2/#103-core-schema): `010` is ten,
`1e-3` a number, `true` and `false` alone are booleans, and `no`, `12:30` and dates are text. There are no
tags but this schema's own and no merge key `<<`.
"""

import json
import re
from collections.abc import Hashable, Iterable
from typing import Any, ClassVar

import yaml

from hddm.utils.errors import HddmError, one_line

DEEPEST = 64
"""Levels of lists and objects; a config has under ten."""
LARGEST_INTEGER = 10**38
"""Operations of a training come near 10^25, and tokenizers without a limit say 10^30."""

_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(text: bytes | str, origin: str) -> Any:
    """Plain values of a JSON text; ``origin`` names its source in errors.

    NaN and Infinity, which are no JSON, are read as Python and diffusers write them. Raises `HddmError` for
    anything else that is no JSON, and for what the module's docstring names.
    """
    try:
        content = json.loads(text.decode() if isinstance(text, bytes) else text, object_pairs_hook=_once)
    except RecursionError as error:
        raise HddmError(f"{origin}: {_TOO_DEEP}") from error
    except ValueError as error:
        # Of a number with too many digits, Python also tells how to allow it.
        reason = one_line(error).partition("; use sys.")[0]
        raise HddmError(f"{origin}: cannot be read as JSON ({reason}); fetch or write it again") from error
    _refuse_odd(content, origin, len(text))
    return content


def parse_object(text: bytes | str, origin: str) -> dict[str, Any]:
    """The object of a JSON text; raises as `parse_json`, and for anything but an object."""
    content = parse_json(text, origin)
    if not isinstance(content, dict):
        kinds = {list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
        kind = kinds.get(type(content), "a number")
        raise HddmError(f"{origin}: holds no JSON object, but {kind}; fetch or write it again")
    return content


def parse_yaml(text: bytes, origin: str, has_numbers: bool = False) -> dict[str, Any]:
    """The mapping of a YAML text, an empty one for an empty text; ``has_numbers`` allows these as keys.

    Raises `HddmError`, with line and column, for what is no YAML or no mapping, for a key that is no text,
    and for what the module's docstring names.
    """
    try:
        content = yaml.load(text.decode(), Loader=_CoreLoader)
    except RecursionError as error:
        raise HddmError(f"{origin}: {_TOO_DEEP}") from error
    # KeyError is a word that a user tagged as a boolean.
    except (yaml.YAMLError, ValueError, KeyError, OverflowError) as error:
        raise HddmError(f"{origin}: is not YAML ({_reason(error)}); correct it") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise HddmError(f"{origin}: holds no settings; write them as 'key: value', one per line")
    _refuse_odd(content, origin, len(text), (str, int) if has_numbers else str)
    return content


def is_text(value: str) -> bool:
    """True for a text that can be written, without halves of surrogate pairs."""
    return value.isascii() or not _SURROGATE.search(value)


_TOO_DEEP = f"is nested more than {DEEPEST} levels deep; write it flatter"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, of which Python would keep the last of equal keys."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {one_line(next(key for key in found if keys.count(key) > 1), 60)!r} twice")
    return found


def _refuse_odd(content: Any, origin: str, size: int, keys: type | tuple[type, ...] = str) -> None:
    """Refuse values that `json` and `yaml` read and later code cannot take; the error names their key."""
    todo: list[tuple[tuple[Any, ...], Any]] = [((), [content])]
    values = 0
    while todo:
        place, container = todo.pop()
        is_mapping = isinstance(container, dict)
        values += len(container)
        # Every value takes a byte of the text at least, unless an alias repeats it.
        if values > size + 1:
            raise HddmError(f"{origin}: its aliases stand for more values than it has bytes; write them out")
        items: Iterable[tuple[Any, Any]] = container.items() if is_mapping else enumerate(container)
        for key, value in items:
            wrong = None
            if is_mapping and (not isinstance(key, keys) or isinstance(key, bool)):
                wrong = "is a key that is not text; put it in quotes"
            elif is_mapping and not is_text(str(key)):
                wrong = "is a key that is not Unicode; write it again"
            elif isinstance(value, dict | list):
                if len(place) > DEEPEST:
                    raise HddmError(f"{origin}: {_TOO_DEEP}")
                todo.append(((*place, key), value))
            elif isinstance(value, str):
                wrong = (
                    None if is_text(value) else "is not Unicode (half of a surrogate pair); write it again"
                )
            elif isinstance(value, int) and abs(value) >= LARGEST_INTEGER:
                # Longer ones have no decimal text: Python limits the conversion.
                digits = int(abs(value).bit_length() * 0.30103) + 1
                wrong = f"is a whole number of {digits} digits; write a smaller one"
            if wrong:
                named = one_line(".".join(map(str, (*place, key)[1:])), 100)
                raise HddmError(f"{origin}: key {named!r} {wrong}")


def _reason(error: Exception) -> str:
    """Describe an error in a text and its place, without the name that YAML makes up for the text."""
    mark = getattr(error, "problem_mark", None)
    if isinstance(error, yaml.MarkedYAMLError) and mark is not None:
        what = ", ".join(filter(None, (error.context, error.problem)))
        return f"line {mark.line + 1}, column {mark.column + 1}: {one_line(what)}"
    return one_line(getattr(error, "reason", error)).partition("; use sys.")[0]


_TAG = "tag:yaml.org,2002:"


class _CoreLoader(yaml.SafeLoader):
    """Loader of YAML 1.2's core schema, which refuses a repeated key; PyYAML would take the last one.

    PyYAML's own loaders read YAML 1.1. The tables are empty, so that only what is added below is resolved and
    constructed; a merge key, which 1.2 lacks, is a key like others.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - of an instance, in the base's stub

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable) or key in seen:
                is_text = isinstance(key, Hashable)
                what = f"key {one_line(key, 60)!r} twice" if is_text else "a key is not text"
                raise yaml.constructor.ConstructorError(None, None, what, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))

    yaml_constructors: ClassVar[dict[Any, Any]] = {
        f"{_TAG}null": yaml.SafeLoader.construct_yaml_null,
        f"{_TAG}bool": yaml.SafeLoader.construct_yaml_bool,
        f"{_TAG}int": construct_yaml_int,
        f"{_TAG}float": yaml.SafeLoader.construct_yaml_float,
        f"{_TAG}str": yaml.SafeLoader.construct_yaml_str,
        f"{_TAG}seq": yaml.SafeLoader.construct_yaml_seq,
        f"{_TAG}map": yaml.SafeLoader.construct_yaml_map,
        None: yaml.SafeLoader.construct_undefined,
    }


# ``$`` would leave out a final line end.
_NULL = re.compile(r"(?:null|Null|NULL|~|)\Z")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
_INT = re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z")
_FLOAT = re.compile(
    r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
)

for _name, _pattern, _first in (
    ("null", _NULL, ["n", "N", "~", ""]),
    ("bool", _BOOL, list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
):
    _CoreLoader.add_implicit_resolver(_TAG + _name, _pattern, _first)
