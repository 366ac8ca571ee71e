"""Collect the results of finished jobs."""

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hddm.benchmark.jobs import NUMERICS, Store, finite, together
from hddm.benchmark.results import Results, ScoredRow, compare_rows
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
