"""Records beside weights: validated JSON with a format version."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from hddm.errors import HddmError, did_you_mean
from hddm.files import LARGEST_JSON, read_json
from hddm.validation import words

OPTIONS = "options"
"""Where values come from that are given on the command line: errors name them as they are spelt there."""


class Facts(BaseModel):
    """Base of every record: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Record = TypeVar("Record", bound=Facts)


def read_facts(path: Path, record: type[Record], format_version: str, largest: int = LARGEST_JSON) -> Record:
    """The record in a JSON file.

    Raises:
        HddmError: in one line with file and key, for a missing file, a newer major format, or an unknown,
            missing or ill-typed key.
    """
    content = read_json(path, largest)
    check_format(content, format_version, path)
    return parse_facts(content, record, str(path))


def parse_facts(content: dict[str, Any], record: type[Record], origin: str) -> Record:
    """``content`` as a record; ``origin`` names its source in the error, or is `OPTIONS`."""
    try:
        return record.model_validate(content)
    except ValidationError as error:
        errors = error.errors()
        # A misspelt key is missing too, and its name as it stands says more.
        first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
        if origin == OPTIONS:
            raise HddmError(_of_options(first, record.model_fields)) from error
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            # A nested key has its likes in another record than this one.
            known = record.model_fields if len(first["loc"]) == 1 else ()
            raise HddmError(f"{origin}: unknown key {key!r}{did_you_mean(key, known)}") from error
        value = "" if first["type"] == "missing" else f" (is {first['input']!r})"
        # What is wrong with several values together is said of none.
        place = f"key {key!r}{value}: " if key else ""
        raise HddmError(f"{origin}: {place}{words(first)}") from error


def _of_options(problem: ErrorDetails, names: Iterable[str]) -> str:
    """A problem of a record whose keys are options, the options spelt as they are given."""
    if not problem["loc"]:
        text = words(problem)
        for name in names:
            # Without an underscore it may be a word like any other.
            if "_" in name or text.startswith(f"{name} "):
                text = re.sub(rf"\b{name}\b", _option(name), text)
        return text
    value = problem["input"]
    given = " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
    option = _option(str(problem["loc"][0]))
    if problem["type"] == "missing":
        return f"{option} {words(problem)}"
    return f"{option} {given}: {words(problem)}"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_format(content: dict[str, Any], known: str, path: Path) -> None:
    """Refuse a missing format version or one of a newer major."""
    version = content.get("format")
    if not isinstance(version, str) or not version.split(".")[0].isdecimal():
        raise HddmError(f"{path}: has no format version; was it written by hddm?")
    if int(version.split(".")[0]) > int(known.split(".")[0]):
        raise HddmError(f"{path}: format {version} is newer than {known}; upgrade hddm-diffusion")
