"""What runs in worker processes: training what is missing, and scoring samples of one model."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from hddm.benchmark.samples import draw, write_grid
from hddm.benchmark.settings import SamplingPoint
from hddm.ensemble import Ensemble
from hddm.evaluation.scores import Scorer
from hddm.experts.loading import load
from hddm.training.continuation import continue_expert
from hddm.training.distill import distill
from hddm.training.expert import train_expert
from hddm.training.settings import DistillSettings, ExpertSettings
from hddm.utils.files import write_json

GRID_IMAGES = 64
Report = Callable[[int], None]


def distill_job(
    ensemble: Path, shards: Path, out: Path, settings: DistillSettings, init: Path | None, report: Report
) -> None:
    """Train a student that is not there yet."""
    if not out.exists():
        distill(ensemble, shards, out, settings, init=init)
    report(settings.steps)


def control_job(shard: Path, out: Path, settings: ExpertSettings, init: Path | None, report: Report) -> None:
    """Train a control that is not there yet."""
    if not out.exists():
        if init is None:
            train_expert(shard, out, settings)
        else:
            continue_expert(init, shard, out, settings)
    report(settings.steps)


def score_job(
    source: Path,
    strategy: str | None,
    row: Path,
    scorer: Scorer,
    num: int,
    seed: int,
    steps: int,
    solver: str,
    report: Report,
) -> None:
    """Write the scores of samples to ``row`` and a picture of some beside it, unless they are there.

    Args:
        source: an expert or ensemble folder.
        strategy: of an ensemble.
        row: the JSON file.
        scorer: measures the samples.
        num: samples.
        seed: of their noise.
        steps: of the solver.
        solver: its name.
        report: called with the number of samples after each batch.
    """
    if row.exists():
        report(num)
        return
    model = load(source)
    recommended = model.strategy if isinstance(model, Ensemble) else "draw"
    point = SamplingPoint(strategy=strategy or recommended, solver=solver, steps=steps, num_images=num)
    drawn = draw(model, point, seed, 0, num, report)
    row.parent.mkdir(parents=True, exist_ok=True)
    write_grid(drawn.pixels[:GRID_IMAGES], row.with_suffix(".png"))
    scores = asdict(scorer.score(drawn.pixels))
    write_json(row, {**scores, "experts_a_step": sum(drawn.expert_rows) / num / steps})
