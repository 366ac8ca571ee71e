"""Archives of images: tar files in WebDataset's naming, and Parquet files of Hugging Face's ``datasets``.

In a tar, the files of a sample share their name up to the first dot: ``shard-000.tar`` holds ``0001.jpg``,
``0001.txt`` (caption), ``0001.cls`` (label) and ``0001.json`` (an object), then ``0002.jpg`` and so on.
Nothing is extracted: one scan locates each image, which is read in place. Files of other names are ignored.

In a Parquet file, an image column is ``struct<bytes: binary, path: string>``, or plain ``binary``. The
schema's ``huggingface`` metadata, if present, names the image column and the classes. Label and caption
columns are found by type and name, or are named by the caller; nothing is guessed.
"""

import re
import tarfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from hddm.data.sources.base import (
    CAPTION_COLUMNS,
    PARQUET,
    SUFFIXES,
    TAR,
    Columns,
    ImageSource,
    SourceImage,
    as_captions,
    as_labels,
    choose_column,
    described,
    safe_name,
)
from hddm.utils.documents import parse_json, parse_object
from hddm.utils.errors import HddmError, one_line, optional
from hddm.utils.files import opened

LARGEST_TEXT = 2**20
"""Bytes per caption, label or JSON object."""

_KEY = re.compile(r"((?:.*/|)[^./]+)\.([^/]*)")
_TEXTS = ("txt", "cls", "json")
_READ_AT_ONCE = 2**16


def _read(archive: Path, offset: int, length: int, name: Path) -> bytes:
    """Bytes of an archive; ``name`` is for messages."""
    with opened(archive) as file:
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
    wanted = {*CAPTION_COLUMNS, "txt", "cls", "label", *columns}
    images: dict[str, tuple[SourceImage, dict[str, object]]] = {}
    for archive in archives:
        prefix = f"{archive.removesuffix(TAR)}/" if archive else ""
        path = root / archive
        for name, member, values in _samples(path):
            read = partial(_read, path, member.offset_data, member.size, root / prefix / name)
            # Other values of JSON objects would fill the memory.
            kept = {key: values[key] for key in values.keys() & wanted}
            images[prefix + name] = (SourceImage(read, member.size), kept)
    has_txt = any("txt" in values for _, values in images.values())
    captions = ("txt",) if has_txt else CAPTION_COLUMNS
    return described(root, images, columns, captions, ("cls", "label"), root)


def _samples(path: Path) -> Iterator[tuple[str, tarfile.TarInfo, dict[str, object]]]:
    """Name and place of each image in an archive, and the values beside it."""
    try:
        with opened(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for key, members in _members(archive, path).items():
                images = [one for suffix, one in members.items() if suffix not in _TEXTS]
                if len(images) != 1:
                    found = " and ".join(sorted(name for name, _ in members.values()))
                    raise HddmError(f"{path}: holds {found}; a sample has one image, named {key}")
                values: dict[str, object] = {}
                for suffix, (name, member) in members.items():
                    if suffix in _TEXTS:
                        values |= _values(archive, suffix, member, f"{path}: {name}")
                name, member = images[0]
                yield name, member, values
    except (tarfile.TarError, EOFError) as error:
        raise HddmError(
            f"{path}: is not a plain tar archive, or is damaged ({error}); unpack .tar.gz first"
        ) from error


def _members(
    archive: tarfile.TarFile, path: Path
) -> dict[str, dict[str, tuple[str, tarfile.TarInfo]]]:
    """Names and places of images and texts, by sample and suffix."""
    samples: dict[str, dict[str, tuple[str, tarfile.TarInfo]]] = {}
    while (member := archive.next()) is not None:
        name = safe_name(member.name, path)
        if member.isdir():
            continue
        is_regular = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and member.sparse is None
        if not is_regular or member.size < 0:
            raise HddmError(
                f"{path}: {name} is not a regular file (a link, a device or sparse); remove it"
            )
        match = _KEY.fullmatch(name)
        suffix = match[2].lower() if match else ""
        if match and (suffix in _TEXTS or f".{suffix}" in SUFFIXES):
            samples.setdefault(match[1], {})[suffix] = name, member
    # tarfile takes a damaged header for the end.
    archive.fileobj.seek(archive.offset)
    while block := archive.fileobj.read(_READ_AT_ONCE):
        if any(block):
            raise HddmError(
                f"{path}: damaged or joined to another after byte {archive.offset}: what follows is not "
                "read; fetch or write it again"
            )
    return samples


def _values(
    archive: tarfile.TarFile, suffix: str, member: tarfile.TarInfo, origin: str
) -> dict[str, Any]:
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
        with pq.ParquetFile(path) as file:
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
    files: list[str] = []
    images: list[SourceImage] = []
    labels: list[object] = []
    captions: list[object] = []
    columns: TableColumns | None = None
    for name in names:
        path = root / name
        prefix = f"{name.removesuffix(PARQUET)}/" if name else ""
        with open_table(path) as file:
            found = find_columns(file.schema_arrow, path, requested)
            if columns is None:
                columns = found
                held = HeldImages(found.image)
            if found != columns:
                raise HddmError(
                    f"{path}: has other columns or classes than {root / names[0]}; name one of them, or a "
                    "folder of one dataset"
                )
            groups: list[tuple[int, int]] = []
            for number in range(file.metadata.num_row_groups):
                group = file.metadata.row_group(number)
                groups.append((group.num_rows, group.total_byte_size))
            largest = max((size for _, size in groups), default=0)
            if largest > LARGEST_ROW_GROUP:
                raise HddmError(
                    f"{path}: a row group has {largest} bytes; write the file with smaller ones"
                )
            has_path = "path" in image_fields(file.schema_arrow.field(columns.image).type)
            read = [column for column in (columns.label, columns.caption) if column]
            if has_path:
                read.append(f"{columns.image}.path")
            table = file.read(columns=read)
            stated = sum(num_rows for num_rows, _ in groups)
            for rows in (len(table), file.metadata.num_rows):
                if rows != stated:
                    text = f"has {rows} rows where its row groups state {stated}; fetch it again"
                    raise HddmError(f"{path}: {text}")
        paths = table[columns.image].to_pylist() if has_path else [None] * rows
        own = [f"{prefix}{row:08d}{_suffix(value)}" for row, value in enumerate(paths)]
        first = 0
        for number, (num_rows, size) in enumerate(groups):
            for row, one in enumerate(own[first : first + num_rows]):
                read_image = partial(held.read, path, number, row, root / one)
                images.append(SourceImage(read_image, size))
            first += num_rows
        files += own
        if columns.label:
            labels += table[columns.label].to_pylist()
        if columns.caption:
            captions += table[columns.caption].to_pylist()
    assert columns is not None
    numbers, classes = _labels(labels, columns, files, root)
    texts = as_captions(captions, files, root) if columns.caption else None
    return ImageSource(root, tuple(files), classes, numbers, texts, images)


def _suffix(value: object) -> str:
    path = value.get("path") if isinstance(value, dict) else None
    suffix = PurePosixPath(path).suffix.lower() if isinstance(path, str) else ""
    return suffix if suffix in SUFFIXES else UNKNOWN_SUFFIX


def _labels(
    values: list[object], columns: TableColumns, files: Sequence[str], root: Path
) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    if columns.label is None:
        return None, ()
    if columns.classes is None:
        return as_labels(values, files, root)
    for value, name in zip(values, files, strict=True):
        if not isinstance(value, int) or not 0 <= value < len(columns.classes):
            raise HddmError(
                f"{root}: {name} has {columns.label} {value} of {len(columns.classes)} classes; remove the "
                "column from a split without labels"
            )
    return tuple(int(str(value)) for value in values), columns.classes
