"""What results were computed on."""

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("hddm-diffusion", "torch", "diffusers", "numpy", "scipy", "scikit-learn")


def machine() -> dict[str, Any]:
    """Platform, cores, accelerator and versions of packages."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "platform": platform.platform(),
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "packages": {name: version(name) for name in PACKAGES},
    }
