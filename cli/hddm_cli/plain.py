"""Plain values as lines for a reader; what scripts read is JSON."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

WIDTH = 100
"""Characters of what stands on the line of its name; more goes below it."""
MOST = 20
"""Items of a list that are told."""


def plain_lines(facts: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """``name: value`` for each of ``facts``, with lines below it where the value is long.

    Shapes are told as ``3 × 32 × 32`` and ranges as ``0 … 1``; of long lists the beginning is told.
    """
    for name, value in facts.items():
        told = _told(name, value)
        if told is not None:
            yield f"{indent}{name}: {told}"
            continue
        yield f"{indent}{name}:"
        if isinstance(value, Mapping):
            yield from plain_lines(value, f"{indent}  ")
        else:
            yield from (f"{indent}  {_item(one)}" for one in value[:MOST])
            if len(value) > MOST:
                yield f"{indent}  {_rest(value)}"


def _told(name: str, value: Any) -> str | None:
    """A value on one line, None where it is too long for that."""
    if isinstance(value, Mapping):
        pairs = [(key, _told(key, one)) for key, one in value.items()]
        line = ", ".join(f"{key}={told}" for key, told in pairs)
        return (line or "none") if len(line) <= WIDTH and all(told for _, told in pairs) else None
    if isinstance(value, list | tuple):
        return _list(name, value)
    if isinstance(value, int) and not isinstance(value, bool) and name.startswith(("parameters", "images")):
        return f"{value:,}"
    return _scalar(value)


def _list(name: str, values: Sequence[Any]) -> str | None:
    if any(isinstance(value, Mapping | list | tuple) for value in values):
        return None
    told = [_scalar(value) for value in values]
    if name.endswith("shape"):
        return " × ".join(told)
    if name.endswith("range"):
        return " … ".join(told)
    if any(len(one) > WIDTH // 3 for one in told) and len(told) > 1:
        return None
    return ", ".join([*told[:MOST], *([_rest(told)] if len(told) > MOST else [])]) or "none"


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
    return f"… ({len(values)} in all; --json tells them)"
