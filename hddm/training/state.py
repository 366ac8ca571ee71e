"""State of a training between two steps, and the run folder that keeps it, beside the folder OUT.

OUT.run/
  run.json                     settings, data, environment and changes of the run, and how it is kept
  checkpoints/step_00000500/   weights, ema, optimizer, losses (.safetensors, `TrainingState`),
                               weak (.safetensors) from `Task.weak_step` on,
                               of split weights (`hddm.training.sharding`) weights.1.safetensors and so on
                               too, with the rows of the processes after the first,
                               progress.json (counters), manifest.json (SHA-256 of them all, written last)
  logs/, samples/              TensorBoard and pictures
  lock                         held by the process that trains

A checkpoint is written to a draft, synced and renamed, and counts only if every file has its hash: a process
that is killed or runs out of disk keeps the one before. OUT itself appears when the training is done.
"""

import contextlib
import functools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn

from hddm.training import resume
from hddm.training.resume import (
    CHECKPOINTS,
    RUN_FILE,
    SettingsChange,
    checkpoints_in,
    run_folder_of,
    step_of,
)
from hddm.training.settings import Keeping, RunOptions
from hddm.training.sharding import own_part, own_rows, split_as
from hddm.utils.errors import HddmError
from hddm.utils.files import new_folder, read_json, remove, sha256_of, write_json, writing
from hddm.utils.records import (
    MANIFEST,
    Count,
    OpenRecord,
    damage,
    parse_record,
    read_folder_manifest,
    write_manifest,
)
from hddm.utils.tensors import read_safetensors
from hddm.utils.work import Work

log = logging.getLogger(__name__)


def trained_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of ``network`` that require gradients, by name."""
    return {name: p for name, p in network.named_parameters() if p.requires_grad}


class Ema:
    """Moving average of a network's trained parameters, in float32: shadow += (1 - d) (parameter - shadow).

    The decay d is (1 + n)/(10 + n) at update n, and at most ``decay``, so that the first steps do not linger.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self._live = trained_parameters(network)
        self._shadow = {name: one.float().clone() for name, one in self._own().items()}

    @staticmethod
    def size_of(network: nn.Module) -> int:
        """Bytes of the averages of ``network``."""
        numbers = sum(p.numel() for p in trained_parameters(network).values())
        return numbers * torch.float32.itemsize

    @torch.no_grad()
    def update(self) -> None:
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        current = [one.float() for one in self._own().values()]
        torch._foreach_lerp_(list(self._shadow.values()), current, 1 - decay)
        self.updates += 1

    def tensors(self) -> dict[str, Tensor]:
        """Return the averages themselves, by the names of the parameters."""
        return self._shadow

    def _own(self) -> dict[str, Tensor]:
        """Return what this process holds of each parameter."""
        return {name: own_part(p.detach()) for name, p in self._live.items()}

    @torch.no_grad()
    def copy_to_network(self) -> None:
        """Replace the parameters by their averages."""
        for name, value in self._own().items():
            value.copy_(self._shadow[name])

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the network its averages for a block, and its own parameters again afterwards."""
        before = {name: one.clone() for name, one in self._own().items()}
        self.copy_to_network()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in self._own().items():
                    value.copy_(before[name])


WEIGHTS, EMA, OPTIMIZER, LOSSES = "weights", "ema", "optimizer", "losses"
WEAK = "weak"
"""In checkpoints after the step whose averages are kept."""
PROGRESS = "progress.json"
PARTS = "parts"
"""Folder of a run in which processes after the first leave their part of a checkpoint."""
COMPLETE = {PROGRESS, *(f"{name}.safetensors" for name in (WEIGHTS, EMA, OPTIMIZER, LOSSES))}
"""Files of every checkpoint."""


class ProgressRecord(OpenRecord):
    """``progress.json``: counters of a `TrainingState`."""

    step: Count
    ema_updates: Count
    seconds: Annotated[float, Field(ge=0)]
    non_finite: Count
    scaler: dict[str, Any] | None = None
    held_out: list[dict[str, Any]] = Field(default_factory=list)
    parts: Annotated[int, Field(ge=1)] = 1
    """Files that weights, their averages, the moments and the weak model are split over."""


@dataclass
class TrainingState:
    """Weights as the optimiser left them, their averages, its moments, and counters.

    ``losses`` are those of all steps, so ``step`` is their number; a skipped step left NaN or Inf there.
    ``weak`` is the network with the averages of an early step, in bfloat16, once that is done. If weights are
    split over processes, tensors are this process's ``part`` of ``parts``.
    """

    network: nn.Module
    ema: Ema
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler = field(
        default_factory=lambda: torch.amp.GradScaler(enabled=False)
    )
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    """Time of all steps, without the time between them."""
    weak: dict[str, Tensor] = field(default_factory=dict)
    non_finite: int = 0
    """Steps in a row that were skipped, up to now."""
    held_out: list[dict[str, Any]] = field(default_factory=list)
    """Errors on held-out images: per measurement its step, and ten errors by name."""
    part: int = 0
    parts: int = 1

    @property
    def step(self) -> int:
        return len(self.losses)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return this process's tensors by file and name, not copied, and none under two names."""
        files: dict[str, dict[str, Tensor]] = {}
        for file, tensors in self._live().items():
            files[file] = {name: own_part(value) for name, value in tensors.items()}
        return files

    def _live(self) -> dict[str, dict[str, Tensor]]:
        saved = self.network.state_dict()
        weights: dict[str, Tensor] = {}
        moments: dict[str, Tensor] = {}
        for name, parameter in trained_parameters(self.network).items():
            weights[name] = parameter.detach()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                moments[f"{key}.{name}"] = value
        for name, buffer in self.network.named_buffers():
            if name in saved:
                weights[name] = buffer
        tensors = {
            WEIGHTS: weights,
            EMA: self.ema.tensors(),
            OPTIMIZER: moments,
            LOSSES: {"losses": torch.tensor(self.losses, dtype=torch.float64)},
        }
        if self.weak:
            tensors[WEAK] = self.weak
        return tensors

    def keep_weak(self) -> None:
        """Keep the averages of this step as ``weak``."""
        with self.ema.averaged():
            for name, value in self.network.state_dict().items():
                dtype = torch.bfloat16 if value.is_floating_point() else value.dtype
                self.weak[name] = own_part(value).to("cpu", dtype, copy=True)

    def progress(self) -> ProgressRecord:
        """Return the counters."""
        return ProgressRecord(
            step=self.step,
            ema_updates=self.ema.updates,
            seconds=self.seconds,
            non_finite=self.non_finite,
            scaler=self.scaler.state_dict() or None,
            held_out=self.held_out,
            parts=self.parts,
        )

    @torch.no_grad()
    def load(
        self, tensors: Mapping[str, Mapping[str, Sequence[Tensor]]], progress: ProgressRecord
    ) -> None:
        """Load what `tensors` and `progress` returned for the same network, in any number of parts."""
        live = self._live()
        trained = trained_parameters(self.network)
        for file in (WEIGHTS, EMA):
            for key, value in live[file].items():
                own_part(value).copy_(own_rows(tensors[file][key], live[WEIGHTS][key]))
        for key, parts in tensors[OPTIMIZER].items():
            # A copy: rounding may depend on where in memory a tensor begins, and a mapped one begins
            # anywhere. The step count goes along, since the fused optimizer reads it on the device.
            moment, _, parameter = key.partition(".")
            of = trained[parameter]
            own = own_rows(parts, of).to(of.device).clone()
            self.optimizer.state[of][moment] = split_as(own, of) if own.ndim else own
        self.losses = tensors[LOSSES]["losses"][0].tolist()
        state = self.network.state_dict()
        for key, parts in tensors.get(WEAK, {}).items():
            self.weak[key] = own_rows(parts, state[key])
        self.ema.updates = progress.ema_updates
        self.seconds, self.non_finite = progress.seconds, progress.non_finite
        self.held_out = progress.held_out
        if progress.scaler is not None:
            self.scaler.load_state_dict(progress.scaler)


LATEST = 120.0
"""Most seconds without a checkpoint, unless writing takes so long that `_SPACING` requires more."""
_SPACING = 10
"""Least time between checkpoints by the clock, as a multiple of the time that one takes."""


class Run:
    """A run folder, locked by this process; of its checkpoints the ``options.keep`` newest stay."""

    def __init__(self, folder: Path, options: RunOptions) -> None:
        self.folder, self.options = folder, options
        self.changes: list[SettingsChange] = []
        self._checkpoints = folder / CHECKPOINTS
        self._saved, self._took = time.monotonic(), 0.0

    @functools.cached_property
    def begun_at(self) -> Path | None:
        """The checkpoint that this start resumes, if any."""
        return self.newest()

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint; incomplete ones are passed over with a warning."""
        for path in checkpoints_in(self._checkpoints):
            if _is_complete(path):
                return path
            log.warning("%s is incomplete or damaged; it is skipped", path)
        return None

    def restore(self, state: TrainingState) -> None:
        """Load the resumed checkpoint, if any, into ``state``, which must be of the same network."""
        path = self.begun_at
        if path is not None:
            file = path / PROGRESS
            progress = parse_record(read_json(file), ProgressRecord, str(file))
            state.load(_read_parts(path, progress.parts), progress)
            log.info("%s: continuing from step %d", self.folder, state.step)

    def is_late(self) -> bool:
        """True if a checkpoint is due by the clock."""
        return time.monotonic() - self._saved >= max(LATEST, _SPACING * self._took)

    def is_due(self, state: TrainingState, is_late: bool) -> bool:
        """True if a checkpoint is due, by the step or because it ``is_late``."""
        # By the clock alone, a checkpoint of skipped steps must not replace a good one.
        return (is_late and not state.non_finite) or state.step % self.options.checkpoint_every == 0

    def save_part(self, state: TrainingState) -> None:
        """Write the tensors of a process after the first, which `save` in the first one takes in."""
        folder = self.folder / PARTS
        with writing(folder):
            folder.mkdir(exist_ok=True)
            _write(state, folder)

    def save(self, state: TrainingState) -> None:
        """Write a checkpoint, verify it, and only then remove older ones; disk errors raise `HddmError`."""
        begun = time.monotonic()
        target = self._checkpoints / f"step_{state.step:08d}"
        if _is_complete(target):
            return
        with writing(target):
            # Damaged, or the run would have resumed from it.
            remove(target)
        with new_folder(target, MANIFEST, is_locked=True, kept=self.kept) as draft:
            for name in _write(state, draft):
                for part in range(1, state.parts):
                    file = _file_of(name, part)
                    (self.folder / PARTS / file).replace(draft / file)
            write_json(draft / PROGRESS, state.progress().model_dump(mode="json"))
            write_manifest(draft)
        if not _is_complete(target):
            raise HddmError(
                f"{target}: does not read back as it was written; the disk may be failing"
            )
        self._prune(state.step)
        self._saved = time.monotonic()
        self._took = self._saved - begun

    def kept(self) -> str:
        """Say what a training that ends now can go on from."""
        newest = self.newest()
        if newest is None:
            return "there is no checkpoint yet; `resume=True` starts from the beginning"
        return f"the checkpoint of step {step_of(newest)} is complete, and `resume=True` continues from it"

    def _prune(self, step: int) -> None:
        try:
            found = checkpoints_in(self._checkpoints)
            # The run would have resumed from later ones, were they not damaged.
            valid = [path for path in found if step_of(path) <= step][: self.options.keep]
            for path in set(found) - set(valid):
                remove(path)
        except OSError as error:
            log.warning("%s: older checkpoints could not be removed (%s)", self._checkpoints, error)


def _file_of(name: str, part: int) -> str:
    """Return the name of the file of a ``part``."""
    return f"{name}.{part}.safetensors" if part else f"{name}.safetensors"


def _write(state: TrainingState, folder: Path) -> list[str]:
    """Write this process's tensors; return the names of those that are split over processes."""
    split: list[str] = []
    for name, each in state.tensors().items():
        if name != LOSSES:
            split.append(name)
        elif state.part:
            continue
        on_cpu = {key: value.cpu().contiguous() for key, value in each.items()}
        save_file(on_cpu, folder / _file_of(name, state.part))
    return split


def _read_parts(path: Path, number: int) -> dict[str, dict[str, list[Tensor]]]:
    """Map the tensors of a checkpoint to memory, by file and name, in the parts that they were written in."""
    found: dict[str, dict[str, list[Tensor]]] = {}
    for name in (WEIGHTS, EMA, OPTIMIZER, LOSSES, WEAK):
        for part in range(number):
            file = path / _file_of(name, part)
            if file.exists():
                for key, value in read_safetensors(file).items():
                    found.setdefault(name, {}).setdefault(key, []).append(value)
    return found


def _is_complete(path: Path) -> bool:
    try:
        listed = read_folder_manifest(path).files
        return listed.keys() >= COMPLETE and not damage(path, PROGRESS, sha256=sha256_of)
    except (HddmError, OSError):
        return False


def _work_of(out: Path) -> Work:
    busy = f"{out}: another process is training it"
    return Work(run_folder_of(out), RUN_FILE, busy, "another `out`")


@contextlib.contextmanager
def open_run(
    out: Path, record: Mapping[str, Any], options: RunOptions, overwrite: bool = False
) -> Iterator[Run]:
    """Open the run folder of ``out``, new or resumed, locked for a block; ``overwrite`` removes an old run.

    ``record`` holds plain values that determine the result: "settings", "data", "environment".

    Raises:
        HddmError: for a run in use by another process, one that exists without ``resume`` or ``overwrite``,
            one that was started with another record, or a folder that is no run.
    """
    work = _work_of(out)
    with work.held():
        if overwrite and not options.resume:
            work.clear()
        run = Run(work.folder, options)
        if not options.resume:
            resume.refuse_run(out)
        elif before := resume.recorded(out):
            changed = resume.compare_records(out, before, record, options)
            step = 0 if run.begun_at is None else step_of(run.begun_at)
            run.changes = resume.with_changes(before.get("changes", []), changed, step)
        keeping = options.model_dump(mode="json", include=set(Keeping.model_fields))
        work.write(
            {"format": resume.RUN_FORMAT, **record, "keeping": keeping, "changes": run.changes}
        )
        work.sweep()
        if options.resume and run.begun_at is None:
            log.info("%s: has no checkpoint; the training starts at step 1", work.folder)
        yield run


def discard_runs(outs: Sequence[Path]) -> None:
    """Remove the content of the runs of ``outs``: all, or none where one is in use or is no run."""
    works = [work for work in map(_work_of, outs) if work.folder.is_dir()]
    with contextlib.ExitStack() as stack:
        for work in works:
            stack.enter_context(work.held())
        for work in works:
            work.clear()


def wait_for_run(out: Path, seconds: float = 60.0) -> None:
    """Wait ``seconds`` at most until no other process holds the run of ``out``; else `open_run` refuses."""
    # On a network file system the lock of a process that died with its machine may stay for a while.
    if run_folder_of(out).is_dir():
        with contextlib.suppress(HddmError), _work_of(out).held(patience=seconds):
            pass
