"""GPUs of this machine. Torch, which takes seconds to import, is asked only where there may be one."""

import os
import sys

_OF_GPUS = ("nvidia", "nvhost", "nvmap", "kfd", "dxg", "win")
"""Beginnings of names of devices for GPUs (NVIDIA, its boards, AMD, Windows under Linux), and of Windows."""


def count_gpus() -> int:
    """Number of CUDA GPUs that torch sees."""
    if not _may_have_gpu():
        return 0
    import torch

    return torch.cuda.device_count()


def gpu_name() -> str | None:
    """Name of the CUDA GPU that torch takes by default; None without one."""
    if not _may_have_gpu():
        return None
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _may_have_gpu() -> bool:
    devices = os.listdir("/dev") if sys.platform == "linux" else [sys.platform]
    return any(name.startswith(_OF_GPUS) for name in devices)
