"""One training from its record to its folder: new or resumed, watched, and written complete or not at all."""

import contextlib
import os
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

from hddm.training.loop import Fitted, OnStep, StepReport, Task, Watcher, fit
from hddm.training.resume import as_recorded, is_complete, run_folder_of
from hddm.training.run_folder import Run, open_run
from hddm.training.settings import LoopSettings, RunOptions
from hddm.utils.files import new_folder

Settings = TypeVar("Settings", bound=LoopSettings)
Write = Callable[[Path, Fitted, Settings], None]
Watch = Callable[[Run], contextlib.AbstractContextManager[Watcher]]


def train(
    task: Task,
    settings: Settings,
    out: Path,
    record: str,
    write: Write[Settings],
    data: Mapping[str, Any],
    overwrite: bool = False,
    on_step: OnStep | None = None,
    run: RunOptions | None = None,
    watch: Watch | None = None,
) -> list[float]:
    """Fit ``task`` and write ``out``, which appears complete or not at all.

    Args:
        task: what is trained.
        settings: how.
        out: the folder to write.
        record: the JSON file that marks its kind.
        write: ``write(draft, fitted, settings)`` fills it; the settings are those that were used.
        data: plain values that say what it is trained on, which a resumed run must share.
        overwrite: whether an existing ``out``, and a run that is there, are replaced.
        on_step: called after each step with its number, loss and seconds.
        run: how the training is kept; it is not without.
        watch: opens what looks at the training, given its run.

    Returns:
        The loss of every step; none where a resumed ``out`` is complete.

    Raises:
        HddmError: as `hddm.training.run_folder.open_run` and `hddm.training.loop.fit`.
        Stopped: after a signal, with the run saved.
    """
    if is_complete(out, record, run, overwrite, settings, data):
        return []
    used = completed(settings, out if run is not None and run.resume else None)
    counting = [] if on_step is None else [_counting(on_step)]
    with contextlib.ExitStack() as stack:
        kept = None if run is None else Run(run_folder_of(out), run)
        watchers: list[Watcher] = list(counting)
        # Of several processes the first alone holds the run; the others meet it in `fit`.
        first = int(os.environ.get("RANK", "0")) == 0
        if run is not None and first:
            kept = stack.enter_context(open_run(out, _record(used, data), run, overwrite))
            if watch is not None:
                watchers.append(stack.enter_context(watch(kept)))
        fitted = fit(task, used, kept, watchers)
        if first:
            with new_folder(out, record, overwrite) as draft:
                write(draft, fitted, used)
    return fitted.losses


def completed(settings: Settings, out: Path | None, threads: int | None = None) -> Settings:
    """Fill in the threads and the warm-up that ``settings`` leave open.

    Both are those of the resumed run of ``out``, whose default may have been another; else as many
    ``threads``, by default torch's, and `LoopSettings.warmup_steps`.
    """
    if out is not None:
        settings = as_recorded(settings, out)
    found: dict[str, int] = {}
    if settings.threads is None:
        found["threads"] = threads or torch.get_num_threads()
    if settings.warmup is None:
        found["warmup"] = settings.warmup_steps
    return settings.model_copy(update=found)


def _record(settings: LoopSettings, data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "settings": settings.model_dump(mode="json"),
        "data": dict(data),
        "environment": {
            "hddm": version("hddm-diffusion"),
            "torch": torch.__version__,
            "hostname": os.uname().nodename,
            "device": _device(settings),
            "processes": int(os.environ.get("WORLD_SIZE", "1")),
        },
    }


def _device(settings: LoopSettings) -> str:
    """Name the device that the settings mean on this machine."""
    if settings.device in ("auto", "cuda") and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    mps = settings.device in ("auto", "mps") and torch.backends.mps.is_available()
    return "mps" if mps else "cpu"


def _counting(on_step: OnStep) -> Watcher:
    def watch(report: StepReport) -> None:
        on_step(report.step, report.loss, report.seconds)

    return watch
