"""Shards for training, of images or encoded, one or all of a partition.

Files are checked against their hashes on opening. Images are decoded to memory; tensors of an encoded shard
are mapped from disk. A store gives samples by row.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hddm.data.images import decode_image, stack, to_unit_range
from hddm.data.shard_records import (
    DEVIATION,
    MEAN,
    MIN_IMAGES,
    MIRRORED,
    PIXELS,
    TOKENS,
    EncodingRecord,
    FileRecord,
    captions_of,
    entry_labels,
    read_content,
    read_manifest,
    sketch_of,
)
from hddm.networks.encoders import has_deviation
from hddm.networks.identity import TextEncoderRecord, VaeRecord
from hddm.utils.errors import HddmError
from hddm.utils.files import inside
from hddm.utils.records import HashCache, composed
from hddm.utils.tensors import read_safetensors

Own = slice | Tensor
"""Selects the rows that one of several processes reads: a slice, or a mask (n,)."""
ALL = slice(None)


@dataclass(frozen=True)
class Rows:
    """One tensor (N, …) stored in ``parts`` (n_k, …) of one shape."""

    parts: tuple[Tensor, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a row."""
        return tuple(self.parts[0].shape[1:])

    @cached_property
    def _ends(self) -> Tensor:
        """End row of each part (exclusive), shape (parts,)."""
        return torch.tensor([len(part) for part in self.parts]).cumsum(0)

    def take(self, rows: Tensor) -> Tensor:
        """Rows (n, …) at indices (n,) in [0, N), in the widest dtype; only these are read into memory."""
        if len(self.parts) == 1:
            return self.parts[0][rows]
        dtype = reduce(torch.promote_types, {part.dtype for part in self.parts})
        taken = torch.empty((len(rows), *self.shape), dtype=dtype)
        where = torch.searchsorted(self._ends, rows, right=True)
        for k in where.unique().tolist():
            here = where == k
            part = self.parts[k]
            first = int(self._ends[k]) - len(part)
            taken[here] = part[rows[here] - first].to(dtype)
        return taken


@dataclass(frozen=True)
class Samples:
    """Samples from their tensors by name: pixels in uint8, or what the encoder of ``vae`` gave.

    A latent sample is (z - shift) × scale with z = mean + deviation × ε and fresh normal ε each time, as DiT
    and Stable Diffusion are trained; z is the mean without a deviation or noise. Mirror images have latents
    of their own.

    Samples of several shards, one after the other, have their ``sizes``; each shard draws its own noise.
    """

    tensors: Mapping[str, Rows]
    vae: VaeRecord | None = None
    sizes: tuple[int, ...] = ()

    @property
    def main(self) -> Rows:
        """Pixels, or means of latents."""
        return self.tensors[PIXELS if self.vae is None else MEAN]

    @property
    def shape(self) -> tuple[int, int, int]:
        channels, height, width = self.main.shape
        return channels, height, width

    def __len__(self) -> int:
        return len(self.main)

    def take(
        self, rows: Tensor, noise: torch.Generator | None, flip: Tensor | None, own: Own = ALL
    ) -> Tensor:
        """As `hddm.data.shards.Shard.take`; raises `HddmError` for ``flip`` without encoded mirror images."""
        mine = rows[own]
        mirrored = None if flip is None else flip[own]
        if self.vae is None:
            images = to_unit_range(self.main.take(mine))
            if mirrored is None:
                return images
            return torch.where(mirrored[:, None, None, None], images.flip(-1), images)
        z = self._either(MEAN, mine, mirrored)
        if noise is not None and DEVIATION in self.tensors:
            drawn = torch.empty(len(rows), *self.shape)
            shards = self.shard_of(rows)
            for shard in shards.unique().tolist():
                here = shards == shard
                drawn[here] = torch.randn(int(here.sum()), *self.shape, generator=noise)
            z += self._either(DEVIATION, mine, mirrored) * drawn[own]
        return self.vae.scaling.samples(z)

    def _either(self, name: str, rows: Tensor, flip: Tensor | None) -> Tensor:
        """Rows in float32, of mirror images where ``flip`` (n,) is true; each is read once."""
        plain = self.tensors[name]
        if flip is None or not flip.any():
            return plain.take(rows).float()
        if MIRRORED + name not in self.tensors:
            raise HddmError(
                "the latents were encoded without their mirror images, and cannot be mirrored themselves; "
                "encode them with `random_flip=True` or train without it"
            )
        taken = torch.empty((len(rows), *plain.shape))
        taken[~flip] = plain.take(rows[~flip]).float()
        taken[flip] = self.tensors[MIRRORED + name].take(rows[flip]).float()
        return taken

    def shard_of(self, rows: Tensor) -> Tensor:
        """Place of the shard of each of ``rows`` (n,)."""
        ends = torch.tensor(self.sizes or [len(self)]).cumsum(0)
        return torch.searchsorted(ends, rows, right=True)

    def digest(self, row: int) -> bytes:
        """SHA-256 of the pixels or means, equal exactly for equal samples."""
        sample = self.main.take(torch.tensor([row])).view(torch.uint8)
        return hashlib.sha256(sample.numpy().tobytes()).digest()


def join_samples(parts: Sequence[Samples]) -> Samples:
    """The samples of ``parts`` that have one shape and VAE, one after the other."""
    names = set(parts[0].tensors)
    for one in parts[1:]:
        names &= one.tensors.keys()
    rows: dict[str, Rows] = {}
    for name in names:
        rows[name] = joined_rows([one.tensors[name] for one in parts])
    return Samples(rows, parts[0].vae, tuple(map(len, parts)))


def joined_rows(tensors: Sequence[Rows]) -> Rows:
    """The rows of all ``tensors``, one after the other."""
    parts: list[Tensor] = []
    for one in tensors:
        parts += one.parts
    return Rows(tuple(parts))


NO_CAPTION = -1
"""Row that stands for the empty prompt."""


@dataclass(frozen=True)
class TokenStore:
    """Tokens (N, tokens, width) of captions, and of the empty prompt (tokens, width) in float32."""

    tokens: Rows
    null: Tensor

    def take(self, rows: Tensor) -> Tensor:
        """Tokens (n, tokens, width) in float32, of the empty prompt where a row is `NO_CAPTION`."""
        tokens = self.tokens.take(rows.clamp(min=0)).float()
        return torch.where((rows == NO_CAPTION)[:, None, None], self.null, tokens)


@dataclass(frozen=True)
class Shard:
    """One shard, ready to train on; ``hash`` covers every file and label, ``partition`` all shards.

    Samples are in model space: pixels in [-1, 1], or latents (z - shift) × scale of ``vae``.
    """

    folder: Path
    index: int
    num_shards: int
    hash: str
    classes: tuple[str, ...]
    stored: Samples
    labels: Tensor | None
    partition: str | None = None
    held_out_of: str | None = None
    captions: Sequence[str] | None = None
    vae: VaeRecord | None = None
    text_encoder: TextEncoderRecord | None = None
    texts: TokenStore | None = None
    sketch: tuple[str, ...] = ()
    """Hashes of some images (`hddm.data.shard_records.sketch_of`)."""

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of a sample."""
        return self.stored.shape

    @property
    def space(self) -> Literal["pixels", "latents"]:
        """Kind of the samples."""
        return "pixels" if self.vae is None else "latents"

    @property
    def images(self) -> Tensor:
        """All samples (N, C, H, W), from `take`."""
        return self.take(torch.arange(len(self)))

    def pixels_of(self, row: int) -> NDArray[np.uint8]:
        """One image as it is stored, (H, W, C) in bytes."""
        return self.stored.main.take(torch.tensor([row]))[0].permute(1, 2, 0).numpy()

    def take(
        self,
        rows: Tensor,
        noise: torch.Generator | None = None,
        flip: Tensor | None = None,
        own: Own = ALL,
    ) -> Tensor:
        """Samples (n, C, H, W) in model space, float32, at indices ``rows`` (n,).

        ``noise`` draws from the VAE's posterior; without it, its mean is used. ``flip`` (n,) bool mirrors
        left to right. Only samples ``own`` of ``rows`` are read and returned; ``noise`` is drawn for all.
        """
        return self.stored.take(rows, noise, flip, own)


def open_shard(folder: Path, is_outline: bool = False) -> Shard:
    """Open the shard in ``folder``: images (from `hddm partition`) or encoded (from `hddm encode`).

    Every file is checked against its hash. Tensors of an encoded shard stay on disk, and files that were
    verified before are not hashed again. An outline has everything but the pixels of all images after the
    first, to check settings against it.

    Raises `HddmError` as `read_manifest`, for images of several sizes, fewer than `MIN_IMAGES` to train on,
    and a file that is outside the folder, missing, changed or unlike the manifest.
    """
    manifest = read_manifest(folder)
    if manifest.num_rows < MIN_IMAGES and manifest.held_out_of is None:
        text = f"has {manifest.num_rows} images; an expert needs at least {MIN_IMAGES} to train on"
        raise HddmError(f"{folder}: {text}")
    entries = manifest.rows
    texts = None
    if manifest.encoding is not None:
        layout = layout_of(manifest.encoding, manifest.vae, manifest.text_encoder)
        verified = HashCache(folder)
        files = [_open(folder, one, layout, verified) for one in manifest.data]
        tensors: dict[str, Rows] = {}
        for name in layout:
            tensors[name] = Rows(tuple(file[name] for file in files))
        if sum(one.rows for one in manifest.data) != len(entries):
            raise HddmError(f"{folder}: its data are not of {len(entries)} images; encode again")
        if manifest.null is not None and TOKENS in layout:
            null = _open(folder, manifest.null, {TOKENS: layout[TOKENS]}, verified)[TOKENS]
            texts = TokenStore(tensors[TOKENS], null[0].float())
        verified.keep()
    else:
        read = entries[:1] if is_outline else entries
        names = []
        images = []
        for entry in read:
            names.append(entry.file)
            images.append(decode_image(read_content(folder, entry), folder / entry.file))
        tensors = {PIXELS: Rows((stack(images, names, folder),))}
    labels = entry_labels(entries)
    return Shard(
        folder,
        manifest.shard,
        manifest.num_shards,
        manifest.hash,
        tuple(map(composed, manifest.classes)),
        Samples(tensors, manifest.vae),
        None if labels is None else torch.tensor(labels),
        manifest.partition,
        manifest.held_out_of,
        captions_of(entries),
        manifest.vae,
        manifest.text_encoder,
        texts,
        sketch_of(entries.hashes()),
    )


RowLayout = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Row shape and dtype by tensor name."""


def layout_of(
    encoding: EncodingRecord, vae: VaeRecord | None, text_encoder: TextEncoderRecord | None
) -> RowLayout:
    """Tensors of a data file."""
    names = [PIXELS]
    if vae is not None:
        names = [MEAN, DEVIATION] if has_deviation(vae.kind) else [MEAN]
        if encoding.mirrored:
            names += [MIRRORED + name for name in names]
    row = (encoding.shape, getattr(torch, encoding.dtype))
    layout: RowLayout = dict.fromkeys(names, row)
    if text_encoder is not None:
        size = (text_encoder.tokens, text_encoder.width)
        layout[TOKENS] = (size, getattr(torch, encoding.text_dtype or "float32"))
    return layout


def _open(
    folder: Path, file: FileRecord, layout: RowLayout, verified: HashCache
) -> Mapping[str, Tensor]:
    path = inside(folder, file.file)
    if not verified.matches(file.file, file.sha256):
        raise HddmError(f"{folder / file.file}: changed since it was encoded; copy the shard again")
    tensors = read_safetensors(path)
    expected: RowLayout = {}
    for name, (shape, dtype) in layout.items():
        expected[name] = ((file.rows, *shape), dtype)
    found: RowLayout = {}
    for name, tensor in tensors.items():
        found[name] = (tuple(tensor.shape), tensor.dtype)
    if found != expected:
        raise HddmError(
            f"{folder / file.file}: holds {found}, not {expected}; encode the shard again"
        )
    return tensors


def joined(shards: Sequence[Shard], folder: Path) -> Shard:
    """Join all ``shards`` of the partition in ``folder`` to one shard, index 0 of 1.

    Its hash and partition are the partition's hash, which no shard has, so a model of it cannot be mistaken
    for an expert of one shard or combined with these. Captions are left out, their tokens are kept. Raises
    `HddmError` for shards that differ in shape, classes, VAE, text encoder or partition.
    """
    first = shards[0]
    kinds = set()
    for one in shards:
        kinds.add((one.shape, one.classes, one.vae, one.text_encoder, one.partition))
    if len(kinds) > 1:
        text = "its shards differ in shape, classes, VAE, text encoder or partition"
        raise HddmError(f"{folder}: {text}")
    labels = [one.labels for one in shards if one.labels is not None]
    texts = [one.texts for one in shards if one.texts is not None]
    tokens = joined_rows([one.tokens for one in texts])
    hashes: list[str] = []
    for one in shards:
        hashes += one.sketch
    digest = hashlib.sha256("\n".join(one.hash for one in shards).encode()).hexdigest()
    return Shard(
        folder=folder,
        index=0,
        num_shards=1,
        hash=first.partition or digest,
        classes=first.classes,
        stored=join_samples([one.stored for one in shards]),
        labels=torch.cat(labels) if len(labels) == len(shards) else None,
        partition=first.partition or digest,
        vae=first.vae,
        text_encoder=first.text_encoder,
        texts=TokenStore(tokens, texts[0].null) if texts else None,
        sketch=sketch_of(hashes),
    )
