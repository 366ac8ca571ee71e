"""What a measurement finds: figures, each with its goal and a verdict."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MET, MISSED, MEASURED = "met", "missed", "measured"
UNJUDGED = ""
"""Verdict on a figure without a goal."""


@dataclass(frozen=True)
class Figure:
    """A measured value with its goal and the verdict, all in words but ``number``."""

    what: str
    value: str
    goal: str = ""
    verdict: str = UNJUDGED
    number: float | None = None

    @property
    def line(self) -> str:
        """The figure as a terminal shows it."""
        kind = "goal" if self.verdict else "beside"
        goal = f" ({kind}: {self.goal})" if self.goal else ""
        verdict = f": {self.verdict}" if self.verdict else ""
        return f"{self.what}: {self.value}{goal}{verdict}"


def at_most(what: str, number: float, limit: float, unit: str = "") -> Figure:
    """A figure that must not exceed ``limit``; NaN misses every goal."""
    verdict = MET if number <= limit else MISSED
    return Figure(what, f"{_shown(number)}{unit}", f"at most {limit:,g}{unit}", verdict, number)


def at_least(what: str, number: float, limit: float, unit: str = "") -> Figure:
    """A figure that must reach ``limit``; NaN misses every goal."""
    verdict = MET if number >= limit else MISSED
    return Figure(what, f"{_shown(number)}{unit}", f"at least {limit:,g}{unit}", verdict, number)


def holds(what: str, is_so: bool) -> Figure:
    """A statement that must be true."""
    return Figure(what, "yes" if is_so else "no", "yes", MET if is_so else MISSED)


def told(what: str, value: float | str, unit: str = "", goal: str = "") -> Figure:
    """A figure that nothing judges; ``goal`` says what it stands beside."""
    if isinstance(value, str):
        return Figure(what, value, goal)
    return Figure(what, f"{_shown(value)}{unit}", goal, number=value)


def _shown(number: float) -> str:
    """Three digits, or all before the point."""
    if not math.isfinite(number):
        return str(number)
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


@dataclass(frozen=True)
class Result:
    """What a measurement found.

    ``is_stand_in`` marks figures of tiny models, which say nothing about real ones. ``commit`` is that of a
    repository on a hub. ``pictures`` are files by caption.
    """

    figures: Sequence[Figure] = ()
    notes: Sequence[str] = ()
    is_stand_in: bool = False
    commit: str = ""
    pictures: Mapping[str, str] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        """Missed if one goal is missed, and measured if there is none."""
        verdicts = {one.verdict for one in self.figures}
        if MISSED in verdicts:
            return MISSED
        return MET if MET in verdicts else MEASURED
