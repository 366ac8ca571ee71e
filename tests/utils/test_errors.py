"""Errors: one line, or a line a part; what is not printable never reaches a terminal."""

import pickle

import pytest

from hddm.utils.errors import HddmError


@pytest.mark.parametrize(
    ("message", "details", "text"),
    [
        ("file.json: no such file", [], "file.json: no such file"),
        ("these do not fit:", ["a: one", "b: two"], "these do not fit:\n  a: one\n  b: two"),
        ("a\nb", ["c\x1b[2J", "d\ne\u202e"], "a\\nb\n  c\\x1b[2J\n  d\\ne\\u202e"),
    ],
)
def test_an_error_is_its_message_and_details_also_out_of_another_process(
    message: str, details: list[str], text: str
) -> None:
    error = HddmError(message, details)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, HddmError)
    assert str(error) == str(again) == text
    assert (again.message, again.details) == (error.message, error.details)
    assert len(error.details) == len(details)
