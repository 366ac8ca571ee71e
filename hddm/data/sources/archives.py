"""Archives of images: tar files in WebDataset's naming, and Parquet files of Hugging Face's ``datasets``.

In a tar, the files of a sample share their name up to the first dot: ``shard-000.tar`` holds ``0001.jpg``,
``0001.txt`` (caption), ``0001.cls`` (label) and ``0001.json`` (an object), then ``0002.jpg`` and so on.
Nothing is extracted: one scan locates each image, which is read in place. Files of other names are ignored.
Archives at addresses are fetched when they are read, one after the other (`hddm.utils.fetching`).

In a Parquet file, an image column is ``struct<bytes: binary, path: string>``, or plain ``binary``. The
schema's ``huggingface`` metadata, if present, names the image column and the classes. Label and caption
columns are found by type and name, or are named by the caller; nothing is guessed.
"""

import tarfile
import threading
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby, repeat
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hddm.data.entries import PART, GrowingTexts, Texts
from hddm.data.sources.base import (
    CAPTION_COLUMNS,
    PARQUET,
    SUFFIXES,
    TAR,
    Columns,
    FoundImages,
    ImageSource,
    SourceImage,
    as_captions,
    as_labels,
    choose_column,
    in_order,
    safe_name,
)
from hddm.utils.addresses import at_hand
from hddm.utils.documents import parse_json, parse_object
from hddm.utils.errors import HddmError, one_line, optional
from hddm.utils.files import opened

LARGEST_TEXT = 2**20
"""Bytes per caption, label or JSON object."""

_TEXTS = ("txt", "cls", "json")
_READ_AT_ONCE = 2**16


def _read(archive: Path, offset: int, length: int, name: Path) -> bytes:
    """Bytes of an archive; ``name`` is for messages."""
    with at_hand(archive) as place, opened(place) as file:
        file.seek(offset)
        content = file.read(length)
    if len(content) < length:
        raise HddmError(f"{name}: {archive} was cut short since it was opened")
    return content


def open_tars(root: Path, archives: Sequence[str], columns: Columns) -> ImageSource:
    """Open the images in ``root/<archive>`` for each of ``archives``; "" stands for ``root`` itself.

    Images are named ``<archive without .tar>/<name>``, in a single archive ``<name>``. Unless a column is
    requested, captions are ``txt``, else ``text`` or ``caption`` of the JSON objects, labels ``cls`` or
    ``label``.

    Raises:
        HddmError: for a file that is no plain tar or is damaged; for links, devices and names that leave the
            folder; for a sample without an image or with several; for captions and labels that only some
            samples have.
    """
    found = FoundImages({*CAPTION_COLUMNS, "txt", "cls", "label", *filter(None, columns)})
    places = TarPlaces(array("i"), array("q"), array("q"))
    for number, archive in enumerate(archives):
        prefix = f"{archive.removesuffix(TAR)}/" if archive else ""
        for name, offset, size, values in _samples(root / archive, found.wanted):
            found.add(prefix + name, values)
            places.archives.append(number)
            places.offsets.append(offset)
            places.sizes.append(size)
    found.sort()
    repeated = found.repeated()
    if repeated is not None:
        name = found.files[repeated]
        raise HddmError(f"{root}: two archives hold an image named {name}; rename one archive")
    captions = ("txt",) if "txt" in found.columns else CAPTION_COLUMNS
    images = TarImages(root, archives, found.files, found.order, places)
    return found.source(root, images, columns, captions, ("cls", "label"), root)


class TarPlaces(NamedTuple):
    """Where each image of some archives begins, and its bytes, in the order in which they were found."""

    archives: "array[int]"
    offsets: "array[int]"
    sizes: "array[int]"


@dataclass(frozen=True)
class TarImages:
    """Images in ``root/<archive>``: image i, named ``files[i]``, is at place ``order[i]``."""

    root: Path
    archives: Sequence[str]
    files: Texts
    order: NDArray[np.int64]
    places: TarPlaces

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int, /) -> SourceImage:
        place = int(self.order[i])
        archive = self.root / self.archives[self.places.archives[place]]
        offset, size = self.places.offsets[place], self.places.sizes[place]
        return SourceImage(partial(_read, archive, offset, size, self.root / self.files[i]), size)


def _samples(
    path: Path, wanted: Collection[str]
) -> Iterator[tuple[str, int, int, dict[str, object]]]:
    """Name, first byte and size of each image in an archive, and the ``wanted`` values beside it."""
    try:
        with at_hand(path) as place, opened(place) as file:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                names, offsets, sizes = _members(archive, path)
            keys = Texts.of(_key(name) for name in names)
            for key, numbers in groupby(in_order(keys).tolist(), keys.__getitem__):
                # Of files of one suffix the last one counts, as in tar itself.
                members = {_suffix_of(names[number]): number for number in numbers}
                images = [number for suffix, number in members.items() if suffix not in _TEXTS]
                if len(images) != 1:
                    held = " and ".join(sorted(names[number] for number in members.values()))
                    raise HddmError(f"{path}: holds {held}; a sample has one image, named {key}")
                values: dict[str, object] = {}
                for suffix, number in members.items():
                    if suffix in _TEXTS:
                        origin = f"{path}: {names[number]}"
                        values |= _values(file, suffix, offsets[number], sizes[number], origin)
                image = images[0]
                # Other values of JSON objects would fill the memory.
                kept = {name: values[name] for name in values.keys() & wanted}
                yield names[image], offsets[image], sizes[image], kept
    except (tarfile.TarError, EOFError) as error:
        raise HddmError(
            f"{path}: is not a plain tar archive, or is damaged ({error}); unpack .tar.gz first"
        ) from error


def _key(name: str) -> str:
    """What the files of a sample have in common: the name up to the first dot."""
    folder, slash, own = name.rpartition("/")
    return f"{folder}{slash}{own.partition('.')[0]}"


def _suffix_of(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[2].lower()


def _members(archive: tarfile.TarFile, path: Path) -> tuple[Texts, "array[int]", "array[int]"]:
    """Names, first bytes and sizes of images and texts."""
    names, offsets, sizes = GrowingTexts(), array("q"), array("q")
    while (member := archive.next()) is not None:
        # tarfile would keep a kilobyte of each.
        archive.members = []  # type: ignore[attr-defined]
        name = safe_name(member.name, path)
        if member.isdir():
            continue
        is_regular = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and member.sparse is None
        if not is_regular or member.size < 0:
            raise HddmError(
                f"{path}: {name} is not a regular file (a link, a device or sparse); remove it"
            )
        suffix = _suffix_of(name)
        is_hidden = PurePosixPath(name).name.startswith(".")
        if not is_hidden and (suffix in _TEXTS or f".{suffix}" in SUFFIXES):
            names.append(name)
            offsets.append(member.offset_data)
            sizes.append(member.size)
    # tarfile takes a damaged header for the end.
    archive.fileobj.seek(archive.offset)
    while block := archive.fileobj.read(_READ_AT_ONCE):
        if any(block):
            raise HddmError(
                f"{path}: damaged or joined to another after byte {archive.offset}: what follows is not "
                "read; fetch or write it again"
            )
    return names.texts(), offsets, sizes


def _values(file: BinaryIO, suffix: str, offset: int, size: int, origin: str) -> dict[str, Any]:
    """Values by column of a text beside an image."""
    if size > LARGEST_TEXT:
        raise HddmError(f"{origin} has {size} bytes, more than {LARGEST_TEXT}; shorten it")
    file.seek(offset)
    content = file.read(size)
    if len(content) < size:
        raise HddmError(f"{origin} is cut short; fetch or write the archive again")
    try:
        text = content.decode("utf-8-sig")
        if suffix != "json":
            return {suffix: text.strip() if suffix == "txt" else int(text)}
    except ValueError as error:
        kind = {"txt": "UTF-8 text", "cls": "a class number", "json": "JSON"}[suffix]
        raise HddmError(
            f"{origin} cannot be read as {kind} ({one_line(error)}); write it again"
        ) from error
    found = parse_object(text, origin)
    return {key: value for key, value in found.items() if key not in _TEXTS}


class TableColumns(NamedTuple):
    """Names of the columns to read; ``classes`` come from the schema of ``datasets``, if any."""

    image: str
    label: str | None
    classes: tuple[str, ...] | None
    caption: str | None


def find_columns(schema: Any, path: Path, requested: Columns) -> TableColumns:
    """Columns of a file with the arrow ``schema``; raises `HddmError` for none or several to choose from."""
    features = _features(schema)

    def declared(kind: str, names: Sequence[str]) -> list[str]:
        return [name for name in names if features.get(name, {}).get("_type") == kind]

    images = [name for name in schema.names if "bytes" in image_fields(schema.field(name).type)]
    declared_images = declared("Image", images)
    if "image" in images:
        images = ["image"]
    elif declared_images:
        images = declared_images
    if len(images) != 1:
        found = f"{' and '.join(images) or 'none'} of {', '.join(schema.names)}"
        raise HddmError(f"{path}: one column has to hold encoded images, named image ({found} do)")
    others = [name for name in schema.names if name != images[0]]
    classes = declared("ClassLabel", others)
    usual = ["label"] if "label" in others else classes
    label = choose_column(others, requested.label, usual, "`label_column`", path)
    class_names = None
    if label is not None and label in classes:
        names = features[label].get("names")
        if isinstance(names, list):
            class_names = tuple(map(str, names))
    caption = choose_column(others, requested.caption, CAPTION_COLUMNS, "`caption_column`", path)
    return TableColumns(images[0], label, class_names, caption)


def image_fields(kind: Any) -> set[str]:
    """``{"bytes"}`` or ``{"bytes", "path"}`` for an arrow type of encoded images, else an empty set."""
    import pyarrow as pa

    fields = {"bytes": kind}
    if pa.types.is_struct(kind):
        fields = {field.name: field.type for field in kind}
    content = fields.get("bytes", pa.null())
    if pa.types.is_binary(content) or pa.types.is_large_binary(content):
        return {"bytes", "path"} & fields.keys()
    return set()


def _features(schema: Any) -> dict[str, dict[str, Any]]:
    """Columns as ``datasets`` declares them, empty for files of other writers."""
    try:
        declared = parse_json((schema.metadata or {})[b"huggingface"], "its features")
        features = declared["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (AttributeError, KeyError, TypeError, HddmError):
        return {}


@contextmanager
def open_table(path: Path) -> Iterator[Any]:
    """The Parquet file; its errors become an `HddmError` that names it."""
    pa = optional("pyarrow", f"{path}: Parquet", "parquet")
    pq = optional("pyarrow.parquet", f"{path}: Parquet", "parquet")
    try:
        with at_hand(path) as place, pq.ParquetFile(place) as file:
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise HddmError(f"{path}: cannot be read as Parquet ({error}); fetch it again") from error


LARGEST_ROW_GROUP = 4 * 2**30
"""Bytes of a row group; up to three are held in memory."""

UNKNOWN_SUFFIX = ".img"
"""Suffix of an image whose row does not name its encoding."""


class HeldImages:
    """Columns of images by file and row group; the last two used stay in memory, for all threads."""

    def __init__(self, column: str) -> None:
        self._lock = threading.Lock()

        @lru_cache(maxsize=2)
        def read(path: Path, group: int) -> Any:
            with open_table(path) as file:
                return file.read_row_group(group, columns=[column])[column]

        self._read = read

    def read(self, path: Path, group: int, row: int, name: Path) -> bytes:
        """Image in the row of that number in the group; ``name`` is for messages."""
        with self._lock:
            images = self._read(path, group)
        value = images[row].as_py() if row < len(images) else None
        content = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(content, bytes):
            raise HddmError(f"{name}: its row holds no image; remove it or fetch it again")
        return content


def open_parquet(root: Path, names: Sequence[str], requested: Columns) -> ImageSource:
    """Open the images in ``root/<name>`` for each of ``names``; "" stands for ``root`` itself.

    Image r of a file is named ``<file without .parquet>/<r, eight digits><suffix>``, in a single file without
    the folder; the suffix is that of the row's ``path``, else `UNKNOWN_SUFFIX`. Unless a column is
    requested, captions are ``text`` or ``caption``, labels ``label`` or else the only column of classes.

    Raises:
        HddmError: without pyarrow; for a file that is no Parquet or has no image column or several; for files
            of different columns, classes or splits; for missing captions and labels.
    """
    # Such as ``train-00000-of-00002.parquet`` and ``test-00000-of-00001.parquet``.
    splits = {PurePosixPath(name).name.split("-")[0].removesuffix(PARQUET) for name in names}
    if len(splits & {"train", "test", "validation"}) > 1:
        known = ", ".join(sorted(splits))
        raise HddmError(
            f"{root}: holds the splits {known}; name one file, or a folder of one split"
        )
    columns = _columns_of(root, names, requested)
    files = GrowingTexts()
    groups = RowGroups(array("i"), array("i"), array("q"), array("q"))
    has_path = False
    for number, name in enumerate(names):
        prefix = f"{name.removesuffix(PARQUET)}/" if name else ""
        with open_table(root / name) as file:
            first = len(files)
            for group, (rows, size) in enumerate(_row_groups(file, root / name)):
                groups.files.append(number)
                groups.numbers.append(group)
                groups.firsts.append(first)
                groups.sizes.append(size)
                first += rows
            has_path = "path" in image_fields(file.schema_arrow.field(columns.image).type)
            suffixes: Iterator[str] = repeat(UNKNOWN_SUFFIX, first - len(files))
            if has_path:
                suffixes = map(_suffix, _column(root, [name], f"{columns.image}.path"))
            for row, suffix in enumerate(suffixes):
                files.append(f"{prefix}{row:08d}{suffix}")
    texts = files.texts()
    images = ParquetImages(root, names, texts, groups, HeldImages(columns.image))
    numbers: Sequence[int] | None = None
    classes: tuple[str, ...] = ()
    captions = None
    if columns.label:
        numbers, classes = _labels(_column(root, names, columns.label), columns, texts, root)
    if columns.caption:
        captions = as_captions(_column(root, names, columns.caption), texts, root)
    return ImageSource(root, texts, classes, numbers, captions, images)


class RowGroups(NamedTuple):
    """Row groups of some Parquet files: number of the file, of the group in it, first image, and bytes."""

    files: "array[int]"
    numbers: "array[int]"
    firsts: "array[int]"
    sizes: "array[int]"


@dataclass(frozen=True)
class ParquetImages:
    """Images in the rows of ``root/<name>``, one file after the other; image i is named ``files[i]``."""

    root: Path
    names: Sequence[str]
    files: Texts
    groups: RowGroups
    held: HeldImages

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int, /) -> SourceImage:
        # The last group that begins at or before the image; empty groups begin there, too.
        group = bisect_right(self.groups.firsts, i) - 1
        path = self.root / self.names[self.groups.files[group]]
        row = i - self.groups.firsts[group]
        name = self.root / self.files[i]
        read = partial(self.held.read, path, self.groups.numbers[group], row, name)
        return SourceImage(read, self.groups.sizes[group])


def _columns_of(root: Path, names: Sequence[str], requested: Columns) -> TableColumns:
    """The columns of all files, which are the same in each."""
    columns: TableColumns | None = None
    for name in names:
        path = root / name
        with open_table(path) as file:
            found = find_columns(file.schema_arrow, path, requested)
        columns = columns or found
        if found != columns:
            raise HddmError(
                f"{path}: has other columns or classes than {root / names[0]}; name one of them, or a "
                "folder of one dataset"
            )
    assert columns is not None
    return columns


def _row_groups(file: Any, path: Path) -> list[tuple[int, int]]:
    """Rows and bytes of each row group."""
    groups: list[tuple[int, int]] = []
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        groups.append((group.num_rows, group.total_byte_size))
    largest = max((size for _, size in groups), default=0)
    if largest > LARGEST_ROW_GROUP:
        raise HddmError(
            f"{path}: a row group has {largest} bytes; write the file with smaller ones"
        )
    _refuse_other_rows(path, file.metadata.num_rows, groups)
    return groups


def _refuse_other_rows(path: Path, rows: int, groups: Sequence[tuple[int, int]]) -> None:
    stated = sum(num_rows for num_rows, _ in groups)
    if rows != stated or any(num_rows < 0 for num_rows, _ in groups):
        text = f"has {rows} rows where its row groups state {stated}; fetch it again"
        raise HddmError(f"{path}: {text}")


def _column(root: Path, names: Sequence[str], column: str) -> Iterator[object]:
    """Values of a column, or of a field as ``image.path``, over all files; one batch is in memory."""
    for name in names:
        path = root / name
        with open_table(path) as file:
            groups = _row_groups(file, path)
            rows = 0
            for batch in file.iter_batches(batch_size=PART, columns=[column]):
                rows += len(batch)
                yield from batch.column(0).to_pylist()
            _refuse_other_rows(path, rows, groups)


def _suffix(value: object) -> str:
    path = value.get("path") if isinstance(value, dict) else None
    suffix = PurePosixPath(path).suffix.lower() if isinstance(path, str) else ""
    return suffix if suffix in SUFFIXES else UNKNOWN_SUFFIX


def _labels(
    values: Iterable[object], columns: TableColumns, files: Texts, root: Path
) -> tuple["array[int]", tuple[str, ...]]:
    if columns.classes is None:
        return as_labels(values, files, root)
    labels = array("i")
    for value, name in zip(values, files, strict=True):
        if not isinstance(value, int) or not 0 <= value < len(columns.classes):
            raise HddmError(
                f"{root}: {name} has {columns.label} {value} of {len(columns.classes)} classes; remove the "
                "column from a split without labels"
            )
        labels.append(value)
    return labels, columns.classes
