"""What a training will need: sizes that follow from its network, and steps on few samples, measured.

The measured steps are those of `hddm.training.loop.Trainer`, with the network, the loss, the data and the
optimizer of the training; they are scaled to its batch (`hddm.utils.scaling`). One and two samples show how
memory grows. A large network is measured on one sample alone.
"""

import logging
import time
from dataclasses import dataclass, field

import torch
from torch import nn

from hddm.training.calibrate import AT_ONCE
from hddm.training.device import Device, optimizer_of, state_bytes
from hddm.training.loop import Trainer, Training, checkpoint_gradients
from hddm.training.settings import Recipe
from hddm.training.state import Ema, trained_parameters
from hddm.utils.errors import UsageError
from hddm.utils.machine import (
    LiveBytes,
    bytes_of,
    has_own_memory,
    main_memory,
    resident_bytes,
    room_on,
)
from hddm.utils.needs import Effort, Memory, Needs
from hddm.utils.processes import StopRequest, number_of_processes
from hddm.utils.progress import Progress
from hddm.utils.scaling import LARGE, Growth, measure_times
from hddm.utils.tensors import synchronize

_ALIVE = 4
"""Of what is counted, as many rows are alive in the measured steps: weights to averages."""
_TAKEN = 3
"""Batches that one measurement takes at most: a first one, one of a step that is not timed, and its own."""
WEAK_BYTES = 2
"""Bytes of a number of the weak model, which is kept in bfloat16."""

log = logging.getLogger(__name__)


@dataclass
class _Measured:
    """Steps on few samples."""

    activations: Growth = field(default_factory=Growth)
    """Bytes of activations."""
    gradients: Growth = field(default_factory=Growth)
    """Seconds from the inputs to gradients."""
    resident: int = 0
    """Bytes that the process held after a step on few samples."""
    update_bytes: int = 0
    """Bytes that an update holds for itself."""
    update: float = 0.0
    """Seconds of an update, which depend on no samples."""
    reading: float = 0.0
    """Share of the time that a step waited for its inputs."""
    evaluation: float = 0.0
    """Seconds of one evaluation of the network on one sample."""
    calibration: Growth = field(default_factory=Growth)
    """Bytes of an evaluation, which keeps nothing for gradients."""
    trajectory: float = 0.0
    """Seconds of one trajectory of the teacher of a student of few steps."""


def needs_of_training(training: Training, trajectories: int = 0) -> Needs:
    """Measure what a training needs, and leave nothing on the disk; its network is changed.

    A student of few steps learns from so many ``trajectories`` of its teacher, and ``training`` from a few.

    Raises:
        HddmError: as the training would before its first step, and for a step that is not finite.
        UsageError: in one of several processes.
    """
    if number_of_processes() > 1:
        raise UsageError("`dry_run`: measures one process; run it without accelerate launch")
    recipe, network = training.recipe, training.task.network
    alone = {"batch_size": 1, "gradient_accumulation_steps": 1, "compile": False}
    with Device(recipe.model_copy(update=alone)) as device:
        room = room_on(device.target)
        weights = bytes_of(network.parameters()) + bytes_of(network.buffers())
        base = max(resident_bytes() - weights, 0)
        rows = _counted(training, base)
        host = main_memory() if has_own_memory(device.target) else None
        lasting = Needs("", rows, (), room, host)
        if recipe.gradient_checkpointing:
            checkpoint_gradients(network)
        measured = None
        if lasting.fits:
            without = ", without `compile`" if recipe.compile else ""
            log.info(
                "dry run: runs steps of one sample, and of more while they are fast, on %s%s",
                device.target,
                without,
            )
            with Progress(None, "measure", is_drawn=False):
                small = recipe.model_copy(update=alone)
                measured = _measure(training, small, device, lasting.left)
            # Libraries come in with the first step, and torch keeps some of what it frees.
            alive = 0 if host is not None else sum(one.size or 0 for one in rows[:_ALIVE])
            rows[-1] = _process(max(base, measured.resident - alive))
    part = recipe.batch_size // recipe.gradient_accumulation_steps
    memory = [*rows, *_passing(recipe, measured, part)]
    work = _work(training, measured, part, trajectories)
    remedies = _remedies(recipe, measured, lasting.left)
    return Needs("training", memory, work, room, host, remedies)


def _counted(training: Training, base: int) -> list[Memory]:
    """Memory that follows from the network, and what the process holds so far."""
    recipe, network = training.recipe, training.task.network
    parameters = list(network.parameters())
    trained = trained_parameters(network).values()
    weights = bytes_of(parameters) + bytes_of(network.buffers())
    number = sum(p.numel() for p in parameters)
    kinds = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters}))
    optimizer = optimizer_of(network, recipe)
    rows = [
        Memory("weights", weights, f"{number:,} parameters in {kinds}"),
        Memory("gradients", bytes_of(trained)),
        Memory("optimizer state", state_bytes(optimizer), recipe.optimizer),
        Memory("average of weights", Ema.size_of(network), "in float32"),
    ]
    for name, size in training.others.items():
        rows.append(Memory(name, size, "in float32"))
    if training.task.weak_step:
        weak = WEAK_BYTES * _floating(network)
        note = f"from step {training.task.weak_step} on"
        rows.append(Memory("weak model", weak, note, is_on_host=True))
    rows.append(_process(base))
    return rows


def _process(size: int) -> Memory:
    note = "Python, libraries, and images that are read"
    return Memory("process", size, note, is_about=True, is_on_host=True)


def _floating(network: nn.Module) -> int:
    """Floating numbers in the state of a network."""
    return sum(v.numel() for v in network.state_dict().values() if v.is_floating_point())


def _measure(training: Training, recipe: Recipe, device: Device, free: int) -> _Measured:
    """Take steps; ``free`` bytes are there for activations."""
    task, found = training.task, _Measured()
    most = training.recipe.batch_size // training.recipe.gradient_accumulation_steps
    if task.prepare is not None:
        started = time.perf_counter()
        task.prepare(device.target, None)
        found.trajectory = (time.perf_counter() - started) / task.num_samples
    stepping = _Steps(Trainer(task, recipe, device))
    task.network.train()
    try:
        started = time.perf_counter()
        found.activations.known[1], found.update_bytes = stepping.traced(1)
        is_large = time.perf_counter() - started > LARGE
        if not is_large:
            # The first step also makes what stays, such as a teacher and tables of positions.
            found.activations.known[1], found.update_bytes = stepping.traced(1)
        if most > 1 and not is_large and 2 * found.activations.known[1] < free:
            found.activations.known[2], found.update_bytes = stepping.traced(2)
        found.resident = resident_bytes()

        def timed(number: int) -> float:
            seconds, found.update, waited = stepping.timed(number)
            found.reading = waited / seconds
            return seconds

        def fits(number: int) -> bool:
            return found.activations.at(number) <= free

        found.gradients = measure_times(most, timed, fits, is_large)
        if training.evaluations:
            number = max(found.gradients.known)
            found.evaluation = stepping.evaluated(number) / number
            for few in found.activations.known:
                with LiveBytes() as live:
                    stepping.evaluated(few)
                found.calibration.known[few] = live.peak()
    finally:
        stepping.trainer.loader.close()
    return found


class _Steps:
    """Steps of a training, one after the other."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.stop, self.step = trainer, StopRequest(), 0

    def traced(self, number: int) -> tuple[int, int]:
        """Most bytes of activations, and of what an update holds for itself, in one step."""
        trainer = self.trainer
        optimizer = trainer.state.optimizer
        self._load(number)
        self.step += 1
        with LiveBytes() as forward:
            begun = trainer.begun(self.step, self.stop, None)
        activations = forward.peak(p.grad for p in trainer.parameters if p.grad is not None)
        with LiveBytes() as update:
            trainer.device.update(optimizer, begun.readings.skipped)
            trainer.finished(begun, self.stop, None)
        kept = []
        for moments in optimizer.state.values():
            kept += [value for value in moments.values() if isinstance(value, torch.Tensor)]
        return activations, update.peak(kept)

    def timed(self, number: int) -> tuple[float, float, float]:
        """Seconds of a step on ``number`` samples to its gradients, of its update, and of its inputs."""
        self._load(number)
        if self.trainer.loader.ahead:
            # In the training, too, inputs are drawn while the step before computes.
            self._step()
        return self._step()

    def _step(self) -> tuple[float, float, float]:
        """Take a step; returns the seconds of `timed`."""
        trainer = self.trainer
        self.step += 1
        started = self._now()
        begun = trainer.begun(self.step, self.stop, None)
        middle = self._now()
        trainer.device.update(trainer.state.optimizer, begun.readings.skipped)
        trainer.finished(begun, self.stop, None)
        return middle - started, self._now() - middle, begun.waited

    @torch.no_grad()
    def evaluated(self, number: int) -> float:
        """Seconds of the network in the loss of ``number`` samples, without gradients."""
        trainer = self.trainer
        network, marks = trainer.state.network, list[float]()
        before = network.register_forward_pre_hook(lambda *_: marks.append(self._now()))
        after = network.register_forward_hook(lambda *_: marks.append(self._now()))
        self._load(number)
        self.step += 1
        _, inputs, _ = trainer.loader.take(self.step)
        inputs = trainer.device.moved(inputs)
        trainer.losses(inputs)
        before.remove()
        after.remove()
        return marks[-1] - marks[0]

    def _load(self, number: int) -> None:
        """Read batches of this size; the first is taken here, so that no step waits for the start of it."""
        trainer = self.trainer
        trainer.loader.close()
        trainer.load(number, self.step + _TAKEN)
        self.step += 1
        trainer.loader.take(self.step)

    def _now(self) -> float:
        synchronize(self.trainer.device.target)
        return time.perf_counter()


_TOO_LARGE = "what is counted above does not fit already"


def _passing(recipe: Recipe, measured: _Measured | None, part: int) -> list[Memory]:
    """Memory that a step takes for a while, on ``part`` samples at once."""
    if measured is None:
        return [Memory("activations", None, _TOO_LARGE, is_passing=True)]
    note = f"{part} at once, measured with {measured.activations.numbers}"
    if recipe.compile:
        note += ", without `compile`"
    size, update = round(measured.activations.at(part)), measured.update_bytes
    found = [Memory("activations", size, note, is_about=True, is_passing=True)]
    if update:
        found.append(Memory("update", update, "", is_about=True, is_passing=True))
    if measured.calibration.known:
        states, note = round(measured.calibration.at(AT_ONCE)), f"{AT_ONCE} states at once"
        found.append(Memory("calibration", states, note, is_about=True, is_passing=True))
    return found


def _work(
    training: Training, measured: _Measured | None, part: int, trajectories: int
) -> list[Effort]:
    recipe = training.recipe
    if measured is None:
        return [Effort("training", None, recipe.steps, "steps", _TOO_LARGE)]
    parts = recipe.gradient_accumulation_steps
    seconds = parts * measured.gradients.at(part) + measured.update
    note = f"measured with {max(measured.gradients.known)} of {recipe.batch_size} samples"
    if measured.reading >= 0.01:
        note += f", {measured.reading:.0%} of it for reading them"
    found = [Effort("training", seconds, recipe.steps, "steps", note)]
    if trajectories:
        few = f"of the teacher, measured with {training.task.num_samples}"
        found.insert(
            0, Effort("trajectories", measured.trajectory, trajectories, "trajectories", few)
        )
    if training.evaluations:
        states, after = training.evaluations, "after the last step"
        found.append(Effort("calibration", measured.evaluation, states, "states", after))
    return found


def _remedies(recipe: Recipe, measured: _Measured | None, free: int) -> list[str]:
    """What makes a training fit ``free`` bytes beside what stays; first what changes no result."""
    if measured is None:
        return ["take a smaller `size`, or `lora_rank` with `init`"]
    found = []
    parts = _parts_that_fit(recipe, measured, free)
    if parts is not None:
        found.append(f"pass `gradient_accumulation_steps` {parts}")
    if not recipe.gradient_checkpointing:
        found.append("pass `gradient_checkpointing`")
    return [*found, "take a smaller `batch_size` or `size`"]


def _parts_that_fit(recipe: Recipe, measured: _Measured, free: int) -> int | None:
    """The least number of equal parts of a batch whose activations fit; None where none do."""
    for parts in range(recipe.gradient_accumulation_steps + 1, recipe.batch_size + 1):
        is_even = recipe.batch_size % parts == 0
        if is_even and measured.activations.at(recipe.batch_size // parts) <= free:
            return parts
    return None
