"""Check of every image before training: damage, sizes, modes, labels, equal images, splits."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

from hddm.data.images import THREADS, OversizedImageError, pixel_digest, read_ahead, read_image
from hddm.data.shard_records import (
    HELD_OUT,
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

    def lines(self, split: Sequence[str]) -> list[str]:
        """Text of the report; ``split`` are the sides of a split."""
        lines = [f"{self.name}: {counted(self.images, 'image')}"]
        for title, counts in (("modes", self.modes), ("sizes", self.sizes)):
            if counts:
                values = shown([f"{name} ({count})" for name, count in counts.items()], _SHOWN)
                lines.append(f"  {title}: {', '.join(values)}")
        if self.transparent:
            lines.append(f"  {counted(self.transparent, 'loses its', 'lose their')} transparency")
        if split and set(split) <= set(self.classes):
            sides = ", ".join(f"{name} ({self.classes[name]})" for name in split)
            text = "training on them together learns them as classes, so name one alone"
            lines.append(f"  sides of a split: {sides}; {text}")
        elif self.classes:
            low, high = min(self.classes.values()), max(self.classes.values())
            each = low if low == high else f"{low} to {high}"
            lines.append(f"  classes: {len(self.classes)}, {each} images each")
        if self.captions is not None:
            lines.append(f"  captions: {self.captions}, {self.empty_captions} of them empty")
        if self.bad:
            lines.append(f"  bad: {len(self.bad)}")
            lines += [f"    {bad.kind}: {bad.reason}" for bad in self.bad]
        return lines


class DataReport(Record):
    """Findings of a check.

    Each group of images with equal pixels is in one list: ``across_split`` if it spans several sides of
    ``split`` (a model would be evaluated on images it was trained on), else ``shared`` if it spans several
    parts, else ``duplicates``. ``split`` names the sides: folders such as ``train`` and ``test``, or those of
    a partition.
    """

    path: str
    kind: Literal["images", "shard", "partition"]
    parts: list[PartReport]
    duplicates: list[list[str]]
    shared: list[list[str]]
    split: list[str]
    across_split: list[list[str]]

    @property
    def num_images(self) -> int:
        """Images of all parts."""
        return sum(part.images for part in self.parts)

    @property
    def bad(self) -> list[BadImage]:
        """Bad images of all parts."""
        return [bad for part in self.parts for bad in part.bad]

    def lines(self) -> list[str]:
        """Text of the report, which names each bad or repeated file."""
        lines = [line for part in self.parts for line in part.lines(self.split)]
        sizes = {size for part in self.parts for size in part.sizes}
        if len(sizes) > 1:
            lines.append(f"images of {len(sizes)} sizes, and training takes one: {TO_ONE_SIZE}")
        across = f"equal images on several sides of the split ({', '.join(self.split)})"
        groups = {
            "equal images": self.duplicates,
            "equal images in several shards": self.shared,
            across: self.across_split,
        }
        for title, copies in groups.items():
            if copies:
                lines.append(f"{title}: {len(copies)}")
                lines += [f"  {' = '.join(group)}" for group in copies]
        repeated = sum(map(len, groups.values()))
        counts = f"{counted(self.num_images, 'image')}, {len(self.bad)} bad, {repeated} that "
        counts += "occurs more than once" if repeated == 1 else "occur more than once"
        if self.split:
            counts += f", {len(self.across_split)} on several sides of the split"
        return [*lines, f"{self.path}: {counts}"]


def check_data(path: Path, caption_column: str | None = None, label_column: str | None = None) -> DataReport:
    """Read and decode every image, with a few in memory at a time.

    ``path`` is a source of images as in `hddm.data.sources.open_source`, a shard, or a partition, whose
    held-out images are separate parts. Raises `HddmError` for any other path and for unreadable lists; bad
    images are reported.
    """
    kind: Literal["images", "shard", "partition"] = "images"
    split: tuple[str, ...] = ()
    if (path / PARTITION_FILE).is_file():
        kind, held_out = "partition", find_held_out(path)
        folders = [*find_shards(path), *held_out]
        sources = {folder.relative_to(path).as_posix(): open_images(folder) for folder in folders}
        split = ("training", HELD_OUT) if held_out else ()
    elif holds_shard(path):
        kind, sources = "shard", {str(path): open_images(path)}
    else:
        source = open_source(path, caption_column, label_column)
        sources, split = {str(path): source}, split_of(source.files)
    parts = []
    # Part and file of all images by their digest.
    copies: dict[bytes, list[tuple[str, str]]] = defaultdict(list)
    with Progress(sum(map(len, sources.values())), "check") as advance, ThreadPoolExecutor(THREADS) as pool:
        for name, source in sources.items():
            modes, sizes, transparent = Counter[str](), Counter[str](), 0
            bad: list[BadImage] = []
            looks = read_ahead(pool, partial(_look, source), ([i] for i in range(len(source))), _AHEAD)
            for file, ((digest, found),) in zip(source.files, looks, strict=True):
                if digest is not None:
                    copies[digest].append((name, file))
                if isinstance(found, BadImage):
                    bad.append(found)
                else:
                    mode, size, is_transparent = found
                    modes[mode] += 1
                    sizes[size] += 1
                    transparent += is_transparent
                advance(1)
            members, captions = Counter(source.labels or ()), source.captions
            classes = {one: members[k] for k, one in enumerate(source.classes)} if members else {}
            parts.append(
                PartReport(
                    name=name,
                    images=len(source),
                    modes=dict(modes.most_common()),
                    sizes=dict(sizes.most_common()),
                    transparent=transparent,
                    classes=classes,
                    captions=None if captions is None else len(captions),
                    empty_captions=sum(not caption.strip() for caption in captions or ()),
                    bad=bad,
                )
            )
    repeated: dict[str, list[list[str]]] = {"across_split": [], "shared": [], "duplicates": []}
    for group in copies.values():
        if len(group) == 1:
            continue
        sides = {file.split("/")[0] for _, file in group} & set(split)
        if kind == "partition":
            sides = {HELD_OUT if name.startswith(f"{HELD_OUT}/") else "training" for name, _ in group}
        is_shared = len({name for name, _ in group}) > 1
        key = "across_split" if len(sides) > 1 else "shared" if is_shared else "duplicates"
        repeated[key].append([f"{name}/{file}" if kind == "partition" else file for name, file in group])
    return DataReport(path=str(path), kind=kind, parts=parts, split=list(split), **repeated)


def _look(source: ImageSource, i: int) -> tuple[bytes | None, tuple[str, str, bool] | BadImage]:
    """Digest of the pixels, else of the file; and mode, size, transparency, or why the image is bad."""
    name, digest = source.files[i], None
    try:
        content = source.read(i)
        digest = hashlib.sha256(content).digest()
        found = read_image(content, source.root / name)
        height, width = found.pixels.shape[:2]
        return pixel_digest(found.pixels), (found.mode, f"{width}×{height}", found.is_transparent)
    except HddmError as error:
        is_large = isinstance(error, OversizedImageError)
        kind = "unreadable" if digest is None else "oversized" if is_large else "corrupt"
        return digest, BadImage.model_validate({"name": name, "kind": kind, "reason": error.message})


_TRAINING = {"train", "training"}
_OTHERS = {"test", "testing", "val", "valid", "validation", "dev", "eval", "evaluation"}
_OTHERS |= {"held_out", "held-out", "heldout", "holdout"}


def split_of(files: Sequence[str]) -> tuple[str, ...]:
    """Sorted top folders of ``files`` that are sides of a split, such as ``train`` and ``test``.

    Empty unless both training images and others are found, since one such name alone may be a class.
    """
    folders = {name.split("/")[0] for name in files if "/" in name}
    sides = [{name for name in folders if name.lower() in kind} for kind in (_TRAINING, _OTHERS)]
    return tuple(sorted(sides[0] | sides[1])) if all(sides) else ()
