"""Images of a source, names of files, and columns of labels and captions."""

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from hddm.utils.errors import HddmError, did_you_mean
from hddm.utils.records import composed

METADATA = "metadata.jsonl"
TAR, PARQUET = ".tar", ".parquet"
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
"""Suffixes of image files, matched without case."""
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


@dataclass(frozen=True)
class ImageSource:
    """Images by number, in sorted order of their names.

    Names, labels and captions are in memory; `read` takes one image at a time. Reading in order is fastest.
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
    images: Sequence[SourceImage] = field(repr=False)

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
    found = Found()
    kinds = {TAR: found.tars, PARQUET: found.parquets, **dict.fromkeys(SUFFIXES, found.images)}
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            suffix = path.suffix.lower()
            if suffix in kinds and path.is_file():
                kinds[suffix].append(safe_name(path.relative_to(root).as_posix(), root))
            if path.stem == "metadata" and suffix in (".jsonl", ".csv"):
                found.tables.append(path.relative_to(root).as_posix())
            elif suffix not in (*kinds, ".json") and not _is_hidden(path.relative_to(root)):
                found.others.append(suffix or name)
    for names in (found.images, found.tars, found.parquets, found.tables):
        names.sort()
    return found


def _is_hidden(path: Path) -> bool:
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


def described(
    root: Path,
    images: Mapping[str, tuple[SourceImage, Mapping[str, object]]],
    requested: Columns,
    captions: Sequence[str],
    labels: Sequence[str],
    origin: Path,
) -> ImageSource:
    """A source of ``images``, each with its values by column; ``captions`` and ``labels`` are usual columns.

    Raises as `choose_column`, `as_captions` and `as_labels`.
    """
    files = tuple(sorted(images))
    rows = [images[name][1] for name in files]
    columns = set().union(*rows)
    caption = choose_column(columns, requested.caption, captions, "`caption_column`", origin)
    label = choose_column(columns, requested.label, labels, "`label_column`", origin)
    numbers: tuple[int, ...] | None = None
    classes: tuple[str, ...] = ()
    if label:
        numbers, classes = as_labels([row.get(label) for row in rows], files, origin)
    texts = None
    if caption:
        texts = as_captions([row.get(caption) for row in rows], files, origin)
    return ImageSource(root, files, classes, numbers, texts, [images[name][0] for name in files])


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


def as_captions(values: Sequence[object], names: Sequence[str], origin: Path) -> tuple[str, ...]:
    """Captions of the images ``names``; raises `HddmError` for the first that is missing or no text."""
    captions = []
    for value, name in zip(values, names, strict=True):
        if not isinstance(value, str):
            text = f"{name} has caption {_short(value)}; write a text, empty for no caption"
            raise HddmError(f"{origin}: {text}")
        captions.append(value)
    return tuple(captions)


def as_labels(
    values: Sequence[object], names: Sequence[str], origin: Path
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Labels (N,) and class names: sorted names, or "0" … up to the largest for numbers.

    Raises `HddmError`, naming the image, for a missing label, one that is neither text nor a number from 0 to
    `LARGEST_LABEL`, and for texts among numbers.
    """
    are_texts = bool(values) and isinstance(values[0], str)
    for value, name in zip(values, names, strict=True):
        is_valid = isinstance(value, str)
        if not are_texts:
            is_valid = type(value) is int and 0 <= value <= LARGEST_LABEL
        if not is_valid:
            wanted = "a text" if are_texts else f"a number from 0 to {LARGEST_LABEL}"
            problem = f"{name} has label {_short(value)}; give each image {wanted}, or none a label"
            raise HddmError(f"{origin}: {problem}")
    if are_texts:
        texts = [composed(str(value)) for value in values]
        classes = tuple(sorted(set(texts)))
        number = {name: index for index, name in enumerate(classes)}
        return tuple(number[text] for text in texts), classes
    numbers = [int(str(value)) for value in values]
    num_classes = max(numbers, default=-1) + 1
    return tuple(numbers), tuple(map(str, range(num_classes)))


def _short(value: object) -> str:
    text = "none" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
