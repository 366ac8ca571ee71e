"""What two starts of a run say differently, and what was changed of it on its way.

A record of today's settings alone would say them of all steps; so every change is kept beside them:

    {"step": 1000, "key": "learning_rate", "was": 0.0015, "is": 0.0003}

The steps up to ``step`` were made with what ``was``, those after it, up to the next change of ``key``, with
what ``is``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Change = dict[str, Any]
"""A record of one change, as plain values of JSON."""
NOT_RECORDED = "not recorded"
"""Stands for what an older version did not write down."""
# What says what is computed; the rest of a run's record is how it is kept, and its history.
_COMPARED = ("settings", "data", "environment")


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What two records of a run say differently of what it computes: was and is, by dotted key."""
    old, new = ({part: record.get(part, {}) for part in _COMPARED} for record in (before, now))
    flat_old, flat_new = _flat(old), _flat(new)
    return {
        key: (flat_old.get(key, NOT_RECORDED), flat_new.get(key, NOT_RECORDED))
        for key in dict.fromkeys([*flat_old, *flat_new])
        if flat_old.get(key) != flat_new.get(key)
    }


def told(key: str, was: Any, now: Any) -> str:
    """A difference in a line."""
    before, after = (value if value is NOT_RECORDED else repr(value) for value in (was, now))
    return f"{key}: was {before}, is {after}"


def with_changes(before: Sequence[Change], new: Sequence[Change], step: int) -> list[Change]:
    """The changes of a run that goes on from ``step``, those that are ``new`` there among them.

    What was computed beyond ``step`` is computed again: changes that were made there count from ``step`` on.
    What is changed back before a step was made, and what is changed before the first, is no change.

    Args:
        before: the changes so far, in the order in which they were made.
        new: those of this start.
        step: steps done, of the checkpoint that the run goes on from.
    """
    merged: dict[tuple[str, int], Change] = {}
    for one in (*before, *new):
        place = one["key"], min(one["step"], step)
        was = merged.get(place, one)["was"]
        merged[place] = {"step": place[1], "key": one["key"], "was": was, "is": one["is"]}
    return [one for one in merged.values() if one["step"] > 0 and one["was"] != one["is"]]


def value_at(step: int, key: str, today: Any, changes: Sequence[Change]) -> Any:
    """What setting ``key``, now ``today``, was in ``step``, which counts from 1."""
    return next((one["was"] for one in changes if one["key"] == key and step <= one["step"]), today)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat
