"""Tar shards in WebDataset's naming: the files of a sample share their name up to the first dot.

``shard-000.tar`` holds ``0001.jpg``, ``0001.txt`` (caption), ``0001.cls`` (label) and ``0001.json`` (an
object), then ``0002.jpg`` and so on. Nothing is extracted: one scan locates each image, which is
read in place. Files of other names are ignored.
"""

import re
import tarfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hddm.data.sources.base import (
    CAPTION_COLUMNS,
    SUFFIXES,
    TAR,
    Columns,
    ImageSource,
    SourceImage,
    described,
    safe_name,
)
from hddm.utils.documents import parse_object
from hddm.utils.errors import HddmError, one_line

LARGEST_TEXT = 2**20
"""Bytes per caption, label or JSON object."""

_KEY = re.compile(r"((?:.*/|)[^./]+)\.([^/]*)")
_TEXTS = ("txt", "cls", "json")
_READ_AT_ONCE = 2**16


def _read(archive: Path, offset: int, length: int, name: Path) -> bytes:
    """Bytes of an archive; ``name`` is for messages."""
    try:
        with archive.open("rb") as file:
            file.seek(offset)
            content = file.read(length)
    except OSError as error:
        raise HddmError(f"{archive}: cannot be read: {error.strerror}") from error
    if len(content) < length:
        raise HddmError(f"{name}: {archive} was cut short since it was opened")
    return content


def open_tars(root: Path, archives: Sequence[str], columns: Columns) -> ImageSource:
    """Open the images in ``root/<archive>`` for each of ``archives``, or in ``root`` if it is one archive.

    Images are named ``<archive without .tar>/<name>``, in a single archive ``<name>``. Unless a column is
    requested, captions are ``txt``, else ``text`` or ``caption`` of the JSON objects, labels ``cls`` or
    ``label``.

    Raises:
        HddmError: for a file that is no plain tar or is damaged; for links, devices and names that leave the
            folder; for a sample without an image or with several; for captions and labels that only some
            samples have.
    """
    wanted = {*CAPTION_COLUMNS, "txt", "cls", "label", *columns}
    images: dict[str, tuple[SourceImage, dict[str, object]]] = {}
    for archive in archives or [""]:
        prefix = f"{archive.removesuffix(TAR)}/" if archive else ""
        for name, member, values in _samples(root / archive):
            read = partial(_read, root / archive, member.offset_data, member.size, root / prefix / name)
            # Other values of JSON objects would fill the memory.
            images[prefix + name] = (
                SourceImage(read, member.size),
                {key: values[key] for key in values.keys() & wanted},
            )
    if not images:
        raise HddmError(f"{root}: its tar archives hold no images ({', '.join(sorted(SUFFIXES))})")
    has_txt = any("txt" in values for _, values in images.values())
    captions = ("txt",) if has_txt else CAPTION_COLUMNS
    return described(root, images, columns, captions, ("cls", "label"), root)


def _samples(path: Path) -> Iterator[tuple[str, tarfile.TarInfo, dict[str, object]]]:
    """Name and place of each image in an archive, and the values beside it."""
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for key, members in _members(archive, path).items():
                images = [name for suffix, (name, _) in members.items() if suffix not in _TEXTS]
                if len(images) != 1:
                    found = " and ".join(sorted(name for name, _ in members.values()))
                    raise HddmError(f"{path}: holds {found}; a sample has one image, named {key}")
                values: dict[str, object] = {}
                for suffix, (name, member) in members.items():
                    if suffix in _TEXTS:
                        values |= _values(archive, suffix, member, f"{path}: {name}")
                yield images[0], next(one for name, one in members.values() if name == images[0]), values
    except (tarfile.TarError, EOFError) as error:
        raise HddmError(
            f"{path}: is not a plain tar archive, or is damaged ({error}); unpack .tar.gz first"
        ) from error
    except OSError as error:
        raise HddmError(f"{path}: cannot be read: {error.strerror}") from error


def _members(archive: tarfile.TarFile, path: Path) -> dict[str, dict[str, tuple[str, tarfile.TarInfo]]]:
    """Names and places of images and texts, by sample and suffix."""
    samples: dict[str, dict[str, tuple[str, tarfile.TarInfo]]] = {}
    while (member := archive.next()) is not None:
        name = safe_name(member.name, path)
        if member.isdir():
            continue
        is_regular = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and member.sparse is None
        if not is_regular or member.size < 0:
            raise HddmError(f"{path}: {name} is not a regular file (a link, a device or sparse); remove it")
        match = _KEY.fullmatch(name)
        suffix = match[2].lower() if match else ""
        if match and (suffix in _TEXTS or f".{suffix}" in SUFFIXES):
            if suffix in samples.setdefault(match[1], {}):
                raise HddmError(f"{path}: holds {name} twice; remove one")
            samples[match[1]][suffix] = name, member
    # tarfile takes a damaged header for the end.
    archive.fileobj.seek(archive.offset)
    while block := archive.fileobj.read(_READ_AT_ONCE):
        if any(block):
            raise HddmError(
                f"{path}: damaged or joined to another after byte {archive.offset}: what follows is not "
                "read; fetch or write it again"
            )
    return samples


def _values(archive: tarfile.TarFile, suffix: str, member: tarfile.TarInfo, origin: str) -> dict[str, Any]:
    """Values by column of a text beside an image."""
    if member.size > LARGEST_TEXT:
        raise HddmError(f"{origin} has {member.size} bytes, more than {LARGEST_TEXT}; shorten it")
    file = archive.extractfile(member)
    assert file is not None
    try:
        text = file.read().decode("utf-8-sig")
        if suffix != "json":
            return {suffix: text.strip() if suffix == "txt" else int(text)}
    except ValueError as error:
        kind = {"txt": "UTF-8 text", "cls": "a class number", "json": "JSON"}[suffix]
        raise HddmError(f"{origin} cannot be read as {kind} ({one_line(error)}); write it again") from error
    return {key: value for key, value in parse_object(text, origin).items() if key not in _TEXTS}
