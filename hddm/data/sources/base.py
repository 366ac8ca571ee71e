"""Images of a source, names of files, and columns of labels and captions."""

import json
import os
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hddm.data.entries import GrowingTexts, Texts
from hddm.utils.errors import HddmError, did_you_mean
from hddm.utils.files import read_whole
from hddm.utils.records import composed

METADATA = "metadata.jsonl"
TAR, PARQUET = ".tar", ".parquet"
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
"""Suffixes of image files, matched without case."""
_KINDS = {TAR, PARQUET, *SUFFIXES}
CAPTION_COLUMNS = ("text", "caption")
# Bytes that are not UTF-8 arrive as lone surrogates.
_UNSAFE = re.compile(r"[\\\0\n\r\ud800-\udfff]")
LARGEST_FILE = 2**30
"""Bytes of the largest image file that is read."""
LARGEST_LABEL = 99_999
"""Limit, since classes are listed by name and a stray number could fill the memory."""


@dataclass(frozen=True)
class SourceImage:
    """Where an encoded image is."""

    read: Callable[[], bytes]
    """Returns the encoded bytes; raises `HddmError` with the image's name if it is no longer readable."""
    size: int
    """Bytes of the image, or of its row group, when opened: a check for changes that reads no content."""
    path: Path | None = None
    """File that holds this image alone, None if it is in an archive."""


class ImagePlaces(Protocol):
    """Where each image of a source is, by number; there may be millions, so one is made when asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> SourceImage: ...


@dataclass(frozen=True)
class ImageFiles:
    """Images in files of their own: ``root/files[i]``, which has ``sizes[i]`` bytes."""

    root: Path
    files: Sequence[str]
    sizes: "array[int]"

    @classmethod
    def of(cls, root: Path, files: Sequence[str]) -> "ImageFiles":
        """The existing ``files`` in ``root``."""
        return cls(root, files, array("q", ((root / name).stat().st_size for name in files)))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int, /) -> SourceImage:
        path = self.root / self.files[i]
        return SourceImage(partial(read_whole, path, LARGEST_FILE), self.sizes[i], path)


@dataclass(frozen=True)
class ImageSource:
    """Images by number, in sorted order of their names.

    Names, labels and captions are in memory, in columns; `read` takes one image at a time. Reading in order
    is fastest.
    """

    root: Path
    """Opened path; ``root / files[i]`` names image i in messages."""
    files: Sequence[str]
    """Names (N,): unique relative paths with ``/`` that stay inside the folder."""
    classes: tuple[str, ...]
    """Class names, may be empty."""
    labels: Sequence[int] | None
    """Class numbers (N,) in [0, len(classes)), or None."""
    captions: Sequence[str] | None
    """Texts (N,), or None."""
    images: ImagePlaces = field(repr=False)

    def __len__(self) -> int:
        return len(self.files)

    def class_of(self, i: int) -> str | None:
        """Class name of image ``i``, None without labels."""
        return None if self.labels is None else self.classes[self.labels[i]]

    def read(self, i: int) -> bytes:
        """Encoded bytes of image ``i``, as `SourceImage.read`."""
        return self.images[i].read()


@dataclass(frozen=True)
class Found:
    """Sorted names of the files below a folder that may hold images."""

    images: list[str] = field(default_factory=list)
    tars: list[str] = field(default_factory=list)
    parquets: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    """Files named ``metadata``, such as ``metadata.jsonl``."""
    others: list[str] = field(default_factory=list)
    """Of each file that is none of these, hidden or JSON: its suffix, or the name if it has none."""


def find_files(root: Path) -> Found:
    """Find files below ``root``; follows links to files, not to folders.

    Raises `HddmError` for a name that is not UTF-8 or has a line break.
    """
    return sort_files(_names_in(root), root)


def _names_in(root: Path) -> Iterator[str]:
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            if path.suffix.lower() not in _KINDS or path.is_file():
                yield path.relative_to(root).as_posix()


def sort_files(names: Iterable[str], root: Path) -> Found:
    """Sort the names of files below ``root`` by what they may hold; raises as `find_files`."""
    found = Found()
    kinds = {TAR: found.tars, PARQUET: found.parquets, **dict.fromkeys(SUFFIXES, found.images)}
    for name in names:
        path = PurePosixPath(name)
        suffix = path.suffix.lower()
        if suffix in kinds:
            kinds[suffix].append(safe_name(name, root))
        if path.stem == "metadata" and suffix in (".jsonl", ".csv"):
            found.tables.append(name)
        elif suffix not in (*kinds, ".json") and not _is_hidden(path):
            found.others.append(suffix or path.name)
    for own in (found.images, found.tars, found.parquets, found.tables):
        own.sort()
    return found


def _is_hidden(path: PurePosixPath) -> bool:
    """True if the name of the file or of a folder above it begins with a dot."""
    return re.search(r"(^|/)\.", f"{path}") is not None


def safe_name(name: str, origin: Path) -> str:
    """``name`` without ``./``.

    Raises `HddmError` if it is absolute, holds ``..``, a backslash, NUL or a line break, or is not UTF-8.
    """
    path = PurePosixPath(name)
    leaves = not path.parts or path.is_absolute() or ".." in path.parts or name[1:2] == ":"
    if leaves or _UNSAFE.search(name):
        raise HddmError(
            f"{origin}: the name {name!r} points outside its folder, has a backslash, NUL or line break, or "
            "is not UTF-8; rename it"
        )
    return path.as_posix()


class Columns(NamedTuple):
    """Columns of captions and labels that were requested; None for the usual ones."""

    caption: str | None = None
    label: str | None = None


class FoundImages:
    """Images as they are found, with their values by column; in columns, since there may be millions.

    Only values of the columns ``wanted`` are kept, as JSON. After the last `add`, `sort` fills ``files`` and
    ``order``.
    """

    def __init__(self, wanted: Collection[str]) -> None:
        self.columns: set[str] = set()
        """Names of all columns."""
        self.wanted = wanted
        self._names = GrowingTexts()
        self._values: dict[str, GrowingTexts] = {}
        self.order: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """Numbers of the images in the order in which they were found, sorted by name."""
        self.files = Texts.of(())
        """Names in that order."""

    def add(self, name: str, values: Mapping[str, object]) -> None:
        """Add an image, with its ``values``, which are plain values of a JSON text."""
        number = len(self._names)
        self._names.append(name)
        self.columns.update(values)
        for key in values.keys() & self.wanted:
            column = self._values.setdefault(key, GrowingTexts())
            column.fill(number)
            column.append(json.dumps(values[key]))

    def sort(self) -> None:
        """Sort all images by name."""
        names = self._names.texts()
        self.order = in_order(names)
        self.files = names[self.order]
        for column in self._values.values():
            column.fill(len(names))

    def repeated(self) -> int | None:
        """Place in ``files`` of the first name that is also that of the image before; None without any."""
        for place, (before, name) in enumerate(pairwise(self.files)):
            if name == before:
                return place + 1
        return None

    def values(self, column: str) -> Iterator[object]:
        """Values of a wanted column, in sorted order; None where an image has none."""
        for text in self._values[column].texts()[self.order]:
            yield json.loads(text) if text else None

    def source(
        self,
        root: Path,
        images: ImagePlaces,
        requested: Columns,
        captions: Sequence[str],
        labels: Sequence[str],
        origin: Path,
    ) -> ImageSource:
        """A source of ``images`` in sorted order; ``captions`` and ``labels`` are usual columns.

        Raises as `choose_column`, `as_captions` and `as_labels`.
        """
        has = self.columns
        caption = choose_column(has, requested.caption, captions, "`caption_column`", origin)
        label = choose_column(has, requested.label, labels, "`label_column`", origin)
        numbers: Sequence[int] | None = None
        classes: tuple[str, ...] = ()
        if label:
            numbers, classes = as_labels(self.values(label), self.files, origin)
        texts = as_captions(self.values(caption), self.files, origin) if caption else None
        return ImageSource(root, self.files, classes, numbers, texts, images)


def in_order(texts: Texts) -> NDArray[np.int64]:
    """Indices (N,) that sort ``texts``; equal ones keep their order."""
    if all(one <= other for one, other in pairwise(texts)):
        return np.arange(len(texts))
    return np.array(sorted(range(len(texts)), key=texts.__getitem__), dtype=np.int64)


def choose_column(
    columns: Collection[str], requested: str | None, usual: Sequence[str], option: str, origin: Path
) -> str | None:
    """The column ``requested``, else the existing one of the ``usual`` names, else None.

    Raises `HddmError` if ``requested`` is none of ``columns``, or several have usual names.
    """
    if requested is not None:
        if requested not in columns:
            known = ", ".join(sorted(columns)) or "none"
            hint = did_you_mean(requested, columns)
            raise HddmError(
                f"{option} {requested}: {origin} has no such column (has {known}){hint}"
            )
        return requested
    found = [name for name in usual if name in columns]
    if len(found) > 1:
        raise HddmError(f"{origin}: has columns {' and '.join(found)}; choose one with {option}")
    return found[0] if found else None


def as_captions(values: Iterable[object], names: Iterable[str], origin: Path) -> Texts:
    """Captions of the images ``names``; raises `HddmError` for the first that is missing or no text."""
    captions = GrowingTexts()
    for value, name in zip(values, names, strict=True):
        if not isinstance(value, str):
            text = f"{name} has caption {_short(value)}; write a text, empty for no caption"
            raise HddmError(f"{origin}: {text}")
        captions.append(value)
    return captions.texts()


def as_labels(
    values: Iterable[object], names: Iterable[str], origin: Path
) -> tuple["array[int]", tuple[str, ...]]:
    """Labels (N,) and class names: sorted names, or "0" … up to the largest for numbers.

    Raises `HddmError`, naming the image, for a missing label, one that is neither text nor a number from 0 to
    `LARGEST_LABEL`, and for texts among numbers.
    """
    labels = array("i")
    # Class names by number, in the order in which they are found.
    found: dict[str, int] = {}
    are_texts: bool | None = None
    for value, name in zip(values, names, strict=True):
        if are_texts is None:
            are_texts = isinstance(value, str)
        if are_texts and isinstance(value, str):
            labels.append(found.setdefault(composed(value), len(found)))
        elif not are_texts and type(value) is int and 0 <= value <= LARGEST_LABEL:
            labels.append(value)
        else:
            wanted = "a text" if are_texts else f"a number from 0 to {LARGEST_LABEL}"
            problem = f"{name} has label {_short(value)}; give each image {wanted}, or none a label"
            raise HddmError(f"{origin}: {problem}")
    if not found:
        num_classes = max(labels, default=-1) + 1
        return labels, tuple(map(str, range(num_classes)))
    classes = tuple(sorted(found))
    number_of = np.zeros(len(classes), dtype=np.intc)
    number_of[[found[name] for name in classes]] = np.arange(len(classes))
    return array("i", number_of[np.asarray(labels)].tobytes()), classes


def _short(value: object) -> str:
    text = "none" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
