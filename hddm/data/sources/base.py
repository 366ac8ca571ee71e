"""Interface of image sources, file names, and columns of labels and captions."""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from hddm.utils.errors import HddmError, did_you_mean
from hddm.utils.records import composed

METADATA = "metadata.jsonl"
TAR, PARQUET = ".tar", ".parquet"
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
"""Suffixes of image files, matched without case."""
CAPTION_COLUMNS = ("text", "caption")
LARGEST_FILE = 2**30
"""Bytes of the largest image file that is read."""
LARGEST_LABEL = 99_999
"""Limit, since classes are listed by name and a stray number could fill the memory."""


@dataclass(frozen=True)
class ImageSource(ABC):
    """Images by number, in sorted order of their names.

    Opening reads names, labels and captions; `read` takes one image at a time, so memory does not grow with
    the pixels. Reading in order is fastest.
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

    def __len__(self) -> int:
        return len(self.files)

    @abstractmethod
    def read(self, i: int) -> bytes:
        """Encoded bytes of image ``i``; raises `HddmError` with its name if it is no longer readable."""

    @abstractmethod
    def size(self, i: int) -> int:
        """Bytes of image ``i``, or of its row group: a check for changes that reads no content.

        Raises `HddmError` with its name if it is no longer there.
        """

    def path(self, i: int) -> Path | None:
        """File that holds image ``i`` alone, None if it is in an archive."""
        return None


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
            elif suffix not in (*kinds, ".json") and not re.search(r"(^|/)\.", f"{path.relative_to(root)}"):
                found.others.append(suffix or name)
    for names in (found.images, found.tars, found.parquets, found.tables):
        names.sort()
    return found


def safe_name(name: str, origin: Path) -> str:
    """``name`` without ``./``.

    Raises `HddmError` if it is absolute, holds ``..``, a backslash, NUL or a line break, or is not UTF-8.
    """
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or name[1:2] == ":":
        raise HddmError(f"{origin}: the name {name!r} points outside its folder; rename it")
    if any(letter in name for letter in "\\\0\n\r"):
        raise HddmError(
            f"{origin}: the name {name!r} contains a backslash, NUL or line break; rename the file"
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise HddmError(f"{origin}: the name {name!r} is not UTF-8; rename the file") from error
    return path.as_posix()


def choose_column(
    columns: Collection[str], asked: str | None, usual: Sequence[str], option: str, origin: Path
) -> str | None:
    """The column ``asked`` for, else the existing one of the ``usual`` names, else None.

    Raises `HddmError` if ``asked`` is none of ``columns``, or several have usual names.
    """
    if asked is not None:
        if asked not in columns:
            known = ", ".join(sorted(columns)) or "none"
            hint = did_you_mean(asked, columns)
            raise HddmError(f"{option} {asked}: {origin} has no such column (has {known}){hint}")
        return asked
    found = [name for name in usual if name in columns]
    if len(found) > 1:
        raise HddmError(f"{origin}: has columns {' and '.join(found)}; choose one with {option}")
    return found[0] if found else None


def as_captions(values: Sequence[object], names: Sequence[str], origin: Path) -> tuple[str, ...]:
    """Captions of the images ``names``; raises `HddmError` for the first that is missing or no text."""
    captions = []
    for value, name in zip(values, names, strict=True):
        if not isinstance(value, str):
            raise HddmError(
                f"{origin}: {name} has caption {_short(value)}; write a text, empty for no caption"
            )
        captions.append(value)
    return tuple(captions)


def as_labels(
    values: Sequence[object], names: Sequence[str], origin: Path
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Labels (N,) and class names: sorted names, or "0" … up to the largest for numbers.

    Raises `HddmError`, naming the image, for a missing label, one that is neither text nor a number from 0 to
    `LARGEST_LABEL`, and for texts among numbers.
    """
    numbers: list[int] = []
    texts: list[str] = []
    for value, name in zip(values, names, strict=True):
        if isinstance(value, str) and not numbers:
            texts.append(composed(value))
        elif type(value) is int and 0 <= value <= LARGEST_LABEL and not texts:
            numbers.append(value)
        else:
            wanted = "a text, or a number for all images"
            if isinstance(values[0], int):
                wanted = f"a number from 0 to {LARGEST_LABEL}"
            raise HddmError(
                f"{origin}: {name} has label {_short(value)}; give each image {wanted}, or none a label"
            )
    if numbers:
        return tuple(numbers), tuple(map(str, range(max(numbers) + 1)))
    classes = tuple(sorted(set(texts)))
    number = {name: index for index, name in enumerate(classes)}
    return tuple(number[text] for text in texts), classes


def _short(value: object) -> str:
    text = "none" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
