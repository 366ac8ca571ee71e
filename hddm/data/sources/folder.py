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
    Columns,
    ImageSource,
    SourceImage,
    as_labels,
    described,
)
from hddm.utils.documents import parse_object
from hddm.utils.errors import HddmError, counted, shown
from hddm.utils.files import inside, read_whole

LARGEST_LINE = 2**20
"""Bytes per line."""


@dataclass(frozen=True)
class ImageFile(SourceImage):
    """A file of its own."""

    path: Path

    def read(self) -> bytes:
        return read_whole(self.path, LARGEST_FILE)

    def size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError as error:
            raise HddmError(f"{self.path}: cannot be read: {error.strerror}") from error


def open_folder(root: Path, files: Sequence[str]) -> ImageSource:
    """Open the images ``files`` below ``root``; labelled if each is in the folder of its class."""
    images = [ImageFile(root / name) for name in files]
    if any("/" not in name for name in files):
        return ImageSource(root, tuple(files), (), None, None, images)
    labels, classes = as_labels([name.split("/")[0] for name in files], files, root)
    return ImageSource(root, tuple(files), classes, labels, None, images)


def open_described_folder(root: Path, found: Sequence[str], columns: Columns) -> ImageSource:
    """Open the images ``found`` below ``root``, as ``root/metadata.jsonl`` describes them.

    Each line is an object with ``file_name``, usually ``text`` or ``caption``, and optionally ``label``, a
    number or a name. As in Hugging Face's ``imagefolder``, folders then name no classes. That library skips
    images without a line; here they are refused, since a typo would lose them. Raises `HddmError` for a line
    that is no object, a name that leads out of ``root`` or repeats, captions or labels on some lines only,
    two caption keys, a missing file, and an image without a line.
    """
    path = root / METADATA
    images: dict[str, tuple[SourceImage, dict[str, object]]] = {}
    for number, row in _lines(path):
        name = row.pop("file_name", None)
        if not isinstance(name, str):
            raise HddmError(f"{path}: line {number} has no file_name; write the image's path there")
        inside(root, name)
        name = Path(name).as_posix()
        if name in images:
            raise HddmError(f"{path}: line {number} names {name} again; write one line per image")
        images[name] = ImageFile(root / name), row
    if not images:
        raise HddmError(f"{path}: is empty; write one line per image")
    source = described(root, images, columns, CAPTION_COLUMNS, ("label",), path)
    if missing := sorted(images.keys() - set(found)):
        raise HddmError(
            f"{path}: names {counted(len(missing), 'image')} not in {root}; fetch what is missing, or remove "
            "its lines",
            shown(missing),
        )
    if others := sorted(set(found) - images.keys()):
        raise HddmError(
            f"{root}: {counted(len(others), 'image is', 'images are')} not in {METADATA}; add them there, or "
            "move them away",
            shown(others),
        )
    return source


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LARGEST_LINE + 1):
            number += 1
            if len(line) > LARGEST_LINE:
                raise HddmError(f"{path}: line {number} has more than {LARGEST_LINE} bytes; shorten it")
            if line.strip():
                yield number, parse_object(line.removeprefix(codecs.BOM_UTF8), f"{path}: line {number}")
