"""All of the benchmark."""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks.conversion.report import measured_on
from benchmarks.inference.memory import measure_memory
from benchmarks.inference.report import write_inference
from benchmarks.inference.settings import settings_for
from benchmarks.inference.times import measure_times, operations


def measure_inference(
    device: str,
    dtypes: Sequence[str],
    compiled: bool,
    memory: bool,
    repeats: int | None,
    quick: bool,
    work: Path,
    results: Path,
    command: str,
) -> Path:
    """Times a dtype after another, then memory; returns the Markdown file."""
    facts, began = measured_on(), time.perf_counter()
    settings = settings_for(device, quick)
    settings = replace(settings, repeats=repeats or settings.repeats)
    times = {dtype: measure_times(settings, device, dtype, compiled) for dtype in dtypes}
    taken = {dtype: measure_memory(settings, device, dtype, work) for dtype in dtypes if memory}
    content = {
        "format": "1.0",
        "measured_on": facts,
        "command": command,
        "device": device,
        "accelerator": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
        "threads": torch.get_num_threads(),
        "compiled": compiled,
        "seconds": round(time.perf_counter() - began),
        "load_at_end": round(os.getloadavg()[0], 1),
        "settings": asdict(settings),
        "mflop": operations(settings),
        "times": {
            dtype: {k: [asdict(v) for v in each] for k, each in t.items()} for dtype, t in times.items()
        },
        "memory": {dtype: {"expert_bytes": size, "rows": rows} for dtype, (size, rows) in taken.items()},
    }
    return write_inference(results, settings, content, times, taken)
