"""Command lines that a benchmark runs: checked before any of them runs, and run in worker processes."""

import contextlib
from collections.abc import Iterator
from typing import Any

from hddm.utils.errors import HddmError
from hddm_cli import usage


def run_words(words: list[str]) -> None:
    """Run a command line of hddm, without ``hddm``; wrong usage raises `HddmError`."""
    from hddm_cli.app import commands

    with _worded():
        commands(args=words, prog_name="hddm", standalone_mode=False)


def check_words(words: list[str]) -> None:
    """Raise `HddmError` for a command line with an unknown verb or option, or a value that cannot be.

    Nothing is run, and folders need not exist yet.
    """
    from typer.main import get_command

    from hddm_cli.app import commands

    command: Any = get_command(commands)
    context, rest = command.context_class(command, info_name="hddm"), list(words)
    with _worded():
        while hasattr(command, "commands"):
            name, command, rest = command.resolve_command(context, rest)
            context = command.context_class(command, info_name=name, parent=context)
        given, left, _ = command.make_parser(context).parse_args(args=rest)
        if left:
            raise HddmError(f"unexpected argument {left[0]}")
        values = {}
        for param in command.params:
            # They look for folders, which other steps write.
            param.callback = None
            if param.required or param.name in given:
                values[param.name] = param.process_value(context, given.get(param.name))
        if hasattr(command.callback, "made_of"):
            command.callback.made_of(values)


@contextlib.contextmanager
def _worded() -> Iterator[None]:
    """Block in which wrong usage is an `HddmError`, which can be sent to another process."""
    try:
        yield
    except HddmError:
        raise
    except Exception as error:
        if (wrong := usage.wording(error)) is None:
            raise
        raise HddmError(wrong) from error
