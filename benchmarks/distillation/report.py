"""The table, the ratios to the teacher, and samples side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import image
from matplotlib.figure import Figure as Canvas

from benchmarks.conversion.report import finite, table
from benchmarks.distillation.settings import CONTROL, COUNTED, ROWS, STUDENT, TEACHER, TUNING_SEED, Settings
from benchmarks.provenance import provenance
from benchmarks.summary import figure
from hddm.utils.files import write_json

SIDES = {"to_training": "to training images", "to_held_out": "to held-out images"}
GOAL = 1.15
Runs = Sequence[Mapping[str, Any]]


def write_distillation(
    folder: Path, settings: Settings, command: str, content: Mapping[str, Any], grids: Sequence[Path]
) -> Path:
    """Write ``<date>-distillation-<name>`` as .md, .json and .png; return the first.

    Args:
        folder: where.
        settings: of the benchmark.
        command: its options.
        content: what was measured.
        grids: pictures of samples: teacher, student, control.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{content['measured_on']['date']}-distillation-{settings.name}"
    titles = (TEACHER, STUDENT, CONTROL)
    _side_by_side(grids, titles).savefig(stem.with_suffix(".png"), dpi=130, metadata={"Software": None})
    runs: Runs = content["runs"]
    lines = [
        "# Distillation on digits: one student of two DDPM and two flow experts",
        "",
        provenance("distillation", content, command),
        "",
        *_method(settings, content),
        *_scores(content, runs),
        "",
        "Distance of a row divided by its own teacher's, over trainings; the goal is at most "
        f"{GOAL:g} for the student:",
        "",
        *(
            f"- {row}: {'; '.join(f'{label} {ratio(runs, row, side)}' for side, label in SIDES.items())}"
            for row in ROWS
            if row != TEACHER
        ),
        "",
        "## What was tuned",
        "",
        *_tuning(content),
        "",
        f"![Samples of seed 0: {', '.join(titles)}]({stem.name}.png)",
    ]
    stem.with_suffix(".md").write_text("\n".join(lines).rstrip() + "\n")
    write_json(stem.with_suffix(".json"), finite(content))
    return stem.with_suffix(".md")


def ratio(runs: Runs, row: str, side: str) -> str:
    """Distance of ``row`` over the teacher's, paired by training, and whether the goal is met."""
    each = [run["rows"][row][side]["value"] / run["rows"][TEACHER][side]["value"] for run in runs]
    found = figure(each)
    spread = "" if found.spread is None else f" (s {found.spread:.2f})"
    return f"{found.mean:.2f}{spread}, {'within' if found.mean <= GOAL else 'beyond'} the goal"


def _method(settings: Settings, content: Mapping[str, Any]) -> list[str]:
    chosen, images = settings.quickstart, content["images"]
    return [
        f"The quickstart's digits, experts (`{chosen.size}`, {chosen.steps:,} steps), solver and scores. The "
        f"teacher is {settings.num_ddpm} DDPM and {chosen.num_shards - settings.num_ddpm} flow experts, "
        "sampled by `draw`; in training a sample's own expert teaches (`--teacher shard`). The student has "
        "the size of one expert; what it begins with was tuned, and stands below. "
        f"{chosen.num_images:,} images a row, {chosen.sampling_steps} steps of {chosen.solver}.",
        "",
        f"**Training compute** is images × forwards: {content['forward_mflop']:.1f} MFLOP a forward, three "
        "forwards an image that is trained on (a backward counts two), one more where a teacher is asked. "
        f"The teacher's is that of its {chosen.num_shards} experts together, {images[TEACHER]:,} images; "
        f"its router, which `draw` does without, is left out. '{STUDENT}' has 1/{settings.share} of that "
        f"without what its teacher computes, '{COUNTED}' with it. '{CONTROL}' is one flow model on all data "
        f"that sees as many images as '{STUDENT}'. Calibration is left out everywhere.",
        "",
        "Fréchet distances on 64 features of a small classifier, **not comparable with published FID**. "
        '"±" is the 95 % half-width over samples, "s" the standard deviation over trainings. Real held-out '
        f"images are at {content['real']['value']:.1f} from the training images.",
        "",
    ]


def _scores(content: Mapping[str, Any], runs: Runs) -> list[str]:
    body = []
    for row in ROWS:
        each = [run["rows"][row] for run in runs]
        distances = [
            figure([one[side]["value"] for one in each], [one[side]["half_width"] for one in each])
            for side in SIDES
        ]
        others = [figure([one[key] for one in each]) for key in ("diversity", "nearest_ratio")]
        own, counted = content["compute"][row]
        used = figure([one["experts_a_step"] for one in each]).mean
        cells = [f"{content['images'][row]:,}", f"{own:.2f}", f"{counted:.2f}", f"{used:.2f}"]
        body.append([row, *map(str, (*distances, *others)), *cells])
    columns = ["images trained on", "compute", "with teacher's forwards", "experts a step"]
    return table(["model", *SIDES.values(), "diversity", "nearest-image ratio", *columns], body)


def _tuning(content: Mapping[str, Any]) -> list[str]:
    kinds = list(content["tuning"])
    recipes = list(content["tuning"][kinds[0]])
    rows = [[name, *(f"{content['tuning'][kind][name]:.2f}" for kind in kinds)] for name in recipes]
    taken = "; ".join(f"{kind}: {content['recipes'][kind]}" for kind in kinds)
    return [
        f"Distance to the training images of one training each (seed {TUNING_SEED}, which no row has; the "
        "teacher is that of seed 0), at the same number of images. Held-out images had no say. Warm-up, EMA "
        "and size are the quickstart's.",
        "",
        *table(["recipe", *kinds], rows),
        "",
        f"Taken: {taken}.",
    ]


def _side_by_side(grids: Sequence[Path], titles: Sequence[str]) -> Canvas:
    canvas = Canvas(figsize=(4 * len(grids), 4.3), layout="constrained")
    for panel, path, title in zip(canvas.subplots(1, len(grids)), grids, titles, strict=True):
        panel.imshow(image.imread(path), cmap="gray")
        panel.set_title(title)
        panel.set_axis_off()
    return canvas
