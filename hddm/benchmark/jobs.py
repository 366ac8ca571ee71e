"""Jobs of a benchmark by their content: where they lie once done, and how workers do them.

jobs/
  lock                       held by the benchmark that writes here
  <kind>-<hash>/job.json     what was done, with which settings, on what, by which versions, how long
  .<kind>-<hash>.work/       a training that is not finished, with its run folder

A finished job lies under the hash of all that it depends on, and its folder appears complete. The same job,
of this benchmark or of another that shares the store, is found there.
"""

import functools
import hashlib
import json
import math
import multiprocessing
import os
import platform
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol

import torch

from hddm.utils.errors import HddmError, with_arguments
from hddm.utils.files import locked, new_folder, put_in_place, read_json, write_json
from hddm.utils.processes import Call, Interrupted, Report, Stopped, interruptible
from hddm.utils.records import check_format

FORMAT = "1.1"
RECORD = "job.json"
LOCK = "lock"
NUMERICS = "1"
"""Part of every hash; raise it when a job computes something else from the same settings."""
_SHORT = 16


@dataclass(frozen=True, eq=False)
class Job:
    """One piece of work: its kind, its settings as plain values, and hashes of what it reads by name."""

    kind: str
    settings: Mapping[str, Any]
    inputs: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of kind, settings, inputs and `NUMERICS`."""
        return hash_of([self.kind, self.settings, self.inputs, NUMERICS])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and other.hash == self.hash

    def __hash__(self) -> int:
        return hash(self.hash)

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.kind}-{self.hash[:_SHORT]}"


class Store:
    """The finished jobs in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, job: Job) -> Path:
        return self.folder / job.name

    def has(self, job: Job) -> bool:
        """Tell whether ``job`` is complete."""
        return (self.path(job) / RECORD).is_file()

    def record(self, job: Job) -> dict[str, Any]:
        """Read ``job.json`` of a finished job; one of another job or program raises `HddmError`."""
        path = self.path(job) / RECORD
        record = read_json(path, largest=2**28)
        check_format(record, FORMAT, path)
        if record.get("hash") != job.hash:
            raise HddmError(f"{path}: belongs to another job; delete its folder")
        # Formats before 1.1 have no seal.
        if record["format"] != "1.0" and record.get("seal") != _seal(finite(record)):
            raise HddmError(f"{path}: was changed after it was written; delete its folder to repeat the job")
        return record

    def result(self, job: Job) -> dict[str, Any]:
        """Result of a complete job, as plain values."""
        return dict(self.record(job)["result"])

    def once(self, job: Job, make: Callable[[Path], Mapping[str, Any] | None]) -> dict[str, Any]:
        """Return the result of ``job``; if not done, ``make`` fills its folder and returns the result."""
        if not self.has(job):
            started = time.perf_counter()
            with new_folder(self.path(job), RECORD, is_locked=True) as draft:
                result = make(draft) or {}
                write_json(draft / RECORD, _record_of(job, result, time.perf_counter() - started))
        return self.result(job)

    def work_folder(self, job: Job) -> Path:
        """Return the folder in which a resumable job keeps its state."""
        return self.folder / f".{job.name}.work"

    def finish_work(self, job: Job, seconds: float) -> None:
        """Turn the work folder of ``job``, without what it needed on the way, into its own."""
        work = self.work_folder(job)
        for run in work.glob("*.run"):
            shutil.rmtree(run)
        write_json(work / RECORD, _record_of(job, {}, seconds))
        put_in_place(work, self.path(job), overwrite=True)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the store for a block and remove drafts of killed processes; raise `HddmError` if in use."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(
            self.folder / LOCK,
            lambda holder: (
                f"{self.folder}: another benchmark works in it ({holder}); wait, or choose another --out"
            ),
        ):
            for draft in self.folder.glob(".*.part-*"):
                shutil.rmtree(draft, ignore_errors=True)
            yield


def _record_of(job: Job, result: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    content = {
        "format": FORMAT,
        "kind": job.kind,
        "hash": job.hash,
        "settings": dict(job.settings),
        "inputs": dict(job.inputs),
        "numerics": NUMERICS,
        "seconds": round(seconds, 1),
        "machine": machine(),
        "result": finite(result),
    }
    # As it reads back: keys of JSON are texts.
    written: dict[str, Any] = json.loads(json.dumps(content))
    return written | {"seal": _seal(written)}


def _seal(record: Mapping[str, Any]) -> str:
    """SHA-256 of a job's record, by which a damaged one is told from what was written."""
    return hash_of({key: value for key, value in record.items() if key != "seal"})


def hash_of(content: Any) -> str:
    """SHA-256 of plain values, whatever the order of their keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def finite(value: Any) -> Any:
    """Replace numbers that are not finite, which JSON lacks, by None."""
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


PACKAGES = ("hddm-diffusion", "torch", "diffusers", "numpy", "scipy", "scikit-learn")


@functools.cache
def machine() -> dict[str, Any]:
    """Platform, cores, accelerator and versions of packages."""
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "packages": {name: version(name) for name in PACKAGES},
    }


def together(machines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge descriptions of machines: the value that all share, or all values where they differ."""
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for one in machines for key in one):
        values: list[Any] = [one.get(key) for one in machines]
        if all(isinstance(value, Mapping) for value in values):
            found[key] = together(values)
        elif all(value == values[0] for value in values):
            found[key] = values[0]
        else:
            found[key] = "; ".join(sorted({str(value) for value in values}))
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@contextmanager
def named(what: str) -> Iterator[None]:
    """Begin every `HddmError` raised in the block with ``what``; `Stopped` passes as it is."""
    try:
        yield
    except Stopped:
        raise
    except HddmError as error:
        # What a training takes stands in the settings, and is no option of the benchmark.
        message, *details = map(with_arguments, (error.message, *error.details))
        raise HddmError(f"{what}: {message}", details) from error


class Runnable(Protocol):
    """Work for a worker: a frozen dataclass of plain values, which can be sent to another process."""

    @property
    def job(self) -> Job:
        """The key of the result in the store."""

    @property
    def units(self) -> int:
        """Units of work, for the progress bar."""

    def do(self, store: Store, report: Report) -> None:
        """Do the job."""


def call_of(store: Store, task: Runnable, what: str, weight: int = 1, shown: str = "") -> Call:
    """Wrap a task as work of one process, whose errors begin with ``what``.

    A unit of the task counts as ``weight``; ``shown`` names it while it runs.
    """
    arguments = {"store": store, "task": task, "what": what, "weight": weight}
    return Call(_do, arguments, task.units * weight, shown)


def _do(store: Store, task: Runnable, what: str, weight: int, report: Report) -> None:
    end_with_parent()
    with named(what):
        task.do(store, lambda units: report(units * weight))


_watching = False


def end_with_parent() -> None:
    """End this process when its parent is gone, however that happened; in the main process, do nothing.

    Workers of a killed benchmark would hold what the next one needs. What a terminal sends to all is left to
    the parent, which tells its workers once to stop.
    """
    global _watching
    parent = multiprocessing.parent_process()
    if parent is None or _watching:
        return
    _watching = True
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="ends with its parent").start()


@contextmanager
def stoppable(out: Path) -> Iterator[None]:
    """Within the block a signal raises `Stopped`, on which `hddm.utils.processes.Workers` stops its own."""
    try:
        with interruptible():
            yield
    except Interrupted as error:
        raise Stopped(
            f"{out}: stopped; finished work is saved, and the same command continues", error.number
        ) from error
