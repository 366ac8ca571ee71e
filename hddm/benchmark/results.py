"""Results of a benchmark: ``results.json``, from which tables, report and comparisons are made.

Two uncertainties are kept apart: the 95 % interval over samples of one model (bootstrap), and the standard
deviation over training seeds. Figures name their split: ``to_validation`` in a benchmark that chooses
settings, ``to_held_out`` in one that confirms them, never both in one file.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from hddm.benchmark.settings import BenchmarkSettings, SamplingPoint, Split
from hddm.evaluation.compare import figure_at
from hddm.evaluation.results import Result, ResultGroup, ScoresRecord, checked, read_groups
from hddm.evaluation.scores import LEARNED
from hddm.evaluation.verdict import Contrast, Figure, GapVerdict, verdicts
from hddm.utils.errors import HddmError
from hddm.utils.files import read_json
from hddm.utils.records import RESULTS_FILE, Record, check_format, parse_record

FORMAT = "3.0"
LARGEST = 2**29
MARK = "†"
"""Mark of a spread over seeds that is one of samples alone (`Results.one_model`)."""


def _as_scores(content: dict[str, Any]) -> dict[str, Any]:
    ScoresRecord.model_validate(content)
    return content


def _with(*names: str) -> AfterValidator:
    """Check that a mapping has these keys."""

    def check(content: dict[str, Any]) -> dict[str, Any]:
        if missing := [name for name in names if name not in content]:
            raise ValueError(f"lacks {missing[0]!r}")
        return content

    return AfterValidator(check)


Scored = Annotated[dict[str, Any], AfterValidator(_as_scores)]


class ScoredRow(Record):
    """One row of a table, of one training seed."""

    table: str
    row: str
    model: str
    seed: int
    point: SamplingPoint
    scores: Scored
    """`hddm.evaluation.scores.Scores`, with the held-out images named by the split."""
    images: int
    expert_evaluations: tuple[float, ...]
    """Evaluations of each expert per image."""
    router_evaluations: float
    sampling_flop: float
    """Counted operations of experts and router per image."""
    samples: tuple[str, ...]
    """Folders of the images, below the store."""
    scores_job: str
    seconds: float
    """Time of sampling, summed over workers."""
    sampled_as: dict[str, Any] = Field(default_factory=dict)
    """``weights`` as in the experts' records, and ``device`` of the jobs, None where not recorded."""


class ModelResult(Record):
    """Parts of one model of one seed, and the cost of its training in counted operations."""

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
    """The part of ``experts_flop`` that calibration took."""
    router_flop: int | None
    training_flop: int | None
    """All operations of the model's training; None where unknown."""
    seconds: float | None


class Comparison(Record):
    """One row against another by the score that decides; lower is better."""

    table: str
    kind: Literal["model", "setting"]
    """Two models at one point, or two points of one model."""
    row: str
    against: str
    gaps: dict[int, float]
    """By training seed."""
    ratio: float | None
    """Ratio of the means."""
    verdict: GapVerdict

    @property
    def sentence(self) -> str:
        """The verdict with its numbers."""
        one = self.verdict
        text = f"{self.row} against {self.against}: {number(one.gap, signed=True)}, {one.judgement}"
        if one.why is not None:
            return f"{text} ({one.why})"
        low, high = one.interval or (0.0, 0.0)
        return f"{text} (95 % interval {number(low, signed=True)} … {number(high, signed=True)})"


@dataclass(frozen=True)
class Row:
    """One row of a table over all training seeds."""

    scored: tuple[ScoredRow, ...]
    trained: tuple[ModelResult, ...]

    @property
    def name(self) -> str:
        return self.scored[0].row

    @property
    def model(self) -> str:
        return self.scored[0].model

    @property
    def point(self) -> SamplingPoint:
        return self.scored[0].point

    def figure(self, path: str) -> Figure | None:
        """A score by its name, dots between parts; None where it was not measured."""
        results = tuple(Result(Path(), one.scores, str(one.seed)) for one in self.scored)
        return figure_at(ResultGroup(self.name, results), path)

    @property
    def has_learned(self) -> bool:
        """False where samples are recognised less than `LEARNED` times as often as real images."""
        own, real = (self.figure(f"recognised.{key}") for key in ("share", "real"))
        return own is None or real is None or own.mean >= LEARNED * real.mean

    @property
    def experts_a_step(self) -> float:
        """States that experts were asked for, a solver step and image."""
        return statistics.fmean(sum(one.expert_evaluations) / one.point.steps for one in self.scored)

    @property
    def sampling_flop(self) -> float:
        """Operations per image."""
        return statistics.fmean(one.sampling_flop for one in self.scored)

    @property
    def training_flop(self) -> float | None:
        """Operations per seed, router included; None where unknown."""
        known = [one.training_flop for one in self.trained if one.training_flop is not None]
        return statistics.fmean(known) if known else None


class Results(Record):
    """``results.json``."""

    format: str = FORMAT
    name: str
    complete: bool
    """All seeds are in."""
    score_on: Split
    seeds: tuple[int, ...]
    """Those that are in."""
    date: str
    settings: BenchmarkSettings
    machine: Annotated[dict[str, Any], _with("packages")]
    hashes: Annotated[dict[str, Any], _with("training", "shards", "reference")]
    """Of data, shards, reference images and features, and the numerics version of the jobs."""
    images: Annotated[dict[str, int], _with("training", "fresh")]
    """Training images, and those of the split that is scored on."""
    features: Annotated[dict[str, Any], _with("dimensions")]
    """Name, dimensions, hash, resizing and choice of the extractor."""
    sampled_as: dict[str, Any]
    """Weights, dtype, device and VAE of all samples; several where rows differ, None where none says."""
    real: dict[str, Any]
    """The split's own images against the training images."""
    models: tuple[ModelResult, ...]
    scored: tuple[ScoredRow, ...]
    comparisons: tuple[Comparison, ...]
    seconds: float
    """Of all jobs together, whenever and by however many workers they were done."""

    @model_validator(mode="after")
    def _has_what_decides(self) -> "Results":
        if not self.scored:
            raise ValueError("holds no rows")
        trained = {(one.model, one.seed) for one in self.models}
        for one in self.scored:
            if one.scores.get(self.decides) is None:
                raise ValueError(f"row {one.row!r} lacks {self.decides!r}, which decides")
            if (one.model, one.seed) not in trained:
                raise ValueError(
                    f"row {one.row!r} is of a model {one.model!r} of seed {one.seed} that is not there"
                )
        return self

    @property
    def tables(self) -> dict[str, list[Row]]:
        """Rows over all seeds, by table."""
        found: dict[str, dict[str, list[ScoredRow]]] = {}
        for one in self.scored:
            found.setdefault(one.table, {}).setdefault(one.row, []).append(one)
        return {
            table: [
                Row(tuple(each), tuple(model for model in self.models if model.model == each[0].model))
                for each in rows.values()
            ]
            for table, rows in found.items()
        }

    @property
    def first(self) -> list[Row]:
        """The first table, which has the answer."""
        return next(iter(self.tables.values()))

    @property
    def decides(self) -> str:
        """The score that verdicts are about."""
        return f"to_{self.score_on.replace('-', '_')}"

    @property
    def one_model(self) -> frozenset[str]:
        """Models that are one set of weights in every seed, of which other samples alone were drawn."""
        hashes: dict[str, list[str]] = {}
        for one in self.models:
            hashes.setdefault(one.model, []).append(one.hash)
        elsewhere = {one.model for one in self.models if not one.experts}
        same = {name for name, each in hashes.items() if len(each) > 1 and len(set(each)) == 1}
        return frozenset(elsewhere | same)

    @property
    def answers(self) -> list[Comparison]:
        """Models against baselines, of the first table."""
        table = next(iter(self.tables))
        return [one for one in self.comparisons if one.table == table and one.kind == "model"]

    def decisive(self, row: Row) -> Figure:
        """The score of a row that verdicts are about."""
        found = row.figure(self.decides)
        assert found is not None
        return replace(found, samples=frozenset({row.point.num_images}))

    def shown(self, row: Row, path: str) -> str:
        """Mean, half-width over samples and spread over trainings of a score, – where it was not measured."""
        found = row.figure(path)
        if found is None:
            return "–"
        half = "" if found.half_width is None else f" ± {number(found.half_width)}"
        mark = MARK if row.model in self.one_model else ""
        spread = "" if found.spread is None else f" (s {number(found.spread)}{mark})"
        return f"{number(found.mean)}{half}{spread}"


def number(value: float, signed: bool = False) -> str:
    """A figure with as many decimals as its size asks for."""
    size = abs(value)
    decimals = 1 if size >= 10 else 2 if size >= 0.1 or size == 0 else 3 if size >= 0.01 else 4
    return f"{value:{'+' if signed else ''}.{decimals}f}".replace("-", "−")


def read_results(folder: Path) -> Results:
    """Read the results in a benchmark's folder; those of an older format raise `HddmError`."""
    path = folder / RESULTS_FILE
    content = read_json(path, LARGEST)
    check_format(content, FORMAT, path)
    if int(str(content.get("format")).partition(".")[0]) < int(FORMAT.partition(".")[0]):
        raise HddmError(
            f"{path}: format {content['format']} was written by an older hddm; repeat the benchmark "
            f"with another --out and this folder's jobs as --jobs"
        )
    return parse_record(content, Results, str(path))


def compare_rows(results: Results) -> Iterator[Comparison]:
    """Compare candidates with baselines in all tables, and each setting with the first.

    Models with one set of weights in every seed, and rows of the same samples, get no verdict.
    """
    baselines = results.settings.compare.baselines
    candidates = results.settings.compare.candidates or tuple(
        model.name for model in results.settings.models if model.name not in baselines
    )
    single = {model.name for model in results.settings.models if model.kind == "single"}
    for table, rows in results.tables.items():
        pairs: list[tuple[Literal["model", "setting"], Row, Row]] = []
        for row in rows:
            for baseline in baselines if row.model in candidates else ():
                pairs += [
                    ("model", row, other)
                    for other in rows
                    if other.model == baseline and _are_alike(row.point, other.point, baseline in single)
                ]
            first = next(one for one in rows if one.model == row.model)
            if first is not row:
                pairs.append(("setting", row, first))
        judged = verdicts([_contrast(results, ours, base) for _, ours, base in pairs])
        for (kind, ours, base), verdict in zip(pairs, judged, strict=True):
            a, b = (results.decisive(row).values for row in (ours, base))
            yield Comparison(
                table=table,
                kind=kind,
                row=ours.name,
                against=base.name,
                gaps={int(seed): a[seed] - b[seed] for seed in a},
                ratio=sum(a.values()) / sum(b.values()) if sum(b.values()) else None,
                verdict=verdict,
            )


def read_compared(paths: Sequence[Path]) -> dict[str, list[ResultGroup]]:
    """Read what ``hddm compare`` compares: evaluations under "", or benchmarks by row.

    Rows are those in the first table of every benchmark, in the first one's order. Fewer than two,
    evaluations mixed with benchmarks, or benchmarks without a common row raise `HddmError`.
    """
    benchmarks = [path for path in paths if _is_benchmark(path)]
    if not benchmarks:
        return {"": read_groups(paths)}
    if len(paths) < 2:
        raise HddmError(
            f"{paths[0]}: the tables of one benchmark are in tables.md and report.html; name two or "
            f"more to compare"
        )
    foreign = [path for path in paths if path not in benchmarks]
    if foreign:
        raise HddmError(f"{foreign[0]}: is not a benchmark, but others here are; compare results of one kind")
    folders = [path if path.is_dir() else path.parent for path in paths]
    found = [(folder, read_results(folder)) for folder in folders]
    names = [{row.name for row in results.first} for _, results in found]
    shared = [row.name for row in found[0][1].first if all(row.name in one for one in names)]
    if not shared:
        raise HddmError(
            "these benchmarks have no row of their first tables in common",
            [f"{path}: {', '.join(one)}" for path, one in zip(paths, names, strict=True)],
        )
    return {
        name: [
            ResultGroup(str(folder), tuple(_evaluations(folder, results, name))) for folder, results in found
        ]
        for name in shared
    }


def _is_benchmark(path: Path) -> bool:
    if path.is_dir():
        return (path / RESULTS_FILE).is_file()
    return path.name == RESULTS_FILE and {"settings", "score_on"} <= read_json(path, LARGEST).keys()


def _evaluations(folder: Path, results: Results, name: str) -> Iterator[Result]:
    """The seeds of a row of the first table as results of evaluations."""
    (row,) = (one for one in results.first if one.name == name)
    hashes, images = results.hashes, results.images
    for one in row.scored:
        made = next(each for each in row.trained if each.seed == one.seed)
        few = one.scores[results.decides].get("few_images", False)
        sampled = {"source": made.hash, "seed": one.seed}
        content: Mapping[str, Any] = {
            **one.scores,
            "features": results.features,
            "data": {
                "images": {"images": one.images, "shape": None, "hash": " ".join(one.samples)},
                "reference": {"images": images["training"], "hash": hashes["training"]},
                "held_out": {"images": images["fresh"], "hash": hashes["reference"]},
                "shards": {"images": images["training"], "hash": hashes["shards"]},
            },
            "split": results.score_on,
            "sampling": {**one.point.model_dump(), **results.sampled_as, **one.sampled_as, **sampled},
            "training_tflop": None if made.training_flop is None else made.training_flop / 1e12,
            "versions": results.machine["packages"],
            "comparable": not few,
            "reasons": [f"too few images: {results.features['dimensions']} features"] if few else [],
        }
        yield checked(folder / RESULTS_FILE, dict(content), str(one.seed))


def _are_alike(one: SamplingPoint, other: SamplingPoint, has_no_router: bool) -> bool:
    """True of rows that were sampled alike; a model without a router has no strategy to differ in."""
    routing = {"strategy", "calibration", "router_temperature"} if has_no_router else set()
    return one.model_dump(exclude=routing) == other.model_dump(exclude=routing)


def _contrast(results: Results, ours: Row, base: Row) -> Contrast:
    why = None
    failed = [row.name for row in (ours, base) if not row.has_learned]
    fixed = [name for name in dict.fromkeys((ours.model, base.model)) if name in results.one_model]
    if all(a.samples == b.samples for a, b in zip(ours.scored, base.scored, strict=True)):
        why = "the same samples in every seed"
    elif failed:
        why = f"{' and '.join(failed)}: did not learn, since a classifier recognises too few of its samples"
    elif fixed:
        why = f"{' and '.join(fixed)}: one set of weights in every seed, so no other training is judged"
    return Contrast(results.decisive(ours), results.decisive(base), "lower", why)
