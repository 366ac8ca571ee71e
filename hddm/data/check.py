"""Check of every image before training: damage, sizes, modes, labels, equal images."""

import hashlib
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

from hddm.data.images import THREADS, OversizedImageError, pixel_digest, read_ahead, read_image
from hddm.data.shard_records import (
    PARTITION_FILE,
    find_held_out,
    find_shards,
    holds_shard,
    open_images,
)
from hddm.data.sources import open_source
from hddm.data.sources.base import ImageSource
from hddm.utils.errors import TO_ONE_SIZE, HddmError, counted, shown
from hddm.utils.progress import Progress
from hddm.utils.records import Record

_SHOWN = 5
_AHEAD = 32
"""Images held in memory at a time."""


class BadImage(Record):
    """An image that cannot be trained on, and why."""

    name: str
    kind: Literal["unreadable", "oversized", "corrupt"]
    reason: str


class PartReport(Record):
    """Counts of one shard, or of one source of images.

    ``modes`` and ``sizes`` (upright "width×height") count images that are not bad, the most frequent first.
    ``transparent`` images lose their alpha channel. ``captions`` is None for data without captions;
    ``empty_captions`` hold no text.
    """

    name: str
    images: int
    modes: dict[str, int]
    sizes: dict[str, int]
    transparent: int
    classes: dict[str, int]
    captions: int | None
    empty_captions: int
    bad: list[BadImage]

    def lines(self) -> list[str]:
        """Text of the report."""
        lines = [f"{self.name}: {counted(self.images, 'image')}"]
        for title, counts in (("modes", self.modes), ("sizes", self.sizes)):
            if counts:
                values = shown([f"{name} ({count})" for name, count in counts.items()], _SHOWN)
                lines.append(f"  {title}: {', '.join(values)}")
        if self.transparent:
            lines.append(f"  {counted(self.transparent, 'loses its', 'lose their')} transparency")
        if self.classes:
            low, high = min(self.classes.values()), max(self.classes.values())
            each = low if low == high else f"{low} to {high}"
            lines.append(f"  classes: {len(self.classes)}, {each} images each")
        if self.captions is not None:
            lines.append(f"  captions: {self.captions}, {self.empty_captions} of them empty")
        if self.bad:
            lines.append(f"  bad: {len(self.bad)}")
            for bad in self.bad:
                lines.append(f"    {bad.kind}: {bad.reason}")
        return lines


class DataReport(Record):
    """Findings of a check; each of ``duplicates`` has the names of images with equal pixels."""

    path: str
    kind: Literal["images", "shard", "partition"]
    parts: list[PartReport]
    duplicates: list[list[str]]

    @property
    def bad(self) -> list[BadImage]:
        """Bad images of all parts."""
        found: list[BadImage] = []
        for part in self.parts:
            found += part.bad
        return found

    def lines(self) -> list[str]:
        """Text of the report, which names each bad or repeated file."""
        lines: list[str] = []
        sizes: set[str] = set()
        for part in self.parts:
            lines += part.lines()
            sizes.update(part.sizes)
        if len(sizes) > 1:
            lines.append(f"images of {len(sizes)} sizes, and training takes one: {TO_ONE_SIZE}")
        repeated = len(self.duplicates)
        if repeated:
            lines.append(f"equal images: {repeated}")
            for group in self.duplicates:
                lines.append(f"  {' = '.join(group)}")
        images = sum(part.images for part in self.parts)
        counts = f"{counted(images, 'image')}, {len(self.bad)} bad, {repeated} that "
        counts += "occurs more than once" if repeated == 1 else "occur more than once"
        return [*lines, f"{self.path}: {counts}"]


def check_data(
    path: Path, caption_column: str | None = None, label_column: str | None = None
) -> DataReport:
    """Read and decode every image, with a few in memory at a time.

    ``path`` is a source of images as in `hddm.data.sources.open_source`, a shard, or a partition, whose
    held-out images are separate parts. Raises `HddmError` for any other path and for unreadable lists; bad
    images are reported.
    """
    kind: Literal["images", "shard", "partition"] = "images"
    if (path / PARTITION_FILE).is_file():
        kind = "partition"
        sources = {}
        for folder in [*find_shards(path), *find_held_out(path)]:
            sources[folder.relative_to(path).as_posix()] = open_images(folder)
    elif holds_shard(path):
        kind = "shard"
        sources = {str(path): open_images(path)}
    else:
        sources = {str(path): open_source(path, caption_column, label_column)}
    parts = []
    # Names of all images by their digest.
    copies: dict[bytes, list[str]] = defaultdict(list)
    with (
        Progress(sum(map(len, sources.values())), "check") as advance,
        ThreadPoolExecutor(THREADS) as pool,
    ):
        for name, source in sources.items():
            modes = Counter[str]()
            sizes = Counter[str]()
            transparent = 0
            bad: list[BadImage] = []
            batches = ([i] for i in range(len(source)))
            looks = read_ahead(pool, partial(_look, source), batches, _AHEAD)
            for file, ((digest, found),) in zip(source.files, looks, strict=True):
                if digest is not None:
                    copies[digest].append(f"{name}/{file}" if kind == "partition" else file)
                if isinstance(found, BadImage):
                    bad.append(found)
                else:
                    mode, size, is_transparent = found
                    modes[mode] += 1
                    sizes[size] += 1
                    transparent += is_transparent
                advance(1)
            captions = source.captions
            parts.append(
                PartReport(
                    name=name,
                    images=len(source),
                    modes=dict(modes.most_common()),
                    sizes=dict(sizes.most_common()),
                    transparent=transparent,
                    classes=_class_sizes(source),
                    captions=None if captions is None else len(captions),
                    empty_captions=sum(not text.strip() for text in captions or ()),
                    bad=bad,
                )
            )
    duplicates = [names for names in copies.values() if len(names) > 1]
    return DataReport(path=str(path), kind=kind, parts=parts, duplicates=duplicates)


def _class_sizes(source: ImageSource) -> dict[str, int]:
    """Number of images of each class, in the order of the classes; empty for images without labels."""
    members = Counter(source.labels or ())
    if not members:
        return {}
    return {name: members[k] for k, name in enumerate(source.classes)}


def _look(source: ImageSource, i: int) -> tuple[bytes | None, tuple[str, str, bool] | BadImage]:
    """Digest of the pixels, else of the file; and mode, size, transparency, or why the image is bad."""
    name = source.files[i]
    digest = None
    try:
        content = source.read(i)
        digest = hashlib.sha256(content).digest()
        found = read_image(content, source.root / name)
        height, width = found.pixels.shape[:2]
        return pixel_digest(found.pixels), (found.mode, f"{width}×{height}", found.is_transparent)
    except HddmError as error:
        kind: Literal["unreadable", "oversized", "corrupt"] = "corrupt"
        if digest is None:
            kind = "unreadable"
        elif isinstance(error, OversizedImageError):
            kind = "oversized"
        return digest, BadImage(name=name, kind=kind, reason=error.message)
