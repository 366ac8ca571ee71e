"""Parquet files with encoded images, in the layout of Hugging Face's ``datasets``.

An image column is ``struct<bytes: binary, path: string>``, or plain ``binary``. The schema's ``huggingface``
metadata, if present, names the image column and the classes. Label and caption columns are found by type and
name, or are named by the caller; nothing is guessed.
"""

import bisect
import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from hddm.data.sources.base import (
    CAPTION_COLUMNS,
    PARQUET,
    SUFFIXES,
    ImageSource,
    as_captions,
    as_labels,
    choose_column,
)
from hddm.utils.documents import parse_json
from hddm.utils.errors import HddmError, optional


@dataclass(frozen=True)
class TableColumns:
    """Names of the columns to read; ``classes`` come from the schema of ``datasets``, if any."""

    image: str
    label: str | None
    classes: tuple[str, ...] | None
    caption: str | None


def find_columns(
    schema: Any, path: Path, caption_column: str | None, label_column: str | None
) -> TableColumns:
    """Columns of a file with the arrow ``schema``; raises `HddmError` for none or several to choose from."""
    features = _features(schema)
    image = _image_column(schema, features, path)
    others = [name for name in schema.names if name != image]
    declared = [name for name in others if features.get(name, {}).get("_type") == "ClassLabel"]
    usual = ["label"] if "label" in others else declared
    label = choose_column(others, label_column, usual, "--label-column", path)
    names = features[label].get("names") if label is not None and label in declared else None
    classes = tuple(map(str, names)) if isinstance(names, list) else None
    caption = choose_column(others, caption_column, CAPTION_COLUMNS, "--caption-column", path)
    return TableColumns(image, label, classes, caption)


def _image_column(schema: Any, features: dict[str, Any], path: Path) -> str:
    names: list[str] = schema.names
    fitting = [name for name in names if "bytes" in image_fields(schema.field(name).type)]
    fitting = [name for name in fitting if features.get(name, {}).get("_type") == "Image"] or fitting
    if "image" in fitting:
        return "image"
    if not fitting:
        raise HddmError(f"{path}: has no column of encoded images (has {', '.join(schema.names)})")
    if len(fitting) > 1:
        raise HddmError(f"{path}: columns {' and '.join(fitting)} hold images; rename one to image")
    return fitting[0]


def image_fields(kind: Any) -> set[str]:
    """``{"bytes"}`` or ``{"bytes", "path"}`` for an arrow type of encoded images, else an empty set."""
    import pyarrow as pa

    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return {"bytes"}
    if not pa.types.is_struct(kind):
        return set()
    held = {field.name: field.type for field in kind}
    content = held.get("bytes")
    if content is None or not (pa.types.is_binary(content) or pa.types.is_large_binary(content)):
        return set()
    return {"bytes", "path"} & held.keys()


def _features(schema: Any) -> dict[str, dict[str, Any]]:
    """Columns as ``datasets`` declares them, empty for files of other writers."""
    try:
        features = parse_json((schema.metadata or {})[b"huggingface"], "its features")["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (AttributeError, KeyError, TypeError, HddmError):
        return {}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The Parquet file; its errors become an `HddmError` that names it."""
    pa = optional("pyarrow", f"{path}: Parquet", "parquet")
    pq = optional("pyarrow.parquet", f"{path}: Parquet", "parquet")
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise HddmError(f"{path}: cannot be read as Parquet ({error}); fetch it again") from error


LARGEST_ROW_GROUP = 4 * 2**30
"""Bytes of a row group; two are held in memory."""

UNKNOWN_SUFFIX = ".img"
"""Suffix of an image whose row does not name its encoding."""


@dataclass(frozen=True)
class ParquetSource(ImageSource):
    """Images in Parquet files.

    ``groups`` (G,) are file and row group, ``starts`` (G + 1,) the first image of each and the end, ``sizes``
    (G,) the bytes of all columns. The last two row groups read stay in memory.
    """

    held: "_RowGroups" = field(repr=False)
    groups: tuple[tuple[Path, int], ...] = field(repr=False)
    starts: tuple[int, ...] = field(repr=False)
    sizes: tuple[int, ...] = field(repr=False)

    def read(self, i: int) -> bytes:
        group = self._group(i)
        images = self.held.images(*self.groups[group])
        _refuse_other_rows(self.groups[group][0], len(images), self.starts[group + 1] - self.starts[group])
        value = images[i - self.starts[group]].as_py()
        content = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(content, bytes):
            raise HddmError(
                f"{self.root / self.files[i]}: its row holds no image; remove it or fetch it again"
            )
        return content

    def size(self, i: int) -> int:
        return self.sizes[self._group(i)]

    def _group(self, i: int) -> int:
        return bisect.bisect_right(self.starts, i) - 1


def open_parquet(
    root: Path, names: Sequence[str], caption_column: str | None = None, label_column: str | None = None
) -> ParquetSource:
    """Open the images in ``root/<name>`` for each of ``names``, or in ``root`` if it is a file.

    Image r of a file is named ``<file without .parquet>/<r, eight digits><suffix>``, in a single file without
    the folder; the suffix is that of the row's ``path``, else `UNKNOWN_SUFFIX`. Unless a column is given,
    captions are ``text`` or ``caption``, labels ``label`` or else the only column of classes.

    Raises:
        HddmError: without pyarrow; for a file that is no Parquet or has no image column or several; for files
            of different columns, classes or splits; for missing captions and labels.
    """
    _refuse_splits(root, names)
    tables = [_read_table(root / name, caption_column, label_column) for name in names or [""]]
    for table in tables[1:]:
        if table.columns != tables[0].columns:
            raise HddmError(
                f"{table.path}: has other columns or classes than {tables[0].path}; name one of them, or a "
                "folder of one dataset"
            )
    files: list[str] = []
    for name, table in zip(names or [""], tables, strict=True):
        prefix = f"{name.removesuffix(PARQUET)}/" if name else ""
        files += [f"{prefix}{row:08d}{suffix}" for row, suffix in enumerate(table.suffixes)]
    if not files:
        raise HddmError(f"{root}: its Parquet files hold no rows")
    columns = tables[0].columns
    captions = [value for table in tables for value in table.captions]
    labels, classes = _labels([v for table in tables for v in table.labels], columns, files, root)
    return ParquetSource(
        root,
        tuple(files),
        classes,
        labels,
        as_captions(captions, files, root) if columns.caption else None,
        _RowGroups(columns.image),
        tuple((table.path, group) for table in tables for group in range(len(table.rows))),
        tuple(itertools.accumulate((rows for table in tables for rows in table.rows), initial=0)),
        tuple(size for table in tables for size in table.sizes),
    )


class _RowGroups:
    """Images by row group; the last two used stay in memory, shared by all threads."""

    def __init__(self, column: str) -> None:
        self._column, self._lock = column, threading.Lock()
        self._held: dict[tuple[Path, int], Any] = {}

    def images(self, path: Path, group: int) -> Any:
        """Arrow array of the image column."""
        key = path, group
        with self._lock:
            images = self._held.pop(key, None)
            while len(self._held) > 1:
                del self._held[next(iter(self._held))]
            if images is None:
                with _opened(path) as file:
                    images = file.read_row_group(group, columns=[self._column])[self._column]
            self._held[key] = images
        return images

    def __reduce__(self) -> tuple[type["_RowGroups"], tuple[str]]:
        # Another process reads its own row groups.
        return type(self), (self._column,)


@dataclass(frozen=True)
class _Table:
    """One file: columns, rows and bytes by row group, and suffix, label and caption by row."""

    path: Path
    columns: TableColumns
    rows: list[int]
    sizes: list[int]
    suffixes: list[str]
    labels: list[object]
    captions: list[object]


def _read_table(path: Path, caption_column: str | None, label_column: str | None) -> _Table:
    with _opened(path) as file:
        schema, metadata = file.schema_arrow, file.metadata
        columns = find_columns(schema, path, caption_column, label_column)
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        for number, group in enumerate(groups):
            if group.total_byte_size > LARGEST_ROW_GROUP:
                raise HddmError(
                    f"{path}: row group {number} has {group.total_byte_size} bytes; write the file "
                    "again with smaller ones"
                )
        has_path = "path" in image_fields(schema.field(columns.image).type)
        read = [columns.label, columns.caption, f"{columns.image}.path" if has_path else None]
        table = file.read(columns=[name for name in read if name])
        for found in (len(table), metadata.num_rows):
            _refuse_other_rows(path, found, sum(group.num_rows for group in groups))
        paths = table[columns.image].to_pylist() if has_path else [None] * metadata.num_rows
        return _Table(
            path,
            columns,
            [group.num_rows for group in groups],
            [group.total_byte_size for group in groups],
            [_suffix(value) for value in paths],
            table[columns.label].to_pylist() if columns.label else [],
            table[columns.caption].to_pylist() if columns.caption else [],
        )


def _refuse_other_rows(path: Path, found: int, stated: int) -> None:
    if found != stated:
        raise HddmError(f"{path}: has {found} rows where its row groups state {stated}; fetch it again")


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


def _refuse_splits(root: Path, names: Sequence[str]) -> None:
    """Refuse to mix splits, such as ``train-00000-of-00002.parquet`` and ``test-00000-of-00001.parquet``."""
    known = {"train", "test", "validation"}
    splits = {PurePosixPath(name).name.split("-")[0].removesuffix(PARQUET) for name in names} & known
    if len(splits) > 1:
        raise HddmError(
            f"{root}: holds the splits {', '.join(sorted(splits))}; name one file, or a folder of one split"
        )
