"""Command lines as data, which benchmarks plan and compare (`hddm.benchmark.lines`)."""

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import typer
from typer.models import ParameterInfo

from hddm.benchmark.lines import Line, RunCommand, Settings
from hddm.utils.errors import HddmError
from hddm_cli.app import commands, run_words, worded
from hddm_cli.options import READERS

_OWN = {"out", "overwrite", "resume", "dry_run"}
"""Options that a benchmark sets."""


class Lines:
    """The verbs of hddm, as `hddm.benchmark.lines.CommandLine`."""

    @property
    def run(self) -> RunCommand:
        """Runs a command line."""
        return run_words

    def read(self, words: Sequence[str]) -> Line:
        """Sort words by the parameters of their verb."""
        command, context, verb, rest = _found(words)
        with worded():
            given, left, order = command.make_parser(context).parse_args(args=rest)
        if left:
            raise HddmError(f"unexpected argument {left[0]}")
        if "help" in given:
            raise HddmError("--help: is no step; leave it out")
        for name in _OWN.intersection(given):
            raise HddmError(f"--{name}: is set by the benchmark; leave it out")
        found = {}
        # Arguments first; an option that is repeated is in the order several times.
        for param in sorted(order, key=lambda one: one.param_type_name != "argument"):
            group = _words(param, given[param.name])
            if group:
                found[param.name] = group
        return Line(verb, found)

    def settings(self, line: Line) -> Settings:
        """Parse a line as its verb does."""
        command, context, _, rest = _found(line.words)
        values: dict[str, Any] = {}
        with worded():
            given, _, _ = command.make_parser(context).parse_args(args=[*rest, "--out", "$out"])
            for param in command.params:
                if param.required or given.get(param.name) is not None:
                    values[param.name] = param.process_value(context, given.get(param.name))
            made_of = getattr(command.callback, "made_of", None)
            records = {} if made_of is None else made_of(values, values.get("config"))
        found = {}
        for param in command.params:
            found[param.name] = values.get(param.name, param.get_default(context))
        _check(command.callback, {**found, **records})
        for record in records.values():
            found |= dict(record)
        for name in _OWN:
            found.pop(name, None)
        return Settings(found, frozenset(_read(command.callback) & found.keys()))


LINES = Lines()


@functools.cache
def _root() -> Any:
    """All verbs, in a tree of its own, whose parameters are not looked up on the disk."""
    root: Any = typer.main.get_command(commands)
    waiting = [root]
    while waiting:
        command = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        for param in command.params:
            # They look for folders, which other steps write.
            param.callback = None
    return root


def _found(words: Sequence[str]) -> tuple[Any, Any, str, list[str]]:
    """The verb that words begin with: its command, its context, its name, and the rest of the words."""
    command, rest = _root(), list(words)
    names: list[str] = []
    context = command.context_class(command, info_name="hddm")
    while hasattr(command, "commands"):
        if not rest:
            raise HddmError(
                f"{' '.join(['hddm', *names])}: needs a command, such as {next(iter(command.commands))}"
            )
        with worded():
            name, command, rest = command.resolve_command(context, rest)
        context = command.context_class(command, info_name=name, parent=context)
        names.append(name)
    return command, context, " ".join(names), rest


def _check(callback: Any, values: Mapping[str, Any]) -> None:
    """Check the values of a verb's parameters together, as the verb does before it reads anything."""
    check = getattr(callback, "check", None)
    if check is not None:
        with worded():
            check(**{name: values[name] for name in inspect.signature(check).parameters})


def _words(param: Any, value: Any) -> tuple[str, ...]:
    """The words that give a parameter its ``value``, as the parser found it."""
    if value is None:
        return ()
    if param.param_type_name == "argument":
        return (value,) if isinstance(value, str) else tuple(value)
    if param.is_flag:
        names = param.opts if value else param.secondary_opts
        return (names[0],)
    words: list[str] = []
    for one in value if param.multiple else [value]:
        words.append(param.opts[0])
        words += [one] if isinstance(one, str) else one
    return tuple(words)


def _read(callback: Any) -> set[str]:
    """Parameters of a verb that are paths which it reads."""
    found = set()
    for name, parameter in inspect.signature(callback).parameters.items():
        for one in get_args(parameter.annotation):
            if isinstance(one, ParameterInfo) and one.callback in READERS:
                found.add(name)
    return found
