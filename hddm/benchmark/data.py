"""Images of a benchmark: to train on, to choose settings by, and to confirm them on."""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from hddm.benchmark.jobs import Job, Store
from hddm.benchmark.settings import DataSettings, PartitionSettings, Split
from hddm.data.images import decode, fit_image, load_images, save_png, to_bytes
from hddm.data.partition import partition
from hddm.data.shard_records import HELD_OUT, ShardManifest, find_shards, read_manifest
from hddm.data.shards import Shard, load_shard
from hddm.data.sources import open_source
from hddm.utils.errors import HddmError, optional
from hddm.utils.files import link_or_copy
from hddm.utils.tensors import read_safetensors, refuse_other_kinds

SHARDS, WHOLE = "shards", "whole"
TRAINING_SIDE, HELD_OUT_SIDE = "train", "held_out"
_PACKED = "images.safetensors"


@dataclass(frozen=True)
class SourceImages:
    """Where images lie, and the hash of the training side; the other is not read before it is scored on."""

    training: Path
    held_out: Path | None
    hash: str
    job: Job | None = None
    """The job that wrote them, where a benchmark did."""


@dataclass(frozen=True)
class PartitionedImages:
    """The shards of the training side, and all of it as one; validation images are kept from both."""

    shards: Path
    whole: Path

    @cached_property
    def shard_folders(self) -> list[Path]:
        return find_shards(self.shards)

    @cached_property
    def manifests(self) -> list[ShardManifest]:
        return [read_manifest(folder) for folder in self.shard_folders]

    @property
    def hashes(self) -> list[str]:
        return [manifest.hash for manifest in self.manifests]

    @property
    def all_images(self) -> Path:
        return self.whole / "shard_0"

    @property
    def validation_folders(self) -> list[Path]:
        """Validation images of each shard that has some."""
        folders = (self.shards / HELD_OUT / f"shard_{index}" for index in range(len(self.manifests)))
        return [folder for folder in folders if folder.is_dir()]

    @property
    def validation_manifests(self) -> list[ShardManifest]:
        return [read_manifest(folder) for folder in self.validation_folders]


def prepare_images(settings: DataSettings, data: Path | None, store: Store) -> SourceImages:
    """Return both sides, written first if digits or cut from one folder; paths lie below ``data``."""
    if settings.source == "digits":
        if data is not None:
            raise HddmError(f"--data {data}: this benchmark uses scikit-learn's digits; leave the option out")
        job = Job("digits", {})
        write: Callable[[Path], object] = write_digits
    else:
        training, held_out = image_paths(settings, data)
        content, share = hash_of_images(training), settings.held_out_share
        if settings.classes or settings.resolution:
            assert held_out is not None
            chosen: dict[str, Any] = {"classes": list(settings.classes), "resolution": settings.resolution}
            job = Job("resized", chosen, {"images": content, "held_out": hash_of_images(held_out)})
            write = partial(_resize, {TRAINING_SIDE: training, HELD_OUT_SIDE: held_out}, **chosen)
        elif share:
            job = Job("split", {"held_out_share": share}, {"images": content})
            write = partial(_split, training, share)
        else:
            return SourceImages(training, held_out, content)

    def make(folder: Path) -> dict[str, str]:
        write(folder)
        return {"hash": hash_of_images(folder / TRAINING_SIDE)}

    made, folder = store.once(job, make), store.path(job)
    return SourceImages(folder / TRAINING_SIDE, folder / HELD_OUT_SIDE, made["hash"], job)


def image_paths(settings: DataSettings, data: Path | None) -> tuple[Path, Path | None]:
    """Return the paths of a user's training and held-out images, which must exist and not overlap."""
    above = data or Path()
    training = above / settings.training
    held_out = None if settings.held_out is None else above / settings.held_out
    for key, path in (("training", training), ("held_out", held_out)):
        if path is not None and not path.exists():
            raise HddmError(
                f"{path}: no such images; name by --data the folder that data.{key}, "
                f"{getattr(settings, key)!r}, lies in"
            )
    one, other = training.resolve(), (held_out or Path()).resolve()
    if held_out is not None and (one.is_relative_to(other) or other.is_relative_to(one)):
        raise HddmError(
            f"data.held_out: {held_out} and the training images, {training}, overlap, so held-out "
            f"images would be trained on; set data.training to a folder of training images only"
        )
    return training, held_out


def refuse_work_among_images(settings: DataSettings, data: Path | None, folders: Iterable[Path]) -> None:
    """Refuse ``folders`` to write among the images, which a second start would take for more of them."""
    images_of = [path for path in image_paths(settings, data) if path is not None]
    for images, folder in itertools.product(images_of, folders):
        if folder.resolve().is_relative_to(images.resolve()):
            raise HddmError(f"{folder}: is inside the image folder {images}; choose a folder outside it")


def divide(
    sources: SourceImages, data: DataSettings, settings: PartitionSettings, store: Store
) -> PartitionedImages:
    """Partition the training side, without its validation images, into shards and into one whole.

    Validation images are chosen by the hash of their pixels (`hddm.data.partition`), so both leave out the
    same.
    """

    def once(name: str, shards: int, features: str) -> Path:
        chosen: dict[str, Any] = {"features": features, "seed": settings.seed}
        chosen["held_out"] = data.validation_share
        # Left out where there are none, so that earlier partitions are found again.
        if settings.classes is not None and name == SHARDS:
            chosen["classes"] = [*settings.classes.values()]
        job = Job(name, {"shards": shards, **chosen}, {"images": sources.hash})

        def make(folder: Path) -> None:
            partition(sources.training, folder / name, shards, **chosen)

        store.once(job, make)
        return store.path(job) / name

    return PartitionedImages(once(SHARDS, settings.shards, settings.features), once(WHOLE, 1, "pixels"))


def reference_job(
    sources: SourceImages, divided: PartitionedImages, split: Split, has_domains: bool = False
) -> Job:
    """The job that packs the images that samples are scored against, with all labels for `has_domains`."""
    inputs = {"training": read_manifest(divided.all_images).hash, "shards": divided.hashes}
    if split == "validation":
        inputs["fresh"] = [manifest.hash for manifest in divided.validation_manifests]
    elif sources.held_out is None:
        raise HddmError("there are no held-out images to score on: set data.held_out or data.held_out_share")
    else:
        inputs["fresh"] = [hash_of_images(sources.held_out)]
    # Left out where it changes nothing, so that earlier ones are found again.
    return Job("reference", {"score_on": split} | ({"domains": True} if has_domains else {}), inputs)


def fewest_images(sources: SourceImages, divided: PartitionedImages) -> int:
    """Count the images of the smallest side that samples are ever scored against, opening none."""
    counts = [
        sum(len(manifest.images) for manifest in divided.manifests),
        sum(len(manifest.images) for manifest in divided.validation_manifests),
        0 if sources.held_out is None else len(open_source(sources.held_out).files),
    ]
    return min(filter(None, counts))


def write_reference(
    store: Store, job: Job, sources: SourceImages, divided: PartitionedImages
) -> dict[str, Any]:
    """Do `reference_job`: pack bytes into one file, which workers read fast; return its result."""

    def make(folder: Path) -> dict[str, Any]:
        shards = [load_shard(path) for path in divided.shard_folders]
        classes = shards[0].classes
        if job.settings["score_on"] == "held-out":
            assert sources.held_out is not None
            held_out = load_images(sources.held_out)
            fresh, fresh_labels = held_out.pixels, held_out.labels
            if job.settings.get("domains") and held_out.classes != classes:
                raise HddmError(
                    f"{sources.held_out}: its classes are {list(held_out.classes)}, those of the training "
                    f"images {list(classes)}; domains need the same"
                )
        else:
            fresh, fresh_labels = _joined([load_shard(path) for path in divided.validation_folders])
        training, labels = _joined(shards)
        if fresh.shape[1:] != training.shape[1:]:
            shapes = {"training": tuple(training.shape[1:]), "fresh": tuple(fresh.shape[1:])}
            raise HddmError(f"images of different shapes (C, H, W) do not compare: {shapes}")
        tensors = {
            "training": training,
            "shard": torch.cat([torch.full((len(one),), one.index) for one in shards]),
            "labels": labels,
            "fresh": fresh,
            "fresh_labels": fresh_labels if job.settings.get("domains") else None,
        }
        save_file({name: one for name, one in tensors.items() if one is not None}, folder / _PACKED)
        return {"classes": list(classes), "images": {"training": len(training), "fresh": len(fresh)}}

    return store.once(job, make)


def read_reference(folder: Path) -> Mapping[str, Tensor]:
    """``training`` and ``fresh`` bytes (n, C, H, W); ``shard`` and perhaps ``labels`` (n,) of the former.

    For domains there are ``fresh_labels`` (n,) too.
    """
    tensors, numbers = read_safetensors(folder / _PACKED), (torch.int64, 1)
    for images, labels, further in (("training", "labels", ["shard"]), ("fresh", "fresh_labels", [])):
        kinds = {images: (torch.uint8, 4), labels: numbers, **dict.fromkeys(further, numbers)}
        found = {name: value for name, value in tensors.items() if name in kinds}
        refuse_other_kinds(folder, found, kinds, optional=labels)
    return tensors


def hash_of_images(path: Path) -> str:
    """SHA-256 of the names, contents, labels and captions of all images at ``path``."""
    source = open_source(path)
    digest = hashlib.sha256("\n".join(source.classes).encode())
    for index, name in enumerate(source.files):
        label = None if source.labels is None else source.labels[index]
        caption = None if source.captions is None else source.captions[index]
        content = hashlib.sha256(source.read(index)).hexdigest()
        digest.update(f"\n{name} {content} {label} {caption!r}".encode())
    return digest.hexdigest()


def _joined(shards: Sequence[Shard]) -> tuple[Tensor, Tensor | None]:
    """Bytes (n, C, H, W) of all images, and their labels (n,) where all have some."""
    labels = [one.labels for one in shards if one.labels is not None]
    pixels = torch.cat([to_bytes(shard.images) for shard in shards])
    return pixels, torch.cat(labels) if len(labels) == len(shards) else None


def _resize(sides: Mapping[str, Path], folder: Path, classes: Sequence[str], resolution: int | None) -> None:
    """Write the images of ``classes``, or all, cropped and resized, to a folder per side and class."""
    for side, images in sides.items():
        source = open_source(images)
        if unknown := sorted(set(classes) - set(source.classes)):
            raise HddmError(
                f"{images}: has no class {', '.join(unknown)}; it has {', '.join(source.classes)}"
            )
        for index, name in enumerate(source.files):
            label = "" if source.labels is None else source.classes[source.labels[index]]
            if classes and label not in classes:
                continue
            image = Image.fromarray(decode(source.read(index), images / name))
            path = folder / side / label / f"{index:06d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            (fit_image(image, resolution) if resolution else image).save(path)


def _split(images: Path, share: float, folder: Path) -> None:
    """Link images to ``train/`` and ``held_out/`` by the hash of their pixels, so equal ones to one side."""
    source, loaded = open_source(images), load_images(images)
    if source.captions is not None:
        raise HddmError(f"{images}: captions would be lost; hold images out yourself and set data.held_out")
    for index, name in enumerate(source.files):
        # The prefix differs from that of validation images, which would otherwise be the same ones.
        digest = hashlib.sha256(b"held-out" + loaded.pixels[index].numpy().tobytes()).digest()
        side = HELD_OUT_SIDE if int.from_bytes(digest[:8], "big") / 2**64 < share else TRAINING_SIDE
        path, target = source.path(index), folder / side / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if path is None:
            raise HddmError(f"{images}: is an archive; set data.held_out to its held-out images")
        link_or_copy(path, target)


HELD_OUT_SHARE = 5


def write_digits(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write ``train/<digit>/<n>.png`` and ``held_out/<digit>/<n>.png``; return both folders.

    1,797 images of 8×8 pixels from the test part of the UCI Optical Recognition of Handwritten Digits
    set. A fifth of them, chosen at random, is held out before anything looks at the rest.
    """
    bunch = optional("sklearn.datasets", "the digits", "train").load_digits()
    # Levels are 0 … 16.
    pixels = torch.from_numpy(np.round(bunch.images / 16 * 255).astype(np.uint8))[:, None]
    order = np.random.default_rng(seed).permutation(len(pixels))
    held_out = set(order[: len(pixels) // HELD_OUT_SHARE].tolist())
    for index, (image, digit) in enumerate(zip(pixels, bunch.target.tolist(), strict=True)):
        side = HELD_OUT_SIDE if index in held_out else TRAINING_SIDE
        path = folder / side / str(digit) / f"{index:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_png(image, path)
    return folder / TRAINING_SIDE, folder / HELD_OUT_SIDE
