"""What figures were measured on."""

import functools
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

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
    """What all of several say, and one after the other where they differ."""
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for one in machines for key in one):
        values = [one.get(key) for one in machines]
        inner = [value for value in values if isinstance(value, Mapping)]
        if len(inner) == len(values):
            found[key] = together(inner)
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
