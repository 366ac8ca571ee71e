"""Shards of images, written by hand: what is in them depends on no clustering."""

import hashlib
import io
import json
import shutil
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hddm.data import encoding, shard_records
from hddm.data import entries as columns
from hddm.data.entries import Entries, ImageEntry, shard_hash
from hddm.data.shard_records import read_manifest, write_list, write_manifest
from hddm.utils.progress import Progress


def noise(
    num: int, height: int = 8, width: int = 8, seed: int = 0, colour: bool = True
) -> list[np.ndarray]:
    """Images (height, width, 3) or (height, width) in uint8."""
    shape = (num, height, width, 3) if colour else (num, height, width)
    return list(np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8))


def as_file(pixels: np.ndarray | Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The content of an image file."""
    buffer, image = (
        io.BytesIO(),
        pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels),
    )
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def bomb(width: int = 100_000, height: int = 100_000) -> bytes:
    """A PNG of one pixel that says it has very many."""
    content = bytearray(as_file(np.zeros((1, 1), np.uint8)))
    content[16:24] = struct.pack(">II", width, height)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    return bytes(content)


def write_shard(
    folder: Path,
    images: Sequence[np.ndarray | bytes],
    labels: Sequence[int] | None = None,
    captions: Sequence[str] | None = None,
    shard: int = 0,
    num_shards: int = 1,
    held_out_of: str | None = None,
) -> str:
    """Write a shard of PNG files, with two classes where there are labels; its hash is returned.

    Bytes are written as they are.
    """
    (folder / "images").mkdir(parents=True)
    entries, arrays = [], [image for image in images if isinstance(image, np.ndarray)]
    for index, image in enumerate(images):
        name = f"images/{index:03d}.png"
        if isinstance(image, bytes):
            (folder / name).write_bytes(image)
        else:
            Image.fromarray(image).save(folder / name)
        entries.append(
            ImageEntry(
                file=name,
                sha256=hashlib.sha256((folder / name).read_bytes()).hexdigest(),
                label=None if labels is None else labels[index],
                caption=None if captions is None else captions[index],
            )
        )
    classes = [] if labels is None else ["cat", "dog"]
    manifest = {
        "format": "1.4",
        "shard": shard,
        "num_shards": num_shards,
        "classes": classes,
        "hash": shard_hash(Entries.of(entries), classes),
        "partition": "of-all",
        "held_out_of": held_out_of,
        "channels": max(1 if one.ndim == 2 else 3 for one in arrays),
        "size": arrays[0].shape[:2] if len({one.shape[:2] for one in arrays}) == 1 else None,
        "images": [entry.model_dump() for entry in entries],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return str(manifest["hash"])


def with_table(shard: Path, target: Path) -> Path:
    """Copy ``shard`` to ``target``, and list its images in a table of several row groups."""
    shutil.copytree(shard, target)
    manifest = read_manifest(shard)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shard_records, "LARGEST_LIST", 3)
        patched.setattr(columns, "PART", 7)
        images = manifest.images
        written = write_list(target, images.parts(), len(images), manifest.classes)
    assert written.hash == manifest.hash
    write_manifest(target, manifest.model_copy(update={"table": written.table}))
    return target


def write_partition(root: Path, num: int = 20, held_out: int = 0, colour: bool = True) -> Path:
    """Write two shards of ``num`` images, and their held-out images where there are some."""
    hashes = []
    for k in range(2):
        images = noise(num, seed=k, colour=colour)
        labels = [n % 2 for n in range(num)]
        hashes.append(write_shard(root / f"shard_{k}", images, labels, shard=k, num_shards=2))
        if held_out:
            place, kept = (
                root / "held_out" / f"shard_{k}",
                noise(held_out, seed=100 + k, colour=colour),
            )
            write_shard(place, kept, labels[:held_out], None, k, 2, hashes[k])
    return write_partition_record(root, [num, num], hashes)


def write_partition_record(root: Path, sizes: Sequence[int], hashes: Sequence[str]) -> Path:
    """Make a partition of the shards in ``root``, which is returned, with a key that no version has now."""
    facts = {
        "format": "1.2",
        "images": sum(sizes),
        "features": "pixel_pca",
        "fine_clusters": 2,
        "seed": 0,
    }
    (root / "partition.json").write_text(
        json.dumps({**facts, "sizes": sizes, "hashes": hashes, "proposal": None})
    )
    return root


def encode(
    source: Path,
    out: Path,
    rows: int = 1000,
    overwrite: bool = False,
    on_images: Callable[[int], None] = lambda number: None,
    **options: Any,
) -> Path:
    """Encode a shard or a partition, ``rows`` a data file; options are `EncodingSettings`.

    ``on_images`` is called with the number of images done, those of an earlier start too.
    """

    class Heard(Progress):
        def __call__(self, units: int) -> None:
            super().__call__(units)
            on_images(units)

        def skip(self, units: int) -> None:
            super().skip(units)
            on_images(units)

    settings = encoding.EncodingSettings.model_validate(options)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(encoding, "Progress", Heard)
        encoding.encode_shards(source, out, settings, overwrite, rows)
    return out
