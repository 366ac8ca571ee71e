"""Shards on disk: self-contained folders that a contributor can take away and train on.

shards/
  partition.json                 how the shards were made, and their sizes
  clusters.safetensors           fine centres and their shard
  shard_0/manifest.json          files with SHA-256 and label, one hash of it all, one of all shards
  shard_0/images/<file>          hard links where the file system allows, copies otherwise
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor

from hddm.data.clustering import Hierarchy, cluster
from hddm.data.features import pixel_pca
from hddm.data.images import ImageSet, decode, load_images, stack, to_unit_range
from hddm.errors import HddmError
from hddm.facts import Facts, read_facts
from hddm.files import link_or_copy, new_folder, write_json

FORMAT = "1.1"
MANIFEST = "manifest.json"
PARTITION_FILE = "partition.json"
MIN_IMAGES = 16
FINE_PER_SHARD = 8


class ImageEntry(Facts):
    """One image of a shard: its path inside the folder, its SHA-256 and its label."""

    file: str
    sha256: str
    label: int | None


class Manifest(Facts):
    """``manifest.json`` of a shard; ``hash`` covers every file, content and label."""

    format: str
    shard: int
    num_shards: int
    classes: list[str]
    hash: str
    partition: str | None = None
    """Hash of the hashes of all shards, which those of one partition share; format 1.0 has none."""
    images: list[ImageEntry]


class PartitionFacts(Facts):
    """``partition.json``: how the shards were made."""

    format: str
    images: int
    features: str
    fine_clusters: int
    seed: int
    sizes: list[int]
    hashes: list[str]


@dataclass(frozen=True)
class Shard:
    """One shard in memory; ``hash`` covers every file and label in it, ``partition`` all shards beside it."""

    folder: Path
    index: int
    num_shards: int
    hash: str
    classes: tuple[str, ...]
    pixels: Tensor
    labels: Tensor | None
    partition: str | None = None

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def images(self) -> Tensor:
        """Images (N, C, H, W) in [-1, 1]."""
        return to_unit_range(self.pixels)


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


def load_shard(folder: Path) -> Shard:
    """Read a shard, checking every file against its hash.

    Raises:
        HddmError: for a missing or newer manifest, a file outside the folder, a changed file, a label
            that is no class, or fewer than `MIN_IMAGES` images.
    """
    path = folder / MANIFEST
    _refuse_other_folder(folder, MANIFEST)
    manifest = read_facts(path, Manifest, FORMAT)
    entries = manifest.images
    if len(entries) < MIN_IMAGES:
        raise HddmError(
            f"{folder}: has {len(entries)} images; an expert needs at least {MIN_IMAGES} to train on"
        )
    digest = _digest(entries, manifest.classes)
    if digest != manifest.hash:
        raise HddmError(f"{path}: its list of images does not match its hash; take the shard anew")
    for entry in entries:
        if entry.label is not None and not 0 <= entry.label < len(manifest.classes):
            raise HddmError(
                f"{path}: {entry.file} has label {entry.label} of {len(manifest.classes)} classes"
            )
    names = [entry.file for entry in entries]
    pixels = stack([_read_checked(folder, entry) for entry in entries], names)
    labels = [entry.label for entry in entries]
    return Shard(
        folder,
        manifest.shard,
        manifest.num_shards,
        digest,
        tuple(manifest.classes),
        pixels,
        None if None in labels else torch.tensor(labels),
        manifest.partition,
    )


def find_shards(folder: Path) -> list[Path]:
    """The shard folders of a partition, in order.

    Raises:
        HddmError: where ``folder`` holds no partition.
    """
    _refuse_other_folder(folder, PARTITION_FILE)
    facts = read_facts(folder / PARTITION_FILE, PartitionFacts, FORMAT)
    return [folder / f"shard_{k}" for k in range(len(facts.sizes))]


def _refuse_other_folder(folder: Path, record: str) -> None:
    """Refuse a folder that holds no ``record``, and say what it is instead."""
    if not folder.is_dir():
        raise HddmError(f"{folder}: no such folder")
    if (folder / record).exists():
        return
    if (folder / PARTITION_FILE).exists():
        shard = folder / "shard_0"
        raise HddmError(f"{folder}: is a partition, not a shard; name one of its folders, as {shard}")
    if (folder / MANIFEST).exists():
        above = folder.parent if (folder.parent / PARTITION_FILE).exists() else None
        hint = f", {above}" if above else ""
        raise HddmError(f"{folder}: is a shard, not a partition; name the folder of all shards{hint}")
    kind = "shard" if record == MANIFEST else "partition"
    raise HddmError(f"{folder}: is no {kind}, since it holds no {record}; hddm partition writes them")


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
        hash=_digest(entries, source.classes),
        images=entries,
    )


def _write_centres(clusters: Hierarchy, folder: Path) -> None:
    tensors = {"fine_centres": clusters.fine_centres, "fine_to_coarse": clusters.fine_to_coarse}
    save_file(tensors, folder / "clusters.safetensors")


def _digest(entries: list[ImageEntry], classes: Sequence[str]) -> str:
    lines = [json.dumps(list(classes))] + [f"{e.file} {e.sha256} {e.label}" for e in entries]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _read_checked(folder: Path, entry: ImageEntry) -> np.ndarray:
    path = folder / entry.file
    if not path.resolve().is_relative_to(folder.resolve()):
        raise HddmError(f"{folder}: its manifest names {entry.file!r}, outside the folder; refused")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise HddmError(f"{path}: named by the manifest, but {error.strerror}") from error
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise HddmError(f"{path}: its content changed since the partition; take the shard anew")
    return decode(content, path)
