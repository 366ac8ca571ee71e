"""The images at a path, whatever holds them: files, archives, a shard or a partition."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from hddm.data.decoding import decode, read_header
from hddm.data.encoding_records import is_encoded
from hddm.data.images import to_bytes
from hddm.data.open_shard import open_shard
from hddm.data.shard_records import HELD_OUT, PARTITION_FILE, find_held_out, find_shards, holds_shard
from hddm.data.shard_source import ShardSource
from hddm.data.sources import ImageSource, open_source
from hddm.errors import HddmError

Role = Literal["images", "reference", "held-out"]
"""What a path is named for: samples, training images, or images that no model has seen."""
_ROWS = 4096
"""Of an encoded shard that are brought back to bytes at once."""


@dataclass
class Pictures:
    """Images (H, W) or (H, W, 3) in bytes, by ``names``, and the reasons why others are ``bad``, by theirs.

    ``modes`` are Pillow's of their files; encoded shards have none, and are L or RGB. ``labels`` are numbers
    among ``classes``, None where an image has none.
    """

    classes: tuple[str, ...]
    names: list[str] = field(default_factory=list)
    arrays: list[NDArray[np.uint8]] = field(default_factory=list)
    modes: list[str] = field(default_factory=list)
    labels: list[int] | None = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)


def read_pictures(root: Path, role: Role) -> Pictures:
    """All images at ``root``, in sorted order.

    Args:
        root: as `hddm.data.sources.open_source`; or a shard, or a partition, of images or encoded to pixels.
            Of a partition these are its training images, its held-out ones where it is named for such.
        role: what it is named for. Samples must not be JPEG, by content: its compression moves distances.

    Raises:
        HddmError: as `open_source`, `hddm.data.shard_records.find_shards` and
            `hddm.data.open_shard.open_shard`; for JPEG samples, latents, a partition named as samples, and
            one without held-out images named for such. Images that cannot be read are ``bad``.
    """
    folders = _shards(root, role)
    parts = [_of_shard(root, folder, role) for folder in folders]
    if not folders:
        parts = [_of_source(open_source(root), "", role)]
    if len({part.classes for part in parts}) > 1:
        raise HddmError(f"{root}: its shards have different classes; take them from one partition")
    whole = Pictures(parts[0].classes)
    for part in parts:
        whole.names += part.names
        whole.arrays += part.arrays
        whole.modes += part.modes
        whole.labels = None if whole.labels is None or part.labels is None else whole.labels + part.labels
        whole.bad |= part.bad
    return whole


def check_pictures(root: Path, role: Role) -> None:
    """Refuse a path that holds no images; none of them is read. Raises as `read_pictures` then would."""
    if not _shards(root, role):
        open_source(root)


def _shards(root: Path, role: Role) -> list[Path]:
    """The shards that ``root`` stands for, none where it is another source of images."""
    if holds_shard(root):
        return [root]
    if root.name == HELD_OUT and (root.parent / PARTITION_FILE).is_file():
        return _held_out(root.parent)
    if not (root / PARTITION_FILE).is_file():
        return []
    if role == "images":
        shard = root / "shard_0"
        raise HddmError(f"{root}: is a partition, not samples; name one of its shards, as {shard}")
    return find_shards(root) if role == "reference" else _held_out(root)


def _held_out(partition: Path) -> list[Path]:
    found = find_held_out(partition)
    if not found:
        raise HddmError(f"{partition}: holds no held-out images; hddm partition --held-out keeps some")
    return found


def _of_shard(root: Path, folder: Path, role: Role) -> Pictures:
    prefix = "" if folder == root else f"{folder.relative_to(root).as_posix()}/"
    if not is_encoded(folder):
        return _of_source(ShardSource.of(folder), prefix, role)
    shard = open_shard(folder)
    if shard.space != "pixels":
        raise HddmError(
            f"{folder}: holds latents, and figures are of pixels; name the partition of images that it was "
            "encoded from"
        )
    found = Pictures(shard.classes, labels=None if shard.labels is None else shard.labels.tolist())
    for rows in torch.arange(len(shard)).split(_ROWS):
        pixels = to_bytes(shard.take(rows)).permute(0, 2, 3, 1).numpy()
        found.arrays += [image[..., 0] if image.shape[2] == 1 else image for image in pixels]
        found.names += [f"{prefix}{row}" for row in rows.tolist()]
    found.modes = ["L" if image.ndim == 2 else "RGB" for image in found.arrays]
    return found


def _of_source(source: ImageSource, prefix: str, role: Role) -> Pictures:
    found = Pictures(source.classes)
    rows = []
    for row, name in enumerate(source.files):
        path = source.root / name
        try:
            content = source.read(row)
            header, array = read_header(content, path), decode(content, path)
        except HddmError as error:
            found.bad[f"{prefix}{name}"] = error.message
            continue
        if role == "images" and header.format in ("JPEG", "MPO"):
            raise HddmError(f"{path}: JPEG compression moves a Fréchet distance; save samples as PNG")
        rows.append(row)
        found.names.append(f"{prefix}{name}")
        found.arrays.append(array)
        found.modes.append(header.mode)
    labels = source.labels
    found.labels = None if labels is None else [labels[row] for row in rows]
    return found
