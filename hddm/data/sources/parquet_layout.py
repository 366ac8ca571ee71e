"""Which columns of a Parquet file hold images, labels and captions."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hddm.data.sources.columns import CAPTION_COLUMNS, choose_column
from hddm.errors import HddmError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Layout:
    """Names of the columns that are read; ``classes`` are named by the schema of ``datasets``, if at all."""

    image: str
    label: str | None
    classes: tuple[str, ...] | None
    caption: str | None


def find_layout(schema: Any, path: Path, caption_column: str | None, label_column: str | None) -> Layout:
    """The layout of a file with the arrow ``schema``.

    Raises:
        HddmError: without a column of images, or where a choice is left.
    """
    features = _features(schema)
    image = _image_column(schema, features, path)
    others = [name for name in schema.names if name != image]
    declared = [name for name in others if _type(features, name) == "ClassLabel"]
    usual = ["label"] if "label" in others else declared
    label = choose_column(others, label_column, usual, "--label-column", path)
    names = features[label].get("names") if label is not None and label in declared else None
    classes = tuple(map(str, names)) if isinstance(names, list) else None
    caption = choose_column(others, caption_column, CAPTION_COLUMNS, "--caption-column", path)
    return Layout(image, label, classes, caption)


def _image_column(schema: Any, features: dict[str, Any], path: Path) -> str:
    names: list[str] = schema.names
    fitting = [name for name in names if "bytes" in image_fields(schema.field(name).type)]
    fitting = [name for name in fitting if _type(features, name) == "Image"] or fitting
    if "image" in fitting:
        return "image"
    if not fitting:
        raise HddmError(f"{path}: has no column of encoded images (has {', '.join(schema.names)})")
    if len(fitting) > 1:
        raise HddmError(f"{path}: columns {' and '.join(fitting)} hold images; rename one to image")
    return fitting[0]


def image_fields(kind: Any) -> set[str]:
    """``{"bytes"}`` or ``{"bytes", "path"}`` for an arrow type that holds encoded images, else nothing."""
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


def _features(schema: Any) -> dict[str, Any]:
    """Columns as ``datasets`` declares them, empty for a file of another writer."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}


def _type(features: dict[str, Any], name: str) -> object:
    feature = features.get(name)
    return feature.get("_type") if isinstance(feature, dict) else None


def read_parquet(path: Path, work: Callable[[Any], Result]) -> Result:
    """``work`` on the opened Parquet file.

    Raises:
        HddmError: without pyarrow, and for whatever is wrong with the file.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise HddmError(f"{path}: Parquet needs pyarrow: pip install 'hddm-diffusion[parquet]'") from error
    try:
        with pq.ParquetFile(path) as file:
            return work(file)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise HddmError(f"{path}: cannot be read as Parquet ({error}); fetch it again") from error
