"""Looking at every image before hours are spent on them."""

import hashlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hddm.data.check_report import BadImage, DataReport, PartReport
from hddm.data.decoding import Header, OversizedImageError, open_image, read_header
from hddm.data.encoding_records import is_encoded
from hddm.data.shard_records import (
    HELD_OUT,
    MANIFEST,
    PARTITION_FILE,
    Manifest,
    find_shards,
    image_path,
    read_content,
    read_manifest,
)
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
    kind, sources = _parts(path, caption_column, label_column)
    total = sum(len(source) for _, source in sources)
    digests = np.zeros((total, 4), dtype=np.uint64)
    known = np.zeros(total, dtype=bool)
    reports, start = [], 0
    with Progress(total, "check") as advance, ThreadPoolExecutor(_THREADS) as pool:
        for name, source in sources:
            report = _Tally(name, source)
            for i, look in enumerate(_looks(source, pool)):
                report.add(i, look)
                if look.digest is not None:
                    digests[start + i] = np.frombuffer(look.digest, dtype=np.uint64)
                    known[start + i] = True
                advance(1)
            reports.append(report.finish())
            start += len(source)
    duplicates, shared = _repeated(digests, known, sources, path)
    return DataReport(path=str(path), kind=kind, parts=reports, duplicates=duplicates, shared=shared)


Kind = Literal["images", "shard", "partition"]


def _parts(
    path: Path, caption_column: str | None, label_column: str | None
) -> tuple[Kind, list[tuple[str, ImageSource]]]:
    if (path / PARTITION_FILE).is_file():
        folders = find_shards(path)
        held_out = [path / HELD_OUT / folder.name for folder in folders]
        folders += [folder for folder in held_out if folder.is_dir()]
        return "partition", [(str(folder.relative_to(path)), _ShardSource.of(folder)) for folder in folders]
    if (path / MANIFEST).is_file():
        return "shard", [(str(path), _ShardSource.of(path))]
    return "images", [(str(path), open_source(path, caption_column, label_column))]


@dataclass(frozen=True)
class _ShardSource:
    """Images of a shard by its manifest; each is held against its hash when it is read."""

    root: Path
    manifest: Manifest

    @classmethod
    def of(cls, folder: Path) -> "_ShardSource":
        if (folder / MANIFEST).is_file() and is_encoded(folder):
            raise HddmError(
                f"{folder}: is an encoded shard, which holds no images; name the shard it was made of"
            )
        return cls(folder, read_manifest(folder))

    @property
    def files(self) -> Sequence[str]:
        return [entry.file for entry in self.manifest.images]

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.manifest.classes)

    @property
    def labels(self) -> Sequence[int] | None:
        labels = [entry.label for entry in self.manifest.images if entry.label is not None]
        return labels if len(labels) == len(self) else None

    @property
    def captions(self) -> Sequence[str] | None:
        captions = [entry.caption for entry in self.manifest.images if entry.caption is not None]
        return captions if len(captions) == len(self) else None

    def __len__(self) -> int:
        return len(self.manifest.images)

    def read(self, i: int) -> bytes:
        return read_content(self.root, self.manifest.images[i])

    def size(self, i: int) -> int:
        return self.path(i).stat().st_size

    def path(self, i: int) -> Path:
        return image_path(self.root, self.manifest.images[i])


@dataclass(frozen=True)
class _Look:
    """What is seen of one image: its header, or why it is bad."""

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
        open_image(content, name)
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


def _repeated(
    digests: NDArray[np.uint64],
    known: NDArray[np.bool_],
    sources: Sequence[tuple[str, ImageSource]],
    path: Path,
) -> tuple[list[list[str]], list[list[str]]]:
    """Groups of equal files: those within a part, and those that lie in several."""
    rows = np.flatnonzero(known)
    order = rows[np.lexsort((rows, *digests[rows].T))]
    equal = (digests[order[1:]] == digests[order[:-1]]).all(1)
    edges = np.diff(equal.astype(np.int8), prepend=0, append=0)
    runs = zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True)
    groups = sorted(order[first : last + 1].tolist() for first, last in runs)
    starts = np.cumsum([0, *(len(source) for _, source in sources)])
    files = [source.files for _, source in sources]
    within: list[list[str]] = []
    across: list[list[str]] = []
    for group in groups:
        parts = (np.searchsorted(starts, group, side="right") - 1).tolist()
        names = []
        for part, row in zip(parts, group, strict=True):
            root = sources[part][1].root
            inside = "" if root == path else f"{root.relative_to(path).as_posix()}/"
            names.append(f"{inside}{files[part][row - starts[part]]}")
        (within if len(set(parts)) == 1 else across).append(names)
    return within, across
