"""Watch a training: log its figures, and pictures that its network draws, to TensorBoard and a tracker.

Nothing here changes or ends the training (`Guarded`): modes, torch's generators, gradients and compiled code
are afterwards as before.
"""

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from hddm.condition_names import LABELS, TEXT
from hddm.conditions import Conditions
from hddm.data.held_out import open_held_out
from hddm.data.images import save_png, tiled, to_bytes
from hddm.data.shards import Shard
from hddm.experts.denoising import velocity_errors
from hddm.experts.shard_images import conditions_of, conditions_of_rows, evenly_spaced
from hddm.noise import Seeded
from hddm.running import Batch, run
from hddm.sampling import plan
from hddm.training.loop import StepReport, Watch, Watcher, mean
from hddm.training.report import LOGS, REPORT_FILE, SAMPLES, RunReport
from hddm.training.resume import RUN_FILE, read_run, step_of
from hddm.training.settings import RunOptions, parse_tracker
from hddm.training.state import Run
from hddm.training.trackers import TRACKER_LOGS, TrackerLog
from hddm.utils.errors import HddmError, one_line, optional
from hddm.utils.files import write_whole
from hddm.utils.streams import Use, generator
from hddm.velocity import VelocityField

T = TypeVar("T")

log = logging.getLogger(__name__)


def watching(
    field: VelocityField | None = None,
    shard: Shard | None = None,
    conditions: Collection[str] = (),
    options: RunOptions | None = None,
) -> Watch:
    """Return what opens the watcher of a run, by its options; see `hddm.training.loop.run_task`.

    ``field`` is the network in training, ``shard`` its data, and ``conditions`` name what it is trained
    with; without field and shard there are no pictures. ``options`` name the held-out images, if any.

    Raises:
        HddmError: as `hddm.data.held_out.open_held_out`, and for held-out images of other classes, or without
            captions where the network is trained with some.
    """
    images = None
    if options is not None and options.held_out is not None and shard is not None:
        images = open_held_out(options.held_out, shard)
        if TEXT in conditions and images.texts is None:
            raise HddmError(
                f"`held_out` {images.folder}: holds no text embeddings; hddm encode makes them"
            )
        if field is not None:
            conditions_of(images, field)

    @contextlib.contextmanager
    def watch(run: Run) -> Iterator[Watcher]:
        options, logs = run.options, run.folder / LOGS
        figures, grids, held_out = Figures(options.log_every), None, None
        if images is not None and field is not None:
            held_out = Guarded(
                "held-out images", lambda: HeldOut(field, images, options.validate_every)
            )
        if options.sample_every and field is not None and shard is not None:
            samples = run.folder / SAMPLES
            grids = Guarded("pictures", lambda: SampleGrids(field, shard, conditions, samples))
        page = Guarded(f"report ({run.folder / REPORT_FILE})", lambda: RunReport(run.folder))
        first = 1 if run.begun_at is None else step_of(run.begun_at) + 1
        sinks = list[Guarded[TensorBoardLog] | Guarded[TrackerLog]]()
        sinks.append(Guarded(f"TensorBoard ({logs})", lambda: TensorBoardLog(logs, first)))
        if options.tracker is not None:
            name, project = parse_tracker(options.tracker)
            config = read_run(run.folder / RUN_FILE)["settings"]
            entry_name = options.run_name or run.folder.stem
            sinks.append(
                Guarded(name, lambda: TRACKER_LOGS[name](run.folder, project, entry_name, config))
            )

        def on_step(report: StepReport) -> None:
            # Of a checkpoint before this step: nothing may delay saving one.
            page.use(lambda one: one.renew())
            entry = figures.add(report)
            pictures: dict[str, Tensor] = {}
            if grids is not None and report.step % options.sample_every == 0:
                grids.use(lambda one: pictures.update(one.draw(report)))
            if held_out is not None and report.step % options.validate_every == 0:
                held_out.use(lambda one: entry.update(one.measure(report)))
            named = {f"samples/{name}": grid for name, grid in pictures.items()}
            if entry or named:
                for sink in sinks:
                    sink.use(lambda one: one.put(report.step, entry, named))
            if report.is_due and report.state.seconds > SHORTEST:
                page.use(lambda one: one.put_off(report.step, len(report.losses)))

        has_failed = True
        try:
            yield on_step
            has_failed = False
        finally:
            for sink in sinks:
                sink.use(lambda one: one.close(has_failed))
            if not has_failed:
                page.use(lambda one: one.renew(is_last=True))

    return watch


SHORTEST = 30.0
"""Seconds of a training from which on it has a report."""
BINS = 5
"""Bins of equal width for noise levels t in [0, 1]."""


class Figures:
    """Means of figures since the last entry, given every ``every`` steps; skipped steps do not count."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._reports: list[StepReport] = []

    def add(self, report: StepReport) -> dict[str, float]:
        """Add a step; return the entry at steps that ``every`` divides, else {}.

        ``train/loss`` is the mean since the last entry, also of steps before a resumption. Means over those
        of this process are ``train/loss_by_noise/0.2-0.4``, of samples with t there, and
        ``train/images_per_second``, without checkpoints and pictures. ``train/gradient_norm``, before
        clipping, ``train/learning_rate``, with Muon ``train/muon_learning_rate``, and
        ``train/seconds_waited`` for inputs are this step's.
        """
        self._reports.append(report)
        if report.step % self._every:
            return {}
        reports, self._reports = self._reports, []
        entry = {"train/loss": mean(report.state.losses[-self._every :])}
        all_losses = [torch.zeros(0)]
        all_times = [torch.zeros(0)]
        for one in reports:
            if math.isfinite(one.loss):
                all_losses.append(one.losses)
                all_times.append(one.t)
        losses = torch.cat(all_losses)
        t = torch.cat(all_times)
        # Of a sample without time NaN, which is in no bin.
        bins = (t * BINS).floor().clamp(max=BINS - 1)
        for index in range(BINS):
            name = f"train/loss_by_noise/{index / BINS:.1f}-{(index + 1) / BINS:.1f}"
            entry[name] = losses[bins == index].double().mean().item()
        entry["train/gradient_norm"] = report.grad_norm
        rates = ("train/learning_rate", "train/muon_learning_rate")
        entry |= dict(zip(rates, report.learning_rates, strict=False))
        entry["train/seconds_waited"] = report.waited
        images = sum(len(one.losses) for one in reports)
        seconds = sum(one.seconds for one in reports)
        entry["train/images_per_second"] = images / max(seconds, 1e-9)
        return {name: value for name, value in entry.items() if math.isfinite(value)}


IMAGES, COLUMNS = 16, 4
STEPS, SEED = 30, 0
"""Solver steps per picture, on the model's own time grid, and the seed, as of ``hddm sample --seed 0``."""
LATENT_RANGE = 3.0
"""Latents, of variance about 1, are shown from minus to plus this."""
_SMALLEST = 64
_MOST_HELD_OUT = 512


class SampleGrids:
    """A grid of samples for raw and averaged weights, always from the same noise, as PNG under ``folder``.

    Class-conditional networks draw the classes in turn, text-conditional ones the first captions of the
    shard, others null conditions. Latents are not decoded: their first three channels are shown as colours.
    ``conditions`` are the names of the conditions that the network is trained with.
    """

    def __init__(
        self, field: VelocityField, shard: Shard, conditions: Collection[str], folder: Path
    ) -> None:
        self._field, self._folder, self._space = field, folder, shard.space
        self._num, given = IMAGES, dict[str, Tensor]()
        if TEXT in conditions and shard.texts is not None:
            self._num = min(IMAGES, len(shard))
            given[TEXT] = shard.texts.take(torch.arange(self._num))
        if LABELS in conditions:
            given[LABELS] = torch.arange(self._num) % len(shard.classes)
        self._conditions = Conditions(given)

    def draw(self, report: StepReport) -> dict[str, Tensor]:
        """Write grids and return them, (C, H, W) in bytes, by "raw" and "ema"; {} if the training is to stop.

        Raises `OSError` where they cannot be written, `HddmError` for samples that are not finite, or for a
        network for a part of t, which cannot sample alone.
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
            write_whole(path, functools.partial(save_png, grid))
        return grids

    def _grid(self, report: StepReport) -> Tensor:
        field = self._field
        steps = STEPS if field.sampling_steps is None else None
        how = plan(field, steps=steps, noise=Seeded(SEED))
        conditions = self._conditions.map(lambda value: value.to(field.device))
        alone = Batch.of(self._num, conditions, torch.zeros(self._num, dtype=torch.long))
        images = to_shown_bytes(run(how, alone, stop=report.should_stop).cpu(), self._space)
        return tiled(images, COLUMNS, max(1, _SMALLEST // images.shape[-1]))


STRATA = 10
"""Noise levels at which the error on held-out images is measured: the middles of equal parts of t."""
_COST = 0.02
"""Share of a training's time that the measurements may take."""


class HeldOut:
    """Mean squared error of the velocity on images that are not trained on, by noise level.

    The images and their noise are the same at every measurement, for raw and for averaged weights.
    Measurements are a part of the training's state, and so of its checkpoints and of the finished expert's
    record.
    """

    def __init__(self, field: VelocityField, held_out: Shard, every: int) -> None:
        self._field, self._shard, self._every = field, held_out, every
        self._labels = conditions_of(held_out, field)
        low, high = field.noise_range
        self._times = [low + (high - low) * (k + 0.5) / STRATA for k in range(STRATA)]

    def measure(self, report: StepReport) -> dict[str, float]:
        """Figures of the step, by name; {} if the training is to stop, or if they are not finite."""
        state = report.state
        errors: dict[str, list[float]] = {}
        # A step takes about three passes per image, a measurement one per level and set of weights.
        most = int(_COST * self._every * 3 * len(report.losses) / (2 * STRATA))
        rows = evenly_spaced(self._shard, min(max(most, 2), _MOST_HELD_OUT))
        given = conditions_of_rows(rows, self._labels, self._shard, self._field)
        images = self._shard.take(rows)
        with undisturbed(state.network):
            for name, weights in (("raw", contextlib.nullcontext()), ("ema", state.ema.averaged())):
                with weights, torch.no_grad():
                    noise = generator(SEED, Use.DENOISING)
                    found = velocity_errors(self._field, images, given, self._times, noise)
                errors[name] = found[:, 0].mean(1).tolist()
                if report.should_stop():
                    return {}
        measured = [*errors["raw"], *errors["ema"]]
        if not all(math.isfinite(one) for one in measured):
            # No JSON could hold them.
            return {}
        state.held_out.append({"step": report.step, **errors})
        means = {name: sum(one) / STRATA for name, one in errors.items()}
        text = "step %d: error of the velocity on held-out images %.4f, of averaged weights %.4f"
        log.info(text, report.step, means["raw"], means["ema"])
        figures: dict[str, float] = {}
        for name, error in means.items():
            figures[f"held_out/{name}"] = error
        for t, error in zip(self._times, errors["ema"], strict=True):
            figures[f"held_out_by_noise/{t:.2f}"] = error
        return figures


@contextlib.contextmanager
def undisturbed(network: nn.Module) -> Iterator[None]:
    """Put ``network`` in evaluation mode, not compiled, for a block; afterwards all is as before."""
    modes = {module: module.training for module in network.modules()}
    device = next(network.parameters()).device
    devices = [device] if device.type == "cuda" else []
    # Other shapes and modes would compile anew, and after too many torch runs code that rounds otherwise.
    with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"):
        try:
            network.eval()
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


def to_shown_bytes(x: Tensor, space: str) -> Tensor:
    """Convert samples (N, C, H, W), pixels or latents, to bytes (N, 1 or 3, H, W); NaN or Inf raises."""
    if space == "latents":
        x = x / LATENT_RANGE
    return to_bytes(x[:, :3] if x.shape[1] >= 3 else x[:, :1])


class Guarded(Generic[T]):
    """Something that a training does not need: its failure is one warning, after which it is not used again.

    ``start`` opens it.
    """

    def __init__(self, name: str, start: Callable[[], T]) -> None:
        self._name = name
        self._one: T | None = None
        with self._warned():
            self._one = start()

    def use(self, act: Callable[[T], object]) -> None:
        """Do something with it, if it is open and has not failed."""
        one = self._one
        if one is not None:
            with self._warned():
                act(one)

    @contextlib.contextmanager
    def _warned(self) -> Iterator[None]:
        try:
            yield
        # Whatever fails here, weeks of training must not be lost to it.
        except Exception as error:
            self._one = None
            log.warning("%s: %s; the training goes on without", self._name, one_line(error))


class TensorBoardLog:
    """TensorBoard events in ``folder``.

    Each process writes a file of its own, which first declares void what earlier ones hold from ``first`` on,
    its first step: a killed process may have logged steps after its last checkpoint.
    """

    def __init__(self, folder: Path, first: int) -> None:
        optional("tensorboard", "this log", "train")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=first)

    def put(self, step: int, figures: Mapping[str, float], pictures: Mapping[str, Tensor]) -> None:
        """Write ``figures``, and ``pictures`` (C, H, W) in bytes, by name."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        for name, pixels in pictures.items():
            self._writer.add_image(name, pixels, step)
        # A checkpoint may follow, and no step before it may be missing.
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()
