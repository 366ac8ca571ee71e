"""A training whose result goes to an address: its run is kept here, and every checkpoint is uploaded.

ADDRESS.run/run.json               the run's record, uploaded before each checkpoint
ADDRESS.run/checkpoints/step_…/    as in a run folder; the manifest is uploaded last and removed first
ADDRESS/                           the expert, at the end

A checkpoint counts only with its manifest, so an upload that is killed leaves the one before. The folders on
this machine are in the cache (`hddm.utils.uploading.work_folder`). A start with ``resume=True`` fetches the
newest complete checkpoint unless it has a newer one, so the same command continues on any machine.
"""

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from hddm.training.loop import OnTrainingStep
from hddm.training.resume import CHECKPOINTS, RUN_FILE, checkpoints_in, run_folder_of, step_of
from hddm.training.settings import RunOptions
from hddm.utils.addresses import Address, is_file, names_below, reached
from hddm.utils.copies import link_or_copy
from hddm.utils.errors import HddmError
from hddm.utils.fetching import fetched
from hddm.utils.files import below, new_folder, write_whole
from hddm.utils.processes import number_of_processes
from hddm.utils.records import EXPERT_FILE, MANIFEST, damage
from hddm.utils.uploading import (
    begin,
    end,
    refuse_existing,
    refuse_unwritable,
    upload,
    upload_files,
    work_folder,
)

log = logging.getLogger(__name__)
Train = Callable[[Path, OnTrainingStep], object]
"""Trains to a folder, and calls the second after every step."""


def train_at(out: Address, run: RunOptions, overwrite: bool, train: Train) -> None:
    """Train to `work_folder`, upload checkpoints on the way, and the result to ``out``.

    A failed upload of a checkpoint is a warning, and the next checkpoint is uploaded in its turn.

    Raises:
        HddmError: as ``train``; for a result or a run that is at the address already, unless it is to be
            resumed; for several processes; if the upload of the result fails, with what is kept.
    """
    if number_of_processes() > 1:
        text = "a training by several processes writes to a folder that they all see; name one"
        raise HddmError(f"{out}: {text}")
    remote = _RemoteRun(out, run)
    if run.resume and not overwrite and remote.is_finished():
        log.info("%s: is finished; there is nothing to resume", out)
        end(out)
        return
    refuse_existing(out, EXPERT_FILE, overwrite)
    if not run.resume:
        remote.refuse_run()
    refuse_unwritable(out)
    folder = begin(out)
    if run.resume:
        remote.restore()
    with ThreadPoolExecutor(1, "hddm-upload") as pool:
        try:
            train(folder, lambda step, loss, seconds: remote.notice(pool))
        except Exception:
            # After a signal this machine may be gone soon.
            with _warned():
                remote.finish()
            raise
        with _warned():
            remote.finish()
    upload(folder, out, EXPERT_FILE)
    end(out)


@contextlib.contextmanager
def _warned() -> Iterator[None]:
    """A block whose error is a warning: another one is raised, or the work can do without the block."""
    try:
        yield
    except HddmError as error:
        log.warning("%s", error)


class _RemoteRun:
    """The run of ``out`` at its address, and in its run folder on this machine."""

    def __init__(self, out: Address, run: RunOptions) -> None:
        self._out, self._keep = out, run.keep
        self._run = run_folder_of(work_folder(out))
        self.address = out.with_name(f"{out.name}.run")
        self._pending: Future[None] | None = None
        self._tried: Path | None = None
        """The newest checkpoint whose upload was begun."""
        self._is_there = False
        """True if that upload succeeded."""
        self._took_steps = False

    def is_finished(self) -> bool:
        """True if the result is there."""
        return is_file(self._out / EXPERT_FILE)

    def refuse_run(self) -> None:
        """Refuse an address where a run was begun."""
        if is_file(self.address / RUN_FILE):
            text = f"already holds a run of {self._out}; `resume=True` continues it, or choose another `out`"
            raise HddmError(f"{self.address}: {text}")

    def checkpoints(self) -> dict[int, bool]:
        """Steps of the checkpoints at the address, the newest first, and whether each is complete."""
        complete: dict[int, bool] = {}
        for name in names_below(self.address / CHECKPOINTS):
            folder, _, own = name.rpartition("/")
            if folder.startswith("step_"):
                step = step_of(Path(folder))
                complete[step] = complete.get(step, False) or own == MANIFEST
        return dict(sorted(complete.items(), reverse=True))

    def restore(self) -> None:
        """Fetch the newest checkpoint that is complete, unless this machine has as new a one."""
        own = checkpoints_in(self._run / CHECKPOINTS)
        newest = step_of(own[0]) if own else -1
        for step, is_complete in self.checkpoints().items():
            if step <= newest:
                return
            if not is_complete:
                continue
            name = f"step_{step:08d}"
            found = fetched(self.address / CHECKPOINTS / name)
            if damage(found, MANIFEST):
                log.warning("%s is damaged; it is skipped", self.address / CHECKPOINTS / name)
                continue
            record = fetched(self.address / RUN_FILE)
            self._run.mkdir(parents=True, exist_ok=True)
            write_whole(self._run / RUN_FILE, partial(shutil.copyfile, record))
            with new_folder(self._run / CHECKPOINTS / name, MANIFEST, overwrite=True) as draft:
                for file in below(found):
                    shutil.copyfile(file, draft / file.name)
            log.info("%s: fetched the checkpoint of step %d", self.address, step)
            return

    def notice(self, pool: ThreadPoolExecutor) -> None:
        """Begin to upload the newest checkpoint, if it is new and nothing is being uploaded."""
        self._took_steps = True
        if self._pending is not None:
            if not self._pending.done():
                return
            self._report(self._pending)
            self._pending = None
        newest = self._newest()
        if newest is not None and newest != self._tried:
            self._pending = pool.submit(self._upload, self._drafted(newest))

    def finish(self) -> None:
        """Wait for the upload, and upload the newest checkpoint unless it is there.

        A command that was refused uploads nothing.
        """
        if not self._took_steps:
            return
        if self._pending is not None:
            self._pending.exception()
            self._pending = None
        newest = self._newest()
        if newest is not None and not (newest == self._tried and self._is_there):
            self._upload(self._drafted(newest))

    def _report(self, done: Future[None]) -> None:
        error = done.exception()
        if error is not None:
            log.warning("%s; the training goes on, and the next checkpoint is uploaded", error)

    def _newest(self) -> Path | None:
        found = checkpoints_in(self._run / CHECKPOINTS)
        return found[0] if found else None

    def _drafted(self, checkpoint: Path) -> Path:
        """Links to the files of a checkpoint: the training may remove it while it is uploaded."""
        self._tried, self._is_there = checkpoint, False
        draft = self._run / "uploading" / checkpoint.name
        shutil.rmtree(draft.parent, ignore_errors=True)
        draft.mkdir(parents=True)
        for file in below(checkpoint):
            link_or_copy(file, draft / file.name)
        shutil.copyfile(self._run / RUN_FILE, draft.parent / RUN_FILE)
        return draft

    def _upload(self, draft: Path) -> None:
        upload_files({RUN_FILE: draft.parent / RUN_FILE}, self.address, RUN_FILE)
        place = self.address / CHECKPOINTS / draft.name
        if is_file(place / MANIFEST):
            # A damaged one, which counts for nothing while it is replaced.
            _remove(place)
        upload(draft, place, MANIFEST)
        self._is_there = True
        shutil.rmtree(draft.parent, ignore_errors=True)
        kept = 0
        for step, is_complete in self.checkpoints().items():
            if step > step_of(draft):
                continue
            kept += is_complete
            if not is_complete or kept > self._keep:
                # Without the right to remove files, all checkpoints stay.
                with _warned():
                    _remove(self.address / CHECKPOINTS / f"step_{step:08d}")


def _remove(checkpoint: Address) -> None:
    """Remove a checkpoint; without its manifest, what is left of the rest counts for nothing."""
    with reached(checkpoint) as (files, path):
        if files.exists(f"{path}/{MANIFEST}"):
            files.rm_file(f"{path}/{MANIFEST}")
        files.rm(path, recursive=True)
