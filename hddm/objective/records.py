"""Scores by the objective on disk, and their comparison image by image."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from hddm.utils.errors import HddmError
from hddm.utils.records import OpenRecord, read_record

FORMAT = "1.0"
KIND = "objective"
SURE = 1.96
"""Standard errors of a half-width: an interval of 95 %."""


class Mean(OpenRecord):
    """A mean over images, with half of its 95 % interval over them."""

    value: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        """The mean of a value per image."""
        if len(values) < 2:
            return cls(value=values[0], half_width=0.0)
        error = statistics.stdev(values) / len(values) ** 0.5
        return cls(value=statistics.fmean(values), half_width=SURE * error)

    @property
    def interval(self) -> tuple[float, float]:
        """The whole interval."""
        return self.value - self.half_width, self.value + self.half_width

    def __str__(self) -> str:
        return f"{self.value:.4g} ± {self.half_width:.2g}"


class LevelScore(OpenRecord):
    """Mean squared errors of the velocity at one noise level, per dimension, by image."""

    t: float
    by_image: tuple[float, ...]


class BitsScore(OpenRecord):
    """Bits per dimension by image; ``estimate_error`` is the standard error that a trace's estimate adds."""

    by_image: tuple[float, ...]
    estimate_error: float | None = None
    smallest_noise: float
    steps: int


class StrategyScores(OpenRecord):
    """Scores under one strategy; without errors where samples keep an expert of their own."""

    strategy: str
    levels: tuple[LevelScore, ...] = ()
    bits: BitsScore | None = None


class HeldOutData(OpenRecord):
    """The images: ``hash`` covers all of them, ``rows`` and ``likelihood_rows`` are those that are scored."""

    path: str
    hash: str
    rows: tuple[int, ...]
    likelihood_rows: tuple[int, ...] = ()


class HeldOutScores(OpenRecord):
    """A result of ``hddm evaluate MODEL --held-out SHARD``."""

    oldest: ClassVar[str | None] = FORMAT
    remedy: ClassVar[str] = "evaluate the model again"

    format: str = FORMAT
    kind: Literal["objective"] = "objective"
    model: str
    model_sha256: str
    data: HeldOutData
    seed: int
    noise_draws: int
    strategies: tuple[StrategyScores, ...]
    versions: dict[str, str] = Field(default_factory=dict)

    @property
    def measured(self) -> tuple[Any, ...]:
        """Equal for results of the same images and noise."""
        rows, bits = self.data.rows, self.data.likelihood_rows
        smallest = {one.bits.smallest_noise for one in self.strategies if one.bits is not None}
        return self.data.hash, rows, bits, self.seed, self.noise_draws, sorted(smallest)


def read_scores(path: Path) -> HeldOutScores:
    """Read one result; raises `HddmError` as `read_record`."""
    return read_record(path, HeldOutScores, FORMAT)


def difference(ours: Sequence[float], base: Sequence[float]) -> Mean:
    """The mean of the differences of two values per image, of the same images in the same order."""
    return Mean.of([a - b for a, b in zip(ours, base, strict=True)])


MEAN_ERROR, BITS = "error, mean of all levels", "bits per dimension"


def error_at(time: float) -> str:
    """The name of the error at a noise level in tables."""
    return f"error at t = {time:g}"


Values = dict[str, dict[str, tuple[float, ...]]]
"""By row of a table and by column, a value per image."""


def refuse_unlike(results: Sequence[tuple[str, HeldOutScores]]) -> None:
    """Raise an `HddmError` for named results of other images or noise than the first."""
    first_name, first = results[0]
    for name, one in results:
        if one.measured != first.measured:
            raise HddmError(
                f"{name} and {first_name}: were measured on other images or noise; evaluate both with the "
                "same `held_out`, `num_images`, `noise_draws`, `likelihood_images` and `seed`"
            )


def values_of(results: Sequence[tuple[str, HeldOutScores]]) -> Values:
    """Errors by noise level, their mean over levels, and bits, of named results and all their strategies.

    Raises `HddmError` as `refuse_unlike`.
    """
    refuse_unlike(results)
    found: Values = {}
    for name, one in results:
        for scores in one.strategies:
            title = name if len(one.strategies) == 1 else f"{name} {scores.strategy}".strip()
            for level in scores.levels:
                found.setdefault(error_at(level.t), {})[title] = level.by_image
            if scores.levels:
                means = []
                for of_image in zip(*(level.by_image for level in scores.levels), strict=True):
                    means.append(statistics.fmean(of_image))
                found.setdefault(MEAN_ERROR, {})[title] = tuple(means)
            if scores.bits is not None:
                found.setdefault(BITS, {})[title] = scores.bits.by_image
    return found
