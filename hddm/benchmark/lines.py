"""A step's command line as data: the words of each argument and option, and what its verb makes of them.

The command line is above the library, so what a benchmark asks of it is a protocol, `CommandLine`, which
``hddm_cli.lines`` fulfils.
"""

import re
import shlex
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from hddm.utils.errors import HddmError

RunCommand = Callable[[list[str]], None]
"""Runs a command line of hddm, without ``hddm``; importable by name."""
_NAME = re.compile(r"\$([A-Za-z_][\w-]*)")


@dataclass(frozen=True)
class Line:
    """A command line: its verb, and the words that it gives each parameter of it.

    The words of an option begin with its name, as in ``--steps 4``. Arguments come before options.
    """

    verb: str
    given: Mapping[str, tuple[str, ...]]

    @property
    def words(self) -> list[str]:
        """The whole line, without ``hddm``."""
        words = self.verb.split()
        for group in self.given.values():
            words += group
        return words

    def or_else(self, other: "Line") -> "Line":
        """This line, and of ``other`` the parameters that this one does not give."""
        return Line(self.verb, {**self.given, **other.without(self.given).given})

    def without(self, names: Container[str]) -> "Line":
        """This line without what it gives the parameters ``names``."""
        return Line(
            self.verb, {name: words for name, words in self.given.items() if name not in names}
        )

    def with_options(self, values: Mapping[str, str]) -> "Line":
        """This line with ``values`` of options, by parameter, in place of its own."""
        given = {}
        for name, value in values.items():
            given[name] = (f"--{name.replace('_', '-')}", value)
        return Line(self.verb, {**self.without(values).given, **given})

    def placed(self, places: Mapping[str, str]) -> "Line":
        """This line with ``places`` for names."""
        given = {}
        for name, words in self.given.items():
            given[name] = tuple(placed(word, places) for word in words)
        return Line(self.verb, given)


class Settings(NamedTuple):
    """What a verb gets of a line."""

    values: Mapping[str, Any]
    """Value of each parameter that a benchmark does not set, defaults included; a path is a `Path`.

    What a file of settings (``config``) says is among them.
    """
    inputs: frozenset[str]
    """Parameters whose paths are read."""


class CommandLine(Protocol):
    """The verbs of hddm as the command line knows them."""

    @property
    def run(self) -> RunCommand:
        """Runs a command line."""

    def read(self, words: Sequence[str]) -> Line:
        """Sort words by the parameters of their verb; raises `HddmError` for unknown ones.

        Required parameters may be missing.
        """

    def settings(self, line: Line) -> Settings:
        """Parse a line as its verb does.

        Nothing is run, and no folder need exist yet. Raises `HddmError` for missing parameters, and for
        values that cannot be, alone or together.
        """


def split(text: str) -> list[str]:
    """Words of a text, as a shell splits it; raises `HddmError` for an open quote."""
    try:
        return shlex.split(text)
    except ValueError:
        raise HddmError(f"{text!r}: a quote is not closed") from None


def names_in(text: str) -> list[str]:
    """Names that occur as ``$name``."""
    return _NAME.findall(text)


def placed(text: str, places: Mapping[str, str]) -> str:
    """``text`` with ``places`` for its names; other names stay."""
    return _NAME.sub(lambda found: places.get(found[1], found[0]), text)
