"""Ensembles in which each shard has the expert whose velocity error on its validation images is lower.

Both run on the experts of a finished benchmark that has homogeneous flow and homogeneous DDPM, of which half
of the training is then thrown away (by-error) or used by each state alone (blended).
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.finished import DDPM, FLOW, FinishedBenchmark
from benchmarks.heterogeneity.blending import blended_experts, choice
from hddm.data.shards import load_shard
from hddm.ensemble import Ensemble
from hddm.sampling import sample
from hddm.training.denoising import denoising
from hddm.training.expert import conditions_of
from hddm.utils.errors import HddmError
from hddm.velocity import VelocityField


def errors(benchmark: FinishedBenchmark, experts: list[VelocityField]) -> list[dict[str, Any]]:
    """Mean velocity error of each expert on the validation images of its shard, and by noise level.

    Raises:
        HddmError: where there are no validation images.
    """
    found = []
    for index, field in enumerate(experts):
        folder = benchmark.shard(index, held_out=True)
        if not folder.is_dir():
            raise HddmError(f"{folder}: is not there; the benchmark needs a data.validation_share")
        shard = load_shard(folder)
        one = denoising(field, shard.images, conditions_of(shard, field))
        found.append({"mean": one.expert, "levels": [asdict(level) for level in one.levels]})
    return found


def assigned(ddpm: list[dict[str, Any]], flow: list[dict[str, Any]], most: int | None = None) -> list[bool]:
    """Which shards are DDPM: where its error is lower; of ``most``, those where it loses least."""
    gaps = [a["mean"] - b["mean"] for a, b in zip(ddpm, flow, strict=True)]
    if most is None:
        return [gap < 0 for gap in gaps]
    chosen = sorted(range(len(gaps)), key=lambda k: gaps[k])[:most]
    return [k in chosen for k in range(len(gaps))]


def by_error(out: Path, most: int | None = None, blended: bool = False) -> Iterator[str]:
    """A line a seed: the distance of the mixture, sampled as the benchmark's first table."""
    benchmark = FinishedBenchmark.read(out)
    for seed in benchmark.results.seeds:
        flow, ddpm = (benchmark.ensemble(name, seed) for name in (FLOW, DDPM))
        of_flow, of_ddpm = (errors(benchmark, one.experts) for one in (flow, ddpm))
        if blended:
            choices = [choice(*both) for both in zip(of_ddpm, of_flow, strict=True)]
            experts, name = blended_experts(flow, ddpm, choices), "blended"
        else:
            chosen = assigned(of_ddpm, of_flow, most)
            experts = [ddpm.experts[k] if is_ddpm else flow.experts[k] for k, is_ddpm in enumerate(chosen)]
            name = f"by error ({', '.join('ddpm' if is_ddpm else 'flow' for is_ddpm in chosen)})"
        point = benchmark.results.settings.sampling
        images = sample(
            Ensemble(experts, flow.router, point.strategy, prior=flow.prior),
            point.num_images,
            seed,
            point.steps,
            point.strategy,
            point.solver,
        )
        yield benchmark.line(name, seed, benchmark.scores(images, name=name, seed=seed, most=most))
