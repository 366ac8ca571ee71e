"""Records beside weights: nothing unknown is skipped, nothing missing is guessed; errors take one line."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

import hddm as library
from hddm.utils.errors import HddmError
from hddm.utils.records import FolderManifest, Record, parse_record, read_record
from tests.artefacts import refusal

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
NO_VERSION = "has no format version; was it written by hddm?"


@pytest.mark.parametrize("version", ["2.3", "2.9", "1.0"])
def test_a_format_of_a_known_major_is_read(version: str, tmp_path: Path) -> None:
    path = tmp_path / "thing.json"
    path.write_text(json.dumps(GOOD | {"format": version}))
    assert read_record(path, Thing, KNOWN) == Thing(
        format=version, steps=3, parts=(Part(colour="red"),)
    )


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (GOOD | {"step": 1}, "unknown key 'step'; did you mean 'steps'?"),
        # Not the key that is missing for it.
        ({"format": KNOWN, "stpes": 3}, "unknown key 'stpes'; did you mean 'steps'?"),
        (GOOD | {"zzz": 1}, "unknown key 'zzz'"),
        # Its likes are in another record.
        (GOOD | {"parts": [{"colour": "red", "s": 1}]}, "unknown key 'parts.0.s'"),
        ({"format": KNOWN}, "key 'steps': is required"),
        (GOOD | {"steps": "many"}, "key 'steps' (is 'many'): must be a whole number"),
        (
            {"format": "3.0", "something_new": 1},
            "format 3.0 is newer than 2.3; upgrade hddm-diffusion",
        ),
        *((GOOD | {"format": one}, NO_VERSION) for one in (None, "two", "-1.0")),
    ],
    ids=str,
)
def test_an_odd_record_is_refused_by_file_and_key(
    content: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "thing.json"
    path.write_text(json.dumps(content))
    assert refusal(read_record, path, Thing, KNOWN) == f"{path}: {problem}"


@pytest.mark.parametrize(
    ("message", "details", "text"),
    [
        ("file.json: no such file", [], "file.json: no such file"),
        ("these do not fit:", ["a: one", "b: two"], "these do not fit:\n  a: one\n  b: two"),
        ("a\nb", ["c\x1b[2J", "d\ne\u202e"], "a\\nb\n  c\\x1b[2J\n  d\\ne\\u202e"),
    ],
)
def test_an_error_is_the_same_out_of_another_process(
    message: str, details: list[str], text: str
) -> None:
    error = HddmError(message, details)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, HddmError)
    assert str(error) == str(again) == text
    assert (again.message, again.details) == (error.message, error.details)
    assert len(error.details) == len(details)


def test_no_field_answers_with_a_regular_expression() -> None:
    """A field with a pattern is refused with that pattern, which nobody can read."""
    package = Path(library.__file__).parent
    for path in package.rglob("*.py"):
        assert "pattern=" not in path.read_text(), path


@pytest.mark.parametrize("text", ["", "0" * 63, "A" * 64, "0" * 64 + "\n"])
def test_what_is_no_hash_is_told_what_a_hash_looks_like(text: str) -> None:
    content = {"format": "1.0", "files": {"a": text}}
    assert "is no SHA-256, which has 64 digits" in refusal(
        parse_record, content, FolderManifest, "it"
    )
