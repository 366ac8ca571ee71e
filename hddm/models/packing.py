"""Flux's currency: patches of 2×2 as rows of channels, and where each of them lies.

    (batch, C, H, W)  ↔  (batch, HW/4, 4C)      row y W/2 + x holds patch (y, x), channel 4c + 2 dy + dx

as its pipeline in diffusers has it; the network itself takes and gives rows.
"""

import torch
from torch import Tensor

from hddm.errors import HddmError

PATCH = 2


def pack(x: Tensor) -> Tensor:
    """Rows (batch, HW/4, 4C) of a state (batch, C, H, W).

    Raises:
        HddmError: for sides that are odd.
    """
    batch, channels, height, width = x.shape
    if height % PATCH or width % PATCH:
        raise HddmError(f"a state of {height}×{width} has no patches of 2×2; its sides must be even")
    patches = x.reshape(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * PATCH**2)


def unpack(rows: Tensor, height: int, width: int) -> Tensor:
    """The state (batch, C, H, W) of rows (batch, HW/4, 4C)."""
    batch, _, channels = rows.shape
    patches = rows.reshape(batch, height // PATCH, width // PATCH, channels // PATCH**2, PATCH, PATCH)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(batch, -1, height, width)


def positions(height: int, width: int, device: torch.device) -> Tensor:
    """(0, y, x) of every row, (HW/4, 3); in float32, since half types round large numbers."""
    y, x = torch.meshgrid(
        torch.arange(height // PATCH, device=device),
        torch.arange(width // PATCH, device=device),
        indexing="ij",
    )
    return torch.stack([torch.zeros_like(y), y, x], dim=-1).flatten(0, 1).float()
