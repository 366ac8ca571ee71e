"""Print the public surface as JSON: names and signatures of hddm, verbs and options of the command line.

Run it on two commits and compare: ``python -m benchmarks.surface > before.json``.
"""

import inspect
import json
from typing import Any

import typer
from typer.testing import CliRunner

import hddm
from hddm_cli.app import commands


def _methods(kind: type) -> dict[str, str]:
    """Signatures of a class: its constructor and its public methods and properties."""
    found = {"__init__": str(inspect.signature(kind))}
    for name, value in inspect.getmembers(kind):
        if not name.startswith("_") and any(
            name in one.__dict__ for one in kind.__mro__ if "hddm" in one.__module__
        ):
            found[name] = str(inspect.signature(value)) if callable(value) else "property"
    return found


def _names() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in hddm.__all__:
        value = getattr(hddm, name)
        if inspect.ismodule(value):
            public = sorted(
                one for one in dir(value) if one[0].isupper() or one == "from_diffusers"
            )
            found[name] = [
                one
                for one in public
                if getattr(getattr(value, one), "__module__", "").startswith("hddm")
            ]
        elif inspect.isclass(value):
            found[name] = _methods(value)
        else:
            found[name] = str(inspect.signature(value))
    return found


def _verbs(command: Any, name: str = "hddm") -> dict[str, Any]:
    """The help of every verb: its options with types, ranges and defaults."""
    if hasattr(command, "commands"):
        return {
            one: _verbs(verb, f"{name} {one}") for one, verb in sorted(command.commands.items())
        }
    return {"help": CliRunner().invoke(commands, [*name.split()[1:], "--help"]).stdout.splitlines()}


if __name__ == "__main__":
    surface = {"python": _names(), "command line": _verbs(typer.main.get_command(commands))}
    print(json.dumps(surface, indent=1, sort_keys=True))
