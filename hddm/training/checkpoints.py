"""Checkpoints: complete or absent, never overwritten by a worse one, read without code.

checkpoints/step_00000500/
  weights, ema, optimizer, losses (.safetensors)    `hddm.training.state.TrainingState`
  progress.json                                      counters
  manifest.json                                      SHA-256 of them all, written last

A checkpoint is written beside its place, synced and renamed, so that whoever is killed in the middle, or runs
out of disk, keeps the one before. It counts only if every file has its hash.
"""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hddm.errors import HddmError
from hddm.facts import Facts, read_facts
from hddm.files import new_folder, read_json, sha256_of, write_json
from hddm.training.run_records import checkpoints_in, step_of
from hddm.training.state import EMA, LOSSES, OPTIMIZER, WEIGHTS, TrainingState

FORMAT = "1.0"
MANIFEST = "manifest.json"
PROGRESS = "progress.json"
FILES = (WEIGHTS, EMA, OPTIMIZER, LOSSES)

log = logging.getLogger(__name__)


class Manifest(Facts):
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
                manifest = Manifest(format=FORMAT, step=state.step, files=hashes)
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
            manifest = read_facts(path / MANIFEST, Manifest, FORMAT)
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
