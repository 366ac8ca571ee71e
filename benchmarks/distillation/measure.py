"""Train teachers, choose a recipe, train students and controls, score all; what is there is kept."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib import image
from matplotlib.figure import Figure

from benchmarks.distillation.report import lines
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
)
from benchmarks.harness import Digits, Start, as_json, check_kept, expert_call, router_call, run_calls
from hddm.benchmark.compute import evaluation_flop
from hddm.benchmark.samples import draw, write_grid
from hddm.benchmark.settings import slug
from hddm.ensemble import Ensemble
from hddm.evaluation.scores import Scorer
from hddm.experts.assembly import assemble
from hddm.experts.loading import load
from hddm.training.distill import DistillSettings, distill
from hddm.utils.files import read_json, write_json
from hddm.utils.processes import Call, Report, Workers

GRID_IMAGES = 64


class Bench:
    """The folder of one measurement, its data and its workers."""

    def __init__(self, settings: Settings, folder: Path, pool: Workers) -> None:
        self.settings, self.folder, self.pool = settings, folder, pool
        digits, chosen = Digits(folder), settings.quickstart
        self.shards, self.whole = digits.shards("shards", settings.num_shards), digits.shards("whole", 1)
        self.scorer = digits.scorer(chosen.sampling.num_images, chosen.resamples)

    def teacher(self, seed: int) -> Path:
        """The mixed ensemble of a training seed, trained if it is not there."""
        chosen, place = self.settings.quickstart, self.folder / f"seed_{seed}"
        experts = [place / "experts" / str(k) for k in range(self.settings.num_shards)]
        calls = [
            expert_call(
                self.shards / f"shard_{k}",
                out,
                chosen.expert("ddpm" if k < self.settings.num_ddpm else "flow", seed),
            )
            for k, out in enumerate(experts)
        ]
        calls.append(router_call(self.shards, place / "router", chosen.router(seed)))
        run_calls(self.pool, calls, f"seed {seed}: teacher")
        ensemble = place / "ensemble"
        if not ensemble.exists():
            assemble(experts, ensemble, place / "router", "draw")
        return ensemble

    def student(self, teacher: Path, out: Path, row: str, recipe: Recipe, seed: int) -> Call:
        """The training of a student's row."""
        own = self.settings.student(row, recipe, seed)
        arguments: dict[str, Any] = {"ensemble": teacher, "shards": self.shards}
        arguments |= {"out": out, "settings": own, "init": self._init(teacher, recipe)}
        return Call(distill_job, arguments, own.steps)

    def control(self, teacher: Path, out: Path, recipe: Recipe, seed: int) -> Call:
        """The training of a control, which begins as a student of ``teacher`` would, and never asks it."""
        own, init = self.settings.control(recipe, seed), self._init(teacher, recipe)
        return expert_call(self.whole / "shard_0", out, own, init)

    def _init(self, teacher: Path, recipe: Recipe) -> Path | None:
        last = self.settings.num_shards - 1
        return teacher.parent / "experts" / str(last) if recipe.init else None

    def scores(
        self, place: Path, models: Mapping[str, tuple[Path, Mapping[str, Any]]], seed: int, label: str
    ) -> dict[str, Any]:
        """Scores of models by name, each sampled with its changes to the settings; kept in ``place``."""
        rows = {name: place / f"{slug(name)}.json" for name in models}
        common = {"scorer": self.scorer, "seed": seed, "settings": self.settings}
        calls = [
            Call(
                score_job,
                {"source": source, "changes": changes, "row": rows[name], **common},
                self.settings.quickstart.sampling.num_images,
            )
            for name, (source, changes) in models.items()
        ]
        run_calls(self.pool, calls, label)
        return {name: read_json(path) for name, path in rows.items()}


def measure_distillation(settings: Settings, start: Start) -> Path:
    """The whole benchmark; returns the Markdown file."""
    folder = start.work / settings.name
    check_kept(folder, as_json(settings))
    with Workers(start.workers) as pool:
        bench = Bench(settings, folder, pool)
        tuned = tune(bench)
        runs = [_run(bench, tuned, seed) for seed in range(start.seeds)]
        teacher = load(bench.teacher(0))
        assert isinstance(teacher, Ensemble)
        # Of its network alone: calibration is left out everywhere.
        teacher.experts[0].calibration = None
    content = {
        "settings": as_json(settings),
        "forward_mflop": evaluation_flop(teacher.experts[0]) / 1e6,
        "compute": {row: settings.compute(row) for row in ROWS},
        "images": {row: settings.images(row) for row in ROWS},
        "real": asdict(bench.scorer.real()),
        "tuning": {kind: found["scores"] for kind, found in tuned.items()},
        "recipes": {kind: str(found["recipe"]) for kind, found in tuned.items()},
        "runs": runs,
    }
    grids = {row: folder / "seed_0" / "rows" / f"{slug(row)}.png" for row in (TEACHER, STUDENT, CONTROL)}
    name = f"distillation-{settings.name}"
    return start.write(name, lines(settings, content), content, _side_by_side(grids))


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
        run_calls(bench.pool, calls, f"tuning: {kind}")
        models: dict[str, tuple[Path, dict[str, Any]]] = {name: (out, {}) for name, out in outs.items()}
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
    run_calls(bench.pool, [*calls, bench.control(teacher, outs[CONTROL], plain, seed)], f"seed {seed}: train")
    models: dict[str, tuple[Path, dict[str, Any]]] = {
        TEACHER: (teacher, {"strategy": "draw"}),
        MIXTURE: (teacher, {"strategy": "full"}),
        **{row: (out, {}) for row, out in outs.items()},
    }
    return {"seed": seed, "rows": bench.scores(place / "rows", models, seed, f"seed {seed}: sample")}


def distill_job(
    ensemble: Path, shards: Path, out: Path, settings: DistillSettings, init: Path | None, report: Report
) -> None:
    """Train a student that is not there yet."""
    if not out.exists():
        distill(ensemble, shards, out, settings, init=init)
    report(settings.steps)


def score_job(
    source: Path,
    changes: Mapping[str, Any],
    row: Path,
    scorer: Scorer,
    seed: int,
    settings: Settings,
    report: Report,
) -> None:
    """Write the scores of a model's samples to ``row``, and a picture beside it, unless they are there.

    ``changes`` are those to the quickstart's sampling; by default an ensemble's strategy is its own.
    """
    point = settings.quickstart.sampling.model_copy(update=dict(changes))
    if row.exists():
        report(point.num_images)
        return
    model = load(source)
    if isinstance(model, Ensemble) and "strategy" not in changes:
        point = point.model_copy(update={"strategy": model.strategy})
    drawn = draw(model, point, seed, 0, point.num_images, report)
    row.parent.mkdir(parents=True, exist_ok=True)
    write_grid(drawn.pixels[:GRID_IMAGES], row.with_suffix(".png"))
    used = sum(drawn.expert_rows) / point.num_images / point.steps
    write_json(row, {**asdict(scorer.score(drawn.pixels)), "experts_a_step": used})


def _side_by_side(grids: Mapping[str, Path]) -> Figure:
    canvas = Figure(figsize=(4 * len(grids), 4.3), layout="constrained")
    for panel, (title, path) in zip(canvas.subplots(1, len(grids)), grids.items(), strict=True):
        panel.imshow(image.imread(path), cmap="gray")
        panel.set_title(title)
        panel.set_axis_off()
    return canvas
