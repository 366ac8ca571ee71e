"""Sources of images: folders, tar shards and Parquet files, opened by `open_source` and read the same way."""

import codecs
import logging
import operator
import os
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hddm.data.entries import GrowingTexts, Texts
from hddm.data.sources.archives import open_parquet, open_tars
from hddm.data.sources.base import (
    CAPTION_COLUMNS,
    METADATA,
    PARQUET,
    SUFFIXES,
    TAR,
    Columns,
    Found,
    FoundImages,
    ImageFiles,
    ImageSource,
    SourceImage,
    as_labels,
    find_files,
    sort_files,
)
from hddm.utils.addresses import Address, address_of, on_disk
from hddm.utils.documents import parse_object
from hddm.utils.errors import HddmError, counted, shown
from hddm.utils.files import inside

log = logging.getLogger(__name__)

LARGEST_LINE = 2**20
"""Bytes per line."""


def open_source(
    path: Path, caption_column: str | None = None, label_column: str | None = None
) -> ImageSource:
    """Open the images at ``path``, which is one of these.

    - a folder of images, or of class folders;
    - a folder of images with ``metadata.jsonl``, as Hugging Face's ``imagefolder``;
    - a tar archive in WebDataset's naming, or a folder of them;
    - a Parquet file with encoded images, as Hugging Face's ``datasets`` writes it, or a folder of them.

    At an address, archives are fetched one after the other when they are read, and other images all at once.

    Captions are in ``caption_column``, else in ``text`` or ``caption`` (in tars ``txt``), if present; class
    labels in ``label_column``, else in ``label`` (in tars also ``cls``). Plain folders have no columns.
    Files of a folder that are not read are counted in a warning, by suffix.
    Raises `HddmError` for a path without images or with several kinds, and as the opener of its kind.
    """
    columns = Columns(caption_column, label_column)
    archives = {TAR: open_tars, PARQUET: open_parquet}
    found: Found | None = None
    address = address_of(path)
    if address is not None:
        found = _found_at(address)
        path = address if found is None or found.tars or found.parquets else on_disk(address)
    elif path.is_dir():
        found = find_files(path)
    elif not path.is_file():
        raise HddmError(f"{path}: no such folder of images")
    if found is None:
        if path.suffix not in archives:
            text = "is not a folder, .tar or .parquet of images; unpack other archives first"
            raise HddmError(f"{path}: {text}")
        return archives[path.suffix](path, [""], columns)
    kinds = {"image files": found.images, TAR: found.tars, PARQUET: found.parquets}
    held: list[str] = []
    for kind, names in kinds.items():
        if names:
            held.append(f"{len(names)} {kind} (as {names[0]})")
    if len(held) > 1:
        raise HddmError(f"{path}: holds {' and '.join(held)}; name a folder with one kind of them")
    for suffix, open_archives in archives.items():
        if kinds[suffix]:
            return open_archives(path, kinds[suffix], columns)
    read = ", ".join(sorted(SUFFIXES))
    if found.others:
        most_common = Counter(found.others).most_common(9)
        left = ", ".join(f"{number} {suffix}" for suffix, number in most_common)
        log.warning("%s: left out %s; only %s are read as images", path, left, read)
    other_tables = [name for name in found.tables if name != METADATA]
    if other_tables:
        raise HddmError(
            f"{path / other_tables[0]}: captions are read from {METADATA} in the folder that is named; "
            "name its folder, or write it there"
        )
    if found.tables:
        return open_described_folder(path, found.images, columns)
    if not found.images:
        raise HddmError(f"{path}: holds no images ({read}, {TAR}, {PARQUET})")
    files = Texts.of(found.images)
    images = ImageFiles.of(path, files)
    if any("/" not in name for name in files):
        return ImageSource(path, files, (), None, None, images)
    labels, classes = as_labels((name.split("/")[0] for name in files), files, path)
    return ImageSource(path, files, classes, labels, None, images)


def _found_at(address: Address) -> Found | None:
    """Files of a folder at an address, of which archives are fetched when they are read; None for a file."""
    from hddm.utils.fetching import listed_for_streaming

    listing = listed_for_streaming(address)
    if not listing.is_folder:
        return None
    return sort_files((one.name for one in listing.files), address)


def open_described_folder(root: Path, found: Sequence[str], columns: Columns) -> ImageSource:
    """Open the images ``found`` below ``root``, as ``root/metadata.jsonl`` describes them.

    Each line is an object with ``file_name``, usually ``text`` or ``caption``, and optionally ``label``, a
    number or a name. As in Hugging Face's ``imagefolder``, folders then name no classes. That library skips
    images without a line; here they are refused, since a typo would lose them. Raises `HddmError` for a line
    that is no object, a name that leads out of ``root`` or repeats, captions or labels on some lines only,
    two caption keys, and for files without a line and lines without a file.
    """
    path = root / METADATA
    rows = FoundImages({*CAPTION_COLUMNS, "label", *filter(None, columns)})
    lines = array("q")
    for number, row in _lines(path):
        name = row.pop("file_name", None)
        if not isinstance(name, str):
            raise HddmError(f"{path}: line {number} has no file_name; write the image's path there")
        inside(root, name)
        rows.add(Path(name).as_posix(), row)
        lines.append(number)
    rows.sort()
    repeated = rows.repeated()
    if repeated is not None:
        number, name = lines[int(rows.order[repeated])], rows.files[repeated]
        raise HddmError(f"{path}: line {number} names {name} again; write one line per image")
    if len(rows.files) != len(found) or any(map(operator.ne, rows.files, found)):
        missing = sorted({*rows.files} ^ {*found})
        raise HddmError(
            f"{path}: {counted(len(missing), 'image is', 'images are')} only there or only in the folder; "
            "complete one of them",
            shown(missing),
        )
    images = ImageFiles.of(root, rows.files)
    return rows.source(root, images, columns, CAPTION_COLUMNS, ("label",), path)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LARGEST_LINE + 1):
            number += 1
            if len(line) > LARGEST_LINE:
                raise HddmError(
                    f"{path}: line {number} has more than {LARGEST_LINE} bytes; shorten it"
                )
            if line.strip():
                content = line.removeprefix(codecs.BOM_UTF8)
                yield number, parse_object(content, f"{path}: line {number}")


def pick(sources: Sequence[ImageSource], classes: Collection[str] = ()) -> ImageSource:
    """Images of all ``sources``, or those of the named ``classes``.

    There are labels where all sources have them, and captions likewise. Raises `HddmError` for an unknown
    class.
    """
    if len(sources) == 1 and not classes:
        return sources[0]
    all_classes: set[str] = set()
    for source in sources:
        all_classes.update(source.classes)
    known = sorted(all_classes)
    unknown = sorted(set(classes) - all_classes)
    if unknown:
        raise HddmError(
            f"{sources[0].root}: has no class {unknown[0]}; it has {', '.join(known) or 'none'}"
        )
    kept = tuple(sorted(classes) if classes else known)
    number = {name: k for k, name in enumerate(kept)}
    root = _common_root(sources)
    files, captions = GrowingTexts(), GrowingTexts()
    labels = array("i")
    chosen = PickedImages(sources, array("i"), array("q"))
    for place, source in enumerate(sources):
        folder = source.root.absolute()
        for i, file in enumerate(source.files):
            name = source.class_of(i)
            if classes and name not in number:
                continue
            files.append((folder / file).relative_to(root).as_posix())
            chosen.sources.append(place)
            chosen.rows.append(i)
            if name is not None:
                labels.append(number[name])
            if source.captions is not None:
                captions.append(source.captions[i])
    has_labels = len(labels) == len(files)
    has_captions = len(captions) == len(files) > 0
    return ImageSource(
        root,
        files.texts(),
        kept if has_labels else (),
        labels if has_labels else None,
        captions.texts() if has_captions else None,
        chosen,
    )


def _common_root(sources: Sequence[ImageSource]) -> Path:
    """The folder or address that all sources lie below; raises `HddmError` for two file systems."""
    roots = [source.root.absolute() for source in sources]
    schemes = {one.scheme if isinstance(one, Address) else "": one for one in roots}
    if len(schemes) > 1:
        one, other, *_ = schemes.values()
        raise HddmError(f"{one} and {other}: are images of two file systems; bring them to one")
    common = os.path.commonpath(roots)
    return Path(common) if "" in schemes else Address(common)


@dataclass(frozen=True)
class PickedImages:
    """Images of several sources: image i is image ``rows[i]`` of ``opened[sources[i]]``."""

    opened: Sequence[ImageSource]
    sources: "array[int]"
    rows: "array[int]"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int, /) -> SourceImage:
        return self.opened[self.sources[i]].images[self.rows[i]]
