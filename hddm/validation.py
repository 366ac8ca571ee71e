"""What pydantic finds wrong with a value, in the words that all our messages use."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hddm.errors import did_you_mean

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_WORDS = {
    "missing": "is required",
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be {ge:g} or more",
    "less_than": "must be below {lt:g}",
    "less_than_equal": "must be {le:g} or less",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
}


def words(problem: "ErrorDetails") -> str:
    """What is wrong with a value, to stand after its name: ``must be 1 or more``.

    An error of our own is taken as it is, without the value that it begins with.
    """
    context = problem.get("ctx", {})
    if problem["type"] in ("literal_error", "enum"):
        return choose(str(problem["input"]), re.findall(r"'([^']*)'", context["expected"]))
    if problem["type"] == "value_error":
        said = re.escape(repr(problem["input"]))
        return re.sub(rf"^unknown [a-z ]+ {said}: ", "", str(context["error"]))
    if problem["type"] in _WORDS:
        return _WORDS[problem["type"]].format(**context)
    return problem["msg"][:1].lower() + problem["msg"][1:]


def choose(value: str, known: Sequence[str]) -> str:
    """What may stand in place of an unknown ``value``, and the nearest to it."""
    return f"choose one of {', '.join(known)}{did_you_mean(value, known)}"
