"""The list of a shard's images as a Parquet file, for shards of many images.

Columns are ``file``, ``sha256`` (32 bytes), ``label`` and ``caption``, in row groups of `PART` images. Pages
are neither compressed nor encoded by a dictionary, so that a small file cannot ask for a large memory.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hddm.data.entries import NO_LABEL, PART, Entries, Texts
from hddm.data.sources.archives import open_table
from hddm.utils.errors import HddmError, one_line, optional

LARGEST_TABLE = 2**33
"""Bytes: about fifty million images."""
_PLAIN = {"PLAIN", "RLE", "BIT_PACKED"}
"""Encodings of values and of whether they are there."""
_AGAIN = "copy the shard again"


def open_arrow(user: str) -> Any:
    """Import pyarrow; raises `HddmError` without it, for ``user``."""
    optional("pyarrow.parquet", user, "parquet")
    return optional("pyarrow", user, "parquet")


def write_table(path: Path, parts: Iterable[Entries]) -> int:
    """Write the images of ``parts``, each of at most `PART`, as they come; returns their number."""
    pa = open_arrow(f"{path}: a long list of images")
    number = 0
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    with pa.parquet.ParquetWriter(path, _schema(pa), **options) as writer:
        for part in parts:
            writer.write_batch(_batch(pa, part))
            number += len(part)
    return number


def _schema(pa: Any) -> Any:
    return pa.schema(
        [
            pa.field("file", pa.string(), nullable=False),
            pa.field("sha256", pa.binary(32), nullable=False),
            pa.field("label", pa.int32()),
            pa.field("caption", pa.string()),
        ]
    )


def _batch(pa: Any, part: Entries) -> Any:
    digests = [None, pa.py_buffer(part.sha256.tobytes())]
    columns = [
        pa.array(list(part.files), pa.string()),
        pa.FixedSizeBinaryArray.from_buffers(pa.binary(32), len(part), digests),
        pa.array(part.labels, mask=part.labels == NO_LABEL),
        pa.array(list(part.captions), pa.string(), mask=~part.are_captioned),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_schema(pa))


def read_table(path: Path, rows: int) -> Entries:
    """The images in a table of ``rows``.

    Raises `HddmError` without pyarrow, for another number of rows, for columns, encodings or sizes that
    `write_table` does not write, and for values that are missing or not UTF-8.
    """
    with open_table(path) as file:
        pa = open_arrow(f"{path}: Parquet")
        problem = _problem(pa, file, path.stat().st_size, rows)
        if problem:
            raise HddmError(f"{path}: {problem}; {_AGAIN}")
        found = Entries.joined(_parts(path, file))
    if len(found) != rows:
        raise HddmError(f"{path}: holds {len(found)} images, not {rows}; {_AGAIN}")
    return found


def _problem(pa: Any, file: Any, size: int, rows: int) -> str | None:
    """What is wrong with the table by its own description, which is read before any of its content."""
    if size > LARGEST_TABLE:
        return f"has more than {LARGEST_TABLE} bytes"
    expected = [(field.name, field.type) for field in _schema(pa)]
    found = [(field.name, field.type) for field in file.schema_arrow]
    if found != expected:
        columns = ", ".join(f"{name} {kind}" for name, kind in found)
        wanted = ", ".join(f"{name} {kind}" for name, kind in expected)
        return f"has the columns {one_line(columns)}, not {wanted}"
    groups = [file.metadata.row_group(k) for k in range(file.metadata.num_row_groups)]
    numbers = [group.num_rows for group in groups]
    if not sum(numbers) == file.metadata.num_rows == rows:
        return f"holds {file.metadata.num_rows} images, not {rows}"
    # Every image takes more bytes than its SHA-256.
    if any(not 0 <= number <= PART for number in numbers) or rows * 32 > size:
        return f"states {rows} images in row groups of up to {max(numbers)}, and has {size} bytes"
    for column in _columns(groups):
        is_plain = column.compression == "UNCOMPRESSED" and _PLAIN.issuperset(column.encodings)
        if not is_plain:
            return f"its column {column.path_in_schema} is compressed"
        if not 0 <= column.total_uncompressed_size <= size:
            return f"states a column of {column.total_uncompressed_size} bytes, and has {size}"
    return None


def _columns(groups: Iterable[Any]) -> Iterator[Any]:
    for group in groups:
        for k in range(group.num_columns):
            yield group.column(k)


def _parts(path: Path, file: Any) -> Iterator[Entries]:
    for batch in file.iter_batches(batch_size=PART):
        batch.validate(full=True)
        yield _entries(path, batch)


def _entries(path: Path, batch: Any) -> Entries:
    """The images of a batch whose buffers were validated; raises `HddmError` for missing values."""
    files, digests, labels, captions = batch.columns
    numbers = labels.fill_null(NO_LABEL).to_numpy()
    is_negative = (labels.fill_null(0).to_numpy() < 0).any()
    if files.null_count or digests.null_count or is_negative:
        raise HddmError(
            f"{path}: has an image without a file or SHA-256, or a label below 0; {_AGAIN}"
        )
    first, length = digests.offset * 32, len(digests) * 32
    content = np.frombuffer(digests.buffers()[1], dtype=np.uint8)[first : first + length]
    return Entries(
        _texts(files),
        content.reshape(-1, 32),
        numbers,
        _texts(captions.fill_null("")),
        captions.is_valid().to_numpy(zero_copy_only=False),
    )


def _texts(column: Any) -> Texts:
    """Texts of a column without missing ones."""
    _, offsets, data = column.buffers()
    first, number = column.offset, len(column)
    places = np.frombuffer(offsets, dtype=np.int32)[first : first + number + 1].astype(np.int64)
    content = b"" if data is None else data[places[0] : places[-1]].to_pybytes()
    return Texts(content, places[:-1] - places[0], places[1:] - places[0])
