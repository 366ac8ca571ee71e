"""Parquet files with encoded images, in the layout of Hugging Face's ``datasets``.

An image column is ``struct<bytes: binary, path: string>``, or plain ``binary``. The schema's ``huggingface``
metadata, where there is some, says which column it is and how the classes are called.
"""

import bisect
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from hddm.data.sources.base import SUFFIXES
from hddm.data.sources.columns import as_captions, as_labels
from hddm.data.sources.names import PARQUET
from hddm.data.sources.parquet_layout import Layout, find_layout, image_fields, read_parquet
from hddm.errors import HddmError

LARGEST_ROW_GROUP = 4 * 2**30
"""Bytes of a row group: two are held in memory."""

UNKNOWN_SUFFIX = ".img"
"""Of an image whose row does not say how it is encoded."""


@dataclass(frozen=True)
class ParquetSource:
    """Images in Parquet files; the fields are those of `hddm.data.sources.base.ImageSource`.

    ``groups`` (G,) are file and row group, ``starts`` (G + 1,) the first image of each and the end, ``sizes``
    (G,) the bytes of all its columns. The two row groups that were read last stay in memory.
    """

    root: Path
    files: tuple[str, ...]
    classes: tuple[str, ...]
    labels: tuple[int, ...] | None
    captions: tuple[str, ...] | None
    held: "_RowGroups" = field(repr=False)
    groups: tuple[tuple[Path, int], ...] = field(repr=False)
    starts: tuple[int, ...] = field(repr=False)
    sizes: tuple[int, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.files)

    def read(self, i: int) -> bytes:
        group = self._group(i)
        value = self.held.images(*self.groups[group])[i - self.starts[group]].as_py()
        content = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(content, bytes):
            raise HddmError(
                f"{self.root / self.files[i]}: its row holds no image; remove it or fetch it again"
            )
        return content

    def size(self, i: int) -> int:
        return self.sizes[self._group(i)]

    def path(self, i: int) -> None:
        return None

    def _group(self, i: int) -> int:
        return bisect.bisect_right(self.starts, i) - 1


def open_parquet(
    root: Path, names: Sequence[str], caption_column: str | None = None, label_column: str | None = None
) -> ParquetSource:
    """The images in ``root/<name>`` for each of ``names``, or in ``root`` if it is one file itself.

    Image r of a file is named ``<file without .parquet>/<r, eight digits><suffix>``, in a single file without
    the folder; the suffix is that of the row's ``path``, else `UNKNOWN_SUFFIX`.

    Args:
        root: a folder, or one file.
        names: files below ``root``, sorted; empty for one file.
        caption_column: name of the captions' column; without it ``text`` or ``caption``.
        label_column: name of the labels' column; without it ``label``, else the only column of classes.

    Raises:
        HddmError: without pyarrow; for a file that is no Parquet or has no image column or several; for files
            of different columns or classes, and of several splits; for captions and labels that are missing.
    """
    _refuse_splits(root, names)
    tables = [_Table.of(root / name, caption_column, label_column) for name in names or [""]]
    for table in tables[1:]:
        if table.layout != tables[0].layout:
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
    layout = tables[0].layout
    captions = [value for table in tables for value in table.captions]
    labels, classes = _labels([v for table in tables for v in table.labels], layout, files, root)
    return ParquetSource(
        root,
        tuple(files),
        classes,
        labels,
        as_captions(captions, files, root) if layout.caption else None,
        _RowGroups(layout.image),
        tuple((table.path, group) for table in tables for group in range(len(table.rows))),
        tuple(itertools.accumulate((rows for table in tables for rows in table.rows), initial=0)),
        tuple(size for table in tables for size in table.sizes),
    )


class _RowGroups:
    """Images by row group; the last two that were asked for stay in memory, for all threads together."""

    def __init__(self, column: str) -> None:
        self._column, self._lock = column, threading.Lock()
        self._held: dict[tuple[Path, int], Any] = {}

    def images(self, path: Path, group: int) -> Any:
        """The column's arrow array."""
        key = path, group
        with self._lock:
            images = self._held.pop(key, None)
            while len(self._held) > 1:
                del self._held[next(iter(self._held))]
            if images is None:
                table = read_parquet(path, lambda file: file.read_row_group(group, columns=[self._column]))
                images = table[self._column]
            self._held[key] = images
        return images

    def __reduce__(self) -> tuple[type["_RowGroups"], tuple[str]]:
        # Another process reads its own.
        return type(self), (self._column,)


@dataclass(frozen=True)
class _Table:
    path: Path
    layout: Layout
    rows: list[int]
    sizes: list[int]
    suffixes: list[str]
    labels: list[object]
    captions: list[object]

    @classmethod
    def of(cls, path: Path, caption_column: str | None, label_column: str | None) -> "_Table":
        return read_parquet(path, lambda file: cls._read(path, file, caption_column, label_column))

    @classmethod
    def _read(cls, path: Path, file: Any, caption_column: str | None, label_column: str | None) -> "_Table":
        schema, metadata = file.schema_arrow, file.metadata
        layout = find_layout(schema, path, caption_column, label_column)
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        for number, group in enumerate(groups):
            if group.total_byte_size > LARGEST_ROW_GROUP:
                raise HddmError(
                    f"{path}: row group {number} has {group.total_byte_size} bytes; write the file "
                    "again with smaller ones"
                )
        has_path = image_fields(schema.field(layout.image).type) >= {"path"}
        columns = [layout.label, layout.caption, f"{layout.image}.path" if has_path else None]
        table = file.read(columns=[column for column in columns if column])
        paths = table[layout.image].to_pylist() if has_path else [None] * metadata.num_rows
        return cls(
            path,
            layout,
            [group.num_rows for group in groups],
            [group.total_byte_size for group in groups],
            [_suffix(value) for value in paths],
            table[layout.label].to_pylist() if layout.label else [],
            table[layout.caption].to_pylist() if layout.caption else [],
        )


def _suffix(value: object) -> str:
    path = value.get("path") if isinstance(value, dict) else None
    suffix = PurePosixPath(path).suffix.lower() if isinstance(path, str) else ""
    return suffix if suffix in SUFFIXES else UNKNOWN_SUFFIX


def _labels(
    values: list[object], layout: Layout, files: Sequence[str], root: Path
) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    if layout.label is None:
        return None, ()
    if layout.classes is None:
        return as_labels(values, files, root)
    for value, name in zip(values, files, strict=True):
        if not isinstance(value, int) or not 0 <= value < len(layout.classes):
            raise HddmError(
                f"{root}: {name} has {layout.label} {value} of {len(layout.classes)} classes; remove the "
                "column from a split without labels"
            )
    return tuple(int(str(value)) for value in values), layout.classes


def _refuse_splits(root: Path, names: Sequence[str]) -> None:
    """``train-00000-of-00002.parquet`` and ``test-00000-of-00001.parquet`` are not to be mixed."""
    known = {"train", "test", "validation"}
    splits = {PurePosixPath(name).name.split("-")[0].removesuffix(PARQUET) for name in names} & known
    if len(splits) > 1:
        raise HddmError(
            f"{root}: holds the splits {', '.join(sorted(splits))}; name one file, or a folder of one split"
        )
