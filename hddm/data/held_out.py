"""Images that a training is measured on, and that it must not be trained on."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from hddm.data.entries import Entries, ImageEntry, shard_hash
from hddm.data.images import decode_image, in_colour, shared_images, stack
from hddm.data.shard_records import (
    PIXELS,
    entry_labels,
    named_shards,
    read_manifest,
)
from hddm.data.shards import Rows, Samples, Shard, joined, open_shard
from hddm.data.sources import open_source
from hddm.utils.errors import HddmError
from hddm.utils.records import composed


def open_held_out(path: Path, training: Shard) -> Shard:
    """Open the images that ``path`` names, to measure a training on the shard ``training``.

    A shard stands for itself. A partition stands for the images that it held out of ``training``, or for all
    that it holds out where ``training`` is none of its shards. Anything else is a source of images, as in
    `hddm.data.sources.open_source`, for trainings on pixels.

    Raises `HddmError` as `open_shard`, `joined`, `named_shards` and `open_source`, for samples of another
    shape or VAE, and for images that are trained on: by their pixels, or by their files' hashes for latents.
    """
    folders = named_shards(path, are_held_out=True)
    own = [folder for folder in folders if read_manifest(folder).held_out_of == training.hash]
    opened: list[tuple[Shard, Entries]] = []
    for folder in own or folders:
        opened.append((open_shard(folder), read_manifest(folder).rows))
    if not opened:
        opened = [_open_images(path, training.shape[0])]
    shards = [shard for shard, _ in opened]
    found = shards[0] if len(shards) == 1 else joined(shards, path)
    if (found.shape, found.vae) != (training.shape, training.vae):
        one = f"{found.space} of shape {found.shape}"
        two = f"{training.space} of shape {training.shape}"
        vae = " by another VAE" if one == two else ""
        text = f"holds {one}, and {training.folder} {two}{vae}; encode both alike (hddm encode)"
        raise HddmError(f"`held_out` {path}: {text}")
    _refuse_trained(path, opened, training)
    return found


def _refuse_trained(path: Path, opened: Sequence[tuple[Shard, Entries]], training: Shard) -> None:
    """Refuse images of ``training`` in the shards ``opened``, each with the image of every sample."""
    # hddm partition keeps equal images together, so that none is in two parts of one partition.
    kept: set[str | None] = set()
    for shard, _ in opened:
        kept.add(shard.partition if shard.held_out_of else None)
    if training.partition is not None and kept == {training.partition}:
        return
    entries = read_manifest(training.folder).rows
    known: dict[str, str] = {}
    for file, content in zip(entries.files, _contents(training, entries), strict=True):
        known[content] = file
    shared: dict[str, str] = {}
    total = 0
    for shard, own in opened:
        total += len(shard)
        for file, content in zip(own.files, _contents(shard, own), strict=True):
            if content in known:
                name = (shard.folder / file).relative_to(path).as_posix()
                shared[name] = known[content]
    if shared:
        raise shared_images(
            "held_out", path, total, f"training images of {training.folder}", shared
        )


def _contents(shard: Shard, entries: Entries) -> list[str]:
    """A hash of each sample's image: of its pixels, or of its file where latents are all that is left."""
    if shard.vae is not None:
        return list(entries.hashes())
    return [shard.stored.digest(row).hex() for row in range(len(shard))]


def _open_images(path: Path, channels: int) -> tuple[Shard, Entries]:
    """Open plain images as a shard, in colour if there are three ``channels``."""
    source = open_source(path)
    images, arrays = [], []
    for row, name in enumerate(source.files):
        content = source.read(row)
        pixels = decode_image(content, path / name)
        arrays.append(in_colour(pixels) if channels == 3 else pixels)
        label = None if source.labels is None else source.labels[row]
        sha256 = hashlib.sha256(content).hexdigest()
        images.append(ImageEntry(file=name, sha256=sha256, label=label))
    entries = Entries.of(images)
    labels = entry_labels(entries)
    shard = Shard(
        folder=path,
        index=0,
        num_shards=1,
        hash=shard_hash(entries, source.classes),
        classes=tuple(map(composed, source.classes)),
        stored=Samples({PIXELS: Rows((stack(arrays, source.files, path),))}),
        labels=None if labels is None else torch.tensor(labels),
    )
    return shard, entries
