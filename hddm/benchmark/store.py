"""Jobs by content: what is finished lies under the hash of all that it depends on.

jobs/
  lock                       held by the benchmark that writes here
  <kind>-<hash>/job.json     what was done, with which settings, on what, by which versions, how long
  .<kind>-<hash>.work/       a training that is not finished, with its run folder

A job's folder appears whole. The same job, of this benchmark or of another that shares the store, finds it.
"""

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hddm.benchmark.machine import machine
from hddm.utils.errors import HddmError
from hddm.utils.files import locked, new_folder, put_in_place, read_json, write_json
from hddm.utils.records import check_format

FORMAT = "1.0"
RECORD = "job.json"
LOCK = "lock"
NUMERICS = "1"
"""Part of every hash; raised when what a job computes from the same settings changes."""
_SHORT = 16


@dataclass(frozen=True, eq=False)
class Job:
    """One piece of work, as plain values; equal ones have one hash.

    Args:
        kind: what is done.
        settings: how.
        inputs: hashes of what it reads, by name.
    """

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
        """Of its folder."""
        return f"{self.kind}-{self.hash[:_SHORT]}"


class Store:
    """The finished jobs in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, job: Job) -> Path:
        """Where ``job`` lies, or will."""
        return self.folder / job.name

    def has(self, job: Job) -> bool:
        """Whether ``job`` is finished."""
        return (self.path(job) / RECORD).is_file()

    def record(self, job: Job) -> dict[str, Any]:
        """``job.json`` of a finished job.

        Raises:
            HddmError: for a folder that another job of the same name, or another program, wrote.
        """
        path = self.path(job) / RECORD
        record = read_json(path, largest=2**28)
        check_format(record, FORMAT, path)
        if record.get("hash") != job.hash:
            raise HddmError(f"{path}: is of another job; remove its folder")
        return record

    def result(self, job: Job) -> dict[str, Any]:
        """What a finished job found, as plain values."""
        found: dict[str, Any] = self.record(job)["result"]
        return found

    @contextmanager
    def held(self) -> Iterator[None]:
        """The store for this process alone, without the halves that killed ones left.

        Raises:
            HddmError: where another benchmark works in it.
        """
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


@contextmanager
def making(folder: Path, job: Job) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A folder to fill for ``job`` in the store ``folder``, and its result, plain values to be set."""
    started = time.perf_counter()
    result: dict[str, Any] = {}
    with new_folder(folder / job.name, RECORD, is_locked=True) as draft:
        yield draft, result
        write_json(draft / RECORD, record_of(job, result, time.perf_counter() - started))


def work_folder(folder: Path, job: Job) -> Path:
    """Where a job that can go on from where it was stopped keeps what it has done."""
    return folder / f".{job.name}.work"


def finish_work(folder: Path, job: Job, result: Mapping[str, Any], seconds: float) -> None:
    """Turn the work folder of ``job`` into its own; its record is the last file that is written."""
    work = work_folder(folder, job)
    draft = work / f".{RECORD}"
    write_json(draft, record_of(job, result, seconds))
    os.replace(draft, work / RECORD)
    publish_work(folder, job)


def publish_work(folder: Path, job: Job) -> bool:
    """Put the work folder of ``job`` in place if its record is there; whether it was."""
    work = work_folder(folder, job)
    if not (work / RECORD).is_file():
        return False
    for run in work.glob("*.run"):
        shutil.rmtree(run)
    put_in_place(work, folder / job.name, overwrite=True)
    return True


def record_of(job: Job, result: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """``job.json``."""
    return {
        "format": FORMAT,
        "kind": job.kind,
        "hash": job.hash,
        "settings": dict(job.settings),
        "inputs": dict(job.inputs),
        "numerics": NUMERICS,
        "seconds": round(seconds, 1),
        "machine": machine(),
        "result": finite(dict(result)),
    }


def hash_of(content: Any) -> str:
    """SHA-256 of plain values, whatever the order of their keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def finite(value: Any) -> Any:
    """Plain values with None for what is not finite, which JSON has no word for."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
