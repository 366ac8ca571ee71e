"""How well models fill a half of held-out images: one sample, and the mean of several, against the truth."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

import hddm
from benchmarks.mixing.models import CALLS, Models
from hddm.editing import Picture
from hddm.evaluation.images import read_data
from hddm.utils.files import write_json

IMAGES, SAMPLES, RESAMPLING = 200, 4, 4
"""Held-out images, samples of each, and how often each step is taken."""


@dataclass(frozen=True)
class Filled:
    """Peak signal-to-noise ratios in dB over the half that is filled; more is better."""

    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Fillers(Models):
    """The models of a regime, whose rows are ratios of filled images."""

    def row(self, title: str, model: Path, strategy: str | None = None) -> Filled:
        place = self.folder / "rows" / f"filled {title}.json"
        if not place.exists():
            place.parent.mkdir(exist_ok=True)
            write_json(place, self._ratios(model, strategy))
        figures = json.loads(place.read_text(encoding="utf-8"))
        print(f"seed {self.seed}: filled: {title}: {figures}", flush=True)
        return Filled(figures)

    def _ratios(self, model: Path, strategy: str | None) -> dict[str, float]:
        images = self._truth()
        hole = torch.zeros(1, 1, *images.shape[2:], dtype=torch.bool)
        hole[..., images.shape[2] // 2 :, :] = True
        picture = Picture(images, strength=1.0, mask=hole, resampling=RESAMPLING)
        opened = hddm.load(model)
        made = []
        for noise in range(SAMPLES):
            found = hddm.sample(
                opened, IMAGES, noise, CALLS, strategy, batch_size=IMAGES, picture=picture
            )
            made.append(found.clamp(-1, 1))
        samples = torch.stack(made)
        return {
            "one sample": _ratio(samples - images, hole),
            f"mean of {SAMPLES}": _ratio(samples.mean(0) - images, hole),
        }

    def _truth(self) -> Tensor:
        fresh = read_data({"fresh": self.data.fresh(self.work)})["fresh"].images
        return fresh.pixels[:IMAGES].float() / 127.5 - 1


def _ratio(errors: Tensor, hole: Tensor) -> float:
    """10 log10(4 / mean squared error) in the hole, as pixels span 2."""
    wrong = errors.square() * hole
    share = hole.float().mean()
    return 10 * math.log10(4 / float(wrong.mean() / share))
