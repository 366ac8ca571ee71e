"""Dividing images into shards of similar content and nearly equal size."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from hddm.data.clustering import Hierarchy, cluster
from hddm.data.clustering_proposal import Candidate, best, propose
from hddm.data.equal_images import count_copies
from hddm.data.feature_cache import ImageFeatures, compute_features
from hddm.data.features import Extractor, open_extractor
from hddm.data.held_out import check_rest, check_share, images_needed, numbers_of
from hddm.data.partition_report import write_report
from hddm.data.partition_writing import write_shards
from hddm.data.shard_records import FORMAT, MIN_IMAGES, PARTITION_FILE, PartitionFacts, holds_shard
from hddm.data.sources import ImageSource, open_source
from hddm.errors import HddmError, UsageError
from hddm.files import check_absent, new_folder, write_json, writing

FINE_PER_SHARD = 8


@dataclass(frozen=True)
class Division:
    """Where each image goes: ``shard`` (M,) and ``held_out`` (M,), by row of its ``features`` (M, d)."""

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
        num_shards: how many, or "auto" for the best of `hddm.data.clustering_proposal.propose`.
        seed: of the clusters, of what pixel components are fitted on, and of the report's random pictures.
        overwrite: whether an existing partition in ``out`` may be replaced.
        features: as `hddm.data.features.open_extractor`.
        cache: folder in which features are kept; without it they are computed anew and forgotten.
        replace_cache: whether features of other images or settings in ``cache`` may go.
        max_bad: images that may be broken; they are left out, and the record names them.
        held_out: share in [0, 1) of the images that goes to ``held_out/shard_k`` instead, on average
            (`hddm.data.held_out`): equal images are on one side, the same one for any number of shards.
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
    extractor = open_extractor(features, seed)
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
    facts = PartitionFacts(
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
        copies=count_copies(division.features.pixels),
        skipped=tuple(source.files[row] for row in division.features.broken),
        proposal={one.shards: one.silhouette for one in candidates} or None,
    )
    write_json(folder / PARTITION_FILE, facts.model_dump())
    write_report(folder, source, division.features, shard, facts)


@contextmanager
def _kept(cache: Path | None, out: Path) -> Iterator[Path]:
    """Where features lie: in ``cache``, or for a while beside ``out``."""
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
