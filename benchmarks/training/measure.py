"""All of the benchmark."""

import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks.conversion.report import measured_on
from benchmarks.inference.times import Times
from benchmarks.training.report import write_training
from benchmarks.training.settings import Settings, settings_for
from benchmarks.training.times import measure_times
from hddm.utils.processes import compute_environment, environment


def measure_training(
    device: str,
    dtypes: Sequence[str],
    compiled: bool,
    rounds: int | None,
    threads: int | None,
    quick: bool,
    results: Path,
    command: str,
) -> Path:
    """Times a dtype after another, each in a process of its own; returns the Markdown file."""
    facts, began = measured_on(), time.perf_counter()
    settings = settings_for(device, quick)
    settings = replace(settings, rounds=rounds or settings.rounds)
    threads = threads or os.cpu_count() or 1
    measured = {dtype: _apart(settings, device, dtype, compiled, threads) for dtype in dtypes}
    content = {
        "format": "1.0",
        "measured_on": facts,
        "command": command,
        "device": device,
        "accelerator": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
        "threads": threads,
        "compiled": compiled,
        "seconds": round(time.perf_counter() - began),
        "load_at_end": round(os.getloadavg()[0], 1),
        "settings": asdict(settings),
        "million_parameters": next(iter(measured.values()))[1],
        "times": {
            dtype: {way: [asdict(one) for one in each] for way, each in times.items()}
            for dtype, (times, _) in measured.items()
        },
    }
    return write_training(
        results, settings, content, {dtype: times for dtype, (times, _) in measured.items()}
    )


def _apart(
    settings: Settings, device: str, dtype: str, compiled: bool, threads: int
) -> tuple[Times, dict[str, float]]:
    """In a fresh process, with the environment that hddm gives its own; it is the same for every way."""
    # glibc reads its variables when a process starts.
    fresh = multiprocessing.get_context("spawn")
    with environment(compute_environment(threads)), ProcessPoolExecutor(1, fresh) as pool:
        return pool.submit(measure_times, settings, device, dtype, compiled).result()
