"""Samples of a model folder with their cost, for benchmarks that keep no store."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from hddm.benchmark.samples import draw
from hddm.benchmark.schema import Point
from hddm.ensemble import Ensemble
from hddm.loading import load
from hddm.workers import Report


@dataclass(frozen=True)
class Sampled:
    """Images (n, C, H, W) in uint8."""

    pixels: Tensor
    evaluations: float
    """Expert evaluations a step and image, on average."""


def sample_job(
    source: Path,
    num: int,
    seed: int,
    steps: int,
    solver: str,
    report: Report,
    strategy: str | None = None,
) -> Sampled:
    """Samples of an expert or ensemble folder, as it is."""
    model = load(source)
    recommended = model.strategy if isinstance(model, Ensemble) else "draw"
    point = Point(strategy=strategy or recommended, solver=solver, steps=steps, num_images=num)
    drawn = draw(model, point, seed, 0, num, report)
    return Sampled(drawn.pixels, sum(drawn.expert_rows) / num / steps)
