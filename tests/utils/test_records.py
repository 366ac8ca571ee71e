"""Records beside weights: nothing unknown is skipped, nothing missing is guessed."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from hddm.utils.errors import HddmError
from hddm.utils.records import Record, parse_record, read_record

KNOWN = "2.3"


class Part(Record):
    """A nested record."""

    colour: str


class Thing(Record):
    """A record with a format."""

    format: str
    steps: int
    parts: tuple[Part, ...] = ()


GOOD: dict[str, Any] = {"format": KNOWN, "steps": 3, "parts": [{"colour": "red"}]}


def _refusal(tmp_path: Path, content: dict[str, Any]) -> str:
    path = tmp_path / "thing.json"
    path.write_text(json.dumps(content))
    with pytest.raises(HddmError) as caught:
        read_record(path, Thing, KNOWN)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


@pytest.mark.parametrize("version", ["2.3", "2.0", "2.9", "1.0"])
def test_a_format_of_a_known_major_is_read(version: str, tmp_path: Path) -> None:
    path = tmp_path / "thing.json"
    path.write_text(json.dumps(GOOD | {"format": version}))
    assert read_record(path, Thing, KNOWN) == Thing(format=version, steps=3, parts=(Part(colour="red"),))


def test_a_newer_major_asks_for_an_upgrade_before_its_keys_are_judged(tmp_path: Path) -> None:
    message = _refusal(tmp_path, {"format": "3.0", "something_new": 1})
    assert "format 3.0 is newer than 2.3" in message
    assert "upgrade" in message


@pytest.mark.parametrize("version", [None, 2, "", "two", "-1.0"])
def test_a_record_without_format_version_is_refused(version: object, tmp_path: Path) -> None:
    assert "no format version" in _refusal(tmp_path, GOOD | {"format": version})


def test_an_unknown_key_is_named_with_the_nearest_known_one(tmp_path: Path) -> None:
    assert "unknown key 'step'; did you mean 'steps'?" in _refusal(tmp_path, GOOD | {"step": 1})


def test_a_misspelt_key_is_named_and_not_the_one_that_is_missing_for_it(tmp_path: Path) -> None:
    assert "unknown key 'stpes'; did you mean 'steps'?" in _refusal(tmp_path, {"format": KNOWN, "stpes": 3})


def test_an_unknown_key_like_no_other_is_named_alone(tmp_path: Path) -> None:
    message = _refusal(tmp_path, GOOD | {"zzz": 1})
    assert "unknown key 'zzz'" in message
    assert "did you mean" not in message


def test_a_nested_unknown_key_is_named_without_a_misleading_hint(tmp_path: Path) -> None:
    message = _refusal(tmp_path, GOOD | {"parts": [{"colour": "red", "s": 1}]})
    assert "unknown key 'parts.0.s'" in message
    assert "did you mean" not in message


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    message = _refusal(tmp_path, {"format": KNOWN})
    assert "'steps'" in message
    assert "required" in message


def test_an_ill_typed_key_is_named_with_its_value(tmp_path: Path) -> None:
    assert "'steps' (is 'many')" in _refusal(tmp_path, GOOD | {"steps": "many"})


def test_facts_cannot_be_changed() -> None:
    thing = parse_record(GOOD, Thing, "test")
    with pytest.raises(ValidationError):
        thing.steps = 4
