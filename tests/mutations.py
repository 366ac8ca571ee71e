"""Files spoiled on purpose: one value, key, tensor or byte of a valid file, changed where it hurts.

JSON, YAML and the headers of safetensors are changed as trees, so that most of the file stays valid and the
change reaches the code behind the parser. Anything else loses or changes bytes.
"""

import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TREES = {".json", ".jsonl", ".yaml", ".safetensors"}
"""Endings of files that are changed as trees."""


@dataclass(frozen=True)
class Raw:
    """A value as it stands in the text, which Python's own types may not have."""

    text: str


class Pairs(list[tuple[Any, Any]]):
    """An object as pairs, since a key may stand in it twice."""


_NUMBERS = (0, 1, -1, 2, 3, 7, 0.5, -0.5, 1e-300, 1e300, -1e300, 10**6, 10**30, -(10**30))
_BOUNDS = (2**31, -(2**31) - 1, 2**62, 2**63, -(2**63) - 1, 2**64)
_WORDS = (
    "",
    "x",
    "0",
    "1",
    "-1",
    "1e5",
    "nan",
    "inf",
    "true",
    "٣",
    "float64",
    "x" * 300,
    "x" * 10000,
)
_PATHS = ("../x", "/etc/passwd", ".", "..", "a/../../b", "C:\\x", "~", "con")
_SIGNS = ("x\n", "x\ny", "\0", "x\0y", "\x1b[31m", "|", "`", "{{x}}", "%s", "\u202e", "😀")
_LISTS = ([], [[]], [None], [0], [-1], ["x"], [[0, 1], [2]], [1] * 300)
_OBJECTS = (Pairs(), Pairs([("x", 1)]), Pairs([("", None)]))
_TEXTS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-0.0",
    "01",
    "",
    "9" * 100,
    "9" * 10000,
    "1" + "0" * 400,
)
_TEXTS += ('"\\ud800"', '"x\\udfffy"', '{"x":1,"x":2}', '{"a":' * 2000)
_TEXTS += ("[" * 50 + "]" * 50, "[" * 200 + "]" * 200, "[" * 100000)
_ODD: tuple[Any, ...] = (None, True, False, *_NUMBERS, *_BOUNDS, *_WORDS, *_PATHS, *_SIGNS)
_ODD += ("<script>alert(1)</script>", *_LISTS, *_OBJECTS, *map(Raw, _TEXTS))
_YAML = (
    "&a [*a]",
    "*a",
    "!!binary x",
    "!!python/object:os.x {}",
    "yes",
    "No",
    "010",
    "1:30",
    "<<",
    "0x1F",
)
_ODD_YAML = tuple(map(Raw, _YAML))
_ODD_KEYS = ("x", "", "0", "../x", "a\nb", "\0", "x" * 300, "_class_name", "format", "<b>|")
_ODD_KEYS += (Raw('"\\ud800"'), Raw("1"))


def spoil(name: str, content: bytes, rng: random.Random) -> bytes:
    """``content`` of a file called ``name`` with one to three changes."""
    suffix = Path(name).suffix
    tree = None
    if suffix in TREES and rng.random() < 0.85:
        tree = _parsed(suffix, content)
    if tree is None:
        return _with_other_bytes(content, rng)
    root, written = tree
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        root = _changed(root, rng, _ODD + _ODD_YAML if suffix == ".yaml" else _ODD)
    return written(root)


def _parsed(suffix: str, content: bytes) -> tuple[Any, Callable[[Any], bytes]] | None:
    """The tree in a file, and how it is written back; None where there is none."""
    try:
        if suffix == ".safetensors":
            (size,) = struct.unpack("<Q", content[:8])
            header, data = _loaded(content[8 : 8 + size]), content[8 + size :]
            return header, lambda tree: _with_header(_dumped(tree), data)
        if suffix == ".jsonl":
            lines = [_loaded(line) for line in content.splitlines() if line.strip()]
            return lines, lambda tree: b"\n".join(
                map(_dumped, tree if type(tree) is list else [tree])
            )
        if suffix == ".yaml":
            # JSON is YAML; the text itself is changed by its bytes.
            from hddm.utils.documents import parse_yaml

            return _loaded(json.dumps(parse_yaml(content, "valid")).encode()), _dumped
        return _loaded(content), _dumped
    except (ValueError, struct.error):
        return None


def _loaded(text: bytes) -> Any:
    return json.loads(text, object_pairs_hook=Pairs)


def _dumped(tree: Any) -> bytes:
    return _text(tree).encode("utf-8", "surrogatepass")


def _text(tree: Any) -> str:
    if isinstance(tree, Raw):
        return tree.text
    if isinstance(tree, Pairs):
        return "{" + ", ".join(f"{_text(key)}: {_text(value)}" for key, value in tree) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(_text, tree)) + "]"
    return json.dumps(tree)


def _with_header(header: bytes, data: bytes) -> bytes:
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + data


Place = tuple[int, ...]


def _places(tree: Any, place: Place = ()) -> Iterator[Place]:
    yield place
    if isinstance(tree, Pairs):
        for index, (_, value) in enumerate(tree):
            yield from _places(value, (*place, index))
    elif isinstance(tree, list):
        # One of many alike is enough.
        for index, value in enumerate(tree[:20]):
            yield from _places(value, (*place, index))


def _at(tree: Any, place: Place) -> Any:
    for index in place:
        tree = tree[index][1] if isinstance(tree, Pairs) else tree[index]
    return tree


def _with(tree: Any, place: Place, value: Any) -> Any:
    """The tree with another value at ``place``; parts beside it are shared."""
    if not place:
        return value
    first, *rest = place
    new = type(tree)(tree)
    if isinstance(tree, Pairs):
        new[first] = (tree[first][0], _with(tree[first][1], tuple(rest), value))
    else:
        new[first] = _with(tree[first], tuple(rest), value)
    return new


def _without(tree: Any, place: Place) -> Any:
    *above, last = place
    holder = _at(tree, tuple(above))
    new = type(holder)(holder)
    del new[last]
    return _with(tree, tuple(above), new)


def _changed(tree: Any, rng: random.Random, odd: tuple[Any, ...]) -> Any:
    """The tree with one change at a place of chance; near the root as often as deep below."""
    places = list(_places(tree))
    shallow = [place for place in places if len(place) <= 1]
    place = rng.choice(shallow if rng.random() < 0.4 else places)
    value = _at(tree, place)
    kind = rng.random()
    if kind < 0.5 or not place:
        if not place and isinstance(value, Pairs) and rng.random() < 0.8:
            return _with(tree, place, Pairs([*value, (rng.choice(_ODD_KEYS), rng.choice(odd))]))
        return _with(tree, place, _near(value, rng) if rng.random() < 0.3 else rng.choice(odd))
    if kind < 0.65:
        return _without(tree, place)
    if kind < 0.72:
        return _with(tree, place, [value] if rng.random() < 0.5 else Pairs([("x", value)]))
    *above, last = place
    holder = _at(tree, tuple(above))
    new = type(holder)(holder)
    if kind < 0.8:
        new.insert(last, holder[last])
    elif kind < 0.9 and isinstance(holder, Pairs):
        new[last] = (rng.choice(_ODD_KEYS), holder[last][1])
    else:
        other = rng.randrange(len(holder))
        if isinstance(holder, Pairs):
            new[last] = (holder[last][0], holder[other][1])
            new[other] = (holder[other][0], holder[last][1])
        else:
            new[last], new[other] = holder[other], holder[last]
    return _with(tree, tuple(above), new)


def _near(value: Any, rng: random.Random) -> Any:
    """A value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return rng.choice(
            (-value, value + 1, value - 1, value * 2, value * 1000, value / 2, str(value), [value])
        )
    if isinstance(value, str):
        if value.startswith("{"):
            # JSON in a text, as the metadata of safetensors has it.
            try:
                return _text(_changed(_loaded(value.encode()), rng, _ODD))
            except ValueError:
                return value[1:]
        return rng.choice(
            (
                value + "x",
                value[:-1],
                value.upper(),
                value * 2,
                f" {value}",
                value.replace("/", "/../"),
            )
        )
    if isinstance(value, Pairs):
        return Pairs(value[: len(value) // 2])
    if isinstance(value, list):
        return rng.choice((value[: len(value) // 2], value * 2, value[::-1], [value]))
    return rng.choice(_ODD)


def _with_other_bytes(content: bytes, rng: random.Random) -> bytes:
    """``content`` cut, with a bit or a run of bytes changed, or with bytes too many."""
    kind, size = rng.random(), len(content)
    if kind < 0.25:
        return content[: rng.randrange(size + 1)]
    spoiled = bytearray(content)
    # Headers are at one end or at the other.
    reach = min(size, rng.choice((16, 128, 1024, size)))
    start = rng.randrange(reach) if reach else 0
    if rng.random() < 0.3:
        start = size - 1 - start
    if kind < 0.5 and size:
        for _ in range(rng.choice((1, 1, 4, 32))):
            spoiled[min(size - 1, start + rng.randrange(16))] ^= 1 << rng.randrange(8)
    elif kind < 0.75:
        length = rng.choice((1, 4, 8, 64))
        spoiled[start : start + length] = rng.choice((b"\x00", b"\xff", b"9", b"[")) * length
    elif kind < 0.9:
        spoiled[start:start] = rng.randbytes(rng.choice((1, 7, 200)))
    else:
        del spoiled[start : start + rng.choice((1, 8, 100))]
    return bytes(spoiled)
