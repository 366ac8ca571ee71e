"""Models of ``benchmarks.mixing`` and their scores: what one training seed trains, assembles and measures."""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

import hddm
from benchmarks.harness import run_once
from benchmarks.mixing.data import Data, Shards
from hddm.objective.records import HeldOutScores
from hddm.objective.scores import score_held_out
from hddm.utils.files import write_json

DEVICE = "--device cpu --threads 1"
CALLS, NOISES = 25, 2
"""Calls per sample, and seeds of noise."""


class Row(Protocol):
    """What one model of one training seed scores, by the names of the figures."""

    @property
    def figures(self) -> dict[str, float]:
        """The figures."""


@dataclass(frozen=True)
class Models:
    """Experts, ensembles and scores of one training seed, each made unless it is there."""

    data: Data
    work: Path
    seed: int
    measure: Callable[[Tensor], float]

    @property
    def folder(self) -> Path:
        """Where they are kept."""
        return self.work / f"seed-{self.seed}"

    def expert(self, name: str, shard: str, words: str, seed: int | None = None) -> Path:
        """An expert of a shard (``all/shard_0``), trained with these words beside the recipe."""
        place = self.folder / name
        number = self.seed if seed is None else seed
        recipe = self.data.recipe.split()
        given = ["train", "expert", str(self.work / shard), *words.split(), *recipe]
        if "--init" not in given:
            given += ["--size", self.data.size]
        run_once(place, [*given, *DEVICE.split(), "--seed", str(number)])
        return place

    def router(self, of: Shards) -> Path:
        """A router of these shards."""
        place = self.folder / of.router
        shards = [str(self.work / one) for one in of.routed]
        recipe = f"{self.data.router} {self.data.routers[of.router]}"
        given = ["train", "router", *shards, *recipe.split()]
        run_once(place, [*given, *DEVICE.split(), "--seed", str(self.seed)])
        return place

    def ensemble(self, name: str, experts: Sequence[Path], words: str = "") -> Path:
        """An ensemble of experts."""
        place = self.folder / name
        run_once(place, ["assemble", *map(str, experts), *words.split()])
        return place

    def weighed(self, name: str, ensemble: Path) -> Path:
        """An ensemble whose experts are weighed on validation images."""
        place = self.folder / name
        data = str(self.work / "all" / "held_out")
        run_once(place, ["calibrate", str(ensemble), "--data", data, "--seed", str(self.seed)])
        return place

    def row(self, title: str, model: Path, strategy: str | None = None) -> Row:
        """Scores of a model on held-out images."""
        place = self.folder / "rows" / f"{title}.json"
        if not place.exists():
            place.parent.mkdir(exist_ok=True)
            scores = score_held_out(
                model,
                self.data.fresh(self.work),
                strategies=() if strategy is None else (strategy,),
                num_images=1000,
                likelihood_images=self.data.likelihood_images,
                device="cpu",
            )
            distances = [self.distance(model, strategy, noise) for noise in range(NOISES)]
            content = {"scores": scores.model_dump(mode="json"), "distances": distances}
            write_json(place, content)
        content = json.loads(place.read_text(encoding="utf-8"))
        row = Scored(HeldOutScores.model_validate(content["scores"]), content["distances"])
        print(f"seed {self.seed}: {title}: {row}", flush=True)
        return row

    def distance(
        self, model: Path, strategy: str | None, noise: int, calls: int = CALLS, **options: Any
    ) -> float:
        """Fréchet distance of samples to held-out images."""
        opened = hddm.load(model)
        num = self.data.num_samples
        samples = hddm.sample(opened, num, noise, calls, strategy, batch_size=500, **options)
        return self.measure(samples)


@dataclass(frozen=True)
class Scored:
    """Scores on held-out images, and distances of samples."""

    scores: HeldOutScores
    distances: Sequence[float]
    figures: dict[str, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        (own,) = self.scores.strategies
        means = []
        for level in own.levels:
            mean = statistics.fmean(level.by_image)
            self.figures[f"error at t = {level.t:g}"] = mean
            means.append(mean)
        if means:
            self.figures["mean error"] = statistics.fmean(means)
        if own.bits is not None:
            self.figures["bits"] = statistics.fmean(own.bits.by_image)
        self.figures["distance"] = statistics.fmean(self.distances)

    def __str__(self) -> str:
        shown = [name for name in ("mean error", "bits", "distance") if name in self.figures]
        return ", ".join(f"{name} {self.figures[name]:.4g}" for name in shown)
