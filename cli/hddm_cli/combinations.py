"""Options that do not go together."""

import typer

from hddm.utils.errors import UsageError


def refuse_given(context: typer.Context, reason: str, *names: str) -> None:
    """Refuse each parameter called one of ``names`` that was given on the command line.

    Raises:
        UsageError: with ``reason``, naming the first of them.
    """
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"--{name.replace('_', '-')}: {reason}; drop one of the two")
