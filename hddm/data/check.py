"""Check of every image before training: damage, sizes, modes, labels, equal images, splits."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hddm.data.images import (
    THREADS,
    Header,
    OversizedImageError,
    decode,
    pixel_digest,
    read_ahead,
    read_header,
)
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


class BadImage(Record):
    """An image that cannot be trained on, and why."""

    name: str
    kind: Literal["unreadable", "oversized", "corrupt"]
    reason: str


class PartReport(Record):
    """Counts of one shard, or of one source of images.

    ``formats``, ``modes`` and ``sizes`` (upright "width×height") count images that are not bad, the most
    frequent first. ``transparent`` images lose their alpha channel, ``turned`` ones are rotated upright,
    ``animated`` ones keep their first frame. ``captions`` is None for data without captions;
    ``empty_captions`` hold no text.
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
    counters = {"formats": part.formats, "modes": part.modes, "sizes": part.sizes}
    lines += [f"  {title}: {_counts(counts)}" for title, counts in counters.items() if counts]
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
        low, high = min(part.classes.values()), max(part.classes.values())
        each = low if low == high else f"{low} to {high}"
        lines.append(f"  classes: {len(part.classes)}, {each} images each")
    if part.captions is not None:
        lines.append(f"  captions: {part.captions}, {part.empty_captions} of them empty")
    if part.bad:
        lines.append(f"  bad: {len(part.bad)}")
        lines += [f"    {bad.kind}: {bad.reason}" for bad in part.bad]
    return lines


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(shown([f"{name} ({count})" for name, count in counts.items()], _SHOWN))


_AHEAD = 32
"""Images held in memory at a time."""


def check_data(path: Path, caption_column: str | None = None, label_column: str | None = None) -> DataReport:
    """Read and decode every image, with a few in memory at a time.

    ``path`` is a source of images as in `hddm.data.sources.open_source`, a shard, or a partition, whose
    held-out images are separate parts. Raises `HddmError` for any other path and for unreadable lists; bad
    images are reported.
    """
    kind: Literal["images", "shard", "partition"] = "images"
    split: Sequence[str] = ()
    if (path / PARTITION_FILE).is_file():
        kind, held_out = "partition", find_held_out(path)
        folders = [*find_shards(path), *held_out]
        sources: dict[str, ImageSource] = {f.relative_to(path).as_posix(): open_images(f) for f in folders}
        split = ("training", HELD_OUT) if held_out else ()
    elif holds_shard(path):
        kind, sources = "shard", {str(path): open_images(path)}
    else:
        source = open_source(path, caption_column, label_column)
        sources, split = {str(path): source}, split_of(source.files)

    def side(name: str, file: str) -> str | None:
        if kind == "partition":
            return HELD_OUT if name.startswith(f"{HELD_OUT}/") else "training"
        folder = file.split("/")[0]
        return folder if folder in split else None

    total = sum(map(len, sources.values()))
    parts = []
    places: list[tuple[str, str]] = []
    digests = bytearray()
    with Progress(total, "check") as advance, ThreadPoolExecutor(THREADS) as pool:
        for name, source in sources.items():
            headers: Counter[Header] = Counter()
            bad: list[BadImage] = []
            looks = read_ahead(pool, partial(_look, source), ([i] for i in range(len(source))), _AHEAD)
            for file, ((digest, found),) in zip(source.files, looks, strict=True):
                if digest is not None:
                    places.append((name, file))
                    digests += digest
                if isinstance(found, Header):
                    headers[found] += 1
                else:
                    bad.append(found)
                advance(1)
            parts.append(_part(name, source, headers, bad))
    repeated: dict[str, list[list[str]]] = {"across_split": [], "shared": [], "duplicates": []}
    for group in equal_groups(np.frombuffer(digests, dtype=np.uint8).reshape(-1, 32)):
        copies = [places[row] for row in group]
        is_across = len({side(*copy) for copy in copies} - {None}) > 1
        is_shared = len({name for name, _ in copies}) > 1
        key = "across_split" if is_across else "shared" if is_shared else "duplicates"
        repeated[key].append([f"{name}/{file}" if kind == "partition" else file for name, file in copies])
    return DataReport(path=str(path), kind=kind, parts=parts, split=list(split), **repeated)


def _look(source: ImageSource, i: int) -> tuple[bytes | None, Header | BadImage]:
    """Digest of the pixels, else of the file, None if unreadable; and the header, or why the image is bad."""
    file = source.files[i]
    name, digest = source.root / file, None
    try:
        content = source.read(i)
        digest = hashlib.sha256(content).digest()
        header = read_header(content, name)
        return pixel_digest(decode(content, name)), header
    except HddmError as error:
        is_large = isinstance(error, OversizedImageError)
        kind = "unreadable" if digest is None else "oversized" if is_large else "corrupt"
        return digest, BadImage.model_validate({"name": file, "kind": kind, "reason": error.message})


def _part(name: str, source: ImageSource, headers: Mapping[Header, int], bad: list[BadImage]) -> PartReport:
    def counts(key: Callable[[Header], str]) -> dict[str, int]:
        found: Counter[str] = Counter()
        for header, number in headers.items():
            found[key(header)] += number
        return dict(found.most_common())

    members, captions = Counter(source.labels or ()), source.captions
    labelled = enumerate(source.classes) if source.labels is not None else ()
    return PartReport(
        name=name,
        images=len(source),
        formats=counts(lambda header: header.format),
        modes=counts(lambda header: header.mode),
        sizes=counts(lambda header: f"{header.width}×{header.height}"),
        transparent=sum(number for header, number in headers.items() if header.transparent),
        turned=sum(number for header, number in headers.items() if header.turned),
        animated=sum(number for header, number in headers.items() if header.animated),
        classes={name: members[k] for k, name in labelled},
        captions=None if captions is None else len(captions),
        empty_captions=sum(not caption.strip() for caption in captions or ()),
        bad=bad,
    )


_TRAINING = frozenset({"train", "training"})
_OTHERS = frozenset(
    {"test", "testing", "val", "valid", "validation", "dev", "eval", "evaluation"}
    | {"held_out", "held-out", "heldout", "holdout"}
)


def split_of(files: Sequence[str]) -> tuple[str, ...]:
    """Sorted top folders of ``files`` that are sides of a split, such as ``train`` and ``test``.

    Empty unless both training images and others are found, since one such name alone may be a class.
    """
    folders = {name.split("/")[0] for name in files if "/" in name}
    sides = [{name for name in folders if name.lower() in kind} for kind in (_TRAINING, _OTHERS)]
    return tuple(sorted(sides[0] | sides[1])) if all(sides) else ()


def equal_groups(digests: NDArray[np.uint8]) -> list[list[int]]:
    """Groups of equal rows of ``digests`` (N, 32), in ascending order."""
    _, number, counts = np.unique(digests, axis=0, return_inverse=True, return_counts=True)
    order = np.argsort(number.reshape(-1), kind="stable")
    groups = np.split(order, np.cumsum(counts)[:-1])
    return sorted(group.tolist() for group in groups if len(group) > 1)
