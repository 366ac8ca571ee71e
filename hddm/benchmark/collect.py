"""Results out of finished jobs."""

import datetime
import math
from collections.abc import Iterable, Sequence

from hddm.benchmark.jobs import NUMERICS, Job, Store, finite, together
from hddm.benchmark.results import ModelResult, Results, ScoredRow, compare_rows
from hddm.benchmark.seed import SampledRow, SeedJobs, SharedInputs
from hddm.benchmark.settings import BenchmarkSettings


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
    done = [store.record(job) for job in _jobs(seeds)]
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
        real=finite(shared.real),
        models=tuple(_model(store, seed, name) for seed in seeds for name in seed.models),
        scored=scored,
        comparisons=(),
        seconds=round(math.fsum(one["seconds"] for one in done), 1),
    )
    return results.model_copy(update={"comparisons": tuple(compare_rows(results))})


def _scored_row(store: Store, seed: SeedJobs, row: SampledRow) -> ScoredRow:
    drawn = [store.record(job) for job in row.samples]
    parts = [one["result"] for one in drawn]
    images = sum(part["images"] for part in parts)
    experts = [sum(counts) / images for counts in zip(*(p["expert_evaluations"] for p in parts), strict=True)]
    return ScoredRow(
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
        samples=tuple(job.name for job in row.samples),
        scores_job=row.scores.name,
        seconds=round(sum(one["seconds"] for one in drawn), 1),
        sampled_as={
            "weights": seed.models[row.model].weights,
            # Jobs of older versions do not say.
            "device": _joined(part.get("device") for part in parts),
        },
    )


def _joined(values: Iterable[str | None]) -> str | None:
    """The one value, or several one after the other; None where none is recorded."""
    distinct = set(values)
    if distinct <= {None}:
        return None
    return ", ".join(sorted("not recorded" if one is None else one for one in distinct))


def _model(store: Store, seed: SeedJobs, name: str) -> ModelResult:
    model = seed.models[name]
    flop = model.training_flop
    jobs = [one.job for one in model.trainings]
    starts = [one.start.job for one in model.trainings if one.start is not None]
    routers = [seed.router] if seed.router is not None and not model.source.is_single and jobs else []
    seconds = sum(store.record(job)["seconds"] for job in (*jobs, *starts, *routers))
    return ModelResult(
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


def _jobs(seeds: Sequence[SeedJobs]) -> set[Job]:
    """All that training, sampling and scoring took."""
    jobs = {job for seed in seeds for row in seed.rows for job in (*row.samples, row.scores)}
    for seed in seeds:
        jobs |= {training.job for training in seed.trainings}
        jobs |= {seed.router} if seed.router is not None else set()
    return jobs
