"""A check of every image before a training: damaged files, sizes, modes, labels, equal images, splits."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hddm.data.decoding import (
    THREADS,
    Header,
    OversizedImageError,
    decode,
    equal_groups,
    pixel_digest,
    read_ahead,
    read_header,
    split_of,
)
from hddm.data.shard_records import (
    HELD_OUT,
    PARTITION_FILE,
    ShardImages,
    find_held_out,
    find_shards,
    holds_shard,
)
from hddm.data.sources import ImageSource, open_source
from hddm.utils.errors import TO_ONE_SIZE, HddmError, counted, shown
from hddm.utils.progress import Progress
from hddm.utils.records import Record

_SHOWN = 5


class BadImage(Record):
    """An image that cannot be trained on, and why."""

    name: str
    kind: Literal["unreadable", "oversized", "corrupt"]
    reason: str


class PartReport(Record):
    """Counts of one shard, or of one source of images.

    ``sizes`` are upright ("width×height") and, like ``formats`` and ``modes``, the most frequent first, of
    images that are not bad. ``transparent`` images lose their alpha channel, ``turned`` ones are turned
    upright, of ``animated`` ones the first frame is taken. ``classes`` counts the images of each class.
    ``captions`` are None where there are none, ``empty_captions`` those without a letter.
    """

    name: str
    images: int
    formats: dict[str, int]
    modes: dict[str, int]
    sizes: dict[str, int]
    transparent: int
    turned: int
    animated: int
    classes: dict[str, int]
    captions: int | None
    empty_captions: int
    bad: list[BadImage]


class DataReport(Record):
    """Findings of a check.

    Images of equal pixels are groups, each in one list: ``across_split`` where they lie on several sides of
    ``split``, so that what judges a model was trained on; else ``duplicates`` within a part, ``shared``
    in several. ``split`` names the sides: folders as ``train`` and ``test``, or the training and held-out
    images of a partition; it is empty where there are none.
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
        """The report for a reader, with each bad or repeated file by name."""
        lines = [line for part in self.parts for line in _lines(part, self.split)]
        sizes = {size for part in self.parts for size in part.sizes}
        if len(sizes) > 1:
            lines.append(f"images of {len(sizes)} sizes, and training takes one: {TO_ONE_SIZE}")
        titles = {"equal images": self.duplicates, "equal images in several shards": self.shared}
        if self.split:
            titles[f"equal images on several sides of the split ({', '.join(self.split)})"] = (
                self.across_split
            )
        for title, groups in titles.items():
            if groups:
                lines.append(f"{title}: {len(groups)}")
                lines += [f"  {' = '.join(group)}" for group in groups]
        repeated = len(self.duplicates) + len(self.shared) + len(self.across_split)
        counts = f"{counted(self.num_images, 'image')}, {len(self.bad)} bad, {repeated} that "
        counts += "occurs more than once" if repeated == 1 else "occur more than once"
        if self.split:
            counts += f", {len(self.across_split)} on several sides of the split"
        lines.append(f"{self.path}: {counts}")
        return lines


def _lines(part: PartReport, split: Sequence[str]) -> list[str]:
    lines = [f"{part.name}: {counted(part.images, 'image')}"]
    told = {"formats": part.formats, "modes": part.modes, "sizes": part.sizes}
    lines += [f"  {title}: {_counts(counts)}" for title, counts in told.items() if counts]
    treated = {
        ("loses its transparency", "lose their transparency"): part.transparent,
        ("is turned upright", "are turned upright"): part.turned,
        ("gives its first frame", "give their first frame"): part.animated,
    }
    lines += [f"  {counted(count, *what)}" for what, count in treated.items() if count]
    if split and set(split) <= set(part.classes):
        sides = [f"{name} ({part.classes[name]})" for name in split]
        lines.append(
            f"  sides of a split: {', '.join(sides)}; training on them together learns them as classes, so "
            "name one alone"
        )
    elif part.classes:
        lines.append(f"  classes: {len(part.classes)}, {_range(list(part.classes.values()))} images each")
    if part.captions is not None:
        lines.append(f"  captions: {part.captions}, {part.empty_captions} of them empty")
    if part.bad:
        lines.append(f"  bad: {len(part.bad)}")
        lines += [f"    {bad.kind}: {bad.reason}" for bad in part.bad]
    return lines


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(shown([f"{name} ({count})" for name, count in counts.items()], _SHOWN))


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


_AHEAD = 32
"""Images that are in memory at a time."""


def check_data(path: Path, caption_column: str | None = None, label_column: str | None = None) -> DataReport:
    """Read and decode every image, with a few in memory at a time and 32 bytes kept of each.

    Args:
        path: any source of images (`hddm.data.sources.open_source`), a shard, or a partition, whose held-out
            images are parts of their own.
        caption_column: as `open_source`; shards have none to choose.
        label_column: as `open_source`.

    Raises:
        HddmError: for a path that is none of these, or whose lists cannot be read; bad images are reported.
    """
    parts = _Parts.of(path, caption_column, label_column)
    total = sum(len(source) for source in parts.sources)
    digests = np.zeros((total, 32), dtype=np.uint8)
    known = np.zeros(total, dtype=bool)
    reports, start = [], 0
    with Progress(total, "check") as advance, ThreadPoolExecutor(THREADS) as pool:
        for name, source in zip(parts.names, parts.sources, strict=True):
            report = _Tally(name, source)
            looks = read_ahead(pool, partial(_look, source), ([i] for i in range(len(source))), _AHEAD)
            for i, (look,) in enumerate(looks):
                report.add(i, look)
                if look.digest is not None:
                    digests[start + i] = np.frombuffer(look.digest, dtype=np.uint8)
                    known[start + i] = True
                advance(1)
            reports.append(report.finish())
            start += len(source)
    repeated = _repeated(digests, known, parts)
    return DataReport(
        path=str(path),
        kind=parts.kind,
        parts=reports,
        split=list(parts.split),
        duplicates=repeated.within,
        shared=repeated.shared,
        across_split=repeated.across,
    )


@dataclass(frozen=True)
class _Parts:
    """Sources to check by name, and the sides of a split that they, or their folders, are."""

    path: Path
    kind: Literal["images", "shard", "partition"]
    names: Sequence[str]
    sources: Sequence[ImageSource]
    split: Sequence[str] = ()

    @classmethod
    def of(cls, path: Path, caption_column: str | None, label_column: str | None) -> "_Parts":
        if (path / PARTITION_FILE).is_file():
            folders = find_shards(path)
            held_out = find_held_out(path)
            folders += held_out
            names = [folder.relative_to(path).as_posix() for folder in folders]
            split = ("training", HELD_OUT) if held_out else ()
            return cls(path, "partition", names, [ShardImages.of(folder) for folder in folders], split)
        if holds_shard(path):
            return cls(path, "shard", [str(path)], [ShardImages.of(path)])
        source = open_source(path, caption_column, label_column)
        return cls(path, "images", [str(path)], [source], split_of(source.files))

    def inside(self, part: int) -> str:
        """Prefix of the files of a part in their names."""
        return f"{self.names[part]}/" if self.kind == "partition" else ""

    def side(self, part: int, file: str) -> str | None:
        """The side of the split that a file is on, if any."""
        if self.kind == "partition":
            return HELD_OUT if self.names[part].startswith(f"{HELD_OUT}/") else "training"
        folder = file.split("/")[0]
        return folder if folder in self.split else None


@dataclass(frozen=True)
class _Look:
    """One image as it was read: its header, or why it is bad.

    ``digest`` is of its pixels, or of a file that has none, None for one that cannot be read.
    """

    digest: bytes | None = None
    header: Header | None = None
    kind: Literal["unreadable", "oversized", "corrupt"] = "corrupt"
    reason: str = ""


def _look(source: ImageSource, i: int) -> _Look:
    name = source.root / source.files[i]
    try:
        content = source.read(i)
    except HddmError as error:
        return _Look(kind="unreadable", reason=error.message)
    digest = hashlib.sha256(content).digest()
    try:
        header = read_header(content, name)
        digest = pixel_digest(decode(content, name))
    except OversizedImageError as error:
        return _Look(digest, kind="oversized", reason=error.message)
    except HddmError as error:
        return _Look(digest, kind="corrupt", reason=error.message)
    return _Look(digest, header)


class _Tally:
    """Counts of a part, image by image."""

    def __init__(self, name: str, source: ImageSource) -> None:
        self._name, self._source, self._files = name, source, source.files
        self._formats: Counter[str] = Counter()
        self._modes: Counter[str] = Counter()
        self._sizes: Counter[str] = Counter()
        self._marks: Counter[str] = Counter()
        self._bad: list[BadImage] = []

    def add(self, i: int, look: _Look) -> None:
        header = look.header
        if header is None:
            self._bad.append(BadImage(name=self._files[i], kind=look.kind, reason=look.reason))
            return
        self._formats[header.format] += 1
        self._modes[header.mode] += 1
        self._sizes[f"{header.width}×{header.height}"] += 1
        for mark in ("transparent", "turned", "animated"):
            self._marks[mark] += getattr(header, mark)

    def finish(self) -> PartReport:
        labels, captions = self._source.labels, self._source.captions
        members = Counter(labels or ())
        classes = {name: members[k] for k, name in enumerate(self._source.classes)}
        return PartReport(
            name=self._name,
            images=len(self._source),
            formats=dict(self._formats.most_common()),
            modes=dict(self._modes.most_common()),
            sizes=dict(self._sizes.most_common()),
            transparent=self._marks["transparent"],
            turned=self._marks["turned"],
            animated=self._marks["animated"],
            classes=classes if labels is not None else {},
            captions=None if captions is None else len(captions),
            empty_captions=sum(not caption.strip() for caption in captions or ()),
            bad=self._bad,
        )


class _Repeated(NamedTuple):
    """Groups of equal images: on several sides of a split, else in one part, or in several."""

    across: list[list[str]]
    within: list[list[str]]
    shared: list[list[str]]


def _repeated(digests: NDArray[np.uint8], known: NDArray[np.bool_], parts: _Parts) -> _Repeated:
    """Groups of equal images by name, each in one list."""
    rows = np.flatnonzero(known)
    starts = np.cumsum([0, *(len(source) for source in parts.sources)])
    files = [source.files for source in parts.sources]
    found = _Repeated([], [], [])
    for group in equal_groups(digests[rows]):
        places = rows[group]
        numbers = (np.searchsorted(starts, places, side="right") - 1).tolist()
        names = [
            f"{parts.inside(part)}{files[part][row - starts[part]]}"
            for part, row in zip(numbers, places.tolist(), strict=True)
        ]
        sides = {parts.side(part, name) for part, name in zip(numbers, names, strict=True)}
        if len(sides - {None}) > 1:
            found.across.append(names)
        else:
            (found.within if len(set(numbers)) == 1 else found.shared).append(names)
    return found
