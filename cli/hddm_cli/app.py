"""The command line: registers the verbs, runs commands, and words their errors."""

import contextlib
import functools
import logging
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module, metadata
from typing import Annotated, Any

import typer

from hddm.utils.errors import HddmError
from hddm.utils.files import FULL
from hddm.utils.processes import Interrupted, interruptible, is_first
from hddm.utils.progress import Startup
from hddm_cli import usage
from hddm_cli.options import add
from hddm_cli.usage import as_typed, say

commands = typer.Typer(
    name="hddm",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Tables of rich cut the names of options on a narrow terminal.
    rich_markup_mode=None,
)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"hddm {metadata.version('hddm-diffusion')}")
        raise typer.Exit


@commands.callback()
def hddm(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; works with any verb.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train diffusion experts separately and combine them into one model."""


GROUPS = ("data", "train")
"""Modules with several verbs, whose ``group`` holds them."""
VERBS = (
    "quickstart benchmark partition encode convert calibrate describe verify assemble merge distill"
)
VERBS += " sample play serve evaluate compare push inspect"
"""Modules with one verb, the function of the same name, in the order of the help."""

for name in GROUPS:
    commands.add_typer(import_module(f"hddm_cli.{name}").group, name=name)
for name in VERBS.split():
    add(commands, getattr(import_module(f"hddm_cli.{name}"), name))


@functools.cache
def tree() -> Any:
    """All verbs as click's commands, which are made once a process."""
    return typer.main.get_command(commands)


def app() -> None:
    """Run the command line; exit 0 on success, 1 for a failed run, 2 for wrong usage.

    A run that a signal stopped exits with 128 plus the signal's number: 130, 138 or 143.

    ``--debug`` anywhere shows the traceback of a failure.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Line("hddm: %(message)s"))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("hddm").setLevel(logging.INFO if is_first() else logging.WARNING)
    debug = "--debug" in sys.argv
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    warnings.showwarning = _show_warning
    try:
        with interruptible(), Startup(" ".join(["hddm", *arguments[:1]])):
            sys.exit(tree()(args=arguments, prog_name="hddm", standalone_mode=False))
    except typer.Abort:
        sys.exit(130)
    except Interrupted as stopped:
        say(f"hddm: {stopped}; nothing half-written is left", err=True)
        sys.exit(128 + stopped.number)
    except Exception as error:
        _refuse(error, debug)


def _refuse(error: Any, debug: bool) -> None:
    """Print the error in one line and exit; with ``debug`` raise it again."""
    # No arguments at all: the error carries the help.
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        wrong_usage = usage.wording(error)
        if wrong_usage is None and debug:
            raise error
        typer.echo(f"hddm: {as_typed(wrong_usage) if wrong_usage else _message(error)}", err=True)
    sys.exit(getattr(error, "exit_code", 1))


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        # Backticks of other libraries are not ours.
        return as_typed(text) if record.name.partition(".")[0] == "hddm" else text


def _show_warning(
    message: Warning | str, category: type[Warning], *where: object, **more: object
) -> None:
    # Deprecations of other libraries are for developers, who run the tests.
    if issubclass(category, UserWarning):
        say(f"hddm: warning: {message}", err=True)


def _message(error: Exception) -> str:
    """Message and details of an error that a user can mend; one line with the class of any other."""
    # A module that is not loaded cannot have raised its error; safetensors has its own for a full disk.
    of_disks = getattr(sys.modules.get("safetensors"), "SafetensorError", OSError)
    if not isinstance(error, (OSError, HddmError, of_disks)):
        return f"unexpected {type(error).__name__}: {_one_line(error)} (--debug shows where)"
    if isinstance(error, OSError) and error.strerror:
        place = error.filename2 or error.filename or "a file, or the output"
        remedy = "free some space" if error.errno in FULL else "name another path"
        return _one_line(f"{place}: {error.strerror}; {remedy}")
    details = getattr(error, "details", ())
    return as_typed("\n  ".join((_one_line(getattr(error, "message", error)), *details)))


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def run_words(words: list[str]) -> None:
    """Run a command line of hddm, without ``hddm``; wrong usage raises `HddmError`."""
    with worded():
        tree()(args=words, prog_name="hddm", standalone_mode=False)


@contextlib.contextmanager
def worded() -> Iterator[None]:
    """Block in which wrong usage is an `HddmError`, which can be sent to another process."""
    try:
        yield
    except HddmError:
        raise
    except Exception as error:
        wrong = usage.wording(error)
        if wrong is None:
            raise
        raise HddmError(wrong) from error
