"""Figures of comparable results side by side: better, worse, or within noise."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hddm.evaluation.results import Side

ENOUGH = 3
"""Results a side from which there is a spread to judge by."""
Better = Literal["lower", "higher"]


@dataclass(frozen=True)
class Figure:
    """One figure of one side.

    ``spread`` is the standard deviation over its results, None for fewer than two; ``half_width`` the mean
    half-width of the 95 % intervals over images, None where none is known. ``trainings`` is the number of
    results, and 1 where all are of one model.
    ``few_images`` is of one that is measured on no more images than features; ``samples`` are the numbers of
    samples of a figure that is not of all images.
    """

    mean: float
    spread: float | None
    half_width: float | None
    trainings: int
    few_images: bool = False
    samples: frozenset[int] = frozenset()

    def __str__(self) -> str:
        text = _number(self.mean, 4)
        if self.half_width is not None:
            text += f" ± {_number(self.half_width, 2)}"
        return text + (f" (s {_number(self.spread, 2)})" if self.spread is not None else "")


@dataclass(frozen=True)
class Line:
    """One figure of every side, and the verdict on each side but the first, against the first."""

    name: str
    better: Better | None
    figures: tuple[Figure, ...]
    verdicts: tuple[str, ...]


def lines(sides: Sequence[Side]) -> list[Line]:
    """A line for every figure that all results have."""
    found = []
    for name, better, get in _measures(sides):
        asked = [[get(result.content) for result in side.results] for side in sides]
        known = [[one for one in side if one is not None] for side in asked]
        if [len(side) for side in known] != [len(side) for side in asked]:
            continue
        figures = tuple(_figure(each, _trainings(side)) for each, side in zip(known, sides, strict=True))
        verdicts = tuple(verdict(figures[0], other, better) for other in figures[1:])
        found.append(Line(name, better, figures, verdicts))
    return found


def verdict(base: Figure, other: Figure, better: Better | None) -> str:
    """How ``other`` stands against ``base``; nothing for a figure that has no better direction.

    With three trainings or more on both sides, a gap of means counts beyond 2 (s_a² + s_b²)^½, s the standard
    deviations over results. With fewer, beyond (h_a² + h_b²)^½, h the half-widths of the intervals over
    images: that says nothing about another training. Distances of few images, and those of unequal numbers of
    samples, do not compare.
    """
    if better is None:
        return ""
    if base.few_images or other.few_images:
        return "no verdict: too few images"
    if len(base.samples | other.samples) > 1:
        return f"no verdict: {_counts(other)} against {_counts(base)} samples"
    if min(base.trainings, other.trainings) >= ENOUGH:
        noise = 2 * ((base.spread or 0) ** 2 + (other.spread or 0) ** 2) ** 0.5
    elif base.half_width is None or other.half_width is None:
        return "no interval"
    else:
        noise = (base.half_width**2 + other.half_width**2) ** 0.5
    gap = other.mean - base.mean
    if abs(gap) <= noise:
        return f"within noise ({_signed(gap)})"
    return f"{'better' if (gap < 0) == (better == 'lower') else 'worse'} ({_signed(gap)})"


def _trainings(side: Side) -> int:
    return 1 if _is_one_model(side) else len(side.results)


def _is_one_model(side: Side) -> bool:
    """Whether its results are further samples of one set of weights."""
    sources = _sources(side)
    return len(side.results) > 1 and len(sources) == 1 and None not in sources


def _sources(side: Side) -> set[str | None]:
    return {(result.content.get("sampling") or {}).get("source") for result in side.results}


def table(sides: Sequence[Side]) -> str:
    """`lines` in Markdown, and below it what the verdicts are judged by."""
    names = [side.name for side in sides]
    heads = ["", *names, *(f"{name} against {names[0]}" for name in names[1:])]
    rows = [[_titled(line), *map(str, line.figures), *line.verdicts] for line in lines(sides)]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    texts = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in (heads, *rows)
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([texts[0], rule, *texts[1:], "", *_notes(sides)])


def _titled(line: Line) -> str:
    return line.name if line.better is None else f"{line.name} ({line.better} is better)"


def _notes(sides: Sequence[Side]) -> list[str]:
    notes = ["± is the half-width of the 95 % interval over images, s the standard deviation over results."]
    if min(map(_trainings, sides)) >= ENOUGH:
        notes.append("Noise: twice the joint standard deviation over results.")
    else:
        notes.append(
            "Noise: the intervals over images. They say nothing about another training; "
            f"{ENOUGH} results a side, one a training seed, give a spread that does."
        )
    for side in sides:
        if _is_one_model(side):
            notes.append(f"All results of {side.name} are of one model: s is over sampling seeds alone.")
        if None in _sources(side):
            notes.append(f"How the images of {side.name} were sampled is not recorded.")
    found = [result.content.get("versions", {}) for side in sides for result in side.results]
    for package in dict.fromkeys(name for versions in found for name in versions):
        others = sorted({str(versions.get(package)) for versions in found})
        if len(others) > 1:
            notes.append(f"Measured with different versions of {package}: {', '.join(others)}.")
    return notes


@dataclass(frozen=True)
class _Value:
    """One figure of one result, and of it what `Figure` has."""

    value: float
    half_width: float | None = None
    few_images: bool = False
    samples: int | None = None


def _figure(found: Sequence[_Value], trainings: int) -> Figure:
    values = [one.value for one in found]
    widths = [one.half_width for one in found if one.half_width is not None]
    return Figure(
        statistics.fmean(values),
        statistics.stdev(values) if len(values) > 1 else None,
        statistics.fmean(widths) if len(widths) == len(values) else None,
        trainings,
        any(one.few_images for one in found),
        frozenset(one.samples for one in found if one.samples is not None),
    )


def _counts(figure: Figure) -> str:
    low, high = min(figure.samples), max(figure.samples)
    return f"{low}" if low == high else f"{low} to {high}"


def _number(value: float, significant: int) -> str:
    """At least so many significant digits, without an exponent."""
    decimals = significant - 1 - (math.floor(math.log10(abs(value))) if value else 0)
    return f"{value:.{max(decimals, 0)}f}"


def _signed(gap: float) -> str:
    return ("+" if gap >= 0 else "") + _number(gap, 2)


Get = Callable[[dict[str, Any]], _Value | None]


def _measures(sides: Sequence[Side]) -> list[tuple[str, Better | None, Get]]:
    results = [result for side in sides for result in side.results]
    shards = min(len(result.content.get("shards") or ()) for result in results)
    of_shards: list[tuple[str, Better | None, Get]] = [
        (f"Fréchet distance to shard {k}, {which} samples", "lower", _of_shard(k, key))
        for k in range(shards)
        for which, key in (("all", "all"), ("its own", "own"))
    ]
    # Distances of two kinds are no figure to compare, of conditions as of nearest images.
    distances = sorted(
        {(result.content.get("within_conditions") or {}).get("distance", "") for result in results}
    )
    mirrored = {bool((result.content.get("memorisation") or {}).get("mirrored")) for result in results}
    # The images that were not trained on: of a benchmark that still chooses, those of its validation split.
    fresh = results[0].content.get("split", "held-out")
    return [
        ("Fréchet distance to training images", "lower", _interval("to_training")),
        (f"Fréchet distance to {fresh} images", "lower", _interval("to_held_out")),
        ("kernel distance to training images", "lower", _kernel("kernel_to_training")),
        (f"kernel distance to {fresh} images", "lower", _kernel("kernel_to_held_out")),
        ("precision on training images", "higher", _share("on_training", "precision")),
        (f"precision on {fresh} images", "higher", _share("on_held_out", "precision")),
        ("recall on training images", "higher", _share("on_training", "recall")),
        (f"recall on {fresh} images", "higher", _share("on_held_out", "recall")),
        ("diversity against training images", None, _plain("diversity")),
        *[
            (f"distance within conditions ({name})", None, _within)
            for name in distances[:1]
            if not distances[1:]
        ],
        *([("nearest-image ratio", None, _memory)] if len(mirrored) == 1 else []),
        *of_shards,
        ("training, 1e12 operations", None, _plain("training_tflop")),
    ]


def _interval(key: str) -> Get:
    def get(content: dict[str, Any]) -> _Value | None:
        found = content.get(key)
        return None if found is None else _Value(found["value"], found["half_width"], found["few_images"])

    return get


def _kernel(key: str) -> Get:
    def get(content: dict[str, Any]) -> _Value | None:
        found = content.get(key)
        return None if found is None else _Value(found["value"], 1.96 * found["standard_error"])

    return get


def _share(key: str, which: str) -> Get:
    def get(content: dict[str, Any]) -> _Value | None:
        found = content.get(key)
        if found is None:
            return None
        share, images = found[which], found["images"]
        # Wilson's, which at shares of 0 and 1 is no interval of nothing.
        width = 1.96 * (share * (1 - share) / images + (1.96 / (2 * images)) ** 2) ** 0.5
        return _Value(share, width / (1 + 1.96**2 / images))

    return get


def _plain(key: str) -> Get:
    def get(content: dict[str, Any]) -> _Value | None:
        found = content.get(key)
        return None if found is None else _Value(float(found))

    return get


def _within(content: dict[str, Any]) -> _Value | None:
    found = content.get("within_conditions")
    return None if found is None else _Value(found["images"])


def _memory(content: dict[str, Any]) -> _Value | None:
    found = content.get("memorisation")
    return None if found is None else _Value(found["ratio"], found["half_width"])


def _of_shard(k: int, key: str) -> Get:
    def get(content: dict[str, Any]) -> _Value | None:
        shard = content["shards"][k]
        found = _interval(key)(shard)
        # Of all samples there are equally many, or the results do not compare.
        return found if found is None or key == "all" else replace(found, samples=shard["samples"])

    return get
