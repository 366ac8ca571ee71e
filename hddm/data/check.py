"""Looking at every image before hours are spent on them."""

import hashlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hddm.data.check_report import BadImage, DataReport, PartReport
from hddm.data.decoding import Header, OversizedImageError, decode, read_header
from hddm.data.equal_images import equal_groups, pixel_digest, split_of
from hddm.data.shard_records import HELD_OUT, PARTITION_FILE, find_held_out, find_shards, holds_shard
from hddm.data.shard_source import ShardSource
from hddm.data.sources import ImageSource, open_source
from hddm.errors import HddmError
from hddm.progress import Progress

_THREADS = 8
"""That decode; Pillow works outside Python's lock."""

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
    with Progress(total, "check") as advance, ThreadPoolExecutor(_THREADS) as pool:
        for name, source in zip(parts.names, parts.sources, strict=True):
            report = _Tally(name, source)
            for i, look in enumerate(_looks(source, pool)):
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
    """What is checked: sources by name, and the sides of a split that they, or their folders, are."""

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
            return cls(path, "partition", names, [ShardSource.of(folder) for folder in folders], split)
        if holds_shard(path):
            return cls(path, "shard", [str(path)], [ShardSource.of(path)])
        source = open_source(path, caption_column, label_column)
        return cls(path, "images", [str(path)], [source], split_of(source.files))

    def inside(self, part: int) -> str:
        """What stands before the files of a part in their names."""
        return f"{self.names[part]}/" if self.kind == "partition" else ""

    def side(self, part: int, file: str) -> str | None:
        """The side of the split that a file is on, if any."""
        if self.kind == "partition":
            return HELD_OUT if self.names[part].startswith(f"{HELD_OUT}/") else "training"
        folder = file.split("/")[0]
        return folder if folder in self.split else None


@dataclass(frozen=True)
class _Look:
    """What is seen of one image: its header, or why it is bad.

    ``digest`` is of its pixels, or of a file that has none, None for one that cannot be read.
    """

    digest: bytes | None = None
    header: Header | None = None
    kind: Literal["unreadable", "oversized", "corrupt"] = "corrupt"
    reason: str = ""


def _looks(source: ImageSource, pool: ThreadPoolExecutor) -> Iterator[_Look]:
    """In the order of the images."""
    waiting: deque[Future[_Look]] = deque()
    for i, name in enumerate(source.files):
        waiting.append(pool.submit(_look, source, i, source.root / name))
        if len(waiting) == _AHEAD:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _look(source: ImageSource, i: int, name: Path) -> _Look:
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
