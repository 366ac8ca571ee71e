"""The DDPM experts of a finished benchmark under every conversion, sampled as its first table."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.conversion.conversions import EXACT, SAME_TIME, TREATMENTS, sample_ddim, variant
from benchmarks.finished import DDPM, FinishedBenchmark
from hddm.data.shards import load_shard
from hddm.sampling import sample
from hddm.training.fitting import conditions_of

OWN_SAMPLER = "own DDIM sampler"


def grid(out: Path) -> Iterator[str]:
    """A line a conversion and seed."""
    benchmark = FinishedBenchmark.read(out)
    point = benchmark.results.settings.sampling
    for seed in benchmark.results.seeds:
        for how in (EXACT, SAME_TIME):
            for treatment in TREATMENTS:
                name, ensemble = f"{how}, {treatment}", benchmark.ensemble(DDPM, seed)
                for k, field in enumerate(ensemble.experts):
                    shard = load_shard(benchmark.shard(k))
                    given = conditions_of(shard, field)
                    ensemble.experts[k] = variant(field, how == EXACT, treatment, shard.images, given)
                images = sample(ensemble, point.num_images, seed, point.steps, point.strategy, point.solver)
                yield benchmark.line(name, seed, benchmark.scores(images, name=name, seed=seed))
        images = sample_ddim(benchmark.ensemble(DDPM, seed), point.num_images, seed, point.steps)
        scores = benchmark.scores(images, name=OWN_SAMPLER, seed=seed)
        yield benchmark.line(OWN_SAMPLER, seed, scores)
