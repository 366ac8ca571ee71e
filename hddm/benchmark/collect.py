"""From finished jobs to `hddm.benchmark.results.Results`."""

import datetime
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hddm.benchmark.jobs import NUMERICS, Job, Store, finite, together
from hddm.benchmark.results import (
    Curve,
    ErrorCurve,
    ModelRecord,
    Record,
    Results,
    RouterRecord,
    Row,
    figure,
    figures_of,
)
from hddm.benchmark.seed import SampledRow, SeedJobs, SharedInputs
from hddm.benchmark.settings import BenchmarkSettings
from hddm.benchmark.trainings import Training, losses_of
from hddm.benchmark.verdicts import judge


def collect(
    settings: BenchmarkSettings,
    store: Store,
    ground: SharedInputs,
    seeds: Sequence[SeedJobs],
) -> Results:
    """Results of the ``seeds`` that are done."""
    reference = ground.reference
    records = {
        table.name: _by_row(
            [_record(store, seed, row) for seed in seeds for row in seed.rows if row.table == table.name]
        )
        for table in settings.tables
    }
    every = [one for rows in records.values() for each in rows.values() for one in each]
    models = tuple(_model(store, seed, name) for seed in seeds for name in seed.models)
    decides = f"to_{settings.score_on.replace('-', '_')}"
    extractor = store.result(ground.features)
    done = [store.record(job) for job in _jobs(seeds)]
    return Results(
        name=settings.name,
        complete=len(seeds) == len(settings.seeds),
        score_on=settings.score_on,
        seeds=tuple(seed.seed for seed in seeds),
        date=datetime.date.today().isoformat(),
        settings=settings,
        machine=together([one["machine"] for one in done]),
        hashes={
            "training": reference.inputs["training"],
            "shards": ground.divided.hashes,
            "reference": reference.hash,
            "features": extractor["hash"],
            "numerics": NUMERICS,
        },
        images=store.result(reference)["images"],
        features=extractor,
        sampled_as={
            "weights": _told(one.sampled_as["weights"] for one in every),
            "dtype": "float32",
            "device": _told(one.sampled_as["device"] for one in every),
            "vae": None,
        },
        real=finite(ground.real),
        models=models,
        tables={
            table: tuple(_row(name, each, models) for name, each in rows.items())
            for table, rows in records.items()
        },
        verdicts=tuple(judge(settings, models, records, decides)),
        records=tuple(every),
        errors=tuple(one for seed in seeds for one in _errors(store, seed)),
        routers=tuple(_router(store, seed) for seed in seeds if seed.reliability is not None),
        losses=tuple(one for seed in seeds for one in _losses(store, seed)),
        seconds=round(math.fsum(one["seconds"] for one in done), 1),
    )


def _by_row(records: Sequence[Record]) -> dict[str, list[Record]]:
    rows: dict[str, list[Record]] = {}
    for one in records:
        rows.setdefault(one.row, []).append(one)
    return rows


def _record(store: Store, seed: SeedJobs, row: SampledRow) -> Record:
    drawn = [store.record(job) for job in row.samples]
    parts = [one["result"] for one in drawn]
    images = sum(part["images"] for part in parts)
    experts = [sum(counts) / images for counts in zip(*(p["expert_evaluations"] for p in parts), strict=True)]
    return Record(
        table=row.table,
        row=row.row,
        model=row.model,
        seed=seed.seed,
        point=row.point,
        scores=store.result(row.scores),
        images=images,
        expert_evaluations=tuple(experts),
        router_evaluations=sum(part["router_evaluations"] for part in parts) / images,
        sampling_flop=sum(part["flop"] for part in parts) / images,
        use=tuple(_mean_use(parts)),
        samples=tuple(job.name for job in row.samples),
        scores_job=row.scores.name,
        seconds=round(sum(one["seconds"] for one in drawn), 1),
        sampled_as={
            "weights": seed.models[row.model].weights,
            # Jobs of older versions do not say.
            "device": _told(part.get("device") for part in parts),
        },
    )


def _told(values: Iterable[str | None]) -> str | None:
    """What all say, or one after the other; None where none says anything."""
    distinct = set(values)
    if distinct <= {None}:
        return None
    return ", ".join(sorted("not recorded" if one is None else one for one in distinct))


def _mean_use(parts: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Means over pieces, which have the same times, weighted by their images."""
    total = sum(part["images"] for part in parts)
    for entries in zip(*(part["use"] for part in parts), strict=True):
        shares = [part["images"] / total for part in parts]
        merged: dict[str, Any] = {"t": entries[0]["t"]}
        for key in entries[0]:
            if key == "largest":
                merged[key] = sum(s * one[key] for s, one in zip(shares, entries, strict=True))
            elif key != "t":
                merged[key] = [
                    sum(s * value for s, value in zip(shares, values, strict=True))
                    for values in zip(*(one[key] for one in entries), strict=True)
                ]
        yield merged


def _row(name: str, records: Sequence[Record], models: Sequence[ModelRecord]) -> Row:
    first = records[0]
    made = [one for one in models if one.model == first.model]
    flop = [float(one.training_flop) for one in made if one.training_flop is not None]
    return Row(
        name=name,
        model=first.model,
        point=first.point,
        figures=figures_of([one.scores for one in records]),
        evaluations=figure([sum(one.expert_evaluations) / one.point.steps for one in records]),
        sampling_flop=figure([one.sampling_flop for one in records]),
        training_flop=figure(flop) if flop else None,
        images_seen=made[0].images_seen,
    )


def _model(store: Store, seed: SeedJobs, name: str) -> ModelRecord:
    model = seed.models[name]
    flop = model.training_flop
    jobs = [one.job for one in model.trainings]
    starts = [one.start.job for one in model.trainings if one.start is not None]
    routers = [seed.router] if seed.router is not None and not model.source.is_single and jobs else []
    seconds = sum(store.record(job)["seconds"] for job in (*jobs, *starts, *routers))
    return ModelRecord(
        model=name,
        seed=seed.seed,
        hash=model.source.hash,
        folder=str(model.link),
        objectives=model.objectives,
        experts=tuple(job.name for job in jobs),
        steps=tuple(one.total_steps for one in model.trainings),
        batch_sizes=tuple(one.settings.batch_size for one in model.trainings),
        images_seen=model.images_seen,
        experts_flop=flop["experts"] if flop else None,
        calibration_flop=model.calibration_flop,
        router_flop=flop["router"] if flop else None,
        training_flop=sum(flop.values()) if flop else None,
        seconds=round(seconds, 1) if jobs else None,
    )


def _errors(store: Store, seed: SeedJobs) -> Iterator[ErrorCurve]:
    for kind, training in seed.trainings:
        job = seed.errors.get(training.job.hash)
        if job is not None:
            found = store.result(job)
            yield ErrorCurve(
                expert=training.job.name,
                objective=objective_of(training),
                shard=None if kind == "single" else _shard(training),
                seed=seed.seed,
                images=found["images"],
                calibrated=found["calibrated"],
                raw=found["raw"],
            )


def _router(store: Store, seed: SeedJobs) -> RouterRecord:
    assert seed.reliability is not None
    return RouterRecord(seed=seed.seed, **store.result(seed.reliability))


def _losses(store: Store, seed: SeedJobs) -> Iterator[Curve]:
    for kind, training in seed.trainings:
        yield Curve(
            model=training.job.name,
            kind="single" if kind == "single" else "expert",
            objective=objective_of(training),
            shard=None if kind == "single" else _shard(training),
            seed=seed.seed,
            loss=losses_of(store, training.job),
        )
    if seed.router is not None:
        yield Curve(
            model=seed.router.name,
            kind="router",
            objective=None,
            shard=None,
            seed=seed.seed,
            loss=losses_of(store, seed.router),
        )


def objective_of(training: Training) -> str:
    """What an expert learned; one that went on from another objective is ``converted``."""
    is_converted = training.start is not None or training.init is not None
    return "converted" if is_converted else training.settings.objective


def _shard(training: Training) -> int:
    return int(training.shard.name.rpartition("_")[2])


def _jobs(seeds: Sequence[SeedJobs]) -> set[Job]:
    """All that training, sampling and measuring took."""
    jobs = {job for seed in seeds for row in seed.rows for job in (*row.samples, row.scores)}
    for seed in seeds:
        jobs |= {training.job for _, training in seed.trainings} | {*seed.errors.values()}
        jobs |= {job for job in (seed.router, seed.reliability) if job is not None}
    return jobs
