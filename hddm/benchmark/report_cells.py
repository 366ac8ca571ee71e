"""Cells of the report's tables: what they show and what they are sorted by."""

from collections.abc import Sequence
from dataclasses import dataclass

from hddm.benchmark.numbers import number, scientific
from hddm.benchmark.results import Figure, Row, figure

_NONE = "–"


@dataclass(frozen=True)
class Cell:
    """What is shown, and the number or text to sort by: the text itself for None."""

    text: str
    key: float | str | None = None
    kind: str = ""
    """A judgement, which is coloured."""

    @property
    def sorted_by(self) -> float | str:
        """The key; empty where there is nothing, which stays last."""
        return (self.text if self.text != _NONE else "") if self.key is None else self.key

    @property
    def is_words(self) -> bool:
        """Whether it is neither a number nor nothing."""
        return self.key is None and self.text != _NONE


NOTHING = Cell(_NONE)


@dataclass(frozen=True)
class Table:
    """Rows of cells under a head; the first cell of a row names it."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    @property
    def texts(self) -> frozenset[int]:
        """Places of the columns of words, which are set to the left."""
        columns = enumerate(zip(*self.rows, strict=True))
        return frozenset(k for k, cells in columns if any(one.is_words for one in cells))


def figure_of(row: Row, name: str) -> Cell:
    """One score of a row, nothing where it was not measured."""
    found = row.figures.get(name)
    return NOTHING if found is None else plain(found.mean)


def plain(value: float) -> Cell:
    """A number."""
    return Cell(number(value), value)


def half_width(found: Figure | None) -> Cell:
    """Of the interval over samples."""
    return NOTHING if found is None or found.half_width is None else plain(found.half_width)


def spread(found: Figure | None, mark: str = "") -> Cell:
    """Over trainings, or as ``mark`` says."""
    if found is None or found.spread is None:
        return NOTHING
    return Cell(number(found.spread) + mark, found.spread)


def over_seeds(values: Sequence[float | None], mark: str = "") -> Cell:
    """Mean and spread over seeds, the latter with ``mark``."""
    known = [value for value in values if value is not None]
    if not known:
        return NOTHING
    return over_trainings(figure(known), mark)


def over_trainings(found: Figure, mark: str = "") -> Cell:
    """Mean, half-width of the interval over samples, and spread, each where it is known."""
    half = "" if found.half_width is None else f" ± {number(found.half_width)}"
    spread = "" if found.spread is None else f" (s {number(found.spread)}{mark})"
    return Cell(number(found.mean) + half + spread, found.mean)


def operations(value: float | None) -> Cell:
    """Counted operations, where they are known."""
    return Cell("not known") if value is None else Cell(scientific(value), value)


def count(value: int | None) -> Cell:
    """A whole number, where it is known."""
    return Cell("not known") if value is None else Cell(f"{value:,}", value)


def millions(value: float) -> Cell:
    """Operations as millions."""
    millions = value / 1e6
    return Cell(f"{millions:,.0f}" if millions >= 100 else f"{millions:.1f}", value)
