"""Images to measure, from files, archives or shards, and their record in a result."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hddm.data.images import ImageSet, pixel_digest, read_image, shared_images, stack, too_many_bad
from hddm.data.shard_records import named_shards, open_images, read_manifest
from hddm.data.shards import Shard, open_shard
from hddm.data.sources import open_source
from hddm.data.sources.base import ImageSource
from hddm.evaluation.score_records import FEWEST_IMAGES, DataRecord, Role, SamplingRecord
from hddm.utils.errors import HddmError, counted
from hddm.utils.files import read_json
from hddm.utils.records import SAMPLING_FILE, parse_record

_FRESH: tuple[Role, ...] = ("validation", "held_out")
"""Roles of images that no model was trained on."""
_KNOWN: dict[Role, str] = {
    "reference": "training",
    "validation": "validation",
    "held_out": "held-out",
}
"""Roles of real images, of which each image has one only, and their names in texts."""


class ReadImage(NamedTuple):
    """An image (H, W) or (H, W, 3) in bytes, and its number among the classes, if it has one."""

    name: str
    pixels: NDArray[np.uint8]
    label: int | None


@dataclass(frozen=True)
class ImageGroup:
    """Images (N, C, H, W) in bytes and their record."""

    images: ImageSet
    record: DataRecord


def read_data(paths: Mapping[Role, Path], max_bad: int = 0) -> dict[str, ImageGroup]:
    """Read the images of each role, in sorted order, without unreadable ones.

    A path is a source as in `hddm.data.sources.open_source`, or a shard or a partition, of images or encoded
    to pixels. A partition stands for its training images as reference, and for its held-out images in every
    other role (`hddm.data.shard_records.named_shards`). Samples must not be JPEG, by content, since its
    compression changes distances; real images may be: those of a partition, and those that are also named as
    held-out or validation images.

    Raises `HddmError`, before any image is read, as `open_source`, `open_shard` and `named_shards`, and for
    latents; for JPEG samples; for more than ``max_bad`` unreadable images in all, by name; for images of
    several sizes, and fewer than `FEWEST_IMAGES` in a group; and for an image that has two of the roles
    reference, validation and held-out.
    """
    for role in _FRESH:
        if "images" not in paths or role not in paths:
            continue
        if paths[role].resolve() == paths["images"].resolve():
            # Real images in the place of samples are read once, and so are the same in both roles.
            others = dict(paths)
            del others["images"]
            groups = read_data(others, max_bad)
            return {"images": groups[role], **groups}
    # All are opened before any image is read.
    sources = {role: _sources(path, role) for role, path in paths.items()}
    bad: dict[Role, dict[str, str]] = {}
    read: dict[Role, list[ReadImage]] = {}
    for role, found in sources.items():
        bad[role] = {}
        read[role] = []
        are_samples = role == "images" and not _shards(paths[role], role)
        for prefix, source in found:
            read[role] += _read(source, prefix, bad[role], are_samples)
    reasons: list[str] = []
    for of_role in bad.values():
        reasons += of_role.values()
    if len(reasons) > max_bad:
        places = dict.fromkeys(str(paths[role]) for role, of_role in bad.items() if of_role)
        raise too_many_bad(", ".join(places), reasons, max_bad)
    _refuse_shared(paths, read)
    by_role: dict[str, ImageGroup] = {}
    for role, path in paths.items():
        _, first_source = sources[role][0]
        by_role[role] = _group(path, read[role], first_source.classes, tuple(bad[role]))
    return by_role


def _refuse_shared(paths: Mapping[Role, Path], read: Mapping[Role, Sequence[ReadImage]]) -> None:
    """Refuse held-out and validation images that are also training images, or each other's, by pixels."""
    roles: list[Role] = [role for role in _KNOWN if role in paths]
    for other, role in itertools.combinations(roles, 2):
        if other == "reference" and _are_apart(paths[other], paths[role]):
            continue
        known = {pixel_digest(one.pixels): one.name for one in read[other]}
        shared = {}
        for one in read[role]:
            digest = pixel_digest(one.pixels)
            if digest in known:
                shared[one.name] = known[digest]
        if shared:
            among = f"{_KNOWN[other]} images of {paths[other]}"
            raise shared_images(role, paths[role], len(read[role]), among, shared)


def refuse_trained(role: Role, path: Path, learned: Iterable[Path]) -> None:
    """Refuse images of ``path`` that a model learned from in one of the shards or folders ``learned``.

    Images are the same if their files are, or their pixels as they are stored. Raises `HddmError`, in which
    ``role`` names the images of ``path``.
    """
    others = [shard for shard in learned if not _are_apart(shard, path)]
    if not others:
        return
    fresh = _digests(path, role)
    total = len(set(fresh.values()))
    for shard in others:
        known = _digests(shard, "reference")
        shared = {}
        for digest, name in fresh.items():
            if digest in known:
                shared[name] = known[digest]
        if shared:
            raise shared_images(role, path, total, f"training images of {shard}", shared)


def _digests(root: Path, role: Role) -> dict[bytes, str]:
    """Names of the images in ``root`` by the SHA-256 of their files, and of pixels that can be read."""
    found: dict[bytes, str] = {}
    folders = _shards(root, role)
    are_latents = False
    for folder in folders:
        manifest = read_manifest(folder)
        are_latents = are_latents or manifest.vae is not None
        prefix = _prefix(folder, root)
        for row, entry in enumerate(manifest.rows):
            # Images of encoded shards are called by their rows, as in `_read`.
            name = entry.file if manifest.encoding is None else str(row)
            found[bytes.fromhex(entry.sha256)] = prefix + name
    if are_latents:
        # Of these only the hashes of files are left.
        return found
    bad: dict[str, str] = {}
    for prefix, source in _sources(root, role):
        if not folders and not isinstance(source, Shard):
            for row, name in enumerate(source.files):
                found[hashlib.sha256(source.read(row)).digest()] = name
        for image in _read(source, prefix, bad, are_samples=False):
            found[pixel_digest(image.pixels)] = image.name
    return found


def _are_apart(reference: Path, fresh: Path) -> bool:
    """True if hddm partition held the images of ``fresh`` out of those of ``reference``.

    Equal images are then on one side. Some may be equal as they are encoded, though not at their full size:
    `hddm.evaluation.measures.Memorisation` counts those.
    """
    training = [read_manifest(shard) for shard in _shards(reference, "reference")]
    held_out = [read_manifest(shard) for shard in _shards(fresh, "held_out")]
    if not training or not held_out or training[0].partition is None:
        return False
    if len({one.partition for one in [*training, *held_out]}) > 1:
        return False
    are_training = all(one.held_out_of is None for one in training)
    return are_training and all(one.held_out_of is not None for one in held_out)


def _group(
    root: Path, found: Sequence[ReadImage], classes: tuple[str, ...], skipped: tuple[str, ...]
) -> ImageGroup:
    if len(found) < FEWEST_IMAGES:
        text = f"holds {counted(len(found), 'image')}; a distance needs {FEWEST_IMAGES} per side"
        raise HddmError(f"{root}: {text}")
    names = tuple(one.name for one in found)
    arrays = [one.pixels for one in found]
    pixels = stack(arrays, names, root)
    labels = [one.label for one in found if one.label is not None]
    tensor = torch.tensor(labels) if len(labels) == len(found) else None
    record = DataRecord(
        path=str(root),
        images=len(names),
        hash=_hash(arrays),
        shape=tuple(pixels.shape[1:]),
        skipped=skipped,
    )
    return ImageGroup(ImageSet(root, names, pixels, tensor, classes), record)


def _hash(images: Sequence[NDArray[np.uint8]]) -> str:
    """SHA-256 of the pixels of all ``images``, whatever their order."""
    digests = []
    for pixels in images:
        content = f"{pixels.shape} ".encode() + pixels.tobytes()
        digests.append(hashlib.sha256(content).digest())
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()


def alike(groups: dict[str, ImageGroup]) -> dict[str, ImageGroup]:
    """The same groups, with gray ones in RGB if another is in colour.

    Raises `HddmError` for images of different sizes.
    """
    if len({group.record.shape[1:] for group in groups.values()}) > 1:
        listed = ", ".join(f"{name} {group.record.shape}" for name, group in groups.items())
        raise HddmError(
            f"images of different shapes (C, H, W) do not compare: {listed}; resize none of them "
            "by hand, but make samples and references of one size"
        )
    if len({group.record.shape[0] for group in groups.values()}) == 1:
        return groups
    alike = {}
    for name, group in groups.items():
        pixels = group.images.pixels.expand(-1, 3, -1, -1)
        record = group.record.model_copy(update={"shape": tuple(pixels.shape[1:])})
        alike[name] = ImageGroup(replace(group.images, pixels=pixels), record)
    return alike


def read_sampling(images: Path) -> SamplingRecord | None:
    """Record that ``hddm sample`` leaves beside images, if any, without the usage of experts."""
    path = images / SAMPLING_FILE
    if not path.is_file():
        return None
    content = read_json(path)
    content.pop("expert_use", None)
    return parse_record(content, SamplingRecord, str(path))


def conditions(
    samples: ImageSet, sampling: SamplingRecord | None, classes: tuple[str, ...]
) -> tuple[Tensor | None, bool]:
    """Condition (n,) of each of ``samples``, and True if it is a number among ``classes``.

    Taken from folders of ``samples`` named like ``classes``; else from the labels or prompts that were cycled
    over the images. Labels match by name, or by number if no names are recorded. None if nothing is known.
    """
    if samples.labels is not None and set(samples.classes) <= set(classes):
        return class_numbers(samples.classes, classes)[samples.labels], True
    if samples.labels is not None:
        return samples.labels, False
    # If images are missing, their conditions are unknown.
    if sampling is None or sampling.num_images != len(samples):
        return None, False
    numbers = sampling.start + torch.arange(len(samples))
    labels = sampling.class_labels
    names = sampling.class_names
    if labels:
        if not names:
            are_known = max(labels) < len(classes)
            return torch.tensor(labels)[numbers % len(labels)], are_known
        known = set(names) <= set(classes)
        found = class_numbers(names, classes) if known else torch.tensor(labels)
        return found[numbers % len(found)], known
    prompts = sampling.prompts
    if not prompts:
        return None, False
    # Equal prompts are one condition.
    distinct = class_numbers(prompts, prompts)
    return distinct[numbers % len(prompts)], False


def class_numbers(names: Sequence[str], classes: tuple[str, ...]) -> Tensor:
    """Numbers (n,) of ``names`` among ``classes``."""
    return torch.tensor([classes.index(name) for name in names])


def _sources(root: Path, role: Role) -> list[tuple[str, Shard | ImageSource]]:
    """The shards or the source that ``root`` names, each with the prefix of its images' names."""
    found = list[tuple[str, Shard | ImageSource]]()
    for folder in _shards(root, role):
        is_encoded = read_manifest(folder).encoding is not None
        source = open_shard(folder) if is_encoded else open_images(folder)
        found.append((_prefix(folder, root), source))
        if isinstance(source, Shard) and source.space != "pixels":
            text = "holds latents, and figures are of pixels; name the partition of images"
            raise HddmError(f"{folder}: {text}")
    return found or [("", open_source(root))]


def _prefix(folder: Path, root: Path) -> str:
    """What names of images in ``root`` begin with for those in ``folder``."""
    return "" if folder == root else f"{folder.relative_to(root).as_posix()}/"


def _shards(root: Path, role: Role) -> list[Path]:
    """Shards that ``root`` names; none if it is another kind of source."""
    return named_shards(root, are_held_out=role != "reference")


def _read(
    source: Shard | ImageSource, prefix: str, bad: dict[str, str], are_samples: bool
) -> Iterator[ReadImage]:
    """Read all images of a source; ``bad`` gets unreadable ones by name."""
    if isinstance(source, Shard):
        for row in range(len(source)):
            pixels = source.stored.main.take(torch.tensor([row]))[0].permute(1, 2, 0).numpy()
            if pixels.shape[2] == 1:
                pixels = pixels[..., 0]
            label = None if source.labels is None else int(source.labels[row])
            yield ReadImage(f"{prefix}{row}", pixels, label)
        return
    for row, name in enumerate(source.files):
        path = source.root / name
        try:
            image = read_image(source.read(row), path)
        except HddmError as error:
            bad[f"{prefix}{name}"] = error.message
            continue
        if are_samples and image.format in ("JPEG", "MPO"):
            raise HddmError(
                f"{path}: JPEG compression changes a Fréchet distance; save samples as PNG"
            )
        label = None if source.labels is None else source.labels[row]
        yield ReadImage(f"{prefix}{name}", image.pixels, label)
