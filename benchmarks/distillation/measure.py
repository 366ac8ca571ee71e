"""Train teachers, choose a recipe, train students and controls, score all; what is there is kept."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.conversion.report import measured_on
from benchmarks.distillation.jobs import control_job, distill_job, score_job
from benchmarks.distillation.report import write_distillation
from benchmarks.distillation.settings import (
    CONTROL,
    COUNTED,
    MIXTURE,
    ROWS,
    STUDENT,
    TEACHER,
    TUNING_SEED,
    Recipe,
    Settings,
    as_json,
    check_kept,
)
from benchmarks.routing.jobs import expert_job, router_job
from hddm.benchmark.compute import forward_mflop
from hddm.benchmark.data import write_digits
from hddm.benchmark.samples import slug
from hddm.data.images import load_images
from hddm.data.partition import partition
from hddm.evaluation.features import choose_extractor
from hddm.evaluation.scores import Scorer
from hddm.experts.assembly import assemble
from hddm.experts.loading import load
from hddm.utils.files import read_json
from hddm.utils.processes import Call, Workers
from hddm.utils.progress import Progress

ENSEMBLE = "ensemble"


class Bench:
    """The folder of one measurement, its data and its workers."""

    def __init__(self, settings: Settings, folder: Path, pool: Workers) -> None:
        self.settings, self.folder, self.pool = settings, folder, pool
        chosen = settings.quickstart
        training, held_out = write_digits(folder / "digits")
        self.shards, self.whole = folder / "shards", folder / "whole"
        for place, count in ((self.shards, chosen.num_shards), (self.whole, 1)):
            if not place.exists():
                partition(training, place, count)
        images, fresh = load_images(training), load_images(held_out)
        extractor = choose_extractor(images, min(len(images), len(fresh), chosen.num_images))
        self.scorer = Scorer(extractor, images.pixels, fresh.pixels, chosen.resamples)

    def teacher(self, seed: int) -> Path:
        """The mixed ensemble of a training seed, trained if it is not there."""
        chosen, place = self.settings.quickstart, self.folder / f"seed_{seed}"
        calls, experts = [], []
        for k in range(chosen.num_shards):
            own = chosen.expert("ddpm" if k < self.settings.num_ddpm else "flow", seed)
            experts.append(place / "experts" / str(k))
            arguments: dict[str, Any] = {"shard": self.shards / f"shard_{k}", "out": experts[-1]}
            calls.append(Call(expert_job, arguments | {"settings": own}, own.steps))
        router = chosen.router(seed)
        arguments = {"shards": self.shards, "out": place / "router", "settings": router}
        calls.append(Call(router_job, arguments, router.steps))
        self._run(calls, f"seed {seed}: teacher")
        if not (place / ENSEMBLE).exists():
            assemble(experts, place / ENSEMBLE, place / "router", "draw")
        return place / ENSEMBLE

    def student(self, teacher: Path, out: Path, row: str, recipe: Recipe, seed: int) -> Call:
        """The training of a student's row."""
        own = self.settings.student(row, recipe, seed)
        arguments: dict[str, Any] = {"ensemble": teacher, "shards": self.shards}
        arguments |= {"out": out, "settings": own, "init": self._init(teacher, recipe)}
        return Call(distill_job, arguments, own.steps)

    def control(self, teacher: Path, out: Path, recipe: Recipe, seed: int) -> Call:
        """The training of a control, which begins as a student of ``teacher`` would, and never asks it."""
        own = self.settings.control(recipe, seed)
        arguments = {"shard": self.whole / "shard_0", "out": out, "settings": own}
        return Call(control_job, arguments | {"init": self._init(teacher, recipe)}, own.steps)

    def _init(self, teacher: Path, recipe: Recipe) -> Path | None:
        last = self.settings.quickstart.num_shards - 1
        return teacher.parent / "experts" / str(last) if recipe.init else None

    def scores(
        self, place: Path, models: dict[str, tuple[Path, str | None]], seed: int, label: str
    ) -> dict[str, Any]:
        """Scores of models, by their names; rows are kept in ``place``."""
        chosen, rows = self.settings.quickstart, {name: place / f"{slug(name)}.json" for name in models}
        common = {"scorer": self.scorer, "num": chosen.num_images, "seed": seed}
        common |= {"steps": chosen.sampling_steps, "solver": chosen.solver}
        calls = [
            Call(
                score_job,
                {"source": source, "strategy": strategy, "row": rows[name], **common},
                chosen.num_images,
            )
            for name, (source, strategy) in models.items()
        ]
        self._run(calls, label)
        return {name: read_json(path) for name, path in rows.items()}

    def train(self, calls: Sequence[Call], label: str) -> None:
        """Run trainings."""
        self._run(calls, label)

    def _run(self, calls: Sequence[Call], label: str) -> None:
        with Progress(sum(call.units for call in calls), label) as progress:
            self.pool.run(calls, progress)


def measure_distillation(
    settings: Settings, seeds: int, work: Path, results: Path, workers: int, command: str
) -> Path:
    """The whole benchmark; returns the Markdown file."""
    facts, started = measured_on(), time.perf_counter()
    folder = work / settings.name
    check_kept(folder, settings)
    with Workers(workers) as pool:
        bench = Bench(settings, folder, pool)
        tuned = tune(bench)
        runs = [_run(bench, tuned, seed) for seed in range(seeds)]
        cost = forward_mflop(load(bench.teacher(0)))[0]
    content = {
        "format": "1.0",
        "measured_on": facts,
        "seconds": round(time.perf_counter() - started),
        "settings": as_json(settings),
        "forward_mflop": cost,
        "compute": {row: settings.compute(row) for row in ROWS},
        "images": {row: settings.images(row) for row in ROWS},
        "real": asdict(bench.scorer.real()),
        "tuning": {kind: found["scores"] for kind, found in tuned.items()},
        "recipes": {kind: str(found["recipe"]) for kind, found in tuned.items()},
        "runs": runs,
    }
    grids = [folder / "seed_0" / "rows" / f"{slug(row)}.png" for row in (TEACHER, STUDENT, CONTROL)]
    return write_distillation(results, settings, command, content, grids)


def tune(bench: Bench) -> dict[str, dict[str, Any]]:
    """The recipe of the student and that of the control, each by its own distance to the training images.

    Of a seed that no run has, with the teacher of seed 0; held-out images have no say.
    """
    teacher, place = bench.teacher(0), bench.folder / "tuning"
    makers: dict[str, Callable[[Path, Recipe], Call]] = {
        STUDENT: lambda out, recipe: bench.student(teacher, out, STUDENT, recipe, TUNING_SEED),
        CONTROL: lambda out, recipe: bench.control(teacher, out, recipe, TUNING_SEED),
    }
    found: dict[str, dict[str, Any]] = {}
    for kind, make in makers.items():
        outs = {str(recipe): place / slug(f"{kind} {recipe}") for recipe in bench.settings.recipes}
        calls = [make(outs[str(recipe)], recipe) for recipe in bench.settings.recipes]
        bench.train(calls, f"tuning: {kind}")
        models: dict[str, tuple[Path, str | None]] = {name: (out, None) for name, out in outs.items()}
        scores = bench.scores(place / f"rows-{slug(kind)}", models, TUNING_SEED, f"tuning: sample {kind}")
        distances = {name: scores[name]["to_training"]["value"] for name in outs}
        best = min(bench.settings.recipes, key=lambda recipe: distances[str(recipe)])
        found[kind] = {"recipe": best, "scores": distances}
    return found


def _run(bench: Bench, tuned: dict[str, dict[str, Any]], seed: int) -> dict[str, Any]:
    place = bench.folder / f"seed_{seed}"
    teacher = bench.teacher(seed)
    recipe, plain = tuned[STUDENT]["recipe"], tuned[CONTROL]["recipe"]
    outs = {row: place / slug(row) for row in (STUDENT, COUNTED, CONTROL)}
    calls = [bench.student(teacher, outs[row], row, recipe, seed) for row in (STUDENT, COUNTED)]
    bench.train([*calls, bench.control(teacher, outs[CONTROL], plain, seed)], f"seed {seed}: train")
    models: dict[str, tuple[Path, str | None]] = {TEACHER: (teacher, "draw"), MIXTURE: (teacher, "full")}
    models |= {row: (out, None) for row, out in outs.items()}
    return {"seed": seed, "rows": bench.scores(place / "rows", models, seed, f"seed {seed}: sample")}
