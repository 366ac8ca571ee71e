"""Images as separate files, in a folder or in folders by class, or described by ``metadata.jsonl``."""

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hddm.data.sources.base import (
    CAPTION_COLUMNS,
    LARGEST_FILE,
    METADATA,
    ImageSource,
    as_captions,
    as_labels,
    choose_column,
)
from hddm.utils.documents import parse_object
from hddm.utils.errors import HddmError, counted, shown
from hddm.utils.files import inside, read_whole

LARGEST_LINE = 2**20
"""Bytes per line."""


@dataclass(frozen=True)
class FolderSource(ImageSource):
    """Image files below ``root``."""

    def read(self, i: int) -> bytes:
        return read_whole(self.path(i), LARGEST_FILE)

    def size(self, i: int) -> int:
        try:
            return self.path(i).stat().st_size
        except OSError as error:
            raise HddmError(f"{self.path(i)}: cannot be read: {error.strerror}") from error

    def path(self, i: int) -> Path:
        return self.root / self.files[i]


def open_folder(root: Path, files: Sequence[str]) -> FolderSource:
    """Open the images ``files`` below ``root``; labelled if each is in the folder of its class."""
    if any("/" not in name for name in files):
        return FolderSource(root, tuple(files), (), None, None)
    labels, classes = as_labels([name.split("/")[0] for name in files], files, root)
    return FolderSource(root, tuple(files), classes, labels, None)


def open_described_folder(
    root: Path, found: Sequence[str], caption_column: str | None = None, label_column: str | None = None
) -> FolderSource:
    """Open the images ``found`` below ``root``, as ``root/metadata.jsonl`` describes them.

    Each line is an object with ``file_name``, usually ``text`` or ``caption``, and optionally ``label``, a
    number or a name. As in Hugging Face's ``imagefolder``, folders then name no classes. That library skips
    images without a line; here they are refused, since a typo would lose them. Raises `HddmError` for a line
    that is no object, a name that leads out of ``root`` or repeats, captions or labels on some lines only,
    two caption keys, a missing file, and an image without a line.
    """
    path = root / METADATA
    rows: dict[str, dict[str, Any]] = {}
    columns: set[str] = set()
    wanted = {*CAPTION_COLUMNS, "label", caption_column, label_column}
    for number, row in _lines(path):
        name = row.get("file_name")
        if not isinstance(name, str):
            raise HddmError(f"{path}: line {number} has no file_name; write the image's path there")
        inside(root, name)
        name = Path(name).as_posix()
        if name in rows:
            raise HddmError(f"{path}: line {number} names {name} again; write one line per image")
        columns |= row.keys() - {"file_name"}
        rows[name] = {key: value for key, value in row.items() if key in wanted}
    if not rows:
        raise HddmError(f"{path}: is empty; write one line per image")
    files = tuple(sorted(rows))
    caption = choose_column(columns, caption_column, CAPTION_COLUMNS, "--caption-column", path)
    label = choose_column(columns, label_column, ("label",), "--label-column", path)
    labels, classes = as_labels([rows[f].get(label) for f in files], files, path) if label else (None, ())
    captions = as_captions([rows[name].get(caption) for name in files], files, path) if caption else None
    _compare(root, set(files), set(found))
    return FolderSource(root, files, classes, labels, captions)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LARGEST_LINE + 1):
            number += 1
            if len(line) > LARGEST_LINE:
                raise HddmError(f"{path}: line {number} has more than {LARGEST_LINE} bytes; shorten it")
            if not line.strip():
                continue
            yield number, parse_object(line.removeprefix(codecs.BOM_UTF8), f"{path}: line {number}")


def _compare(root: Path, named: set[str], found: set[str]) -> None:
    """Refuse images that are listed but missing, or present but not listed."""
    if missing := sorted(named - found):
        raise HddmError(
            f"{root / METADATA}: names {counted(len(missing), 'image')} not in {root}; fetch what is "
            "missing, or remove its lines",
            shown(missing),
        )
    if others := sorted(found - named):
        raise HddmError(
            f"{root}: {counted(len(others), 'image is', 'images are')} not in {METADATA}; add them "
            f"there, or move them away",
            shown(others),
        )
