"""Counts operations of a step by running its command line for a few steps; see `hddm.benchmark.costs`.

Only matrix products count, as those of Muon's update. Sampling is counted on the first images of a row.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hddm.benchmark.lines import Line, RunCommand
from hddm.benchmark.steps import Step
from hddm.calibration_records import FILE_NAME as CALIBRATION
from hddm.condition_names import LABELS, TEXT
from hddm.ensemble import Ensemble
from hddm.experts.ensemble_records import read_ensemble_record
from hddm.experts.loading import load
from hddm.experts.record_folders import read_router
from hddm.experts.records import read_expert_record
from hddm.reliability import ReliabilityRouter
from hddm.training.calibrate import fitted_states
from hddm.utils.progress import Progress, TrainingProgress, heard
from hddm.utils.records import ENSEMBLE_FILE
from hddm.velocity import VelocityField

IMAGES = 32
"""Images of a row that are sampled to count operations."""
_STEPS = 3
_TRAJECTORIES = 16
# Part of an expert's range of noise, late enough for a calibration to take part.
_TIME = 0.75
# Counted in float32 on the CPU, so that the count is the same everywhere.
_PLAIN = {
    "device": "cpu",
    "threads": "1",
    "mixed_precision": "no",
    "gradient_accumulation_steps": "1",
}


@contextlib.contextmanager
def counting() -> Iterator[FlopCounterMode]:
    """Count floating-point operations within the block."""
    # The fused attention kernels for the CPU have no entry in torch's counter.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        yield counter


def evaluation_flop(field: VelocityField, **conditions: Tensor) -> int:
    """Count one velocity of one image, with the expert's calibration and without guidance."""
    assert field.sample_shape is not None
    x = torch.zeros(1, *field.sample_shape, device=field.device)
    low, high = field.noise_range
    time = low + _TIME * (high - low)
    t = torch.full((1,), time, dtype=torch.float64, device=field.device)
    return forward_flop(field.velocity, x, t, **conditions)


@torch.no_grad()
def forward_flop(
    function: Callable[..., object], x: Tensor, t: Tensor, **conditions: Tensor
) -> int:
    """Count one call of a network or of a function like one."""
    with counting() as counter:
        function(x, t, **conditions)
    return int(counter.get_total_flops())


class _Enough(Exception):
    """Raised to end a training after some steps."""


class TrainingCost(NamedTuple):
    """Counted operations of a training, in parts."""

    image: int
    """Of one image in a step."""
    update: int
    """Of a step, whatever its batch."""
    trajectory: int = 0
    """Of one of the teacher's trajectories, which a student of few steps learns from."""


def count_training(line: Line, run: RunCommand, is_of_few_steps: bool = False) -> TrainingCost:
    """Count a training step of a command line, which may be of a student of few steps."""
    trajectories = _TRAJECTORIES if is_of_few_steps else 0
    one = _count_batch(line, run, 1, trajectories)
    two = _count_batch(line, run, 2, trajectories)
    image, update = two.step - one.step, 2 * one.step - two.step
    if not trajectories:
        return TrainingCost(image, update)
    more = _count_batch(line, run, 1, 2 * trajectories)
    return TrainingCost(image, update, (more.before - one.before) // trajectories)


class _Counted(NamedTuple):
    before: int
    """Work that is done once before the first step, such as taking moments."""
    step: int
    """One step, forward, backward and update."""


def _count_batch(line: Line, run: RunCommand, batch_size: int, trajectories: int) -> _Counted:
    totals: list[int] = []

    def hear(part: float) -> None:
        if isinstance(Progress.opened[-1], TrainingProgress):
            totals.append(counter.get_total_flops())
            if len(totals) == _STEPS:
                raise _Enough

    options = _PLAIN | {"steps": str(_STEPS + 1), "batch_size": str(batch_size)}
    if trajectories:
        options["trajectories"] = str(trajectories)
    # What is measured on the way would fall between the counted steps.
    if line.verb != "train router":
        options["sample_every"] = "0"
    if line.verb == "train expert":
        options["validate_every"] = "1000000"
    enough = contextlib.suppress(_Enough)
    with tempfile.TemporaryDirectory() as folder, heard(hear), counting() as counter, enough:
        run(line.with_options(options | {"out": f"{folder}/out"}).words)
    step = totals[-1] - totals[-2]
    return _Counted(totals[0] - step, step)


def count_sampling(line: Line, run: RunCommand) -> int:
    """Count the operations of one image of a ``hddm sample``, over its first `IMAGES`."""
    options = {"num_images": str(IMAGES), "batch_size": str(IMAGES), "device": "cpu"}
    with tempfile.TemporaryDirectory() as folder, counting() as counter:
        run(line.with_options(options | {"out": f"{folder}/out"}).words)
    return counter.get_total_flops() // IMAGES


def calibration_flop(step: Step) -> int:
    """Count the calibration that ends a finished training or that is one; 0 where there was none."""
    if (step.path / ENSEMBLE_FILE).is_file():
        return _weighing_flop(step.path)
    if step.verb == "train router":
        if not step.values["calibrate"]:
            return 0
        network, router = read_router(step.path)
        side = network.config.sample_size
        x = torch.zeros(1, network.config.in_channels, side, side)
        noised: int = router.calibration["noised_images"]
        conditions = {}
        if router.classes:
            conditions[LABELS] = torch.zeros(1, dtype=torch.long)
        if network.null_text is not None:
            conditions[TEXT] = network.null_text[None]
        return noised * forward_flop(network, x, torch.ones(1), **conditions)
    record = read_expert_record(step.path)
    # One that was trained in was not fitted afterwards.
    if record.training_calibration or not (step.path / CALIBRATION).is_file():
        return 0
    field = load(step.path)
    assert isinstance(field, VelocityField)
    field.calibration = None
    states = fitted_states(field.noise_range)
    if step.verb == "calibrate" and step.values["data"] is None:
        # It samples the images itself that it is fitted to.
        states += step.values["num_images"] * step.values["steps"]
    return states * evaluation_flop(field, **_labels_of(field))


def _labels_of(field: VelocityField) -> dict[str, Tensor]:
    """A class for an expert that takes one."""
    return {LABELS: torch.zeros(1, dtype=torch.long)} if field.classes else {}


def _weighing_flop(folder: Path) -> int:
    """Count the velocities by which an ensemble's experts were weighed, and the router below the weights."""
    known = read_ensemble_record(folder).reliability
    model = load(folder)
    assert known is not None
    assert isinstance(model, Ensemble)
    assert isinstance(model.router, ReliabilityRouter)
    flop = sum(evaluation_flop(one, **_labels_of(one)) for one in model.experts)
    base = model.router.base
    if base is not None:
        assert model.sample_shape is not None
        flop += forward_flop(base, torch.zeros(1, *model.sample_shape), torch.full((1,), _TIME))
    return len(known.times) * known.images * flop
