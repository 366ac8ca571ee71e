"""Small tensor helpers that several rooms share."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from hddm.utils.errors import HddmError


def append_dims(values: Tensor, ndim: int) -> Tensor:
    """View ``values`` of shape (batch,) as (batch, 1, …, 1) with ``ndim`` dimensions."""
    return values.reshape(values.shape[0], *[1] * (ndim - 1))


def to_float64(values: Tensor) -> Tensor:
    """``values`` in float64, on the CPU where the device has none (MPS)."""
    if values.device.type == "mps":
        values = values.cpu()
    return values.to(torch.float64)


def generator(seed: int, *key: int) -> torch.Generator:
    """A CPU generator whose stream depends on ``seed`` and ``key`` alone.

    Hashing the whole key keeps streams apart that adjacent integer seeds would correlate.
    """
    state = np.random.SeedSequence((seed, *key)).generate_state(1, np.uint64)[0]
    # Torch takes seeds as signed 64-bit integers.
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))


def parameter_dtype(network: object) -> torch.dtype | None:
    """Dtype of a module's floating parameters, None for one without any and for plain functions."""
    return next((p.dtype for p in _parameters(network) if p.is_floating_point()), None)


def device_of(network: object) -> torch.device:
    """Device of a module's parameters; the CPU for one without any and for plain functions."""
    return next((p.device for p in _parameters(network)), torch.device("cpu"))


def available_device(name: str | torch.device) -> torch.device:
    """The device of this name; ``auto`` is a GPU where there is one, else the CPU.

    Raises:
        HddmError: for one that is unknown or not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except Exception as error:  # torch has one of its own for every kind of absence
        text = " ".join(str(error).split())[:120]
        raise HddmError(f"--device {name}: is not available here ({text})") from error
    return device


def _parameters(network: object) -> Iterator[Tensor]:
    # A network whose weights are elsewhere has an empty tensor where they will be.
    placement = getattr(network, "placement", None)
    if isinstance(placement, Tensor):
        return iter((placement,))
    return network.parameters() if isinstance(network, nn.Module) else iter(())
