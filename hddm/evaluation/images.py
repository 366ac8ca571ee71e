"""Images to measure, from files, archives or shards, and their record in a result."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hddm.data.images import ImageSet, stack, too_many_bad
from hddm.evaluation.score_records import FEWEST_IMAGES, DataRecord, Role, SamplingRecord
from hddm.evaluation.sources import ReadImage, read_source, refuse_shared, shards_of, sources_of
from hddm.utils.errors import HddmError, counted
from hddm.utils.files import read_json
from hddm.utils.records import SAMPLING_FILE, parse_record

_FRESH: tuple[Role, ...] = ("validation", "held_out")
"""Roles of images that no model was trained on."""


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
    sources = {role: sources_of(path, role) for role, path in paths.items()}
    bad: dict[Role, dict[str, str]] = {}
    read: dict[Role, list[ReadImage]] = {}
    for role, found in sources.items():
        bad[role] = {}
        read[role] = []
        are_samples = role == "images" and not shards_of(paths[role], role)
        for prefix, source in found:
            read[role] += read_source(source, prefix, bad[role], are_samples)
    reasons: list[str] = []
    for of_role in bad.values():
        reasons += of_role.values()
    if len(reasons) > max_bad:
        places = dict.fromkeys(str(paths[role]) for role, of_role in bad.items() if of_role)
        raise too_many_bad(", ".join(places), reasons, max_bad)
    refuse_shared(paths, read)
    by_role: dict[str, ImageGroup] = {}
    for role, path in paths.items():
        _, first_source = sources[role][0]
        by_role[role] = _group(path, read[role], first_source.classes, tuple(bad[role]))
    return by_role


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
