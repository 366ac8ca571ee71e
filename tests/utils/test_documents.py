"""JSON and YAML: read as they are meant, and refused in one line where later code would fail."""

import math
from typing import Any

import pytest

from hddm.utils.documents import parse_json, parse_object, parse_yaml
from tests.artefacts import refusal


@pytest.mark.parametrize(
    ("text", "value"),
    [
        # Where YAML 1.1 has eight, words, booleans, a number of base 60, a date and a number.
        *(
            ("010", 10),
            ("1e-3", 0.001),
            ("no", "no"),
            ("yes", "yes"),
            ("On", "On"),
            ("1:30", "1:30"),
        ),
        *(("2026-01-01", "2026-01-01"), ("1_000", "1_000"), ("0b11", "0b11"), ("=", "=")),
        *(("0o17", 15), ("0x1F", 31), ("-3", -3), ("+.5", 0.5), ("1.", 1.0), ("-.inf", -math.inf)),
        *(
            ("true", True),
            ("False", False),
            ("tRue", "tRue"),
            ("null", None),
            ("~", None),
            ("", None),
        ),
        *(("'010'", "010"), ("!!str 3", "3"), ("!!float 3", 3.0), ("[1, no]", [1, "no"])),
    ],
)
def test_yaml_is_read_by_the_core_schema_of_1_2(text: str, value: object) -> None:
    found = parse_yaml(f"key: {text}\n".encode(), "f")["key"]
    assert (found, type(found)) == (value, type(value))


def test_a_merge_key_is_a_key_like_others_and_keys_are_text() -> None:
    content = parse_yaml(b"b: {<<: {x: 1}}\n7: no\n0x10: {true: 1}", "f")
    assert content == {"b": {"<<": {"x": 1}}, "7": "no", "0x10": {"true": 1}}


_BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{k}: &a{k} [{','.join([f'*a{k - 1}'] * 9)}]\n" for k in range(1, 30)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_BOMB, "line 2, column 10: aliases"),
        ("a: &a [*a]", "line 1, column 8: aliases"),
        ("a: " + "[" * 2000, "nested too deeply"),
        ("a: " + "[" * 80 + "]" * 80, "nested more than 64 levels deep"),
        ("- " * 2000, "nested too deeply"),
        ("a: " + "9" * 100, "a whole number of 100 digits"),
        ("a: 0x" + "f" * 6000, "a whole number of 6002 digits"),
        ('a: {b: ["\\ud800"]}', "not Unicode: half of a surrogate pair"),
        ("a: 1\nb: {c: 1, c: 2}", "line 2, column 11: key 'c' twice"),
        ("? [1]\n: 2", "line 1, column 3: expected a scalar node"),
        ("a: !!int x", "invalid literal for int() with base 10: 'x'"),
        ("a: !!bool x", "'x'"),
        ("a: !!binary aGk=", "Object of type bytes is not JSON serializable"),
        (
            "a: !!python/object:os.system x",
            "line 1, column 4: could not determine a constructor for the tag",
        ),
        ('a: "\\UFFFFFFFF"', ""),
    ],
    ids=range(15),
)
def test_yaml_that_means_harm_is_refused_in_one_line(text: str, message: str) -> None:
    _is_refused(lambda: parse_yaml(text.encode(), "f"), f"is not YAML ({message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "key 'c' twice"),
        ('{"a": ["\\udfff"]}', "not Unicode: half of a surrogate pair"),
        ('{"\\ud800": 1}', "not Unicode: half of a surrogate pair"),
        ('{"a": ' + "9" * 10000 + "}", "a whole number of 10000 digits"),
        ('{"a": -' + "9" * 100 + "}", "a whole number of 101 digits"),
        ('{"a": ' * 100000, "nested too deeply"),
        ('{"a": ' + "[" * 80 + "]" * 80 + "}", "nested more than 64 levels deep"),
        ("", "Expecting value: line 1 column 1 (char 0)"),
        (b"\xff{}", "'utf-8' codec can't decode byte 0xff"),
    ],
    ids=range(9),
)
def test_json_that_later_code_cannot_take_is_refused_in_one_line(
    text: str | bytes, message: str
) -> None:
    _is_refused(lambda: parse_object(text, "f"), f"cannot be read as JSON ({message}")


def test_a_document_without_keys_is_refused() -> None:
    _is_refused(lambda: parse_object("[1]", "f"), "holds no JSON object, but [1]")
    _is_refused(lambda: parse_yaml(b"- a", "f"), "holds no settings")


def _is_refused(read: Any, message: str) -> None:
    assert refusal(read).startswith(f"f: {message}")


def test_json_keeps_numbers_and_texts_that_can_be_written() -> None:
    text = (
        '{"a": "\\ud83d\\ude00", "tokens": 1000000000000000019884624838656, "b": [-Infinity, 1.5]}'
    )
    found = parse_json(text, "f")
    assert found == {"a": "😀", "tokens": 1000000000000000019884624838656, "b": [-math.inf, 1.5]}
