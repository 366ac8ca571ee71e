"""Shards on disk, out of a source of images and the shard of each."""

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hddm.data.feature_cache import ImageFeatures
from hddm.data.shard_records import FORMAT, HELD_OUT, MANIFEST, ImageEntry, Manifest, content_hash
from hddm.data.sources import ImageSource
from hddm.errors import HddmError
from hddm.files import link_or_copy, write_json


def write_shards(
    source: ImageSource,
    features: ImageFeatures,
    shard: NDArray[np.int64],
    held_out: NDArray[np.bool_],
    num_shards: int,
    folder: Path,
    cache: Path | None = None,
) -> list[str]:
    """Write ``shard_k`` and, where any image of it is held out, ``held_out/shard_k``.

    Images are hard links where the source has files and the file system allows, else copies.

    Args:
        source: the images.
        features: which rows of ``source`` are meant, and the hash of each file.
        shard: (M,) in [0, num_shards).
        held_out: (M,), which are held out.
        num_shards: K.
        folder: the partition.
        cache: where the features were kept, for the error's remedy.

    Returns:
        Hashes of the training shards.

    Raises:
        HddmError: for an image that changed since its features were computed.
    """

    def written(chosen: NDArray[np.bool_], target: Path) -> list[ImageEntry]:
        return _write_images(source, features, chosen, target, cache)

    training = [written((shard == k) & ~held_out, folder / f"shard_{k}") for k in range(num_shards)]
    hashes = [content_hash(entries, source.classes) for entries in training]
    whole = hashlib.sha256("\n".join(hashes).encode()).hexdigest()

    def record(k: int, target: Path, entries: list[ImageEntry], of: str | None) -> None:
        manifest = Manifest(
            format=FORMAT,
            shard=k,
            num_shards=num_shards,
            classes=list(source.classes),
            hash=content_hash(entries, source.classes),
            partition=whole,
            held_out_of=of,
            images=entries,
        )
        write_json(target / MANIFEST, manifest.model_dump())

    for k, entries in enumerate(training):
        record(k, folder / f"shard_{k}", entries, None)
    for k in np.unique(shard[held_out]).tolist():
        target = folder / HELD_OUT / f"shard_{k}"
        record(k, target, written((shard == k) & held_out, target), hashes[k])
    return hashes


def _write_images(
    source: ImageSource,
    features: ImageFeatures,
    chosen: NDArray[np.bool_],
    folder: Path,
    cache: Path | None,
) -> list[ImageEntry]:
    entries = []
    for place in np.flatnonzero(chosen).tolist():
        row = int(features.rows[place])
        name = f"images/{source.files[row]}"
        copy, path = folder / name, source.path(row)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path is None:
            copy.write_bytes(source.read(row))
        else:
            link_or_copy(path, copy)
        sha256 = hashlib.sha256(copy.read_bytes()).hexdigest()
        if sha256 != features.files[place].tobytes().hex():
            remedy = f"remove {cache}, or name another folder with --cache" if cache else "partition again"
            raise HddmError(
                f"{source.root / source.files[row]}: changed since its features were computed; {remedy}"
            )
        label = None if source.labels is None else int(source.labels[row])
        caption = None if source.captions is None else source.captions[row]
        entries.append(ImageEntry(file=name, sha256=sha256, label=label, caption=caption))
    return entries
