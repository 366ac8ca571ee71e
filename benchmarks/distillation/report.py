"""The table, the ratios to the teacher, and what was tuned."""

from collections.abc import Mapping
from typing import Any

from benchmarks.distillation.settings import CONTROL, COUNTED, ROWS, STUDENT, TEACHER, TUNING_SEED, Settings
from benchmarks.reports import SCORES, SIDES, Runs, about_scores, figure, score_cells, table

GOAL = 1.15


def lines(settings: Settings, content: Mapping[str, Any]) -> list[str]:
    """The report, its title first."""
    runs: Runs = content["runs"]
    ratios = {
        row: "; ".join(f"{label} {ratio(runs, row, side)}" for side, label in SIDES.items())
        for row in ROWS
        if row != TEACHER
    }
    return [
        "# Distillation on digits: one student of two DDPM and two flow experts",
        *_method(settings, content),
        *_scores(content, runs),
        "",
        "Distance of a row divided by its own teacher's, over trainings; the goal is at most "
        f"{GOAL:g} for the student:",
        "",
        *(f"- {row}: {found}" for row, found in ratios.items()),
        "",
        "## What was tuned",
        "",
        *_tuning(content),
    ]


def ratio(runs: Runs, row: str, side: str) -> str:
    """Distance of ``row`` over the teacher's, paired by training, and whether the goal is met."""
    each = [run["rows"][row][side]["value"] / run["rows"][TEACHER][side]["value"] for run in runs]
    found = figure(each)
    return f"{found.to(2)}, {'within' if found.mean <= GOAL else 'beyond'} the goal"


def _method(settings: Settings, content: Mapping[str, Any]) -> list[str]:
    chosen, images = settings.quickstart, content["images"]
    expert, point = chosen.expert("flow", 0), chosen.sampling
    return [
        f"The quickstart's digits, experts (`{expert.size}`, {expert.steps:,} steps), solver and scores. The "
        f"teacher is {settings.num_ddpm} DDPM and {settings.num_shards - settings.num_ddpm} flow experts, "
        "sampled by `draw`; in training a sample's own expert teaches (`--teacher shard`). The student has "
        "the size of one expert; what it begins with was tuned, and stands below. "
        f"{point.num_images:,} images a row, {point.steps} steps of {point.solver}.",
        "",
        f"**Training compute** is images × forwards: {content['forward_mflop']:.1f} MFLOP a forward, three "
        "forwards an image that is trained on (a backward counts two), one more where a teacher is asked. "
        "Updates by optimisers are left out; with the teacher's, by Muon, its compute is larger than told. "
        f"The teacher's is that of its {settings.num_shards} experts together, {images[TEACHER]:,} images; "
        f"its router, which `draw` does without, is left out. '{STUDENT}' has 1/{settings.share} of that "
        f"without what its teacher computes, '{COUNTED}' with it. '{CONTROL}' is one flow model on all data "
        f"that sees as many images as '{STUDENT}'. Calibration is left out everywhere.",
        "",
        about_scores(content["real"], content["runs"]),
        "",
    ]


def _scores(content: Mapping[str, Any], runs: Runs) -> list[str]:
    body = []
    for row in ROWS:
        own, counted = content["compute"][row]
        used = figure([run["rows"][row]["experts_a_step"] for run in runs]).mean
        cells = [f"{content['images'][row]:,}", f"{own:.2f}", f"{counted:.2f}", f"{used:.2f}"]
        body.append([row, *score_cells(runs, row), *cells])
    columns = ["images trained on", "compute", "with teacher's forwards", "experts a step"]
    return table(["model", *SCORES, *columns], body)


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
