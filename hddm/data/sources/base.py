"""The interface of image sources, and the names of their files, which must stay inside a folder."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

from hddm.utils.errors import HddmError

METADATA = "metadata.jsonl"
TAR, PARQUET = ".tar", ".parquet"


@dataclass(frozen=True)
class Found:
    """Names of the files below a folder that may hold images, each list sorted."""

    images: list[str] = field(default_factory=list)
    tars: list[str] = field(default_factory=list)
    parquets: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    """Files named ``metadata``, such as ``metadata.jsonl``."""


def find_files(root: Path) -> Found:
    """Files below ``root``; links to folders are not followed, links to files are.

    Raises:
        HddmError: for a name that is not UTF-8 or breaks a line.
    """
    found = Found()
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            suffix = path.suffix.lower()
            kinds = {TAR: found.tars, PARQUET: found.parquets, **dict.fromkeys(SUFFIXES, found.images)}
            if suffix in kinds and path.is_file():
                relative = path.relative_to(root).as_posix()
                kinds[suffix].append(safe_name(relative, root))
            if path.stem == "metadata" and suffix in (".jsonl", ".csv"):
                found.tables.append(path.relative_to(root).as_posix())
    for names in (found.images, found.tars, found.parquets, found.tables):
        names.sort()
    return found


def safe_name(name: str, origin: Path) -> str:
    """``name`` without ``./``.

    Raises:
        HddmError: where it is absolute, holds ``..``, a backslash, NUL or a line's end, or is not UTF-8.
    """
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or name[1:2] == ":":
        raise HddmError(f"{origin}: the name {name!r} does not stay inside a folder; refused")
    if any(letter in name for letter in "\\\0\n\r"):
        raise HddmError(
            f"{origin}: the name {name!r} holds a backslash, NUL or a line's end; rename the file"
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise HddmError(f"{origin}: the name {name!r} is not UTF-8; rename the file") from error
    return path.as_posix()


SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
"""Of image files, in lower case; files in upper case count too."""


class ImageSource(Protocol):
    """Images by number, in sorted order of their names, with what is known of each.

    Opening one reads names, labels and captions; `read` takes one image at a time, so that memory does not
    grow with the pixels. Reading in order is the fast way.
    """

    @property
    def root(self) -> Path:
        """The path that was opened; ``root / files[i]`` names image i in messages."""

    @property
    def files(self) -> Sequence[str]:
        """Names (N,): unique relative paths with ``/``, none of which leads out of a folder."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, empty for a source without."""

    @property
    def labels(self) -> Sequence[int] | None:
        """Class numbers (N,) in [0, len(classes)), None for a source without."""

    @property
    def captions(self) -> Sequence[str] | None:
        """Texts (N,), None for a source without."""

    def __len__(self) -> int: ...

    def read(self, i: int) -> bytes:
        """Image ``i`` as it is encoded.

        Raises:
            HddmError: where it is no longer to be read, by name.
        """

    def size(self, i: int) -> int:
        """Bytes of image ``i``, or of what it is stored among: what is known of its content unread.

        Raises:
            HddmError: where it is no longer there, by name.
        """

    def path(self, i: int) -> Path | None:
        """The file that is image ``i`` and nothing else, None where it lies in an archive."""
