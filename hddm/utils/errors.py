"""Errors that users can fix, in one line: the file or option, the value, the remedy."""

import contextlib
import difflib
import importlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


class HddmError(ValueError):
    """A failure that the caller can fix.

    The message is one line that names the file or argument, the value and the remedy. Arguments stand in
    backticks, `` `steps` `` or `` `overwrite=True` ``; the command line prints them as its options, without a
    traceback, and exits with code 1. Unprintable characters, as in names from foreign files, are escaped.
    ``details`` are further lines, indented below the message.
    """

    def __init__(self, message: str, details: Iterable[str] = ()) -> None:
        self.message = _printable(message)
        self.details = tuple(_printable(line) for line in details)
        super().__init__("\n  ".join((self.message, *self.details)))

    def __reduce__(self) -> Any:
        # The joined text alone would arrive from another process as one line, and notes not at all.
        return type(self), (self.message, self.details), vars(self)


class UsageError(HddmError):
    """A call with conflicting options, whatever the files hold; the command line exits with code 2."""

    exit_code = 2


class Unstated(HddmError):
    """A value that neither a file nor the caller states; ``option`` is the argument that states it.

    The message is ``origin``, the file, and ``text``, which names the option.
    """

    def __init__(self, origin: object, text: str, option: str) -> None:
        super().__init__(f"{origin}: {text}")
        self.origin, self.text, self.option = str(origin), text, option

    def __reduce__(self) -> Any:
        return type(self), (self.origin, self.text, self.option)


class Stopped(HddmError):
    """Raised once work is saved after a signal; ``exit_code`` is 128 plus the signal's number."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number, self.exit_code = number, 128 + number

    def __reduce__(self) -> Any:
        return type(self), (self.message, self.number)


@contextlib.contextmanager
def errors_as(kind: type[HddmError], option: str | None = None) -> Iterator[None]:
    """Raise an `HddmError` of this block as one of ``kind``, such as a `UsageError` for wrong arguments.

    Its message then begins with ``option``, an argument and its value, or a step. `Stopped` stays as it is.
    """
    try:
        yield
    except Stopped:
        raise
    except HddmError as error:
        named = error.message if option is None else f"{option}: {error.message}"
        raise kind(named, error.details) from error


def optional(module: str, user: str, extra: str) -> Any:
    """Import an optional dependency; if missing, the `HddmError` says how to install it for ``user``."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise HddmError(
            f"{user} needs {name}: pip install '.[{extra}]' in a checkout of hddm"
        ) from error


_LONGEST_NAME = 100


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """End of a message about an unknown ``name``: the nearest known one, or nothing."""
    # Comparing takes the product of the lengths, and no name has so many letters.
    nearest = difflib.get_close_matches(name[:_LONGEST_NAME], list(known), n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def one_line(error: object, most: int = 200) -> str:
    """Text of a library's error, or of any value, shortened to part of one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, Exception):
        # Backticks mark our own arguments.
        text = text.replace("`", "'")
    return text if len(text) <= most else text[: most - 1] + "…"


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


TO_ONE_SIZE = "hddm encode --resolution N brings all images of a shard or partition to one size"
"""The remedy for images of several sizes."""


def an(name: str) -> str:
    """The name of a class with its article, as it is said aloud: ``a ValueError``, ``an OSError``."""
    # A name that begins with two capitals is spelled out: its first letter is said as "ef", "el", "es", ….
    vowels = "AEFHILMNORSX" if name[:2].isupper() else "AEIOaeio"
    return f"an {name}" if name[:1] in vowels else f"a {name}"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """``1 image``, ``2 images``; ``plural`` if it is not the noun with an s."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def in_words(names: Sequence[str]) -> str:
    """``vae``, ``vae and tokenizer``, ``vae, text_encoder and tokenizer``."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def shown(names: Sequence[str], most: int = 20) -> list[str]:
    """First ``most`` names, and the number of the rest."""
    more = [f"… and {len(names) - most} more"] if len(names) > most else []
    return [*names[:most], *more]


_UNITS = (("kB", 1e3, 0), ("MB", 1e6, 1), ("GB", 1e9, 2))
"""Units of sizes, their bytes, and the digits that are written after the point."""


def size_text(size: float, further: int = 0) -> str:
    """Format as ``120 kB``, ``45.3 MB`` or ``3.21 GB``, with so many ``further`` digits."""
    for unit, number, digits in _UNITS:
        shown = round(size / number, digits + further)
        if shown < 1000 or unit == "GB":
            break
    return f"{shown:,.{digits + further}f} {unit}"


def sizes_apart(one: int, other: int) -> tuple[str, str]:
    """Two sizes as `size_text`, with as many digits as show that they differ."""
    further = 0
    while one != other and size_text(one, further) == size_text(other, further):
        further += 1
    return size_text(one, further), size_text(other, further)


_WORDS = {
    "missing": "is required",
    "greater_than": "must be above {gt:.10g}",
    "greater_than_equal": "must be {ge:.10g} or more",
    "less_than": "must be below {lt:.10g}",
    "less_than_equal": "must be {le:.10g} or less",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("byte_size", "byte_size_unit"), "is not an amount of memory; write it as 6GB"),
    "byte_size_bare": "names no unit, and would be {number} bytes; write {number}GB or {number}MB",
}


def words(problem: "ErrorDetails") -> str:
    """Words for an invalid value, to follow its name: ``must be 1 or more``.

    An error of our own is used as it is, without its leading value.
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
    """List the known values for an unknown ``value``, and suggest the nearest."""
    return f"choose one of {', '.join(known)}{did_you_mean(value, known)}"
