"""The one exception for what a user can mend."""

import difflib
from collections.abc import Iterable


class HddmError(ValueError):
    """A failure that the caller can mend.

    The message is one line that names the file or option, the value and the remedy. The command
    line prints it without a traceback and exits with code 1. Names from foreign files may be part of it: what
    is not printable is shown as its escape.
    """

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in message))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown ``name``: the nearest known one, or nothing."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""
