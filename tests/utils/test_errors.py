"""Errors: one line, or a line a part; what is not printable never reaches a terminal."""

import pickle

from hddm.utils.errors import HddmError


def test_an_error_is_its_message() -> None:
    error = HddmError("file.json: no such file")
    assert str(error) == error.message == "file.json: no such file"
    assert error.details == ()


def test_details_are_lines_of_their_own_below_the_message() -> None:
    error = HddmError("these parts do not fit:", ["a: one", "b: two"])
    assert str(error) == "these parts do not fit:\n  a: one\n  b: two"


def test_what_is_not_printable_is_escaped_in_both() -> None:
    error = HddmError("a\nb", ["c\x1b[2J", "d\ne\u202e"])
    assert str(error) == "a\\nb\n  c\\x1b[2J\n  d\\ne\\u202e"


def test_an_error_comes_out_of_another_process_as_it_was() -> None:
    error = pickle.loads(pickle.dumps(HddmError("first", ["second"])))
    assert isinstance(error, HddmError)
    assert (error.message, error.details, str(error)) == ("first", ("second",), "first\n  second")
