"""Images at a path as evaluations read them, and those that a model learned from; without torch."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hddm.data.images import pixel_digest, read_image, shared_images
from hddm.data.shard_records import named_shards, open_images, read_manifest
from hddm.data.sources import open_source
from hddm.data.sources.base import ImageSource
from hddm.evaluation.score_records import Role
from hddm.utils.errors import HddmError

if TYPE_CHECKING:
    from hddm.data.shards import Shard

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


def refuse_shared(paths: Mapping[Role, Path], read: Mapping[Role, Sequence[ReadImage]]) -> None:
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


def sources_of(root: Path, role: Role) -> list[tuple[str, "Shard | ImageSource"]]:
    """The shards or the source that ``root`` names, each with the prefix of its images' names."""
    found = list[tuple[str, "Shard | ImageSource"]]()
    for folder in shards_of(root, role):
        is_encoded = read_manifest(folder).encoding is not None
        if not is_encoded:
            found.append((_prefix(folder, root), open_images(folder)))
            continue
        # Imported here: it imports torch, which images as files do not need.
        from hddm.data.shards import open_shard

        shard = open_shard(folder)
        if shard.space != "pixels":
            text = "holds latents, and figures are of pixels; name the partition of images"
            raise HddmError(f"{folder}: {text}")
        found.append((_prefix(folder, root), shard))
    return found or [("", open_source(root))]


def read_source(
    source: "Shard | ImageSource", prefix: str, bad: dict[str, str], are_samples: bool
) -> Iterator[ReadImage]:
    """Read all images of a source; ``bad`` gets unreadable ones by name."""
    if not isinstance(source, ImageSource):
        for row in range(len(source)):
            pixels = source.pixels_of(row)
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


def _digests(root: Path, role: Role) -> dict[bytes, str]:
    """Names of the images in ``root`` by the SHA-256 of their files, and of pixels that can be read."""
    found: dict[bytes, str] = {}
    folders = shards_of(root, role)
    are_latents = False
    for folder in folders:
        manifest = read_manifest(folder)
        are_latents = are_latents or manifest.vae is not None
        prefix = _prefix(folder, root)
        for row, entry in enumerate(manifest.rows):
            # Images of encoded shards are called by their rows, as in `read_source`.
            name = entry.file if manifest.encoding is None else str(row)
            found[bytes.fromhex(entry.sha256)] = prefix + name
    if are_latents:
        # Of these only the hashes of files are left.
        return found
    bad: dict[str, str] = {}
    for prefix, source in sources_of(root, role):
        if not folders and isinstance(source, ImageSource):
            for row, name in enumerate(source.files):
                found[hashlib.sha256(source.read(row)).digest()] = name
        for image in read_source(source, prefix, bad, are_samples=False):
            found[pixel_digest(image.pixels)] = image.name
    return found


def _are_apart(reference: Path, fresh: Path) -> bool:
    """True if hddm partition held the images of ``fresh`` out of those of ``reference``.

    Equal images are then on one side. Some may be equal as they are encoded, though not at their full size:
    `hddm.evaluation.measures.Memorisation` counts those.
    """
    training = [read_manifest(shard) for shard in shards_of(reference, "reference")]
    held_out = [read_manifest(shard) for shard in shards_of(fresh, "held_out")]
    if not training or not held_out or training[0].partition is None:
        return False
    if len({one.partition for one in [*training, *held_out]}) > 1:
        return False
    are_training = all(one.held_out_of is None for one in training)
    return are_training and all(one.held_out_of is not None for one in held_out)


def _prefix(folder: Path, root: Path) -> str:
    """What names of images in ``root`` begin with for those in ``folder``."""
    return "" if folder == root else f"{folder.relative_to(root).as_posix()}/"


def shards_of(root: Path, role: Role) -> list[Path]:
    """Shards that ``root`` names; none if it is another kind of source."""
    return named_shards(root, are_held_out=role != "reference")
