"""What ``results.json`` holds: all that the tables and the report are made of.

Two kinds of uncertainty are kept apart: ``half_width``, the 95 % interval over samples of one model
(bootstrap), and ``spread``, the standard deviation over training seeds.

Figures that compare with images are named by the split that they are of: ``to_validation`` of a benchmark
that chooses settings, ``to_held_out`` of one that confirms them, never both in one file; ``score_on`` says so
once more.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from hddm.benchmark.settings import BenchmarkSettings, SamplingPoint, Split
from hddm.utils.records import RESULTS_FILE, Facts, read_facts

FORMAT = "2.3"
LARGEST = 2**29
MARK = "†"
"""Of a spread over seeds that is one of samples alone (`Results.one_model`)."""

Judgement = Literal["better", "worse", "within noise", "no verdict"]


class Figure(Facts):
    """A number over training seeds."""

    mean: float
    spread: float | None
    """Standard deviation over trainings, None for one."""
    half_width: float | None = None
    """Mean half-width of the intervals over samples, None where none was taken."""

    def __str__(self) -> str:
        return self.told()

    def told(self, mark: str = "") -> str:
        """Mean, half-width and spread, with ``mark`` on the spread."""
        digits = 1 if abs(self.mean) >= 10 else 2
        text = f"{self.mean:.{digits}f}"
        if self.half_width is not None:
            text += f" ± {self.half_width:.{digits}f}"
        if self.spread is not None:
            text += f" (s {self.spread:.{digits}f}{mark})"
        return text


class Record(Facts):
    """One row of a table, of one training seed."""

    table: str
    row: str
    model: str
    seed: int
    point: SamplingPoint
    scores: dict[str, Any]
    """`hddm.evaluation.scores.Scores`, renamed by the split."""
    images: int
    expert_evaluations: tuple[float, ...]
    """States that each expert was asked for, an image."""
    router_evaluations: float
    sampling_flop: float
    """Counted operations of experts and router, an image."""
    use: tuple[dict[str, Any], ...]
    """From noise to data: t, weights and runs of the experts, and what the router said
    (`hddm.benchmark.samples.UseOverTime`)."""
    samples: tuple[str, ...]
    """Folders of the images, below the store."""
    scores_job: str
    seconds: float
    """That sampling took, of all workers together."""
    sampled_as: dict[str, Any] = Field(default_factory=dict)
    """``weights``, as the experts' records have it, and the ``device`` of the jobs that drew, None where they
    do not say; empty in older results."""


class Row(Facts):
    """One row of a table, over all seeds: ``figures`` by the name of a score, dots between parts."""

    name: str
    model: str
    point: SamplingPoint
    figures: dict[str, Figure]
    evaluations: Figure
    """Expert evaluations a solver step and image."""
    sampling_flop: Figure
    """An image."""
    training_flop: Figure | None
    """Of everything that the model was trained by, its router included; None where it is not known."""
    images_seen: int | None
    """By all experts in training."""


class Verdict(Facts):
    """One row against another, paired by training seed."""

    table: str
    kind: Literal["model", "setting"]
    """Two models at one point, or two points of one model."""
    row: str
    against: str
    figure: str
    """The score that decides; lower is better."""
    seeds: tuple[int, ...]
    gaps: tuple[float, ...]
    gap: Figure
    interval: tuple[float, float] | None = None
    """95 % interval of the mean gap over trainings (Student's t), None for one or where none compares."""
    ratio: float | None
    """Of the means."""
    judgement: Judgement
    why: str | None = None
    """That there is no verdict, and why; None where there is one, and in older results."""
    one_model: tuple[str, ...] = ()
    """Those of the two models that are one set of weights in every seed: gaps then judge no training."""
    sentence: str


class ModelRecord(Facts):
    """What one model of one seed is made of, and what training it cost in counted operations."""

    model: str
    seed: int
    hash: str
    folder: str
    objectives: tuple[str, ...]
    experts: tuple[str, ...]
    """Their jobs; of finished models none."""
    steps: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    images_seen: int | None
    experts_flop: int | None
    calibration_flop: int | None = None
    """Of ``experts_flop``, what their calibration took; None in older results too."""
    router_flop: int | None
    training_flop: int | None
    seconds: float | None


class Curve(Facts):
    """Losses of one training: the last step of each of many stretches, and its mean loss."""

    model: str
    """An expert's job, or ``router``'s."""
    kind: Literal["expert", "single", "router"]
    objective: str | None
    shard: int | None
    seed: int
    loss: tuple[tuple[int, float], ...]


class ErrorCurve(Facts):
    """Velocity error of one expert by noise level on validation images of its shard.

    ``calibrated`` is as it is sampled, ``raw`` its network alone: ``mean`` and ``levels``, each with ``t``
    and the errors ``expert``, ``gaussian`` (the best linear denoiser) and ``zero`` (v = 0).
    """

    expert: str
    objective: str
    shard: int | None
    """None of a single model."""
    seed: int
    images: int
    calibrated: dict[str, Any]
    raw: dict[str, Any]


class RouterRecord(Facts):
    """How well the router of a seed is calibrated on validation images.

    ``calibrated`` and ``raw``, with its temperatures and without: `hddm.benchmark.measures.reliability`.
    """

    seed: int
    images: int
    temperatures: tuple[float, ...]
    calibrated: dict[str, Any]
    raw: dict[str, Any]


class Results(Facts):
    """``results.json``."""

    format: str = FORMAT
    name: str
    complete: bool
    """Whether all seeds are in."""
    score_on: Split
    seeds: tuple[int, ...]
    """Those that are in."""
    date: str
    settings: BenchmarkSettings
    machine: dict[str, Any]
    hashes: dict[str, Any]
    """Of data, shards, reference images and features, and the numerics version of the jobs."""
    images: dict[str, int]
    """Training images, and those of the split that is scored on."""
    features: dict[str, Any]
    """Name, dimensions, hash, resizing and choice of the extractor."""
    sampled_as: dict[str, Any]
    """Weights, dtype, device and VAE of all samples; several where rows differ, None where none says."""
    real: dict[str, Any]
    """The split's own images against the training images."""
    models: tuple[ModelRecord, ...]
    tables: dict[str, tuple[Row, ...]]
    verdicts: tuple[Verdict, ...]
    records: tuple[Record, ...]
    errors: tuple[ErrorCurve, ...]
    routers: tuple[RouterRecord, ...]
    losses: tuple[Curve, ...]
    seconds: float
    """Of all jobs together, whenever and by however many workers they were done."""

    @property
    def one_model(self) -> frozenset[str]:
        """As `one_set_of_weights`."""
        return one_set_of_weights(self.models)

    def mark(self, model: str) -> str:
        """`MARK` for a spread of ``model``'s rows that is over samples alone."""
        return MARK if model in self.one_model else ""

    @property
    def decides(self) -> str:
        """The figure that verdicts are about."""
        return f"to_{self.score_on.replace('-', '_')}"

    @property
    def verdict(self) -> list[str]:
        """The sentences of the first table: models against baselines."""
        first = next(iter(self.tables))
        return [one.sentence for one in self.verdicts if one.table == first and one.kind == "model"]


def read_results(folder: Path) -> Results:
    """The results in a benchmark's folder.

    Raises:
        HddmError: as `hddm.utils.records.read_facts`.
    """
    return read_facts(folder / RESULTS_FILE, Results, FORMAT, LARGEST)


def one_set_of_weights(models: Iterable[ModelRecord]) -> frozenset[str]:
    """Names of models that are the same in every seed: those of one hash, and all that were not trained here.

    Seeds give them other samples and no other training.
    """
    found: dict[str, list[ModelRecord]] = {}
    for one in models:
        found.setdefault(one.model, []).append(one)
    return frozenset(
        name
        for name, each in found.items()
        if not each[0].experts or (len(each) > 1 and len({one.hash for one in each}) == 1)
    )


def figure(values: Sequence[float], half_widths: Sequence[float] | None = None) -> Figure:
    """Summary of one number over seeds."""
    return Figure(
        mean=statistics.fmean(values),
        spread=statistics.stdev(values) if len(values) > 1 else None,
        half_width=statistics.fmean(half_widths) if half_widths else None,
    )


def figures_of(scores: Sequence[Mapping[str, Any]]) -> dict[str, Figure]:
    """Summaries of all numbers that every seed's scores have, by name."""
    flat = [dict(_numbers(one)) for one in scores]
    names = [name for name in flat[0] if all(name in one for one in flat)]
    found = {}
    for name in names:
        values, widths = zip(*(one[name] for one in flat), strict=True)
        known = [width for width in widths if width is not None]
        found[name] = figure(values, known if len(known) == len(widths) else None)
    return found


def _numbers(scores: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, tuple[float, float | None]]]:
    """Numbers by name, each with its half-width: a mapping with a "value" is one number."""
    for key, value in scores.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            if isinstance(value.get("value"), int | float):
                yield name, (value["value"], _half_width(value))
            else:
                yield from _numbers(value, f"{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, (value, None)


def _half_width(number: Mapping[str, Any]) -> float | None:
    """Of the 95 % interval: a kernel distance comes with its standard error."""
    error = number.get("standard_error")
    found: float | None = number.get("half_width") if error is None else 1.96 * error
    return found
