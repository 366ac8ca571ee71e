"""Dividing images into shards of similar content and nearly equal size."""

import hashlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from hddm.data.clustering import Hierarchy, cluster
from hddm.data.features import pixel_pca
from hddm.data.images import ImageSet, load_images
from hddm.data.shards import (
    FORMAT,
    MANIFEST,
    MIN_IMAGES,
    PARTITION_FILE,
    ImageEntry,
    Manifest,
    PartitionFacts,
    content_hash,
)
from hddm.errors import HddmError
from hddm.files import link_or_copy, new_folder, write_json

FINE_PER_SHARD = 8


def partition(images: Path, out: Path, num_shards: int, seed: int = 0, overwrite: bool = False) -> list[Path]:
    """Divide a folder of images into shards of similar content and nearly equal size.

    Pixel PCA, then balanced hierarchical k-means with `FINE_PER_SHARD` fine clusters a shard.

    Returns:
        The shard folders.

    Raises:
        HddmError: for unreadable images, or fewer than `MIN_IMAGES` a shard.
    """
    if num_shards < 1:
        raise HddmError(f"--shards must be at least 1, not {num_shards}")
    source = load_images(images)
    if len(source) < num_shards * MIN_IMAGES:
        raise HddmError(
            f"{images}: {len(source)} images are too few for --shards {num_shards}: "
            f"a shard needs at least {MIN_IMAGES}"
        )
    fine = min(FINE_PER_SHARD * num_shards, len(source) // 2)
    clusters = cluster(pixel_pca(source.pixels), num_shards, fine, seed)
    sizes = np.bincount(clusters.assignment, minlength=num_shards).tolist()
    if min(sizes) < MIN_IMAGES:
        raise HddmError(f"{images}: the smallest of {num_shards} shards got {min(sizes)} images; take fewer")
    with new_folder(out, PARTITION_FILE, overwrite) as draft:
        manifests = [_write_images(source, clusters, k, draft / f"shard_{k}") for k in range(num_shards)]
        hashes = [manifest.hash for manifest in manifests]
        whole = hashlib.sha256("\n".join(hashes).encode()).hexdigest()
        for k, manifest in enumerate(manifests):
            content = manifest.model_copy(update={"partition": whole})
            write_json(draft / f"shard_{k}" / MANIFEST, content.model_dump())
        _write_centres(clusters, draft)
        facts = PartitionFacts(
            format=FORMAT,
            images=len(source),
            features="pixel_pca",
            fine_clusters=fine,
            seed=seed,
            sizes=sizes,
            hashes=hashes,
        )
        write_json(draft / PARTITION_FILE, facts.model_dump())
    return [out / f"shard_{k}" for k in range(num_shards)]


def _write_images(source: ImageSet, clusters: Hierarchy, k: int, folder: Path) -> Manifest:
    entries = []
    for row in np.flatnonzero(clusters.assignment == k).tolist():
        name = f"images/{source.files[row]}"
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(source.root / source.files[row], copy)
        label = None if source.labels is None else int(source.labels[row])
        sha256 = hashlib.sha256(copy.read_bytes()).hexdigest()
        entries.append(ImageEntry(file=name, sha256=sha256, label=label))
    return Manifest(
        format=FORMAT,
        shard=k,
        num_shards=int(clusters.assignment.max()) + 1,
        classes=list(source.classes),
        hash=content_hash(entries, source.classes),
        images=entries,
    )


def _write_centres(clusters: Hierarchy, folder: Path) -> None:
    tensors = {"fine_centres": clusters.fine_centres, "fine_to_coarse": clusters.fine_to_coarse}
    save_file(tensors, folder / "clusters.safetensors")
