"""Images that are files of their own, in a folder or in folders by class.

Captions and labels come from ``metadata.jsonl`` beside them, as Hugging Face's ``imagefolder`` reads it.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hddm.data.sources.base import METADATA
from hddm.data.sources.parquet import CAPTION_COLUMNS, as_captions, as_labels, choose_column
from hddm.utils.errors import HddmError, counted, shown
from hddm.utils.files import inside

LONGEST_LINE = 2**20
"""Bytes of one line."""


@dataclass(frozen=True)
class Described:
    """Content of ``metadata.jsonl``, in sorted order of the files."""

    files: tuple[str, ...]
    classes: tuple[str, ...]
    labels: tuple[int, ...] | None
    captions: tuple[str, ...] | None


def read_metadata(root: Path, caption_column: str | None, label_column: str | None) -> Described:
    """Each line is an object with ``file_name``, mostly ``text`` or ``caption``, and perhaps ``label``.

    Args:
        root: folder of the images and of the file; names are relative to it.
        caption_column: key of the captions; without it ``text`` or ``caption``.
        label_column: key of the labels, numbers or names; without it ``label``.

    Raises:
        HddmError: for a line that is no object, a name that leads out of ``root`` or comes twice, a caption
            or a label that is missing in some lines, or two keys of captions.
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
            raise HddmError(f"{path}: line {number} names {name} again; one line an image")
        columns |= row.keys() - {"file_name"}
        rows[name] = {key: value for key, value in row.items() if key in wanted}
    if not rows:
        raise HddmError(f"{path}: holds no lines; write one for each image")
    files = tuple(sorted(rows))
    caption = choose_column(columns, caption_column, CAPTION_COLUMNS, "--caption-column", path)
    label = choose_column(columns, label_column, ("label",), "--label-column", path)
    captions = [rows[name].get(caption) for name in files] if caption else None
    labels, classes = as_labels([rows[f].get(label) for f in files], files, path) if label else (None, ())
    return Described(files, classes, labels, as_captions(captions, files, path) if captions else None)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                raise HddmError(f"{path}: line {number} has more than {LONGEST_LINE} bytes; shorten it")
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise HddmError(f"{path}: line {number} cannot be read as JSON ({error})") from error
            if not isinstance(row, dict):
                raise HddmError(f"{path}: line {number} is no JSON object")
            yield number, row


@dataclass(frozen=True)
class FolderSource:
    """Image files below ``root``; the fields are those of `hddm.data.sources.base.ImageSource`."""

    root: Path
    files: tuple[str, ...]
    classes: tuple[str, ...] = ()
    labels: tuple[int, ...] | None = None
    captions: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.files)

    def read(self, i: int) -> bytes:
        path = self.path(i)
        try:
            return path.read_bytes()
        except OSError as error:
            raise HddmError(f"{path}: cannot be read: {error.strerror}") from error

    def size(self, i: int) -> int:
        path = self.path(i)
        try:
            return path.stat().st_size
        except OSError as error:
            raise HddmError(f"{path}: cannot be read: {error.strerror}") from error

    def path(self, i: int) -> Path:
        return self.root / self.files[i]


def open_folder(root: Path, files: Sequence[str]) -> FolderSource:
    """The images ``files`` below ``root``; they have labels where each lies in the folder of its class."""
    parents = [name.split("/")[0] if "/" in name else None for name in files]
    if None in parents:
        return FolderSource(root, tuple(files))
    labels, classes = as_labels(parents, files, root)
    return FolderSource(root, tuple(files), classes, labels)


def open_described_folder(
    root: Path, found: Sequence[str], caption_column: str | None = None, label_column: str | None = None
) -> FolderSource:
    """The images ``found`` below ``root``, as ``root/metadata.jsonl`` describes them.

    As in Hugging Face's ``imagefolder``, folders then name no classes. That library passes over images
    without a line; here they are refused, since a typo would lose them.

    Raises:
        HddmError: as `read_metadata`; where it names a file that is missing, or leaves out an image.
    """
    described = read_metadata(root, caption_column, label_column)
    there, named = set(found), set(described.files)
    missing = [name for name in described.files if name not in there]
    if missing:
        raise HddmError(
            f"{root / METADATA}: names {counted(len(missing), 'image')} not in {root}; fetch what is "
            "missing, or remove its lines",
            shown(missing),
        )
    others = [name for name in found if name not in named]
    if others:
        raise HddmError(
            f"{root}: {counted(len(others), 'image is', 'images are')} not in {METADATA}; describe "
            "what is missing there, or move it away",
            shown(others),
        )
    return FolderSource(root, described.files, described.classes, described.labels, described.captions)
