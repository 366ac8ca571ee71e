"""A benchmark from its settings to its results: trains what is missing, samples, scores, compares.

OUT/
  benchmark.json                       the settings in full
  jobs/                                everything that was done, by content (`hddm.benchmark.jobs`)
  results.json, tables.md, report.html
  shards, whole, digits                links to the data's jobs
  seed_<n>/…                           links to the models; sample grids in samples/
  samples/                             a grid of real images

The same command resumes after a kill at any moment. Results are written after each seed.
"""

import datetime
import functools
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from hddm.benchmark import charts
from hddm.benchmark.data import (
    SHARDS,
    WHOLE,
    divide,
    fewest_images,
    prepare_images,
    read_reference,
    reference_job,
    refuse_work_among_images,
    write_reference,
)
from hddm.benchmark.jobs import NUMERICS, Store, finite, stoppable, together
from hddm.benchmark.models import check_counts, check_rows, check_shapes
from hddm.benchmark.report import tables_text, write_report
from hddm.benchmark.results import FORMAT, LARGEST, Results, ScoredRow, compare_rows
from hddm.benchmark.samples import REAL, STRIPS, grid_path, read_samples, write_grid
from hddm.benchmark.scores import Scoring, features_job_of, write_features
from hddm.benchmark.seed import SampledRow, SeedJobs, SeedRun, SharedInputs
from hddm.benchmark.settings import BenchmarkSettings, points_of
from hddm.utils.errors import HddmError, counted
from hddm.utils.files import check_absent, read_json, write_json, write_whole
from hddm.utils.processes import Workers, require_main_guard
from hddm.utils.progress import Progress
from hddm.utils.records import BENCHMARK_FILE, RESULTS_FILE, OpenRecord, parse_record

TABLES_FILE = "tables.md"
GRID_IMAGES = 64
STRIP = 20


def run_benchmark(
    settings: BenchmarkSettings,
    out: Path,
    data: Path | None = None,
    jobs: Path | None = None,
    overwrite: bool = False,
) -> Results:
    """Run a benchmark in ``out``, or resume it.

    The settings' images lie below ``data``. Finished jobs lie in ``jobs``, by default ``out/jobs``;
    benchmarks that share it share trainings. ``overwrite`` replaces results of other settings in ``out``;
    jobs stay.

    Raises:
        HddmError: for images or models that are missing or do not fit, fewer images than features, a row that
            its model cannot be sampled for, an ``out`` that holds anything else, or a store in use.
        Stopped: after a signal, with all finished work saved.
    """
    require_main_guard()
    if settings.data.source == "folder":
        refuse_work_among_images(settings.data, data, (out, jobs or out))
    check_rows(settings)
    check_out(out, settings, overwrite)
    out.mkdir(parents=True, exist_ok=True)
    store = Store(jobs or out / "jobs")
    with stoppable(out), store.held():
        if not (out / RESULTS_FILE).is_file():
            # If killed from here on, the same command recognises the folder.
            _write_settings(out, settings)
        shared, links = _prepare(settings, data, store)
        check_shapes(settings, read_reference(store.path(shared.reference))["training"].shape[1:])
        before = {} if overwrite else _results_before(out, shared)
        _write_settings(out, settings)
        _write_real(out, shared, store)
        runs = [SeedRun(settings, number, shared, store) for number in settings.seeds]
        with Progress(None, "count the operations of each network"):
            planned, to_train = (sum(map(of, runs)) for of in (SeedRun.planned, SeedRun.to_train))
        _tell(settings, to_train, out, before)
        seeds: list[SeedJobs] = []

        def now() -> list[str]:
            return [f"now {'; '.join(workers.running)}"] if workers.running else []

        workers, progress = Workers(settings.workers), Progress(planned, settings.name, "FLOP", now)
        with workers, progress:
            for run in runs:
                seeds.append(run.run(workers, progress))
                models = seeds[-1].models.values()
                _link(out, links | {one.result.folder: one.source.folder for one in models})
                _write_grids(out, seeds[-1], store)
                if settings.partition.classes is not None:
                    _write_strips(out, seeds[0], store, shared, settings.partition.classes)
                results = _dated(collect(settings, store, shared, seeds), before)
                # Results of fewer seeds than before are not written: the others follow.
                if not set(results.seeds) < set(before.get("seeds", ())):
                    _write(out, results)
    return results


def _tell(settings: BenchmarkSettings, to_train: int, out: Path, before: Mapping[str, Any]) -> None:
    """Print what is ahead; the time that it takes is told with the first progress."""
    if set(settings.seeds) <= set(before.get("seeds", ())):
        text = f"{out}: was finished on {before['date']}; finished parts are not repeated"
    else:
        text = (
            f"{settings.name}: {len(settings.models)} models, trained for "
            f"{counted(len(settings.seeds), 'seed')} ({to_train / 1e12:.3g} TFLOP to go), sampled and scored "
            f"on {settings.score_on} images, {settings.workers} at a time"
        )
    print(text, file=sys.stderr, flush=True)


class _Chosen(OpenRecord):
    """Settings in ``benchmark.json``, of any version."""

    seeds: tuple[int, ...] = ()


class _Begun(OpenRecord):
    """What is read of ``benchmark.json``."""

    settings: _Chosen = _Chosen()


class _Finished(OpenRecord):
    """What is read of the results that new ones replace, of any version."""

    hashes: dict[str, Any] = Field(default_factory=dict)
    date: str = ""


def check_out(out: Path, settings: BenchmarkSettings, overwrite: bool = False) -> None:
    """Refuse a folder of another kind, and without ``overwrite`` results of other settings or seeds."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        check_absent(out, BENCHMARK_FILE, overwrite=True)
        return
    if not (out / BENCHMARK_FILE).is_file():
        raise HddmError(f"{out} exists and holds no benchmark: choose another folder")
    if overwrite or not (out / RESULTS_FILE).is_file():
        return
    path, now = out / BENCHMARK_FILE, settings.model_dump(mode="json")
    before = parse_record(read_json(path), _Begun, str(path)).settings.model_dump(mode="json")
    if set(before.get("seeds", ())) <= set(settings.seeds):
        # Additional seeds lose nothing.
        before["seeds"] = now["seeds"]
    differing = differences(before, now)
    if differing:
        raise HddmError(
            f"{out}: has results of other settings; choose another folder (--jobs {out / 'jobs'} reuses "
            f"what is the same), or pass --overwrite to replace the results",
            differing,
        )


def _write_settings(out: Path, settings: BenchmarkSettings) -> None:
    content = {"format": FORMAT, "settings": settings.model_dump(mode="json")}
    write_whole(out / BENCHMARK_FILE, lambda draft: write_json(draft, content))


def _results_before(out: Path, shared: SharedInputs) -> dict[str, Any]:
    """Read existing results, {} if there are none; refuse those of other images."""
    if not (out / RESULTS_FILE).is_file():
        return {}
    before = read_json(out / RESULTS_FILE, LARGEST)
    parse_record(before, _Finished, str(out / RESULTS_FILE))
    if before.get("hashes", {}).get("reference") != shared.reference.hash:
        raise HddmError(f"{out}: holds results of other images; choose another folder, or pass --overwrite")
    return before


def _dated(results: Results, before: Mapping[str, Any]) -> Results:
    """Keep the date of existing ``results`` where nothing else is new."""
    same = {**before, "date": results.date} == results.model_dump(mode="json")
    return results.model_copy(update={"date": before["date"]}) if same else results


# Settings that change no result.
_FREE = ("workers", "device", "training.checkpoint_every")


def differences(before: Any, now: Any, place: str = "") -> list[str]:
    """Differences of two plain values, a line each; those that change no result are left out."""
    if place in _FREE or before == now:
        return []
    ours, theirs = _by_key(before), _by_key(now)
    if ours is not None and theirs is not None:
        keys = dict.fromkeys([*ours, *theirs])
        inner = [(ours.get(key), theirs.get(key), f"{place}.{key}".strip(".")) for key in keys]
        lines = [line for one in inner for line in differences(*one)]
        return lines or ([f"{place}: in another order"] if isinstance(before, list) else [])
    if None in (before, now) and isinstance(before or now, dict):
        return [f"{place}: is {'new' if before is None else 'gone'}"]
    return [f"{place}: was {before!r}, is {now!r}"]


def _by_key(values: Any) -> dict[str, Any] | None:
    """A mapping, or models or tables by their names; None for anything else."""
    if isinstance(values, list) and all(isinstance(one, dict) and "name" in one for one in values):
        return {one["name"]: one for one in values}
    return values if isinstance(values, dict) else None


def _prepare(
    settings: BenchmarkSettings, data: Path | None, store: Store
) -> tuple[SharedInputs, dict[str, Path]]:
    with Progress(None, "prepare images and shards"):
        sources = prepare_images(settings.data, data, store)
        divided = divide(sources, settings.data, settings.partition, store)
        has_domains = settings.partition.classes is not None
        reference = reference_job(sources, divided, settings.score_on, has_domains)
        images = write_reference(store, reference, sources, divided)["images"]
    drawn = min(point.num_images for table in settings.tables for point in points_of(settings, table))
    # Over both splits, so that what is chosen by one is confirmed on the same features.
    features = features_job_of(settings, reference, min(fewest_images(sources, divided), drawn))
    with Progress(None, "choose the features for scoring"):
        dimensions = write_features(store, features, reference)["dimensions"]
    counts = {
        "num_images": drawn,
        "training images": images["training"],
        f"{settings.score_on} images": images["fresh"],
    }
    check_counts(settings, counts, dimensions)
    links = {SHARDS: divided.shards, WHOLE: divided.whole}
    if sources.job is not None:
        links[sources.job.kind] = store.path(sources.job)
    with Progress(None, "score real images"):
        real = Scoring(settings, (), reference, features).of_real(store)
    return SharedInputs(divided, reference, features, real), links


def _link(out: Path, links: dict[str, Path]) -> None:
    """Link to the store under readable names; the links are relative, so they move along."""
    for name, target in links.items():
        link = out / name
        link.parent.mkdir(parents=True, exist_ok=True)
        to = os.path.relpath(target.resolve(), link.parent.resolve())
        if link.is_symlink() and os.readlink(link) == to:
            continue
        if link.is_symlink():
            link.unlink()
        elif link.exists():
            raise HddmError(f"{link}: is in the way of a link to {target}; move it away")
        link.symlink_to(to, target_is_directory=True)


def _write_real(out: Path, shared: SharedInputs, store: Store) -> None:
    """Write a picture of real images, from all over the split that is scored on."""
    fresh = read_reference(store.path(shared.reference))["fresh"]
    rows = torch.linspace(0, len(fresh) - 1, min(GRID_IMAGES, len(fresh))).round().long()
    write_grid(fresh[rows], grid_path(out, REAL))


def _write_grids(out: Path, seed: SeedJobs, store: Store) -> None:
    """Write pictures of the first samples of every model, at the first point that it is sampled at."""
    for model, row in {row.model: row for row in reversed(seed.rows)}.items():
        pixels, _ = read_samples(store, [row.samples[0].job])
        write_grid(pixels[:GRID_IMAGES], grid_path(out / f"seed_{seed.seed}", model))


def _write_strips(
    out: Path, seed: SeedJobs, store: Store, shared: SharedInputs, domains: Mapping[str, Sequence[str]]
) -> None:
    """Write a picture of the first samples of every row of the first table, each framed by its domain."""
    fresh = read_reference(store.path(shared.reference))["fresh"]
    shown = torch.linspace(0, len(fresh) - 1, STRIP).round().long()
    first = shared.real["of_images"]
    strips = [("real images", fresh[shown], [first[k] for k in shown.tolist()])]
    for row in seed.rows:
        if row.table == seed.rows[0].table:
            pixels, _ = read_samples(store, [row.samples[0].job])
            strips.append((row.row, pixels[:STRIP], store.result(row.scores.job)["of_images"][:STRIP]))
    charts.write_strips(strips, domains, grid_path(out, STRIPS))


def collect(
    settings: BenchmarkSettings, store: Store, shared: SharedInputs, seeds: Sequence[SeedJobs]
) -> Results:
    """Results of the ``seeds`` that are done."""
    reference, extractor = shared.reference, store.result(shared.features)
    scored = tuple(
        _scored_row(store, seed, row)
        for table in settings.tables
        for seed in seeds
        for row in seed.rows
        if row.table == table.name
    )
    done = [store.record(job) for job in set().union(*(seed.jobs for seed in seeds))]
    results = Results(
        name=settings.name,
        complete=len(seeds) == len(settings.seeds),
        score_on=settings.score_on,
        seeds=tuple(seed.seed for seed in seeds),
        date=datetime.date.today().isoformat(),
        settings=settings,
        machine=together([one["machine"] for one in done]),
        hashes={
            "training": reference.inputs["training"],
            "shards": shared.divided.hashes,
            "reference": reference.hash,
            "features": extractor["hash"],
            "numerics": NUMERICS,
        },
        images=store.result(reference)["images"],
        features=extractor,
        sampled_as={
            "weights": _joined(one.sampled_as["weights"] for one in scored),
            "dtype": "float32",
            "device": _joined(one.sampled_as["device"] for one in scored),
            "vae": None,
        },
        real=finite(_without_images(shared.real)),
        models=tuple(model.result for seed in seeds for model in seed.models.values()),
        scored=scored,
        comparisons=(),
        seconds=round(math.fsum(one["seconds"] for one in done), 1),
    )
    return results.model_copy(update={"comparisons": tuple(compare_rows(results))})


def _scored_row(store: Store, seed: SeedJobs, row: SampledRow) -> ScoredRow:
    drawn = [store.record(piece.job) for piece in row.samples]
    found = [one["result"] for one in drawn]
    images = sum(one["images"] for one in found)
    unchanged = {} if row.unchanged is None else {"unchanged": store.result(row.unchanged.job)}
    experts = zip(*(one["expert_evaluations"] for one in found), strict=True)
    return ScoredRow(
        table=row.table,
        row=row.row,
        model=row.model,
        seed=seed.seed,
        point=row.point,
        scores=_without_images(store.result(row.scores.job)) | unchanged,
        images=images,
        expert_evaluations=tuple(sum(counts) / images for counts in experts),
        router_evaluations=sum(one["router_evaluations"] for one in found) / images,
        sampling_flop=sum(one["flop"] for one in found) / images,
        samples=tuple(piece.job.name for piece in row.samples),
        scores_job=row.scores.job.name,
        seconds=round(sum(one["seconds"] for one in drawn), 1),
        sampled_as={
            "weights": seed.models[row.model].weights,
            # Jobs of older versions do not say.
            "device": _joined(one.get("device") for one in found),
        },
    )


def _without_images(scores: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in scores.items() if key != "of_images"}


def _joined(values: Iterable[str | None]) -> str | None:
    """Return the one value, or several joined by commas; None where none is recorded."""
    distinct = set(values)
    return None if distinct <= {None} else ", ".join(sorted(one or "not recorded" for one in distinct))


def _write(out: Path, results: Results) -> None:
    for name, text in (
        (RESULTS_FILE, results.model_dump_json(indent=1)),
        (TABLES_FILE, tables_text(results)),
    ):
        write_whole(out / name, functools.partial(Path.write_text, data=f"{text}\n", encoding="utf-8"))
    write_report(out, results)
