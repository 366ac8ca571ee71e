"""GPUs of this machine. Torch, which takes seconds to import, is asked only where there may be one."""

import os
import sys

_OF_GPUS = ("nvidia", "nvhost", "nvmap", "kfd", "dxg")
"""Beginnings of names of devices: of NVIDIA's GPUs, of those on its boards, of AMD's, and of Windows'."""


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
    if sys.platform != "linux":
        return sys.platform == "win32"
    try:
        devices = os.listdir("/dev")
    except OSError:
        return True
    return any(name.startswith(_OF_GPUS) for name in devices)
