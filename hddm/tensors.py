"""Small tensor helpers that several floors share."""

import numpy as np
import torch
from torch import Tensor


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
