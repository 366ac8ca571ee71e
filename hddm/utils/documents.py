"""JSON and YAML as plain values that can be walked, printed and written again.

A document is refused if it has a key twice, if it is nested too deeply, if a whole number is too large, and
if a text is not Unicode (half of a surrogate pair, which can be neither written nor printed).

YAML is read by the core schema of YAML 1.2.2 (https://yaml.org/spec/1.2.2/#103-core-schema): `010` is ten,
`1e-3` a number, `true` and `false` alone are booleans, and `no`, `12:30` and dates are text. Keys are text
(`1` too), and there are no merge keys (`<<`) and no aliases (`*name`).
"""

import json
import re
from typing import Any

import yaml

from hddm.utils.errors import HddmError, one_line

DEEPEST = 64
"""Levels of lists and objects; a config has under ten."""
MOST_DIGITS = 38
"""Operations of a training come near 10^25, and tokenizers without a limit say 10^30."""


def parse_json(text: bytes | str, origin: str) -> Any:
    """Plain values of a JSON text; ``origin`` names its source in errors.

    NaN and Infinity, which are no JSON, are read as Python and diffusers write them. Raises `HddmError` for
    anything else that is no JSON, and for what the module's docstring names.
    """
    try:
        decoded = text.decode() if isinstance(text, bytes) else text
        content = json.loads(decoded, object_pairs_hook=_object, parse_int=_whole)
        _check(content)
    except (ValueError, RecursionError) as error:
        raise HddmError(f"{origin}: cannot be read as JSON ({_reason(error)})") from error
    return content


def parse_object(text: bytes | str, origin: str) -> dict[str, Any]:
    """The object of a JSON text; raises as `parse_json`, and for anything but an object."""
    content = parse_json(text, origin)
    if not isinstance(content, dict):
        raise HddmError(f"{origin}: holds no JSON object, but {one_line(json.dumps(content), 40)}")
    return content


def parse_yaml(text: bytes, origin: str) -> dict[str, Any]:
    """The mapping of a YAML text, an empty one for an empty text.

    Raises `HddmError`, with line and column where known, for what is no YAML or no mapping, and for what the
    module's docstring names.
    """
    try:
        content = yaml.load(text.decode(), Loader=_CoreLoader)
        _check(content)
    # KeyError is a word tagged as a boolean, TypeError a value tagged as a kind that JSON lacks.
    except (
        yaml.YAMLError,
        ValueError,
        KeyError,
        TypeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise HddmError(f"{origin}: is not YAML ({_reason(error)}); correct it") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise HddmError(f"{origin}: holds no settings; write them as 'key: value', one per line")
    return content


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, of which Python would keep the last of equal keys."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise ValueError(f"key {one_line(twice, 60)!r} twice")
    return found


def _whole(text: str, base: int = 10) -> int:
    if len(text) > MOST_DIGITS + 1:
        raise ValueError(f"a whole number of {len(text)} digits")
    return int(text, base)


def _check(content: Any) -> None:
    """Raise ValueError for values that later code cannot walk, print or write."""
    level, depth = [content], 0
    while True:
        containers = [one for one in level if isinstance(one, dict | list)]
        if not containers:
            break
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"nested more than {DEEPEST} levels deep")
        level = []
        for one in containers:
            level += one.values() if isinstance(one, dict) else one
    json.dumps(content, ensure_ascii=False).encode()


def _reason(error: Exception) -> str:
    """Describe an error in a text and its place, without the name that YAML makes up for the text."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark
        if mark is not None:
            what = ", ".join(filter(None, (error.context, error.problem)))
            return f"line {mark.line + 1}, column {mark.column + 1}: {one_line(what)}"
    if isinstance(error, UnicodeEncodeError):
        return "not Unicode: half of a surrogate pair"
    return "nested too deeply" if isinstance(error, RecursionError) else one_line(error)


_TAG = "tag:yaml.org,2002:"


class _CoreLoader(yaml.SafeLoader):
    """Loader of YAML 1.2's core schema; PyYAML's own read YAML 1.1, and take the last of equal keys."""

    # Only what is added below is resolved.
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - of an instance, in the base's stub

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(
                None, None, "aliases (*) are not read; write it out", mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(self.construct_scalar(key_node))
            if key in found:
                what = f"key {one_line(key, 60)!r} twice"
                raise yaml.constructor.ConstructorError(None, None, what, key_node.start_mark)
            found[key] = self.construct_object(value_node, deep=deep)
        return found

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        return _whole(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


_FRACTION = r"(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
_CoreLoader.add_constructor(f"{_TAG}int", _CoreLoader.construct_yaml_int)
# ``$`` would leave out a final line end.
for _name, _pattern, _first in (
    ("null", r"(?:null|Null|NULL|~|)\Z", ["n", "N", "~", ""]),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)\Z", list("tTfF")),
    ("int", r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z", list("-+0123456789")),
    (
        "float",
        rf"(?:[-+]?(?:{_FRACTION}|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN))\Z",
        list("-+.0123456789"),
    ),
):
    _CoreLoader.add_implicit_resolver(_TAG + _name, re.compile(_pattern), _first)
