"""The main job in minutes on a laptop: partition, train, convert, route, sample, compare."""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hddm.assembly import assemble
from hddm.benchmark.conversions import TREATMENTS
from hddm.benchmark.cost import forward_mflop
from hddm.benchmark.digits import write_digits
from hddm.benchmark.jobs import (
    ExpertUse,
    Sampled,
    convert_job,
    ddim_job,
    sample_job,
    train_expert_job,
    train_router_job,
)
from hddm.benchmark.plots import grid_path, slug, write_grid
from hddm.benchmark.report import write_report
from hddm.benchmark.results import TABLES, Figure, Row, Run, markdown_tables, summarise, verdict
from hddm.benchmark.settings import QuickstartSettings
from hddm.data.images import load_images
from hddm.data.partition import partition
from hddm.describe import describe
from hddm.evaluation.extractors import choose_extractor
from hddm.evaluation.scores import Scorer
from hddm.files import check_absent, new_folder, write_json
from hddm.load import load
from hddm.progress import Progress
from hddm.tensors import generator
from hddm.training.expert import ExpertSettings
from hddm.workers import Call, Workers

SINGLE = "single model"
OBJECTIVES = ("flow", "ddpm")
MIXTURES = (1, 2)
GRID_IMAGES = 64
TABLES_FILE = "tables.md"
RESULTS_FILE = "results.json"
FORMAT = "1.0"


@dataclass(frozen=True)
class _Ground:
    """What all training seeds share."""

    shards: Path
    whole: Path
    scorer: Scorer
    examples: Tensor
    """A few training images, to look at beside samples."""


def quickstart(out: Path, settings: QuickstartSettings, overwrite: bool = False) -> list[Run]:
    """Train and compare on scikit-learn's digits; write the tables, ``report.html`` and all models.

    Per training seed: one flow model on everything, K flow experts, K DDPM experts and a router; then
    homogeneous and mixed ensembles of them, sampled and scored.

    Args:
        out: the folder to write.
        settings: see `QuickstartSettings`.
        overwrite: whether an existing ``out`` is replaced.

    Raises:
        HddmError: where ``out`` exists.
    """
    check_absent(out, RESULTS_FILE, overwrite)
    started = time.perf_counter()
    with new_folder(out, RESULTS_FILE, overwrite) as draft, Workers(settings.workers) as workers:
        ground = _prepare(draft, settings)
        runs = [
            _run(draft / f"seed_{seed}", seed, ground, settings, workers) for seed in range(settings.seeds)
        ]
        _write(draft, settings, runs, time.perf_counter() - started)
    return runs


def _prepare(folder: Path, settings: QuickstartSettings) -> _Ground:
    training, held_out = write_digits(folder / "digits")
    partition(training, folder / "shards", settings.num_shards)
    partition(training, folder / "whole", 1)
    images, fresh = load_images(training), load_images(held_out)
    extractor = choose_extractor(images, min(len(images), len(fresh), settings.num_images_per_strategy))
    scorer = Scorer(extractor, images.pixels, fresh.pixels, settings.resamples)
    examples = images.pixels[torch.randperm(len(images), generator=generator(0))[:GRID_IMAGES]]
    return _Ground(folder / "shards", folder / "whole" / "shard_0", scorer, examples)


def _run(folder: Path, seed: int, ground: _Ground, settings: QuickstartSettings, workers: Workers) -> Run:
    label = f"seed {seed}: " if settings.seeds > 1 else ""
    losses = _train(folder, seed, ground, settings, workers, f"{label}train")
    models = _assemble(folder, settings.num_shards)
    calls = _sampling_calls(models, seed, ground, settings)
    flat = [call for table in TABLES for call in calls[table].values()]
    with Progress(sum(call.units for call in flat), f"{label}sample") as progress:
        sampled = iter(workers.run(flat, progress))
    costs = forward_mflop(load(models["homogeneous flow"]))
    write_grid(ground.examples, grid_path(folder, "training images"))
    tables: dict[str, list[Row]] = {}
    use: dict[str, list[ExpertUse]] = {}
    for table in TABLES:
        tables[table] = []
        for name, call in calls[table].items():
            result = next(sampled)
            tables[table].append(_row(name, call.arguments["source"], result, ground, costs))
            if table == "models":
                write_grid(result.pixels[:GRID_IMAGES], grid_path(folder, name))
            if result.use:
                use[name] = result.use
    return Run(seed, tables, use, losses, ground.scorer.real())


def _train(
    folder: Path,
    seed: int,
    ground: _Ground,
    settings: QuickstartSettings,
    workers: Workers,
    label: str,
) -> dict[str, list[float]]:
    def call(shard: Path, name: str, expert: ExpertSettings) -> Call:
        arguments = {"shard": shard, "out": folder / name, "settings": expert}
        return Call(train_expert_job, arguments, expert.steps * expert.batch_size)

    # The longest first, so that no worker is idle at the end.
    calls = {"single": call(ground.whole, "single", settings.single(seed))}
    for objective in OBJECTIVES:
        for k in range(settings.num_shards):
            name = f"{objective}/{k}"
            calls[name] = call(ground.shards / f"shard_{k}", name, settings.expert(objective, seed))
    router = settings.router(seed)
    arguments = {"shards": ground.shards, "out": folder / "router", "settings": router}
    calls["router"] = Call(train_router_job, arguments, router.steps * router.batch_size)
    with Progress(sum(c.units for c in calls.values()), label) as progress:
        losses = workers.run(list(calls.values()), progress)
    return dict(zip(calls, losses, strict=True))


def _assemble(folder: Path, num_shards: int) -> dict[str, Path]:
    """Folders of the models to compare, by name; a mixture has its DDPM experts on the first shards."""
    models = {SINGLE: folder / "single"}
    mixtures = {"homogeneous flow": 0, "homogeneous DDPM": num_shards}
    mixtures |= {f"mixed {n}:{num_shards - n}": n for n in MIXTURES if n < num_shards}
    for name, num_ddpm in mixtures.items():
        experts = [folder / ("ddpm" if k < num_ddpm else "flow") / str(k) for k in range(num_shards)]
        models[name] = folder / "ensembles" / slug(name)
        assemble(experts, models[name], folder / "router")
    return models


def _sampling_calls(
    models: dict[str, Path], seed: int, ground: _Ground, settings: QuickstartSettings
) -> dict[str, dict[str, Call]]:
    common = {"seed": seed, "steps": settings.sampling_steps, "solver": settings.solver}
    many = {**common, "num": settings.num_images}
    few = {**common, "num": settings.num_images_per_strategy}
    # DDIM is a solver itself.
    without_solver = {key: value for key, value in few.items() if key != "solver"}
    mixed, ddpm = models[list(models)[-1]], models["homogeneous DDPM"]
    shards = [ground.shards / f"shard_{k}" for k in range(settings.num_shards)]

    def call(function: Callable[..., Sampled], **arguments: Any) -> Call:
        return Call(function, arguments, arguments["num"])

    return {
        "models": {name: call(sample_job, source=path, **many) for name, path in models.items()},
        "strategies": {
            strategy: call(
                sample_job, source=mixed, strategy=strategy, **few | {"solver": settings.strategy_solver}
            )
            for strategy in settings.strategies
        },
        "conversions": {
            f"{'exact' if exact else 'same x, same t'}, {treatment}": call(
                convert_job, source=ddpm, shards=shards, exact=exact, treatment=treatment, **few
            )
            for exact in (True, False)
            for treatment in TREATMENTS
        }
        | {"own DDIM sampler": call(ddim_job, source=ddpm, **without_solver)},
    }


def _row(name: str, source: Path, sampled: Sampled, ground: _Ground, costs: tuple[float, float]) -> Row:
    expert, router = costs
    return Row(
        name=name,
        scores=ground.scorer.score(sampled.pixels),
        training_images=images_seen(source),
        evaluations=sampled.evaluations,
        mflop_per_step=sampled.evaluations * expert + (router if sampled.use else 0),
    )


def images_seen(source: Path) -> int:
    """Training images that the experts of an expert or ensemble folder saw, by their own records."""
    facts = describe(source)
    if facts["kind"] == "expert":
        return int(facts["training"]["images_seen"])
    return sum(images_seen(source / expert) for expert in facts["experts"])


def _write(folder: Path, settings: QuickstartSettings, runs: list[Run], seconds: float) -> None:
    results = {
        "format": FORMAT,
        "settings": settings.model_dump(mode="json"),
        "machine": machine(),
        "seconds": round(seconds),
        "verdict": verdict(runs),
        "tables": {
            table: [
                {k: asdict(v) if isinstance(v, Figure) else v for k, v in row.items()}
                for row in summarise(runs, table)
            ]
            for table in TABLES
        },
        "runs": [asdict(run) for run in runs],
    }
    write_json(folder / RESULTS_FILE, results)
    (folder / TABLES_FILE).write_text(markdown_tables(runs) + "\n")
    write_report(folder, runs, settings, results)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    packages = ("hddm-diffusion", "torch", "diffusers", "numpy", "scikit-learn")
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "packages": {name: version(name) for name in packages},
    }
