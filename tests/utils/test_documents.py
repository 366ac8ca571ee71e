"""JSON and YAML: read as they are meant, and refused in one line where later code would fail."""

import math
from typing import Any

import pytest

from hddm.utils.documents import parse_json, parse_object, parse_yaml
from hddm.utils.errors import HddmError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        # Where YAML 1.1 has eight, words, booleans, a number of base 60, a date and a number.
        *(("010", 10), ("1e-3", 0.001), ("no", "no"), ("yes", "yes"), ("On", "On"), ("1:30", "1:30")),
        *(("2026-01-01", "2026-01-01"), ("1_000", "1_000"), ("0b11", "0b11"), ("=", "=")),
        *(("0o17", 15), ("0x1F", 31), ("-3", -3), ("+.5", 0.5), ("1.", 1.0), ("-.inf", -math.inf)),
        *(("true", True), ("False", False), ("tRue", "tRue"), ("null", None), ("~", None), ("", None)),
        *(("'010'", "010"), ("!!str 3", "3"), ("!!float 3", 3.0), ("[1, no]", [1, "no"])),
    ],
)
def test_yaml_is_read_by_the_core_schema_of_1_2(text: str, value: object) -> None:
    found = parse_yaml(f"key: {text}\n".encode(), "f")["key"]
    assert (found, type(found)) == (value, type(value))


def test_a_merge_key_is_a_key_like_others_and_an_alias_repeats_its_value() -> None:
    content = parse_yaml(b"a: &one {x: 1}\nb: {<<: *one}\nc: *one", "f")
    assert content == {"a": {"x": 1}, "b": {"<<": {"x": 1}}, "c": {"x": 1}}


_BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{k}: &a{k} [{','.join([f'*a{k - 1}'] * 9)}]\n" for k in range(1, 30)
)
_DEEP = "is nested more than 64 levels deep; write it flatter"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_BOMB, "its aliases stand for more values than it has bytes; write them out"),
        ("a: &a [*a]", "its aliases stand for more values than it has bytes; write them out"),
        ("a: " + "[" * 5000, _DEEP),
        ("a: " + "[" * 80 + "]" * 80, _DEEP),
        ("- " * 5000, _DEEP),
        ("a: " + "9" * 5000, "is not YAML (Exceeds the limit (4300 digits) for integer string conversion: "),
        ("a: " + "9" * 100, "key 'a' is a whole number of 101 digits; write a smaller one"),
        ("a: 0x" + "f" * 6000, "key 'a' is a whole number of 7225 digits; write a smaller one"),
        ('a: {b: ["\\ud800"]}', "key 'a.b.0' is not Unicode (half of a surrogate pair); write it again"),
        ("a: 1\nb: {c: 1, c: 2}", "is not YAML (line 2, column 11: key 'c' twice); correct it"),
        ("1: 2", "key '1' is a key that is not text; put it in quotes"),
        ("? [1]\n: 2", "is not YAML (line 1, column 3: a key is not text); correct it"),
        ("a: !!int x", "is not YAML (invalid literal for int() with base 10: 'x'); correct it"),
        ("a: !!bool x", "is not YAML ('x'); correct it"),
        ("a: !!binary x", "is not YAML (line 1, column 4: could not determine a constructor for the tag "),
        ('a: "\\UFFFFFFFF"', "is not YAML ("),
        ("- a", "holds no settings; write them as 'key: value', one per line"),
    ],
    ids=range(17),
)
def test_yaml_that_means_harm_is_refused_in_one_line(text: str, message: str) -> None:
    _is_refused(lambda: parse_yaml(text.encode(), "f"), message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"a": 1, "b": {"c": 1, "c": 2}}',
            "cannot be read as JSON (key 'c' twice); fetch or write it again",
        ),
        ('{"a": ["\\udfff"]}', "key 'a.0' is not Unicode (half of a surrogate pair); write it again"),
        ('{"\\ud800": 1}', r"key '\ud800' is a key that is not Unicode; write it again"),
        (
            '{"a": ' + "9" * 10000 + "}",
            "cannot be read as JSON (Exceeds the limit (4300 digits) for integer ",
        ),
        ('{"a": -' + "9" * 100 + "}", "key 'a' is a whole number of 101 digits; write a smaller one"),
        ('{"a": ' * 100000, _DEEP),
        ('{"a": ' + "[" * 80 + "]" * 80 + "}", _DEEP),
        ("[1]", "holds no JSON object, but a list; fetch or write it again"),
        ("", "cannot be read as JSON (Expecting value: line 1 column 1 (char 0)); fetch or write it again"),
        (b"\xff{}", "cannot be read as JSON ('utf-8' codec can't decode byte 0xff"),
    ],
    ids=range(10),
)
def test_json_that_later_code_cannot_take_is_refused_in_one_line(text: str | bytes, message: str) -> None:
    _is_refused(lambda: parse_object(text, "f"), message)


def _is_refused(read: Any, message: str) -> None:
    with pytest.raises(HddmError) as caught:
        read()
    assert str(caught.value).startswith(f"f: {message}")
    assert "\n" not in str(caught.value)
    assert "sys." not in str(caught.value)


def test_json_keeps_numbers_and_texts_that_can_be_written() -> None:
    text = '{"a": "\\ud83d\\ude00", "tokens": 1000000000000000019884624838656, "b": [-Infinity, 1.5]}'
    found = parse_json(text, "f")
    assert found == {"a": "😀", "tokens": 1000000000000000019884624838656, "b": [-math.inf, 1.5]}
