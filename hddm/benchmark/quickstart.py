"""Quickstart: a small benchmark on scikit-learn's digits, in minutes on a laptop."""

import shutil
from pathlib import Path
from typing import Annotated

from pydantic import Field

from hddm.benchmark.results import Results
from hddm.benchmark.run import run_benchmark
from hddm.benchmark.settings import BenchmarkSettings
from hddm.training.settings import ExpertSettings, Positive, RouterSettings
from hddm.utils.errors import HddmError
from hddm.utils.files import check_absent
from hddm.utils.records import BENCHMARK_FILE, RESULTS_FILE, Record


class QuickstartSettings(Record):
    """Settings of `hddm.benchmark.quickstart.quickstart`.

    The single model has batches of ``batch_size``, each expert ``steps`` of ``batch_size / num_shards``; how
    many steps the single model takes follows from the compute of the ensemble with its router
    (`hddm.benchmark.compute`).
    """

    num_shards: Positive = 4
    steps: Positive = 1600
    batch_size: Positive = 128
    learning_rate: float = 4e-3
    ema_decay: float = 0.99
    size: str = "small"
    router_size: str = "tiny"
    router_batch_size: Positive = 64
    sampling_steps: Positive = 30
    solver: str = "adams-bashforth"
    strategy_solver: str = "euler"
    """One-step, since a multistep solver extrapolates across a change of experts."""
    num_images: Positive = 1437
    num_images_per_strategy: Positive = 1000
    strategies: tuple[str, ...] = (
        "draw",
        "top-1",
        "top-2",
        "threshold-0.2",
        "nucleus-0.9",
        "full",
    )
    resamples: Annotated[int, Field(ge=2)] = 100
    seeds: Positive = 1
    workers: Positive = 2

    def expert(self, objective: str, seed: int) -> ExpertSettings:
        """One expert of an ensemble."""
        if self.batch_size % self.num_shards:
            raise HddmError(
                f"batch size {self.batch_size} does not divide into {self.num_shards} shards: "
                "the comparison would not be at equal compute"
            )
        return ExpertSettings.model_validate(
            {
                "objective": objective,
                "steps": self.steps,
                "batch_size": self.batch_size // self.num_shards,
                "learning_rate": self.learning_rate,
                "ema_decay": self.ema_decay,
                "size": self.size,
                "seed": seed,
            }
        )

    def router(self, seed: int) -> RouterSettings:
        """The router of all ensembles."""
        return RouterSettings(
            steps=self.steps,
            batch_size=self.router_batch_size,
            learning_rate=self.learning_rate,
            ema_decay=self.ema_decay,
            size=self.router_size,
            seed=seed,
        )


SINGLE, FLOW, DDPM = "single model", "homogeneous flow", "homogeneous DDPM"
MIXTURES = (1, 2)


def quickstart(out: Path, settings: QuickstartSettings, overwrite: bool = False) -> Results:
    """Train and compare on scikit-learn's digits; write the tables, ``report.html`` and all models.

    Per training seed: one flow model on everything, K flow experts, K DDPM experts and a router; then
    homogeneous and mixed ensembles of them, sampled and scored. One that was interrupted goes on.

    Args:
        out: the folder to write.
        settings: see `QuickstartSettings`.
        overwrite: whether an existing ``out`` is replaced.

    Raises:
        HddmError: where ``out`` exists and is finished, or holds something else.
    """
    is_half = (out / BENCHMARK_FILE).is_file() and not (out / RESULTS_FILE).is_file()
    if not is_half or overwrite:
        check_absent(out, BENCHMARK_FILE, overwrite)
        if overwrite and out.exists():
            shutil.rmtree(out)
    return run_benchmark(as_benchmark(settings), out)


def as_benchmark(settings: QuickstartSettings) -> BenchmarkSettings:
    """The benchmark that a quickstart is: two tables, scored on held-out images.

    Nothing is chosen by it, so there are no validation images.
    """
    expert, router = settings.expert("flow", 0), settings.router(0)
    shared = {"steps", "batch_size", "learning_rate", "ema_decay", "size"}
    mixtures = [f"{n}:{settings.num_shards - n}" for n in MIXTURES if n < settings.num_shards]
    mixed = [f"mixed {ratio}" for ratio in mixtures]
    few = {"num_images": settings.num_images_per_strategy}
    return BenchmarkSettings.model_validate(
        {
            "name": "quickstart",
            "data": {"source": "digits"},
            "partition": {"shards": settings.num_shards},
            "training": {
                "expert": expert.model_dump(include=shared),
                "router": router.model_dump(include=shared),
            },
            "models": [
                {"name": SINGLE, "kind": "single"},
                {"name": FLOW, "objectives": "flow"},
                {"name": DDPM, "objectives": "ddpm"},
                *({"name": f"mixed {ratio}", "objectives": ratio} for ratio in mixtures),
            ],
            "compare": {"candidates": mixed, "baselines": [FLOW, SINGLE]},
            "sampling": {
                "strategy": "draw",
                "solver": settings.solver,
                "steps": settings.sampling_steps,
                "num_images": settings.num_images,
            },
            "tables": [
                {"name": "models"},
                {
                    "name": "strategies",
                    "models": mixed[-1:],
                    "base": few | {"solver": settings.strategy_solver},
                    "vary": {"strategy": settings.strategies},
                },
            ],
            "score_on": "held-out",
            "seeds": list(range(settings.seeds)),
            "resamples": settings.resamples,
            "complete": False,
            "workers": settings.workers,
        }
    )
