"""The checkpoint to start from, and what a contributor can make of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hddm.calibration import Moments
from hddm.checkpoints.convert import write
from hddm.checkpoints.plan import plan
from hddm.experts.loading import load
from hddm.experts.records import Expert, ExpertRecord, save_expert
from hddm.networks.transformers import ExpertTransformer
from hddm.schedules import LinearSchedule, from_diffusers
from hddm.training.continuation import bounded_gain
from hddm.training.loop import Inputs, StepReport, Task, fit
from hddm.training.objectives import TIME_SCALE, Objective
from hddm.training.settings import LoopSettings, Recipe, resolve
from hddm.utils.files import new_folder, read_json, write_json
from hddm.utils.settings import Conversion
from hddm.velocity import PredictionType, VelocityField

# The scheduler of google/ddpm-cifar10-32 and of most DDPM checkpoints.
DDPM_LINEAR = {
    "_class_name": "DDPMScheduler",
    "num_train_timesteps": 1000,
    "beta_start": 1e-4,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "clip_sample": True,
    "prediction_type": "epsilon",
}
RANK = 16
SCRATCH = "from scratch"
PAPER = "paper's recipe"
EXACT = "exact conversion"
AS_THEY_ARE = "weights as they are"
FOLD_0, FOLD_RANK = "folded, rank 0", f"folded, rank {RANK}"
CONVERTED: Mapping[str, Conversion] = {
    PAPER: Conversion(recipe="paper"),
    EXACT: Conversion(),
    FOLD_0: Conversion(architecture="adaln-single"),
    FOLD_RANK: Conversion(architecture="adaln-single", modulation_rank=RANK),
}
STARTS: Mapping[str, str] = {
    SCRATCH: "fresh weights, adaLN-Zero, predicts velocity",
    "from scratch, AdaLN-Single": "the same with AdaLN-Single",
    PAPER: "`--recipe paper`: fresh head, round(999 t), predicts velocity",
    AS_THEY_ARE: "all weights, head too, but its output read as velocity at 999 t",
    EXACT: "`hddm convert`, then as `--init` trains on",
    "exact, gain unbounded": "the same through the plain conversion, 1/(1 - t) and all",
    FOLD_0: "`--architecture adaln-single`, then as `--init` trains on",
    FOLD_RANK: f"the same with `--modulation-rank {RANK}`",
}


@dataclass(frozen=True)
class Size:
    """Of an `ExpertTransformer`."""

    patch: int
    width: int
    depth: int
    heads: int

    def network(self, shape: torch.Size, seed: int, modulation: str) -> ExpertTransformer:
        """A fresh one for images of ``shape`` (C, H, W)."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return ExpertTransformer(
                sample_size=shape[-1],
                in_channels=shape[0],
                patch_size=self.patch,
                hidden_size=self.width,
                depth=self.depth,
                num_heads=self.heads,
                modulation=modulation,
            )


def pretrain(
    images: Tensor, out: Path, size: Size, settings: LoopSettings, report: Callable[[int], None]
) -> None:
    """Train a DDPM without classes and write it, and all that is converted from it, into ``out``."""
    network = size.network(images.shape[1:], settings.seed, "zero")
    objective = Objective(
        "ddpm", from_diffusers(DDPM_LINEAR), PredictionType.EPSILON, "prediction", "uniform"
    )

    def draw(rows: Tensor, noise: torch.Generator, own: slice) -> Inputs:
        time = objective.sample_times(len(rows), noise)[own]
        eps = torch.randn(len(rows), *images.shape[1:], generator=noise)[own]
        return {"x_0": images[rows[own]], "eps": eps, "time": time}

    def loss(module: nn.Module, inputs: Inputs) -> Tensor:
        return objective.errors(module, **inputs, conditions={})

    def count(step: StepReport) -> None:
        report(settings.batch_size)

    task = Task(network, len(images), draw, loss)
    recipe = resolve(Recipe, settings)
    fitted = fit(task, recipe, watchers=[count])
    channels, height, width = images.shape[1:]
    about = ExpertRecord(
        objective="ddpm",
        prediction_type=objective.prediction_type,
        schedule=objective.schedule.config,
        schedule_source="DDPM, linear betas",
        time_scale=objective.time_scale,
        sample_shape=(channels, height, width),
        training=fitted.record(recipe),
    )
    with new_folder(out, RECORD) as draft:
        save_expert(draft, Expert(network.requires_grad_(False), about, None))
        record: dict[str, Any] = {"format": "1.0", "final_loss": about.training["final_loss"]}
        for start, conversion in CONVERTED.items():
            planned = plan(draft, conversion)
            write(planned, draft / _folder(start))
            record[start] = {"modulation_error": planned.built.modulation_error}
        write_json(draft / RECORD, record)


RECORD = "pretrained.json"


def modulation_errors(pretrained: Path) -> dict[str, float]:
    """Relative error of the folds' modulation, by start."""
    record = read_json(pretrained / RECORD)
    found = {start: record[start]["modulation_error"] for start in CONVERTED}
    return {start: error for start, error in found.items() if error is not None}


def started(start: str, pretrained: Path, images: Tensor, size: Size, seed: int) -> VelocityField:
    """``start`` as a velocity field that is ready to be trained on ``images``."""
    if start.startswith(SCRATCH):
        modulation = "zero" if start == SCRATCH else "single"
        # Not the seed of the pretrained network, which would share its first weights.
        network = size.network(images.shape[1:], seed + 1000, modulation)
        return VelocityField(network, LinearSchedule(), "flow_prediction", TIME_SCALE)
    folder = start if start in CONVERTED else EXACT
    field = load(pretrained / _folder(folder))
    assert isinstance(field, VelocityField)
    if start == AS_THEY_ARE:
        return VelocityField(field.network, LinearSchedule(), "flow_prediction", time_scale=999.0)
    if start not in (PAPER, "exact, gain unbounded"):
        field.calibration = bounded_gain(field.prediction_type, field.range[1], Moments.of(images))
    return field


def _folder(start: str) -> str:
    return {PAPER: "paper", EXACT: "exact", FOLD_0: "fold-0", FOLD_RANK: "fold-rank"}[start]
