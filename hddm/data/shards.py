"""Shards in memory, as training reads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from hddm.components.identity import TextEncoderFacts, VaeFacts
from hddm.data.images import decode, stack
from hddm.data.shard_records import MIN_IMAGES, ImageEntry, read_content, read_manifest
from hddm.data.stored import PixelStore, Stored, Texts
from hddm.errors import HddmError


@dataclass(frozen=True)
class Shard:
    """One shard, ready to train on; ``hash`` covers every file and label in it, ``partition`` all beside it.

    Samples are in model space: pixels in [-1, 1], or latents (z - shift) × scale of ``vae``.
    """

    folder: Path
    index: int
    num_shards: int
    hash: str
    classes: tuple[str, ...]
    stored: Stored
    labels: Tensor | None
    partition: str | None = None
    held_out_of: str | None = None
    captions: tuple[str, ...] | None = None
    vae: VaeFacts | None = None
    text_encoder: TextEncoderFacts | None = None
    texts: Texts | None = None

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of a sample."""
        return self.stored.shape

    @property
    def space(self) -> Literal["pixels", "latents"]:
        """What a sample is."""
        return "pixels" if self.vae is None else "latents"

    @property
    def images(self) -> Tensor:
        """All samples (N, C, H, W), as `take` gives them."""
        return self.take(torch.arange(len(self)))

    def take(self, rows: Tensor, noise: torch.Generator | None = None, flip: Tensor | None = None) -> Tensor:
        """Samples (n, C, H, W) in model space, float32.

        Args:
            rows: (n,) indices.
            noise: of the draw from the VAE's posterior; its mean without.
            flip: (n,) bool, which are mirrored left to right; none without.
        """
        return self.stored.take(rows, noise, flip)


def load_shard(folder: Path) -> Shard:
    """Read a shard, checking every file against its hash.

    Raises:
        HddmError: as `read_manifest` and `read_content`, for images of several sizes, or fewer than
            `MIN_IMAGES` images to train on.
    """
    manifest = read_manifest(folder)
    entries = manifest.images
    if len(entries) < MIN_IMAGES and manifest.held_out_of is None:
        raise HddmError(
            f"{folder}: has {len(entries)} images; an expert needs at least {MIN_IMAGES} to train on"
        )
    names = [entry.file for entry in entries]
    pixels = stack(
        [decode(read_content(folder, entry), folder / entry.file) for entry in entries], names, folder
    )
    return Shard(
        folder,
        manifest.shard,
        manifest.num_shards,
        manifest.hash,
        tuple(manifest.classes),
        PixelStore(pixels),
        labels_of(entries),
        manifest.partition,
        manifest.held_out_of,
        captions_of(entries),
    )


def labels_of(entries: Sequence[ImageEntry]) -> Tensor | None:
    """Labels (N,) where every entry has one."""
    labels = [entry.label for entry in entries]
    return None if None in labels else torch.tensor(labels)


def captions_of(entries: Sequence[ImageEntry]) -> tuple[str, ...] | None:
    """Captions where every entry has one."""
    captions = tuple(entry.caption for entry in entries if entry.caption is not None)
    return captions if len(captions) == len(entries) else None
