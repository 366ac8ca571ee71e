"""Tar shards in WebDataset's naming: the files of a sample share their name up to the first dot.

``shard-000.tar`` holds ``0001.jpg``, ``0001.txt`` (caption), ``0001.cls`` (label) and ``0001.json`` (an
object), then ``0002.jpg`` and so on. Nothing is extracted: one scan locates each image, and `TarSource.read`
reads it in place. Files of other names are ignored.
"""

import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hddm.data.sources.base import (
    CAPTION_COLUMNS,
    SUFFIXES,
    TAR,
    ImageSource,
    as_captions,
    as_labels,
    choose_column,
    safe_name,
)
from hddm.utils.documents import parse_object
from hddm.utils.errors import HddmError, one_line

LARGEST_TEXT = 2**20
"""Bytes per caption, label or JSON object."""

_KEY = re.compile(r"((?:.*/|)[^./]+)\.([^/]*)")
_TEXTS = ("txt", "cls", "json")
_READ_AT_ONCE = 2**16


@dataclass(frozen=True)
class TarSource(ImageSource):
    """Images in tar archives; ``places`` (N,) are archive, offset and length in bytes."""

    places: tuple[tuple[Path, int, int], ...] = field(repr=False)

    def read(self, i: int) -> bytes:
        archive, offset, size = self.places[i]
        try:
            with archive.open("rb") as file:
                file.seek(offset)
                content = file.read(size)
        except OSError as error:
            raise HddmError(f"{archive}: cannot be read: {error.strerror}") from error
        if len(content) < size:
            raise HddmError(f"{self.root / self.files[i]}: {archive} was cut short since it was opened")
        return content

    def size(self, i: int) -> int:
        return self.places[i][2]


@dataclass
class _Sample:
    """Name, offset and bytes of an image, its columns, and the suffixes of its files."""

    image: tuple[str, int, int] | None = None
    columns: dict[str, object] = field(default_factory=dict)
    suffixes: set[str] = field(default_factory=set)


def open_tars(
    root: Path, archives: Sequence[str], caption_column: str | None = None, label_column: str | None = None
) -> TarSource:
    """Open the images in ``root/<archive>`` for each of ``archives``, or in ``root`` if it is one archive.

    Images are named ``<archive without .tar>/<name>``, in a single archive ``<name>``. Unless a column is
    given, captions are ``txt``, else ``text`` or ``caption`` of the JSON objects, labels ``cls`` or
    ``label``.

    Raises:
        HddmError: for a file that is no plain tar or is damaged; for links, devices and names that leave the
            folder; for a sample without an image or with several; for captions and labels that only some
            samples have.
    """
    rows: dict[str, tuple[tuple[Path, int, int], dict[str, object]]] = {}
    columns: set[str] = set()
    wanted = {*CAPTION_COLUMNS, "txt", "cls", "label", caption_column, label_column}
    for name in archives or [""]:
        path, prefix = root / name, f"{name.removesuffix(TAR)}/" if name else ""
        for key, sample in _scan(path).items():
            if sample.image is None:
                names = " and ".join(sorted(f"{key}.{suffix}" for suffix in sample.suffixes))
                raise HddmError(f"{path}: holds {names}, but no image {key}; add it, or remove them")
            image, offset, size = sample.image
            columns |= sample.columns.keys()
            kept = {column: value for column, value in sample.columns.items() if column in wanted}
            rows[f"{prefix}{image}"] = (path, offset, size), kept
    if not rows:
        raise HddmError(f"{root}: its tar archives hold no images ({', '.join(sorted(SUFFIXES))})")
    files = tuple(sorted(rows))
    usual = ("txt",) if "txt" in columns else CAPTION_COLUMNS
    caption = choose_column(columns, caption_column, usual, "--caption-column", root)
    label = choose_column(columns, label_column, ("cls", "label"), "--label-column", root)
    values = [rows[name][1] for name in files]
    labels, classes = as_labels([v.get(label) for v in values], files, root) if label else (None, ())
    captions = as_captions([v.get(caption) for v in values], files, root) if caption else None
    return TarSource(root, files, classes, labels, captions, tuple(rows[name][0] for name in files))


def _scan(path: Path) -> dict[str, _Sample]:
    samples: dict[str, _Sample] = {}
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            while (member := archive.next()) is not None:
                # tarfile would keep every member, with its headers, until the end.
                archive.members = []  # type: ignore[attr-defined]
                _take(archive, member, path, samples)
            _refuse_remainder(file, archive.offset, path)
    except (tarfile.TarError, EOFError) as error:
        raise HddmError(
            f"{path}: is not a plain tar archive, or is damaged ({error}); unpack .tar.gz first"
        ) from error
    except OSError as error:
        raise HddmError(f"{path}: cannot be read: {error.strerror}") from error
    return samples


def _take(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path, samples: dict[str, _Sample]) -> None:
    name = safe_name(member.name, path)
    if member.isdir():
        return
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.sparse is not None or member.size < 0:
        raise HddmError(f"{path}: {name} is not a regular file (a link, a device or sparse); remove it")
    match = _KEY.fullmatch(name)
    if match is None:
        return
    key, suffix = match[1], match[2].lower()
    is_text = suffix in _TEXTS
    if not is_text and f".{suffix}" not in SUFFIXES:
        return
    sample = samples.setdefault(key, _Sample())
    if suffix in sample.suffixes:
        raise HddmError(f"{path}: holds {name} twice; remove one")
    sample.suffixes.add(suffix)
    if not is_text:
        if sample.image is not None:
            raise HddmError(f"{path}: {sample.image[0]} and {name} are images of one sample; rename one")
        sample.image = name, member.offset_data, member.size
        return
    if member.size > LARGEST_TEXT:
        raise HddmError(f"{path}: {name} has {member.size} bytes, more than {LARGEST_TEXT}; shorten it")
    file = archive.extractfile(member)
    assert file is not None
    sample.columns |= _columns(suffix, file.read(), f"{path}: {name}")


def _columns(suffix: str, content: bytes, origin: str) -> dict[str, Any]:
    try:
        text = content.decode("utf-8-sig")
        if suffix == "txt":
            return {"txt": text.strip()}
        if suffix == "cls":
            return {"cls": int(text)}
    except ValueError as error:
        kind = {"txt": "UTF-8 text", "cls": "a class number", "json": "JSON"}[suffix]
        raise HddmError(f"{origin} cannot be read as {kind} ({one_line(error)}); write it again") from error
    row = parse_object(text, origin)
    return {key: value for key, value in row.items() if key not in _TEXTS}


def _refuse_remainder(file: Any, offset: int, path: Path) -> None:
    """Refuse data after the end, since tarfile takes a damaged header for the end."""
    file.seek(offset)
    while block := file.read(_READ_AT_ONCE):
        if any(block):
            raise HddmError(
                f"{path}: damaged or joined to another after byte {offset}: what follows is not read; "
                "fetch or write it again"
            )
