"""Shards as training reads them, of images or encoded, one or all of a partition.

Files are checked against their hashes when a shard is opened. Images are decoded to memory; the tensors of an
encoded shard are mapped from its files.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hddm.data.encoding_plan import RowLayout, layout_of
from hddm.data.images import decode, stack
from hddm.data.shard_records import (
    DEVIATION,
    MANIFEST,
    MEAN,
    MIN_IMAGES,
    MIRRORED,
    PIXELS,
    TOKENS,
    EncodedManifest,
    FileRecord,
    ImageEntry,
    ShardIdentity,
    check_entries,
    is_encoded,
    read_content,
    read_encoded_manifest,
    read_entries,
    read_manifest,
)
from hddm.data.stores import (
    JoinedStore,
    LatentStore,
    MappedPixels,
    PixelStore,
    Rows,
    Stored,
    Texts,
    TokenStore,
)
from hddm.networks.identity import TextEncoderRecord, VaeRecord
from hddm.utils.errors import HddmError
from hddm.utils.files import HashCache, inside
from hddm.utils.tensors import read_safetensors


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
    vae: VaeRecord | None = None
    text_encoder: TextEncoderRecord | None = None
    texts: Texts | None = None

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
    _refuse_few(folder, manifest, len(entries))
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


def _refuse_few(folder: Path, shard: ShardIdentity, num: int) -> None:
    if num < MIN_IMAGES and shard.held_out_of is None:
        raise HddmError(f"{folder}: has {num} images; an expert needs at least {MIN_IMAGES} to train on")


def labels_of(entries: Sequence[ImageEntry]) -> Tensor | None:
    """Labels (N,) where every entry has one."""
    labels = [entry.label for entry in entries]
    return None if None in labels else torch.tensor(labels)


def captions_of(entries: Sequence[ImageEntry]) -> tuple[str, ...] | None:
    """Captions where every entry has one."""
    captions = tuple(entry.caption for entry in entries if entry.caption is not None)
    return captions if len(captions) == len(entries) else None


def load_encoded(folder: Path) -> Shard:
    """The encoded shard in ``folder``; its tensors stay on disk until they are taken.

    Files that were hashed by an earlier call, and are untouched since, are not read (`hddm.utils.files`).

    Raises:
        HddmError: for a file that is outside the folder, missing or changed, for files that do not hold what
            the manifest says, and for fewer than `MIN_IMAGES` samples to train on.
    """
    manifest = read_encoded_manifest(folder)
    _refuse_few(folder, manifest, manifest.num_rows)
    verified = HashCache(folder)
    entries = _entries(folder, manifest, verified)
    try:
        layout = layout_of(manifest.encoding, manifest.vae, manifest.text_encoder)
    except HddmError as error:
        raise HddmError(f"{folder / MANIFEST}: {error}") from error
    parts = [_open(folder, one, layout, verified) for one in manifest.data]
    texts = None
    if manifest.null is not None:
        shape, dtype = layout[TOKENS]
        null = _open(folder, manifest.null, {TOKENS: (shape, dtype)}, verified)[TOKENS]
        texts = TokenStore(_rows(parts, TOKENS), null[0].float())
    verified.keep()
    return Shard(
        folder,
        manifest.shard,
        manifest.num_shards,
        manifest.hash,
        tuple(manifest.classes),
        _stored(manifest, parts),
        labels_of(entries),
        manifest.partition,
        manifest.held_out_of,
        captions_of(entries),
        manifest.vae,
        manifest.text_encoder,
        texts,
    )


def _entries(folder: Path, manifest: EncodedManifest, verified: HashCache) -> list[ImageEntry]:
    """The images that have a row, in its order."""
    path = _checked(folder, manifest.images, verified)
    entries = read_entries(path)
    check_entries(path, entries, manifest.classes, manifest.hash)
    skipped = {one.file for one in manifest.skipped}
    entries = [entry for entry in entries if entry.file not in skipped]
    if len(entries) != manifest.num_rows:
        raise HddmError(
            f"{folder / MANIFEST}: {manifest.num_rows} rows of data for {len(entries)} images; encode again"
        )
    return entries


def _open(folder: Path, facts: FileRecord, layout: RowLayout, verified: HashCache) -> Mapping[str, Tensor]:
    tensors = read_safetensors(_checked(folder, facts, verified))
    expected = {name: ((facts.rows, *shape), dtype) for name, (shape, dtype) in layout.items()}
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    if found != expected:
        raise HddmError(f"{folder / facts.file}: holds {found}, not {expected}; encode the shard again")
    return tensors


def _checked(folder: Path, facts: FileRecord, verified: HashCache) -> Path:
    path = inside(folder, facts.file)
    if not path.is_file():
        raise HddmError(f"{folder / facts.file}: named by the manifest, and missing; take the shard anew")
    if not verified.matches(facts.file, facts.sha256):
        raise HddmError(f"{folder / facts.file}: changed since it was encoded; take the shard anew")
    return path


def _stored(manifest: EncodedManifest, parts: list[Mapping[str, Tensor]]) -> Stored:
    vae = manifest.vae
    if vae is None:
        return MappedPixels(_rows(parts, PIXELS))
    found = {name: _rows(parts, name) for name in parts[0] if name != TOKENS}
    return LatentStore(
        found[MEAN],
        found.get(DEVIATION),
        vae.scale,
        vae.shift,
        found.get(MIRRORED + MEAN),
        found.get(MIRRORED + DEVIATION),
    )


def _rows(parts: list[Mapping[str, Tensor]], name: str) -> Rows:
    return Rows(tuple(part[name] for part in parts))


def open_shard(folder: Path) -> Shard:
    """The shard in ``folder``: of images, as `hddm partition` writes it, or encoded, as `hddm encode` does.

    Raises:
        HddmError: as `hddm.data.shards.load_shard` and `hddm.data.shards.load_encoded`; for a folder
            that is neither, with what it is.
    """
    if (folder / MANIFEST).is_file() and is_encoded(folder):
        return load_encoded(folder)
    return load_shard(folder)


def joined(shards: Sequence[Shard], folder: Path) -> Shard:
    """All ``shards`` of the partition in ``folder`` as one shard: index 0 of 1.

    Its hash, and its partition, are the partition's hash, which no shard has. So whoever matches experts by
    their shards takes a model of it neither for an expert of one of them, nor for one that fits beside
    these. Captions and texts are left out.

    Raises:
        HddmError: for shards that differ in shape, classes, VAE or partition.
    """
    first = shards[0]
    qualities: dict[str, Callable[[Shard], Any]] = {
        "shape": lambda one: one.shape,
        "classes": lambda one: one.classes,
        "VAE": lambda one: one.vae,
        "partition": lambda one: one.partition,
    }
    for name, of in qualities.items():
        for other in shards:
            if of(other) != of(first):
                raise HddmError(
                    f"{folder}: its shards do not belong together: {name} of {other.folder.name} is "
                    f"{of(other)}, and {of(first)} of {first.folder.name}"
                )
    labels = [one.labels for one in shards if one.labels is not None]
    digest = hashlib.sha256("\n".join(one.hash for one in shards).encode()).hexdigest()
    return Shard(
        folder=folder,
        index=0,
        num_shards=1,
        hash=first.partition or digest,
        classes=first.classes,
        stored=JoinedStore([one.stored for one in shards]),
        labels=torch.cat(labels) if len(labels) == len(shards) else None,
        partition=first.partition or digest,
        vae=first.vae,
    )
