"""Watch a training: log its figures, and pictures that its network draws.

Nothing here changes or ends the training (`Guarded`): modes, torch's generators, gradients and compiled code
are afterwards as before.
"""

import contextlib
import logging
import math
import os
import re
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from hddm.conditions import LABELS, Conditions
from hddm.data.images import save_png, tiled, to_bytes
from hddm.data.shards import Shard
from hddm.noise import Latents, Seeded
from hddm.running import Batch, run
from hddm.sampling import plan
from hddm.training.loop import StepReport, Watch, Watcher
from hddm.training.resume import RUN_FILE, read_run
from hddm.training.settings import TEXT
from hddm.training.state import BINS, Run, Sums
from hddm.training.wandb_log import WandbLog
from hddm.utils.errors import one_line, optional
from hddm.velocity import VelocityField

log = logging.getLogger(__name__)


def watching(
    field: VelocityField | None = None, shard: Shard | None = None, conditions: Collection[str] = ()
) -> Watch:
    """Return what opens the watcher of a run, by its options; see `hddm.training.loop.train`.

    ``field`` is the network in training, ``shard`` its data, and ``conditions`` name what it is trained
    with; without field and shard there are no pictures.
    """

    @contextlib.contextmanager
    def watch(run: Run) -> Iterator[Watcher]:
        options, logs, project = run.options, run.folder / "logs", run.options.wandb
        figures, grids = Figures(options.log_every), None
        if options.sample_every and field is not None and shard is not None:
            grids = SampleGrids(field, shard, conditions, run.folder / "samples")
        sinks = [Guarded(f"TensorBoard ({logs})", lambda first: EventLog(logs, first))]
        if project is not None:
            config = read_run(run.folder / RUN_FILE)["settings"]
            sinks.append(Guarded("W&B", lambda first: WandbLog(run.folder, project, config)))

        def on_step(report: StepReport) -> None:
            entry, pictures = figures.add(report), dict[str, Tensor]()
            if grids is not None and report.step % options.sample_every == 0:
                pictures = {f"samples/{name}": grid for name, grid in grids.try_to_draw(report).items()}
            for sink in sinks:
                sink.begin(report.step)
                if entry or pictures:
                    sink.use(lambda one: one.put(report.step, entry, pictures))
                # A checkpoint follows, and no step before it may be missing from the log.
                if report.is_due or report.should_stop():
                    sink.use(lambda one: one.sync())

        has_failed = True
        try:
            yield on_step
            has_failed = False
        finally:
            for sink in sinks:
                sink.use(lambda one: one.close(has_failed))

    return watch


class Figures:
    """Means of figures since the last entry, given every ``every`` steps; skipped steps do not count.

    Their sums are part of the training's state, so that a resumed run logs what the uninterrupted one does.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._images, self._seconds = 0, 0.0

    def add(self, report: StepReport) -> dict[str, float]:
        """Add a step; return the entry at steps that ``every`` divides, else {}.

        ``train/loss`` and ``train/loss_by_noise/0.2-0.4``, of samples with t there, are means since the last
        entry; ``train/gradient_norm``, before clipping, ``train/learning_rate`` and, with Muon,
        ``train/muon_learning_rate`` are this step's, as is ``train/seconds_waited`` for its inputs;
        ``train/images_per_second`` is that of the steps since the last entry of this process, without
        checkpoints and pictures.
        """
        sums = report.state.sums
        if sums.step != report.step - 1:
            sums = Sums()
        if math.isfinite(report.loss):
            sums = _added(sums, report)
        due = report.step % self.every == 0
        report.state.sums = (Sums() if due else sums).model_copy(update={"step": report.step})
        entry = _entry(sums, report) if due else {}
        self._images += len(report.losses)
        self._seconds += report.seconds
        if due:
            entry["train/images_per_second"] = self._images / max(self._seconds, 1e-9)
            self._images, self._seconds = 0, 0.0
        return entry


def _added(before: Sums, report: StepReport) -> Sums:
    """Add the losses of a step to the sums ``before``."""
    known = report.t.isfinite()
    bins = (report.t[known] * BINS).long().clamp(0, BINS - 1)
    losses = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, report.losses[known].double())
    counts = bins.bincount(minlength=BINS)
    added = zip(before.bins, losses.tolist(), counts.tolist(), strict=True)
    each = tuple((total + more, count + number) for (total, count), more, number in added)
    return Sums(loss=(before.loss[0] + report.loss, before.loss[1] + 1), bins=each)


def _entry(kept: Sums, report: StepReport) -> dict[str, float]:
    sums = {"train/loss": kept.loss}
    for index, each in enumerate(kept.bins):
        sums[f"train/loss_by_noise/{index / BINS:.1f}-{(index + 1) / BINS:.1f}"] = each
    entry = {name: total / count for name, (total, count) in sums.items() if count}
    entry["train/seconds_waited"] = report.waited
    if math.isfinite(report.grad_norm):
        entry["train/gradient_norm"] = report.grad_norm
    names = ("train/learning_rate", "train/muon_learning_rate")
    return entry | dict(zip(names, report.learning_rates, strict=False))


IMAGES, COLUMNS = 16, 4
STEPS, SEED = 30, 0
"""Solver steps per picture, on the model's own time grid, and the seed, as of ``hddm sample --seed 0``."""
LATENT_RANGE = 3.0
"""Latents, of variance about 1, are shown from minus to plus this."""
_SMALLEST = 64


class SampleGrids:
    """A grid of samples for raw and averaged weights, always from the same noise, as PNG under ``folder``.

    Class-conditional networks draw the classes in turn, text-conditional ones the first captions of the
    shard, others null conditions. Latents are not decoded: their first three channels are shown as colours.
    ``conditions`` are the names of those that the network is trained with. A network for t in [low, high]
    alone goes from images of the shard, with their classes, at high to the x_0 that it means at low.
    """

    def __init__(self, field: VelocityField, shard: Shard, conditions: Collection[str], folder: Path) -> None:
        self._field, self._folder = field, folder
        self._space, self._shape = shard.space, shard.shape
        self._conditions: dict[str, Tensor] = {}
        self._num, self._has_failed = IMAGES, False
        if TEXT in conditions and shard.texts is not None:
            self._num = min(IMAGES, len(shard))
            self._conditions[TEXT] = shard.texts.take(torch.arange(self._num))
        rows = torch.arange(self._num) % len(shard)
        self._x_0 = shard.take(rows)
        if LABELS in conditions:
            own = shard.labels if field.noise_range[1] < 1 else None
            in_turn = torch.arange(self._num) % len(shard.classes)
            self._conditions[LABELS] = in_turn if own is None else own[rows]

    def try_to_draw(self, report: StepReport) -> dict[str, Tensor]:
        """Do as `draw`; where that fails, return {}, with a warning the first time."""
        try:
            return self.draw(report)
        except Exception as error:
            if not self._has_failed:
                log.warning("step %d: no pictures (%s); the training goes on", report.step, one_line(error))
            self._has_failed = True
            return {}

    def draw(self, report: StepReport) -> dict[str, Tensor]:
        """Write grids and return them, (C, H, W) in bytes, by "raw" and "ema"; {} if the training is to stop.

        Raises `OSError` where they cannot be written, `HddmError` for samples that are not finite.
        """
        state, grids = report.state, {}
        with undisturbed(state.network):
            for name, weights in (("raw", contextlib.nullcontext()), ("ema", state.ema.averaged())):
                with weights:
                    grids[name] = self._grid(report)
                if report.should_stop():
                    log.info("step %d: stopping, so its pictures are skipped", report.step)
                    return {}
        self._folder.mkdir(parents=True, exist_ok=True)
        for name, grid in grids.items():
            path = self._folder / f"step_{report.step:08d}_{name}.png"
            # Renamed once complete.
            draft = path.with_name(f".{path.name}")
            save_png(grid, draft)
            os.replace(draft, path)
        return grids

    def _grid(self, report: StepReport) -> Tensor:
        field = self._field
        low, high = field.noise_range
        x = (1 - high) * self._x_0 + high * Seeded(SEED).initial(range(self._num), self._shape)
        steps = STEPS if field.sampling_steps is None else None
        how = plan(field, steps=steps, part=field.noise_range, noise=Latents(x))
        conditions = Conditions(self._conditions).map(lambda value: value.to(field.device))
        alone = Batch.of(self._num, conditions, torch.zeros(self._num, dtype=torch.long))
        x = run(how, alone, stop=report.should_stop)
        if low > 0:
            with torch.no_grad():
                given: dict[str, Any] = conditions.given
                x = x - low * field.velocity(x, how.times[-1], **given)
        return grid_of(shown(x.cpu(), self._space))


@contextlib.contextmanager
def undisturbed(network: nn.Module) -> Iterator[None]:
    """Put ``network`` in evaluation mode, not compiled, for a block; afterwards all is as before."""
    modes = {module: module.training for module in network.modules()}
    # Other shapes and modes would compile anew, and after too many torch runs code that rounds otherwise.
    compiled = network._compiled_call_impl
    device = next(network.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            network.eval()
            network._compiled_call_impl = None
            yield
        finally:
            network._compiled_call_impl = compiled
            for module, mode in modes.items():
                module.training = mode


def shown(x: Tensor, space: str) -> Tensor:
    """Convert samples (N, C, H, W), pixels or latents, to bytes (N, 1 or 3, H, W); NaN or Inf raises."""
    if space == "latents":
        x = x / LATENT_RANGE
    return to_bytes(x[:, :3] if x.shape[1] >= 3 else x[:, :1])


def grid_of(images: Tensor) -> Tensor:
    """Tile images (N, C, H, W) in bytes to one (C, H', W'), small ones enlarged, with a border."""
    return tiled(images, COLUMNS, max(1, _SMALLEST // images.shape[-1]))


class Guarded:
    """A log whose failure is one warning, after which it is not used again.

    ``name`` is its name in the warning; ``start`` opens it, given the first step.
    """

    def __init__(self, name: str, start: "Callable[[int], EventLog | WandbLog]") -> None:
        self._name, self._start, self._has_failed = name, start, False
        self._sink: EventLog | WandbLog | None = None

    def begin(self, step: int) -> None:
        """Open the log unless it is open; ``step`` is the first of this process."""
        if self._sink is None:
            self._sink = self._try(lambda: self._start(step))

    def use(self, act: "Callable[[EventLog | WandbLog], None]") -> None:
        """Do something with the log, if it is open and has not failed."""
        if (sink := self._sink) is not None:
            self._try(lambda: act(sink))

    def _try(self, act: Callable[[], Any]) -> Any:
        if self._has_failed:
            return None
        try:
            return act()
        # Whatever fails here, weeks of training must not be lost to a log.
        except Exception as error:
            self._has_failed = True
            log.warning("%s: %s; the training goes on without it", self._name, one_line(error))
            return None


class EventLog:
    """TensorBoard events in ``folder``; ``first`` is the first step of this process.

    The files of all resumes read as one run: each process writes its own, which sorts behind earlier ones and
    first declares void what they hold from ``first`` on, such as steps after the last checkpoint of a killed
    process. ``SummaryWriter`` names files by the clock alone, so files of a machine whose clock is behind
    would sort before what they replace, and it meets a full disk in a thread of its own.
    """

    def __init__(self, folder: Path, first: int) -> None:
        optional("tensorboard", "this log", "train")
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = Event
        folder.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = (folder / _next_name(folder)).open("xb")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        self._write(step=first, session_log=SessionLog(status=SessionLog.START))
        self._file.flush()

    def put(self, step: int, figures: Mapping[str, float], pictures: Mapping[str, Tensor]) -> None:
        """Write ``figures``, and ``pictures`` (C, H, W) in bytes, by name."""
        from torch.utils.tensorboard.summary import image, scalar

        for name, value in figures.items():
            self._write(step=step, summary=scalar(name, value))
        for name, pixels in pictures.items():
            self._write(step=step, summary=image(name, pixels.numpy(), dataformats="CHW"))
        self._file.flush()

    def sync(self) -> None:
        """Force what was put onto the disk, so that it survives a loss of power."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self, failed: bool) -> None:
        self._file.close()

    def _write(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())


def _next_name(folder: Path) -> str:
    """Return a name that sorts behind all event files in ``folder``, which are read in order."""
    found = [re.match(r"events\.out\.tfevents\.(\d+)\.", path.name) for path in folder.iterdir()]
    newest = max((int(match[1]) for match in found if match), default=0)
    stamp = max(int(time.time()), newest + 1)
    return f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}"
