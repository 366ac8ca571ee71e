"""A temporary folder, and in it what several areas need, made at the first use."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typer.testing import CliRunner

import hddm
from hddm_cli.app import commands
from tests.artefacts import write_images

SHORT: dict[str, Any] = {
    **{"steps": 10, "batch_size": 16, "learning_rate": 3e-3, "warmup": 2, "ema_decay": 0.9},
    **{"size": "tiny", "seed": 7, "optimizer": "adamw", "threads": 1, "log_every": 1},
}
"""A training of seconds."""


def command(*words: object) -> str:
    """Run ``hddm`` with these words in this process, and return what it prints."""
    found = CliRunner().invoke(commands, list(map(str, words)))
    if found.exit_code:
        raise RuntimeError(f"hddm {' '.join(map(str, words))}: {found.output}{found.exception}")
    return found.stdout


def options_of(settings: dict[str, Any]) -> list[str]:
    """Settings as words of a command line."""
    words = []
    for name, value in settings.items():
        words.append(f"--{name.replace('_', '-')}")
        words += [] if value is True else [str(value)]
    return words


def noise(*shape: int, seed: int = 1) -> Tensor:
    """Normal numbers, the same at each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


TIMES = torch.tensor([0.0, 0.001, 0.1, 0.35, 0.5, 0.75, 0.93, 0.999, 1.0])
"""Noise levels from data to noise, both ends included."""


def states(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A state of this shape for each of `TIMES`, and the times."""
    return noise(len(TIMES), *shape), TIMES


class Workshop:
    """Folders with fixed names, so that records of them are the same in each run.

    Whatever is made here depends on its own seeds alone, and not on the areas that ran before.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, name: str) -> Path:
        """A new folder."""
        made = self.root / name
        made.mkdir()
        return made

    def config(self, settings: dict[str, Any]) -> tuple[object, ...]:
        """Options for a training with these settings, by a run file."""
        file = self.root / "settings.yaml"
        file.write_text(json.dumps(settings))
        return "--config", file

    @cached_property
    def images(self) -> Path:
        """48 images of 4×4 pixels, in the classes columns and rows."""
        return write_images(self.root / "images")

    @cached_property
    def shards(self) -> Path:
        """A partition of them into three shards."""
        hddm.partition(self.images, self.root / "shards", 3)
        return self.root / "shards"

    @cached_property
    def experts(self) -> list[Path]:
        """An expert by class for each shard: one of DDPM and two of flow matching, with weak models."""
        settings = [
            {"objective": "ddpm", "prediction": "epsilon"},
            {"objective": "flow", "prediction": "flow_prediction"},
            {"objective": "flow"},
        ]
        folders = []
        for k, own in enumerate(settings):
            shard, out = self.shards / f"shard_{k}", self.root / "experts" / f"expert_{k}"
            folders.append(hddm.train(shard, out, class_conditional=True, **SHORT, **own))
        return folders

    @cached_property
    def router(self) -> Path:
        """A learned router of the shards."""
        out = self.root / "router"
        command("train", "router", self.shards, "--out", out, *self.config(SHORT | {"steps": 30}))
        return out
