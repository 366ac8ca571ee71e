"""What looks at a training: TensorBoard, pictures, and W&B for those who ask for it."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from hddm.data.shards import Shard
from hddm.files import read_json
from hddm.training.figures import Figures
from hddm.training.logs import EventLog, Guarded
from hddm.training.loop import StepReport, Watcher
from hddm.training.run_folder import Run
from hddm.training.run_records import RUN_FILE
from hddm.training.settings import ExpertSettings
from hddm.training.validation_images import Pictures
from hddm.training.wandb_logs import WandbLog
from hddm.velocity import VelocityField

log = logging.getLogger(__name__)


def watching(
    field: VelocityField | None = None, shard: Shard | None = None, settings: ExpertSettings | None = None
) -> Callable[[Run], contextlib.AbstractContextManager[Watcher]]:
    """What `hddm.training.runs.train` watches a training with, as its run's options say.

    Nothing here ends a training: what fails is one warning.

    Args:
        field: the network in training, as it is to be sampled; without one there are no pictures.
        shard: what it is trained on.
        settings: its conditions.
    """

    @contextlib.contextmanager
    def watch(run: Run) -> Iterator[Watcher]:
        pictures = None
        if run.options.sample_every and field is not None and shard is not None and settings is not None:
            told = {
                "class_labels": settings.class_conditional,
                "encoder_hidden_states": settings.text_conditional,
            }
            names = {name for name, wanted in told.items() if wanted}
            pictures = Pictures(field, shard, names, run.samples)
        sinks = _sinks(run)
        failed = True
        try:
            yield _Watch(run, sinks, pictures)
            failed = False
        finally:
            for sink in sinks:
                sink.close(failed)

    return watch


def _sinks(run: Run) -> list[Guarded]:
    project = run.options.wandb
    sinks = [Guarded(f"TensorBoard ({run.logs})", lambda first: EventLog(run.logs, first))]
    if project is not None:
        config = read_json(run.folder / RUN_FILE).get("settings", {})
        sinks.append(Guarded("W&B", lambda first: WandbLog(run.folder, project, config)))
    return sinks


class _Watch:
    """Called after each step."""

    def __init__(self, run: Run, sinks: Sequence[Guarded], pictures: Pictures | None) -> None:
        self._run, self._sinks, self._pictures = run, sinks, pictures
        self._figures = Figures(run.options.log_every)
        self._warned = False

    def __call__(self, report: StepReport) -> None:
        for sink in self._sinks:
            sink.begin(report.step)
        entry = self._figures.add(report)
        with self._figures.paused():
            pictures = {f"samples/{name}": grid for name, grid in self._drawn(report).items()}
            for sink in self._sinks:
                if entry or pictures:
                    sink.put(report.step, entry, pictures)
                # A checkpoint follows: what it has done must not be missing from the log.
                if report.step % self._run.options.checkpoint_every == 0 or report.should_stop():
                    sink.sync()

    def _drawn(self, report: StepReport) -> dict[str, Tensor]:
        if self._pictures is None or report.step % self._run.options.sample_every:
            return {}
        try:
            return self._pictures.draw(report)
        except Exception as error:
            if not self._warned:
                reason = " ".join(str(error).split()) or type(error).__name__
                log.warning("step %d: no pictures (%s); the training goes on", report.step, reason)
            self._warned = True
            return {}
