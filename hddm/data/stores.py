"""Samples of a shard: images in memory, or latents, pixels and text tokens mapped from files."""

import hashlib
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from hddm.data.images import to_unit_range
from hddm.utils.errors import HddmError


class Stored(Protocol):
    """Samples by row, in model space."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of a sample."""

    def __len__(self) -> int: ...

    def take(self, rows: Tensor, noise: torch.Generator | None, flip: Tensor | None) -> Tensor:
        """As `hddm.data.shards.Shard.take`."""

    def digest(self, row: int) -> bytes:
        """A key that equal samples share, and no others."""


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


class Joined:
    """Rows of several ``parts``, one after the other."""

    parts: Sequence[Sized]

    @cached_property
    def ends(self) -> Tensor:
        """(parts,): the row after the last one of each."""
        return torch.tensor([len(part) for part in self.parts]).cumsum(0)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def part_of(self, rows: Tensor) -> Tensor:
        """Index of the part that each of ``rows`` is in."""
        return torch.searchsorted(self.ends, rows, right=True)

    def divided(self, rows: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """By part: its index, which (n,) of ``rows`` are in it, and their numbers there."""
        where = self.part_of(rows)
        for k in where.unique().tolist():
            here = where == k
            yield k, here, rows[here] - (int(self.ends[k]) - len(self.parts[k]))


@dataclass(frozen=True)
class Rows(Joined):
    """One tensor (N, …) whose rows lie in several: ``parts`` (n_k, …), of one shape and dtype."""

    parts: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a row."""
        return tuple(self.parts[0].shape[1:])

    def take(self, rows: Tensor) -> Tensor:
        """Rows (n, …) by their indices (n,), in their dtype; memory grows by these alone.

        Raises:
            IndexError: for an index below 0 or beyond the last row.
        """
        if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < len(self)):
            raise IndexError(f"rows {int(rows.min())} to {int(rows.max())} of {len(self)}")
        taken = torch.empty((len(rows), *self.shape), dtype=self.parts[0].dtype)
        for k, here, own in self.divided(rows):
            taken[here] = self.parts[k][own]
        return taken


@dataclass(frozen=True)
class JoinedStore(Joined):
    """Samples of several stores, one after the other."""

    parts: Sequence[Stored]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.parts[0].shape

    def take(self, rows: Tensor, noise: torch.Generator | None, flip: Tensor | None) -> Tensor:
        taken = torch.empty(len(rows), *self.shape)
        for k, here, own in self.divided(rows):
            taken[here] = self.parts[k].take(own, noise, None if flip is None else flip[here])
        return taken

    def digest(self, row: int) -> bytes:
        ((k, _, own),) = self.divided(torch.tensor([row]))
        return self.parts[k].digest(int(own))


@dataclass(frozen=True)
class MappedPixels:
    """Pixels (N, C, H, W) in uint8."""

    pixels: Rows

    @property
    def shape(self) -> tuple[int, int, int]:
        return _three(self.pixels.shape)

    def __len__(self) -> int:
        return len(self.pixels)

    def take(self, rows: Tensor, noise: torch.Generator | None, flip: Tensor | None) -> Tensor:
        images = to_unit_range(self.pixels.take(rows))
        return images if flip is None else mirrored(images, flip)

    def digest(self, row: int) -> bytes:
        return _digest(self.pixels.take(torch.tensor([row])))


@dataclass(frozen=True)
class LatentStore:
    """Outputs of a VAE's encoder for images and, where they were encoded, for their mirror images.

    A sample is (z - ``shift``) × ``scale`` with z = mean + deviation × ε, ε normal and new each time, as
    DiT and Stable Diffusion are trained; z is the mean where there is no deviation or no noise.
    """

    mean: Rows
    deviation: Rows | None
    scale: float
    shift: float = 0.0
    mirrored_mean: Rows | None = None
    mirrored_deviation: Rows | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        return _three(self.mean.shape)

    def __len__(self) -> int:
        return len(self.mean)

    def take(self, rows: Tensor, noise: torch.Generator | None, flip: Tensor | None) -> Tensor:
        """As `hddm.data.shards.Shard.take`.

        Raises:
            HddmError: for ``flip`` of latents that were encoded without their mirror images.
        """
        z = _either(self.mean, self.mirrored_mean, rows, flip)
        if noise is not None and self.deviation is not None:
            drawn = torch.randn(z.shape, generator=noise)
            z += _either(self.deviation, self.mirrored_deviation, rows, flip) * drawn
        return (z - self.shift) * self.scale

    def digest(self, row: int) -> bytes:
        return _digest(self.mean.take(torch.tensor([row])))


def _either(plain: Rows, mirror: Rows | None, rows: Tensor, flip: Tensor | None) -> Tensor:
    """Rows in float32, of ``mirror`` where ``flip`` (n,) says so; each is read once."""
    if flip is None or not flip.any():
        return plain.take(rows).float()
    if mirror is None:
        raise HddmError(
            "the latents were encoded without their mirror images, and cannot be mirrored themselves; encode "
            "them with --random-flip or train without it"
        )
    taken = torch.empty((len(rows), *plain.shape))
    taken[~flip] = plain.take(rows[~flip]).float()
    taken[flip] = mirror.take(rows[flip]).float()
    return taken


def _digest(row: Tensor) -> bytes:
    return hashlib.sha256(row.view(torch.uint8).numpy().tobytes()).digest()


def _three(shape: Sequence[int]) -> tuple[int, int, int]:
    channels, height, width = shape
    return channels, height, width


@dataclass(frozen=True)
class TokenStore:
    """Tokens (N, tokens, width) of captions, and those of the empty prompt (tokens, width) in float32."""

    tokens: Rows
    null: Tensor

    def take(self, rows: Tensor) -> Tensor:
        """Tokens (n, tokens, width) in float32."""
        return self.tokens.take(rows).float()
