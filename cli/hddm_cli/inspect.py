"""hddm inspect: an artefact as JSON for scripts, or as lines for a reader."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hddm.settings import Reading
from hddm.utils.hub import Wanted, local
from hddm_cli.options import AsJson, NamedArgument, Without, opens_experts
from hddm_cli.usage import say

_OF_CONVERSIONS = ("weights", "num_heads", "sample_size", "preset", "tokenizer")
"""Options that state what a source may not state: a conversion takes them, and this command does not."""


@opens_experts
def inspect(
    path: Annotated[
        Path, NamedArgument(help="Folder or file written by hddm, images or a checkpoint.")
    ],
    settings: Annotated[Reading, Without(_OF_CONVERSIONS)],
    as_json: AsJson = False,
) -> None:
    """Show what a folder or checkpoint is.

    This includes its objective, noise schedule, shard, size, licence and provenance.
    """
    from hddm.inspection.folders import inspected

    path = local(path, Wanted(settings.variant))
    description = inspected(path, settings.allow_pickle, settings.variant)
    if as_json:
        typer.echo(json.dumps(description, indent=2))
    else:
        say("\n".join(plain_lines(description)))


_LONGEST = 100
"""Characters of a value that stands on the line of its name."""
_MOST_ITEMS = 20
"""Items of a list that are shown."""


def plain_lines(values: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """``name: value`` for each of ``values``, with lines below it where the value is long.

    Shapes are written as ``3 × 32 × 32`` and ranges as ``0 … 1``; of long lists the beginning is shown.
    """
    for name, value in values.items():
        line = _line(name, value)
        if line is not None:
            yield f"{indent}{name}: {line}"
            continue
        yield f"{indent}{name}:"
        if isinstance(value, Mapping):
            yield from plain_lines(value, f"{indent}  ")
        else:
            for one in value[:_MOST_ITEMS]:
                yield f"{indent}  {_item(one)}"
            if len(value) > _MOST_ITEMS:
                yield f"{indent}  {_rest(value)}"


def _line(name: str, value: Any) -> str | None:
    """A value on one line, None where it is too long for that."""
    if isinstance(value, Mapping):
        parts = []
        for key, one in value.items():
            text = _line(key, one)
            if not text:
                return None
            parts.append(f"{key}={text}")
        line = ", ".join(parts) or "none"
        return line if len(line) <= _LONGEST else None
    if isinstance(value, list | tuple):
        return _list(name, value)
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and name.startswith(("parameters", "images"))
    ):
        return f"{value:,}"
    return _scalar(value)


def _list(name: str, values: Sequence[Any]) -> str | None:
    if any(isinstance(value, Mapping | list | tuple) for value in values):
        return None
    shown = [_scalar(value) for value in values]
    if name.endswith("shape"):
        return " × ".join(shown)
    if name.endswith("range"):
        return " … ".join(shown)
    if any(len(one) > _LONGEST // 3 for one in shown) and len(shown) > 1:
        return None
    parts = shown[:_MOST_ITEMS]
    if len(shown) > _MOST_ITEMS:
        parts.append(_rest(shown))
    return ", ".join(parts) or "none"


def _item(value: Any) -> str:
    """An item of a list on a line of its own, however long."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_item(one)}" for key, one in value.items())
    return ", ".join(map(_item, value)) if isinstance(value, list | tuple) else _scalar(value)


def _scalar(value: Any) -> str:
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _rest(values: Sequence[Any]) -> str:
    return f"… ({len(values)} in all; --json shows them)"
