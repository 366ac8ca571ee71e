"""Errors: one line, or a line a part; what is not printable never reaches a terminal."""

import pickle

import pytest

from hddm.utils.errors import HddmError, one_line
from hddm_cli.usage import as_typed


@pytest.mark.parametrize(
    ("message", "details", "text"),
    [
        ("file.json: no such file", [], "file.json: no such file"),
        ("these do not fit:", ["a: one", "b: two"], "these do not fit:\n  a: one\n  b: two"),
        ("a\nb", ["c\x1b[2J", "d\ne\u202e"], "a\\nb\n  c\\x1b[2J\n  d\\ne\\u202e"),
    ],
)
def test_an_error_is_the_same_out_of_another_process(message: str, details: list[str], text: str) -> None:
    error = HddmError(message, details)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, HddmError)
    assert str(error) == str(again) == text
    assert (again.message, again.details) == (error.message, error.details)
    assert len(error.details) == len(details)


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("out exists: pass `overwrite=True`", "out exists: pass --overwrite"),
        ("`max_memory` of 2 MB: hddm assemble A --vae B", "--max-memory of 2 MB: hddm assemble A --vae B"),
        ("a `b c` d", "a `b c` d"),
    ],
)
def test_the_command_line_prints_arguments_as_options(text: str, typed: str) -> None:
    assert as_typed(text) == typed


def test_backticks_of_other_libraries_are_not_arguments() -> None:
    assert as_typed(one_line(ValueError("set `weights_only`"))) == "set 'weights_only'"
