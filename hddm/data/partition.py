"""Partition of a data set into shards of similar content and nearly equal size, with images held out.

The hash of its pixels decides whether an image is held out. Equal images share one fate, which does not
depend on the number of shards, the features, or images that were added or removed: images that judge the
experts of one partition were not trained on in another. The price is that the share is met on average only.
"""

import hashlib
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from hddm.data.clustering import Candidate, Hierarchy, best, cluster, propose
from hddm.data.feature_cache import ImageFeatures, compute_features
from hddm.data.features import Extractor, open_feature_extractor
from hddm.data.partition_report import write_report
from hddm.data.shard_records import (
    FORMAT,
    HELD_OUT,
    MANIFEST,
    MIN_IMAGES,
    PARTITION_FILE,
    ImageEntry,
    PartitionRecord,
    ShardManifest,
    content_hash,
    holds_shard,
)
from hddm.data.sources import open_source
from hddm.data.sources.base import ImageSource
from hddm.utils.errors import HddmError, UsageError, counted
from hddm.utils.files import check_absent, link_or_copy, new_folder, write_json, writing

_ROUNDING = 1e-9


def numbers_of(digests: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Numbers (M,) in [0, 1), the first 8 bytes of ``digests`` (M, 32); a share takes those below it."""
    numbers: NDArray[np.float64] = np.ascontiguousarray(digests[:, :8]).view(">u8")[:, 0] / 2.0**64
    return numbers


def images_needed(share: float) -> float:
    """Images that a shard needs, so that `MIN_IMAGES` are to be expected on both sides."""
    return MIN_IMAGES / (min(share, 1 - share) if share else 1)


def check_share(images: Path, num: int, num_shards: int, share: float) -> None:
    """Refuse a share in (0, 1) that leaves shards too few images on a side: known without their features.

    Args:
        images: for the message.
        num: how many there are.
        num_shards: K; num / K are in a shard.
        share: that is to be held out.

    Raises:
        HddmError: with the nearest share that works.
    """
    each = num / num_shards
    if each * (1 + _ROUNDING) >= images_needed(share):
        return
    start = f"{images}: --held-out {share:g} of {num} images in {counted(num_shards, 'shard')}"
    if each < 2 * MIN_IMAGES:
        raise HddmError(
            f"{start}: a shard has about {each:.0f}, and needs {MIN_IMAGES} to train on and {MIN_IMAGES} "
            "to be judged by; take fewer shards or hold none out"
        )
    if share <= 0.5:
        least = _rounded(MIN_IMAGES / each, up=True)
        raise HddmError(
            f"{start} are about {share * each:.1f} a shard, too few to judge its expert by; the "
            f"smallest share that works is {least:g}, or take fewer shards"
        )
    most = _rounded(1 - MIN_IMAGES / each, up=False)
    raise HddmError(
        f"{start} leaves about {(1 - share) * each:.1f} a shard to train on, and {MIN_IMAGES} are needed; "
        f"the largest share that can work is {most:g}, or take fewer shards"
    )


def check_rest(
    images: Path, numbers: NDArray[np.float64], shard: NDArray[np.int64], num_shards: int, share: float
) -> None:
    """Refuse a share that leaves a shard fewer than `MIN_IMAGES` images to train on.

    Args:
        images: for the message.
        numbers: (M,), as `numbers_of`.
        shard: (M,) in [0, num_shards).
        num_shards: K; each has `MIN_IMAGES` images.
        share: that is to be held out.

    Raises:
        HddmError: with a share that works.
    """
    left = np.bincount(shard[numbers >= share], minlength=num_shards)
    if left.min() >= MIN_IMAGES:
        return
    largest = min(float(np.sort(numbers[shard == k])[-MIN_IMAGES]) for k in range(num_shards))
    raise HddmError(
        f"{images}: with --shards {num_shards}, --held-out {share:g} shard {left.argmin()} has "
        f"{counted(int(left.min()), 'image')} left to train on and needs {MIN_IMAGES}; --held-out "
        f"{_rounded(largest, up=False):g} leaves every shard enough, or take fewer shards"
    )


def _rounded(value: float, up: bool) -> float:
    """``value`` in (0, 1) to three significant digits, so that its user is on the safe side."""
    factor = 10.0 ** (2 - math.floor(math.log10(value)))
    scaled = value * factor
    return (math.ceil(scaled - _ROUNDING) if up else math.floor(scaled + _ROUNDING)) / factor


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
        manifest = ShardManifest(
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


FINE_PER_SHARD = 8


@dataclass(frozen=True)
class Division:
    """Places of the images: ``shard`` (M,) and ``held_out`` (M,), by row of its ``features`` (M, d)."""

    features: ImageFeatures
    clusters: Hierarchy
    held_out: NDArray[np.bool_]

    @property
    def num_shards(self) -> int:
        return len(np.unique(self.clusters.fine_to_coarse))

    @property
    def shard(self) -> NDArray[np.int64]:
        return self.clusters.assignment


def partition(
    images: Path,
    out: Path,
    num_shards: int | Literal["auto"],
    seed: int = 0,
    overwrite: bool = False,
    *,
    features: str = "pixels",
    cache: Path | None = None,
    replace_cache: bool = False,
    max_bad: int = 0,
    held_out: float = 0.0,
    caption_column: str | None = None,
    label_column: str | None = None,
) -> list[Path]:
    """Divide images into shards of similar content and nearly equal size.

    Features, then balanced hierarchical k-means with `FINE_PER_SHARD` fine clusters a shard: sizes of shards
    differ by at most `FINE_PER_SHARD` images before any are held out.

    Args:
        images: as `hddm.data.sources.open_source`.
        out: folder of the partition.
        num_shards: how many, or "auto" for the best of `hddm.data.clustering.propose`.
        seed: of the clusters, of what pixel components are fitted on, and of the report's random pictures.
        overwrite: whether an existing partition in ``out`` may be replaced.
        features: as `hddm.data.features.open_feature_extractor`.
        cache: folder in which features are kept; without it they are computed anew and forgotten.
        replace_cache: whether features of other images or settings in ``cache`` may go.
        max_bad: images that may be broken; they are left out, and the record names them.
        held_out: share in [0, 1) of the images that goes to ``held_out/shard_k`` instead, on average
            (`hddm.data.partition`): equal images are on one side, the same one for any number of shards.
        caption_column: as `hddm.data.sources.open_source`.
        label_column: as `hddm.data.sources.open_source`.

    Returns:
        The shard folders, in order.

    Raises:
        HddmError: for a partition or a shard in place of images, unreadable images, a cache of other images,
            fewer than `MIN_IMAGES` a shard, or a share that leaves too few on a side: before features are
            computed, but where chance leaves a shard too few to train on.
    """
    if num_shards != "auto" and num_shards < 1:
        raise UsageError(f"--shards {num_shards}: must be 1 or more")
    if not 0 <= held_out < 1:
        raise UsageError(f"--held-out {held_out:g}: must be 0 or more, and below 1")
    if max_bad < 0:
        raise UsageError(f"--max-bad {max_bad}: must be 0 or more")
    _refuse_partition(images)
    source = open_source(images, caption_column, label_column)
    fewest = MIN_IMAGES if num_shards == "auto" else num_shards * MIN_IMAGES
    if len(source) < fewest:
        raise _too_few(source, len(source), num_shards)
    if held_out:
        check_share(images, len(source), 2 if num_shards == "auto" else num_shards, held_out)
    check_absent(out, PARTITION_FILE, overwrite)
    extractor = open_feature_extractor(features, seed)
    with _kept(cache, out) as folder:
        found = compute_features(source, extractor, folder, max_bad, replace_cache)
        candidates = propose(found, images_needed(held_out), seed) if num_shards == "auto" else ()
        wanted = best(candidates) if num_shards == "auto" else num_shards
        if len(found) < wanted * MIN_IMAGES:
            raise _too_few(source, len(found), wanted)
        clusters = cluster(found, wanted, FINE_PER_SHARD * wanted, seed)
        numbers = numbers_of(found.pixels)
        check_rest(images, numbers, clusters.assignment, wanted, held_out)
        division = Division(found, clusters, numbers < held_out)
        with writing(out), new_folder(out, PARTITION_FILE, overwrite) as draft:
            _write(source, division, draft, extractor, seed, held_out, candidates, cache)
    return [out / f"shard_{k}" for k in range(wanted)]


def _write(
    source: ImageSource,
    division: Division,
    folder: Path,
    extractor: Extractor,
    seed: int,
    held_out: float,
    candidates: tuple[Candidate, ...],
    cache: Path | None,
) -> None:
    shard, kept = division.shard, ~division.held_out
    hashes = write_shards(
        source, division.features, shard, division.held_out, division.num_shards, folder, cache
    )
    clusters = division.clusters
    tensors = {"fine_centres": clusters.fine_centres, "fine_to_coarse": clusters.fine_to_coarse}
    save_file(tensors, folder / "clusters.safetensors")
    counts = [np.bincount(shard[side], minlength=division.num_shards).tolist() for side in (kept, ~kept)]
    facts = PartitionRecord(
        format=FORMAT,
        images=len(division.features),
        features=extractor.name,
        extractor=extractor.identity,
        fine_clusters=len(clusters.fine_centres),
        seed=seed,
        sizes=counts[0],
        hashes=hashes,
        held_out_share=held_out,
        held_out=tuple(counts[1]) if held_out else (),
        copies=len(division.features) - len(np.unique(division.features.pixels, axis=0)),
        skipped=tuple(source.files[row] for row in division.features.broken),
        proposal={one.shards: one.silhouette for one in candidates} or None,
    )
    write_json(folder / PARTITION_FILE, facts.model_dump())
    write_report(folder, source, division.features, shard, facts)


@contextmanager
def _kept(cache: Path | None, out: Path) -> Iterator[Path]:
    """Folder of the features: ``cache``, or a temporary one beside ``out``."""
    if cache is not None:
        yield cache
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.features-", dir=out.parent) as folder:
        yield Path(folder)


def _refuse_partition(images: Path) -> None:
    """Of one, pictures and held-out images would be taken for images to train on; of a shard, no classes."""
    if (images / PARTITION_FILE).is_file():
        raise HddmError(f"{images}: is a partition already; name the images that it was made of")
    if holds_shard(images):
        own = images / "images"
        name = f"its images, {own}" if own.is_dir() else "the images that it was made of"
        raise HddmError(f"{images}: is a shard already; name {name}")


def _too_few(source: ImageSource, num: int, num_shards: int | str) -> HddmError:
    return HddmError(
        f"{source.root}: {num} images are too few for --shards {num_shards}: "
        f"a shard needs at least {MIN_IMAGES}"
    )
