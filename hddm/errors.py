"""The exceptions for what a user can mend."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class HddmError(ValueError):
    """A failure that the caller can mend.

    The message is one line that names the file or option, the value and the remedy. The command
    line prints it without a traceback and exits with code 1. Names from foreign files may be part of it: what
    is not printable is shown as its escape.

    ``details`` are for what has several parts, such as all the differences between models: a line each,
    indented below the message, in ``str(error)`` too.
    """

    def __init__(self, message: str, details: Iterable[str] = ()) -> None:
        self.message = _printable(message)
        self.details = tuple(_printable(line) for line in details)
        super().__init__("\n  ".join((self.message, *self.details)))

    def __reduce__(self) -> tuple[type["HddmError"], tuple[str, tuple[str, ...]]]:
        # By its parts: the joined text would come out of another process as one line.
        return type(self), (self.message, self.details)


class UsageError(HddmError):
    """A call that asks for what cannot be, whatever is found: the command line exits with code 2."""

    exit_code = 2


@contextlib.contextmanager
def asked() -> Iterator[None]:
    """A block that looks at what a caller passes: an `HddmError` in it becomes a `UsageError`."""
    try:
        yield
    except HddmError as error:
        raise UsageError(error.message, error.details) from error


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown ``name``: the nearest known one, or nothing."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
