"""What the samples of a shard are made of, in memory or mapped from disk."""

import hashlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hddm.data.images import to_unit_range


class Stored(Protocol):
    """Samples by row, in model space."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of a sample."""

    def __len__(self) -> int: ...

    def take(self, rows: Tensor, noise: torch.Generator | None, flip: Tensor | None) -> Tensor:
        """As `hddm.data.shards.Shard.take`."""

    def digest(self, row: int) -> bytes:
        """What equal samples share, and nothing else does."""


class Texts(Protocol):
    """Tokens of captions by row, as a text encoder gives them."""

    @property
    def null(self) -> Tensor:
        """Tokens (tokens, width) of the empty prompt."""

    def take(self, rows: Tensor) -> Tensor:
        """Tokens (n, tokens, width) in float32."""


@dataclass(frozen=True)
class PixelStore:
    """Pixels (N, C, H, W) in uint8."""

    pixels: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        channels, height, width = self.pixels.shape[1:]
        return channels, height, width

    def __len__(self) -> int:
        return len(self.pixels)

    def take(self, rows: Tensor, noise: torch.Generator | None, flip: Tensor | None) -> Tensor:
        images = to_unit_range(self.pixels[rows])
        return images if flip is None else mirrored(images, flip)

    def digest(self, row: int) -> bytes:
        return hashlib.sha256(self.pixels[row].numpy().tobytes()).digest()


def mirrored(images: Tensor, flip: Tensor) -> Tensor:
    """``images`` (n, C, H, W), left and right exchanged where ``flip`` (n,) says so."""
    return torch.where(flip[:, None, None, None], images.flip(-1), images)
