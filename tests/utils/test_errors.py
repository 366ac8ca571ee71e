"""Errors: one line, or a line a part; what is not printable never reaches a terminal."""

import pickle
import subprocess
import sys

import pytest

from hddm.utils.errors import HddmError, on_command_line
from hddm.utils.processes import at


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


def test_messages_name_options_on_the_command_line_and_arguments_in_python() -> None:
    error = HddmError(
        "out exists: pass --overwrite", ["--max-memory of 2 MB: hddm assemble A --vae B, or --out"]
    )
    assert (
        str(error) == "out exists: pass overwrite=True\n  max_memory of 2 MB: hddm assemble A --vae B, or out"
    )
    written = "out exists: pass --overwrite\n  --max-memory of 2 MB: hddm assemble A --vae B, or --out"
    with on_command_line():
        assert str(error) == written
        said = subprocess.run([sys.executable, "-c", _SAYS], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "pass --overwrite"
    assert "overwrite=True" in str(error)


_SAYS = "from hddm.utils.errors import HddmError; print(HddmError('pass --overwrite'))"


def test_an_error_of_a_step_begins_with_its_name() -> None:
    with on_command_line(), pytest.raises(HddmError) as raised, at("step 'old'"):
        raise HddmError("try a lower --learning-rate", ["drop --class-conditional"])
    assert raised.value.message == "step 'old': try a lower --learning-rate"
    assert raised.value.details == ("drop --class-conditional",)
