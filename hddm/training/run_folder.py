"""Checkpoints: complete or absent, never overwritten by a worse one, read without code.

checkpoints/step_00000500/
  weights, ema, optimizer, losses (.safetensors)    `hddm.training.state.TrainingState`
  progress.json                                      counters
  manifest.json                                      SHA-256 of them all, written last

A checkpoint is written beside its place, synced and renamed, so that whoever is killed in the middle, or runs
out of disk, keeps the one before. It counts only if every file has its hash.

The run folder of a training, beside the folder that it will write: what is needed to go on, or to look.

OUT.run/
  run.json          settings, data and environment of the run, how it is kept, and what was changed on its way
  checkpoints/      `hddm.training.run_folder`
  logs/, samples/   TensorBoard and pictures
  lock              held by the process that trains

OUT itself appears when the training is done, whole.
"""

import contextlib
import functools
import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hddm.training.resume import (
    CHECKPOINTS,
    RUN_FILE,
    Change,
    checkpoints_in,
    compare_records,
    recorded,
    run_folder_of,
    step_of,
    with_changes,
)
from hddm.training.settings import Keeping, RunOptions
from hddm.training.state import EMA, LOSSES, OPTIMIZER, WEIGHTS, TrainingState
from hddm.utils.errors import HddmError
from hddm.utils.files import locked, new_folder, read_json, sha256_of, write_json, write_whole
from hddm.utils.records import Record, read_record

CHECKPOINT_FORMAT = "1.0"
MANIFEST = "manifest.json"
PROGRESS = "progress.json"
FILES = (WEIGHTS, EMA, OPTIMIZER, LOSSES)

log = logging.getLogger(__name__)


class Manifest(Record):
    """``manifest.json`` of a checkpoint."""

    format: str
    step: int
    files: dict[str, str]
    """SHA-256 by file name."""


class Checkpoints:
    """The checkpoints of one training, in ``folder``; the ``keep`` newest stay.

    One that is newer than what was saved last is damaged, or the run would have gone on from it; it is
    renamed ``damaged_n_…``.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    def save(self, state: TrainingState) -> Path:
        """Write ``state``, verify it, and only then let older checkpoints go.

        Raises:
            HddmError: where the disk is full or fails; older checkpoints are left as they are.
        """
        target = self._of(state.step)
        try:
            if target.exists() and self._complete(target):
                return target
            self._set_aside(target)
            with new_folder(target, MANIFEST, is_locked=True) as draft:
                for name, tensors in state.tensors().items():
                    save_file(_on_cpu(tensors), draft / f"{name}.safetensors")
                write_json(draft / PROGRESS, state.values())
                hashes = {path.name: sha256_of(path) for path in sorted(draft.iterdir())}
                manifest = Manifest(format=CHECKPOINT_FORMAT, step=state.step, files=hashes)
                write_json(draft / MANIFEST, manifest.model_dump())
        except (OSError, SafetensorError) as error:
            left = self.newest()
            kept = f"the one of step {step_of(left)} is whole" if left else "there was none before"
            raise HddmError(
                f"{target}: the checkpoint could not be written ({error}); {kept}; free some space, then "
                "go on with --resume"
            ) from error
        if not self._complete(target):
            raise HddmError(f"{target}: does not read back as it was written; the disk may be failing")
        self._prune(state.step)
        return target

    def newest(self) -> Path | None:
        """The newest complete checkpoint; an incomplete one is passed over, with a warning."""
        for path in self._all():
            if self._complete(path):
                return path
            log.warning("%s is incomplete or damaged; it is passed over", path)
        return None

    def load(self, path: Path, state: TrainingState) -> None:
        """Make ``state`` that of a checkpoint.

        Raises:
            HddmError: for one of another network.
        """
        tensors = {name: load_file(path / f"{name}.safetensors") for name in FILES}
        state.load(tensors, read_json(path / PROGRESS), str(path))

    def clear_drafts(self) -> None:
        """Remove what killed processes had begun to write."""
        for path in self.folder.glob(".step_*"):
            log.warning("%s was never finished; it is removed", path)
            shutil.rmtree(path)

    def _complete(self, path: Path) -> bool:
        try:
            manifest = read_record(path / MANIFEST, Manifest, CHECKPOINT_FORMAT)
            whole = {PROGRESS, *(f"{name}.safetensors" for name in FILES)} == set(manifest.files)
            return whole and all(sha256_of(path / name) == sha for name, sha in manifest.files.items())
        except (HddmError, OSError):
            return False

    def _set_aside(self, path: Path) -> None:
        if path.exists():
            free = next(n for n in range(1, 1000) if not path.with_name(f"damaged_{n}_{path.name}").exists())
            path.rename(path.with_name(f"damaged_{free}_{path.name}"))

    def _prune(self, step: int) -> None:
        """Let go what the complete checkpoint of ``step`` makes superfluous."""
        try:
            for path in self._all():
                # The run went on from before it, so it was passed over as damaged.
                if step_of(path) > step:
                    self._set_aside(path)
            for path in self._all()[self.keep :]:
                shutil.rmtree(path)
        except OSError as error:
            log.warning("%s: older checkpoints could not be removed (%s)", self.folder, error)

    def _all(self) -> list[Path]:
        """Folders of checkpoints, newest first."""
        return checkpoints_in(self.folder)

    def _of(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: value.cpu().contiguous() for name, value in tensors.items()}


FORMAT = "1.1"
LOCK = "lock"
# How the record's drafts begin, which a process that was killed just then leaves.
DRAFT = f".{RUN_FILE}"


class Run:
    """A run folder that this process holds the lock of."""

    def __init__(self, folder: Path, options: RunOptions) -> None:
        self.folder, self.options = folder, options
        self.changes: list[Change] = []
        self.checkpoints = Checkpoints(folder / CHECKPOINTS, options.keep)

    @property
    def logs(self) -> Path:
        """Where TensorBoard looks."""
        return self.folder / "logs"

    @property
    def samples(self) -> Path:
        """Where pictures go."""
        return self.folder / "samples"

    @functools.cached_property
    def begun_at(self) -> Path | None:
        """The checkpoint that this start goes on from: the newest complete one, if there is one."""
        return self.checkpoints.newest()

    def restore(self, state: TrainingState) -> None:
        """Bring ``state`` to the checkpoint to go on from, if there is one."""
        if self.begun_at is not None:
            self.checkpoints.load(self.begun_at, state)
            log.info("%s: going on from step %d", self.folder, state.step)

    def save(self, state: TrainingState) -> None:
        """Write a checkpoint; raises as `Checkpoints.save`."""
        self.checkpoints.save(state)


@contextlib.contextmanager
def open_run(
    out: Path, record: Mapping[str, Any], options: RunOptions, overwrite: bool = False
) -> Iterator[Run]:
    """The run folder of ``out``, new or gone on with, locked within the block.

    Args:
        out: what the run will write.
        record: plain values that say what is computed: "settings", "data", "environment".
        options: see `RunOptions`.
        overwrite: whether a run that is there is removed.

    Raises:
        HddmError: for a run that another process works on, one that is there without ``resume`` or
            ``overwrite``, one that was started with another record, whose every difference is listed, or a
            folder that is no run.
    """
    folder = run_folder_of(out)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder, out):
        known = folder / RUN_FILE
        _refuse_foreign(folder)
        if overwrite and not options.resume:
            _clear(folder)
        run = Run(folder, options)
        if known.exists():
            if not options.resume:
                raise HddmError(
                    f"{folder}: holds a run of {out} already; --resume goes on with it, --overwrite starts "
                    "anew"
                )
            differing = compare_records(out, record, options)
            run.changes = _changes(recorded(out).get("changes", []), differing, run)
        for left in folder.glob(f"{DRAFT}*"):
            left.unlink()
        content = {
            "format": FORMAT,
            **record,
            "keeping": options.model_dump(mode="json", include=set(Keeping.model_fields)),
            "changes": run.changes,
        }
        write_whole(known, lambda path: write_json(path, content))
        run.checkpoints.clear_drafts()
        yield run


def discard_runs(outs: Sequence[Path]) -> None:
    """Remove what the runs of ``outs`` have kept, where there is one: all of them or none.

    Raises:
        HddmError: where another process works on one, or it is no run.
    """
    folders = {out: run_folder_of(out) for out in outs if run_folder_of(out).is_dir()}
    with contextlib.ExitStack() as stack:
        for out, folder in folders.items():
            stack.enter_context(_locked(folder, out))
            _refuse_foreign(folder)
        for folder in folders.values():
            _clear(folder)


def wait_for_run(out: Path, seconds: float) -> None:
    """Wait until no other process holds the run of ``out``, so long at most; `open_run` refuses then.

    On a network file system the lock of a process that died with its machine may stay for a while.
    """
    end = time.monotonic() + seconds
    while run_folder_of(out).is_dir() and time.monotonic() < end:
        with contextlib.suppress(HddmError), _locked(run_folder_of(out), out):
            return
        time.sleep(min(1.0, seconds / 10))


def _locked(folder: Path, out: Path) -> contextlib.AbstractContextManager[None]:
    return locked(
        folder / LOCK,
        lambda holder: (
            f"{out}: another process is training it ({holder}); wait for it, or choose another --out"
        ),
    )


def _refuse_foreign(folder: Path) -> None:
    """Refuse a folder that something else than a run lies in."""
    if not (folder / RUN_FILE).exists() and any(
        path.name != LOCK and not path.name.startswith(DRAFT) for path in folder.iterdir()
    ):
        raise HddmError(f"{folder}: is in the way, and holds no {RUN_FILE} of a run; move it away")


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def _changes(before: list[Change], differing: Mapping[str, tuple[Any, Any]], run: Run) -> list[Change]:
    """The changes of ``run``, with those that this start makes of its settings."""
    settings = {
        key.removeprefix("settings."): values
        for key, values in differing.items()
        if key.startswith("settings.")
    }
    if not before and not settings:
        return []
    step = 0 if run.begun_at is None else step_of(run.begun_at)
    new = [{"step": step, "key": key, "was": was, "is": now} for key, (was, now) in settings.items()]
    return with_changes(before, new, step)
