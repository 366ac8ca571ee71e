"""The training loop that experts, routers and students share; `run_task` runs it from record to folder.

The samples of step s (`Order`) and all random numbers in it depend on (seed, key, s) alone, so checkpoints
hold no random state. A killed and resumed run computes what the uninterrupted one does, bit for bit on a CPU
in float32 with the same number of threads.
"""

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hddm.networks.wrappers import compile_blocks
from hddm.training.device import (
    Device,
    Flags,
    Readings,
    default_attention,
    float32_products,
    optimizer_of,
    placed,
)
from hddm.training.loader import AHEAD, Draw, Key, Loader, Order, StepInputs
from hddm.training.resume import SettingsChange, is_finished, run_folder_of, value_at
from hddm.training.settings import Recipe, RunOptions, refuse_watched, splits_weights
from hddm.training.sharding import Shards
from hddm.training.state import Ema, Run, TrainingState, open_run, trained_parameters
from hddm.utils.errors import HddmError, Stopped, counted
from hddm.utils.files import new_folder, nothing
from hddm.utils.processes import Interrupted, StopRequest, is_first
from hddm.utils.streams import Use
from hddm.utils.tensors import available_device

OnTrainingStep = Callable[[int, float, float], None]
"""Called with a step, its loss, and its seconds, without the time between steps."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """A network, trained in place where its parameters require gradients, and the loss to minimise.

    ``draw(rows, noise, own)`` returns the inputs of the loss, batch first, on the CPU. ``rows`` are the
    batch, of the ``num_samples`` samples; only its part ``own``, this process's, is read and returned.
    Everything random comes from ``noise``, and is drawn for the whole batch; "t" among the inputs is the time
    on the common path. ``loss(network, inputs)`` returns the loss of each sample (n,), in float32, also for a
    part of the batch; the mean over the batch is minimised. ``key`` separates the random numbers
    of trainings with one seed. The averages of step ``weak_step`` are kept to guide by, unless it is 0.
    ``prepare(device, folder)`` is called before the first step, with the run's folder if there is one.
    """

    network: nn.Module
    num_samples: int
    draw: Draw
    loss: Callable[[nn.Module, StepInputs], Tensor]
    key: Key = (Use.EXPERT_ORDER, Use.EXPERT_STEPS, 0)
    weak_step: int = 0
    prepare: Callable[[torch.device, Path | None], None] | None = None


@dataclass(frozen=True)
class StepReport:
    """Report to watchers: ``losses`` and ``t`` (batch,) on the CPU, and ``seconds`` of the step alone."""

    step: int
    losses: Tensor
    t: Tensor
    loss: float
    grad_norm: float
    learning_rates: tuple[float, ...]
    """Of AdamW, and of Muon where it trains the matrices."""
    seconds: float
    waited: float
    """Seconds of the step that it waited for its inputs."""
    state: TrainingState
    should_stop: Callable[[], bool]
    is_due: bool = False
    """A checkpoint follows, as after the last step."""
    is_stopping: bool = False
    """A process had got a signal when the step began."""


Watcher = Callable[[StepReport], None]


@dataclass(frozen=True)
class Fitted:
    """A training's last state, and the changes of settings on the way (`hddm.training.resume`)."""

    state: TrainingState
    device: torch.device
    changes: Sequence[SettingsChange] = ()
    shards: Shards | None = None
    """If weights are split over processes, which then all complete the model."""

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the network on the device for a block; split weights are always there."""
        with contextlib.nullcontext() if self.shards else placed(self.state.network, self.device):
            yield

    def whole(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """Return the network and its weak model on the CPU, whole only in the first process if split."""
        state, shards = self.state, self.shards
        if shards is None:
            return state.network, state.weak
        return shards.whole(), shards.gathered(state.weak)

    def record(self, recipe: Recipe, origin: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return plain values for the record beside the weights: the ``recipe``, and what came of it.

        ``origin`` says where the weights come from; with "init" the network is not of ``recipe.size``.
        """
        origin = origin or {}
        state = self.state
        finite: list[float] = []
        images_seen = 0
        for step, loss in enumerate(state.losses, 1):
            if math.isfinite(loss):
                finite.append(loss)
                images_seen += value_at(step, "batch_size", recipe.batch_size, self.changes)
        tail = finite[-max(state.step // 20, 1) :]
        record = {
            **recipe.model_dump(mode="json", exclude={"size"} if "init" in origin else None),
            "changes": list(self.changes),
            "images_seen": images_seen,
            "final_loss": sum(tail) / len(tail),
            "seconds": round(state.seconds, 1),
        }
        if state.held_out:
            record["held_out"] = state.held_out
        return {**record, **origin}


def fit(
    task: Task, recipe: Recipe, run: Run | None = None, watchers: Sequence[Watcher] = ()
) -> Fitted:
    """Minimise the loss of ``task`` and leave the averaged weights in its network, on the CPU.

    A step whose loss or gradient is not finite changes nothing, and is logged with its samples. Without a
    ``run`` there are no checkpoints, and signals are not caught. ``watchers`` are called after each step, on
    the main process.

    Raises:
        HddmError: after ``recipe.max_non_finite`` non-finite steps in a row, for missing hardware, or a
            checkpoint that cannot be written.
        Stopped: after a signal, with everything saved.
    """
    # It catches signals only within its block.
    stop = StopRequest()
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(Device(recipe))
        if task.prepare is not None:
            task.prepare(device.target, None if run is None else run.folder)
        if run is not None:
            stack.enter_context(stop)
        trainer = Trainer(task, recipe, device)
        stack.callback(trainer.loader.close)
        state = trainer.state
        if run is not None:
            run.restore(state)
        task.network.train()
        for report in trainer.reports(stop, run):
            # A run whose number of steps was changed may be beyond that step already.
            if 0 < task.weak_step <= state.step and not state.weak:
                state.keep_weak()
            for watcher in watchers if device.is_main else ():
                watcher(report)
            if run is not None:
                _keep(run, report, recipe.steps, device, stop)
        state.ema.copy_to_network()
        task.network.eval()
        # Compiled blocks would compile again for every other mode and shape.
        for module in task.network.modules():
            module._compiled_call_impl = None
        if trainer.shards is None:
            task.network.to("cpu")
    return Fitted(state, device.target, [] if run is None else run.changes, trainer.shards)


def _keep(run: Run, report: StepReport, steps: int, device: Device, stop: StopRequest) -> None:
    """Save a checkpoint where one is due or a signal came; after a signal raise `Stopped`."""
    state = report.state
    stopping = device.agreed(stop.requested, report.is_stopping)
    if report.is_due or stopping:
        if device.splits_weights:
            if not device.is_main:
                run.save_part(state)
            device.accelerator.wait_for_everyone()
        if device.is_main:
            run.save(state)
        device.accelerator.wait_for_everyone()
    if stopping and state.step < steps:
        text = f"stopped after step {state.step} of {steps}; progress is saved, and `resume=True` continues"
        raise Stopped(f"{run.folder}: {text}", stop.number or 0)


class _Losses(nn.Module):
    """The loss of a task as a module, since processes exchange gradients after a module's forward."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.network, self._task = task.network, task

    def forward(self, inputs: StepInputs) -> Tensor:
        """Losses (n,)."""
        return self._task.loss(self.network, inputs)


@dataclass
class Begun:
    """A step whose gradients are computed, or will be, and whose figures are not read yet."""

    step: int
    rows: Tensor
    readings: Readings
    rates: tuple[float, ...]
    waited: float
    seconds: float


class Trainer:
    """The steps of a training on a device: `begun` computes gradients, `finished` completes the state."""

    def __init__(self, task: Task, recipe: Recipe, device: Device) -> None:
        self.recipe, self.device = recipe, device
        network: Any = task.network
        self.shards = device.place(network)
        self.parameters = list(trained_parameters(network).values())
        optimizer = optimizer_of(network, recipe)
        if recipe.compile:
            compile_blocks(network)
        self.losses = device.distributed(_Losses(task))
        self.state = TrainingState(
            network,
            Ema(network, recipe.ema_decay),
            optimizer,
            device.scaler,
            part=device.weight_part,
            parts=device.weight_parts,
        )
        self._task = task
        self.load(recipe.batch_size)

    def load(self, batch_size: int, last: int | None = None) -> None:
        """Take batches of this size from the next step on, up to step ``last``, by default the recipe's."""
        task, recipe, device = self._task, self.recipe, self.device
        last = recipe.steps if last is None else last
        order = Order(task.num_samples, batch_size, recipe.seed, task.key)
        ahead = 0 if device.target.type == "cpu" else AHEAD
        self.loader = Loader(order, task.draw, last, device.share(batch_size), ahead)

    def reports(self, stop: StopRequest, run: Run | None) -> Iterator[StepReport]:
        """Take all steps that are left, and yield the report of each.

        The figures of a step are read while the next one's gradients are computed, so that a GPU never waits
        for Python. When a report is yielded, weights, averages and optimizer are those after its step.
        """
        before: Begun | None = None
        for step in range(self.state.step + 1, self.recipe.steps + 1):
            try:
                begun = self.begun(step, stop, run)
            finally:
                # An error belongs to the new step, and must not cost the one before.
                if before is not None:
                    yield self.finished(before, stop, run)
            started = time.perf_counter()
            self.device.update(self.state.optimizer, begun.readings.skipped)
            begun.seconds += time.perf_counter() - started
            before = begun
        if before is not None:
            yield self.finished(before, stop, run)

    def begun(self, step: int, stop: StopRequest, run: Run | None) -> Begun:
        """Start to compute the gradients of ``step``."""
        state, device = self.state, self.device
        started = time.perf_counter()
        rows, inputs, seed = self.loader.take(step)
        waited = time.perf_counter() - started
        # Dropout layers draw from torch's global generator.
        torch.manual_seed(seed)
        state.optimizer.zero_grad(set_to_none=True)
        inputs = device.moved(inputs)
        losses = self._backward(inputs)
        clipped = device.clip(state.optimizer, self.parameters, self.recipe.max_grad_norm)
        flags = Flags(stop.requested, device.is_main and run is not None and run.is_late())
        readings = device.gathered(losses, inputs.get("t"), clipped, flags)
        factor = learning_rate_factor(step - 1, self.recipe)
        for group in state.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        rates = tuple(group["lr"] for group in state.optimizer.param_groups)
        return Begun(step, rows, readings, rates, waited, time.perf_counter() - started)

    def finished(self, begun: Begun, stop: StopRequest, run: Run | None) -> StepReport:
        """Wait for the figures of a step, and complete the state after it."""
        state, device, step = self.state, self.device, begun.step
        started = time.perf_counter()
        losses, t, norm, is_skipped, flags = begun.readings.read()
        loss = losses.mean().item()
        state.losses.append(loss)
        if not is_skipped:
            state.ema.update()
            state.non_finite = 0
        elif math.isfinite(loss) and device.can_scale_down():
            scale = device.scaler.get_scale()
            log.info("step %d: gradients overflowed in fp16; the loss scale is now %g", step, scale)
        else:
            self._skipped(step, begun.rows, losses, norm)
        seconds = begun.seconds + time.perf_counter() - started
        state.seconds += seconds
        # The clocks of several processes differ, and all must save together.
        is_due = run is not None and run.is_due(state, device.agreed(run.is_late(), flags.save))
        is_due |= step == self.recipe.steps
        figures = (step, losses, t, loss, norm, begun.rates, seconds, begun.waited)
        return StepReport(*figures, state, lambda: stop.requested, is_due, flags.stop)

    def _backward(self, inputs: StepInputs) -> Tensor:
        """Return losses (batch,) of this process; gradients are summed over the parts of its batch."""
        number = self.recipe.gradient_accumulation_steps
        batch_size = len(next(iter(inputs.values())))
        chunks = [value.chunk(number) for value in inputs.values()]
        accelerator = self.device.accelerator
        losses = []
        for index, values in enumerate(zip(*chunks, strict=True), 1):
            part = dict(zip(inputs, values, strict=True))
            # Gradients are exchanged after the last part only.
            is_last = index == number
            with contextlib.nullcontext() if is_last else accelerator.no_sync(self.losses):
                with accelerator.autocast():
                    each = self.losses(part)
                self.device.scaler.scale(each.sum() / batch_size).backward()
            losses.append(each.detach())
        return torch.cat(losses)

    def _skipped(self, step: int, rows: Tensor, losses: Tensor, norm: float) -> None:
        self.state.non_finite += 1
        count = self.state.non_finite
        broken = rows[~losses.isfinite()].tolist() or rows.tolist()
        what = (
            f"step {step}: loss {losses.mean().item()}, gradient norm {norm}, samples {broken[:8]}"
        )
        # A single last step may be skipped like any other; more in a row mean that the training diverged.
        diverged = step == self.recipe.steps and (count > 1 or step == 1)
        if count >= self.recipe.max_non_finite or diverged:
            text = f"the last {count} steps were not finite, and nothing was written"
            raise HddmError(f"{what}; {text}; try a lower `learning_rate` or `muon_learning_rate`")
        log.warning("%s; the step is skipped", what)


def learning_rate_factor(step: int, recipe: Recipe) -> float:
    """Return the factor on the learning rate at ``step``, from 0."""
    warm = min(1.0, (step + 1) / max(recipe.warmup, 1))
    return warm * 0.5 * (1 + math.cos(math.pi * min(step / recipe.steps, 1)))


Watch = Callable[[Run], contextlib.AbstractContextManager[Watcher]]
Complete = Callable[[Fitted], Callable[[Path], None]]
"""Completes a fitted model, and returns what writes it into a folder."""


@dataclass(frozen=True)
class Training:
    """A training before its first step; `run` runs it, and `hddm.training.needs` tells what it will take.

    Its fields are those of `run_task`, and what the steps do not show: ``evaluations`` of the network by the
    calibration that follows them, for one image each, and bytes of ``others`` that stay, by name.
    """

    task: Task
    recipe: Recipe
    record: str
    complete: Complete
    data: Mapping[str, Any]
    watch: Watch | None = None
    evaluations: int = 0
    others: Mapping[str, int] = field(default_factory=dict)

    def run(
        self,
        out: Path,
        overwrite: bool = False,
        on_step: OnTrainingStep | None = None,
        run: RunOptions | None = None,
    ) -> list[float]:
        """As `run_task`."""
        parts = (self.task, self.recipe, out, self.record, self.complete, self.data)
        return run_task(*parts, overwrite, on_step, run, self.watch)


def checkpoint_gradients(network: Any) -> None:
    """Turn gradient checkpointing on; `HddmError` for a class that diffusers finds unable."""
    try:
        network.enable_gradient_checkpointing()
    except ValueError as error:
        name = type(network).__name__
        raise HddmError(
            f"`gradient_checkpointing`: {name} does not support it, says diffusers; drop the option"
        ) from error


def run_task(
    task: Task,
    recipe: Recipe,
    out: Path,
    record: str,
    complete: Complete,
    data: Mapping[str, Any],
    overwrite: bool = False,
    on_step: OnTrainingStep | None = None,
    run: RunOptions | None = None,
    watch: Watch | None = None,
) -> list[float]:
    """Fit ``task`` and write ``out``, which appears complete or not at all; return the loss of every step.

    Where a resumed ``out`` is complete, no losses are returned. ``complete(fitted)`` returns what fills
    ``out``, whose kind the JSON file ``record`` marks. ``data`` are plain values that describe the training
    data, which a resumed run must share. ``overwrite`` replaces an existing ``out`` and its run. ``run`` says
    how the training is kept, None for not at all; ``watch`` opens its watcher.

    Raises:
        HddmError: as `fit` and `hddm.training.state.open_run`.
        Stopped: after a signal, with the run saved.
    """
    # The size of a network that is trained further is not the recipe's.
    settings = recipe.model_dump(mode="json", exclude={"size"} if "init" in data else None)
    content = {"settings": settings, "data": dict(data)}
    if is_finished(out, record, content, run, overwrite):
        return []
    if recipe.gradient_checkpointing:
        checkpoint_gradients(task.network)
    if run is not None and splits_weights(recipe):
        refuse_watched(run)
    watchers: list[Watcher] = []
    if on_step is not None:
        watchers.append(lambda report: on_step(report.step, report.loss, report.seconds))
    with contextlib.ExitStack() as stack:
        kept = None if run is None else Run(run_folder_of(out), run)
        # Only the first of several processes holds the run; the others join it in `fit`.
        if run is not None and is_first():
            device = available_device(recipe.device)
            attention = default_attention(device, recipe.mixed_precision)
            versions = {"hddm": version("hddm-diffusion"), "torch": torch.__version__}
            versions |= {"hostname": os.uname().nodename, "default_attention": attention}
            with float32_products(device) as products:
                versions["float32_products"] = products
            content["environment"] = versions
            kept = stack.enter_context(open_run(out, content, run, overwrite))
            if watch is not None:
                watchers.append(stack.enter_context(watch(kept)))
        try:
            fitted = fit(task, recipe, kept, watchers)
            if is_first() or fitted.shards is not None:
                write = complete(fitted)
            if is_first():
                remedy = nothing if kept is None else kept.kept
                with new_folder(out, record, overwrite, kept=remedy) as draft:
                    write(draft)
        except Interrupted as stopped:
            # Before or after the steps, which take signals themselves.
            if kept is None:
                raise
            raise Stopped(f"{kept.folder}: stopped; {kept.kept()}", stopped.number) from stopped
    return fitted.state.losses


def summary_of(losses: Sequence[float], name: str = "loss") -> str:
    """Summarise a training in one line: mean losses of its first and last steps, or of all if they are few.

    The first and last are a tenth of the steps each, at most 100 and at least 10.
    """
    over = min(100, len(losses) // 10)
    first, last, average = mean(losses[:over]), mean(losses[len(losses) - over :]), mean(losses)
    trained = f"trained for {counted(len(losses), 'step')}" if losses else ""
    if over >= 10 and math.isfinite(first) and math.isfinite(last):
        return f"{trained}, {name} {first:.4f} → {last:.4f} (means of the first and the last {over} steps)"
    if math.isfinite(average):
        return f"{trained}, {name} {average:.4f} (mean of all steps)"
    return trained


def mean(losses: Sequence[float]) -> float:
    """Return the mean of the finite losses; NaN where there are none."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return sum(finite) / len(finite) if finite else math.nan
