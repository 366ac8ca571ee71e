"""Sources of images: folders, tar shards and Parquet files, opened by `open_source` and read the same way."""

import logging
from collections import Counter
from pathlib import Path

from hddm.data.sources.base import METADATA, PARQUET, SUFFIXES, TAR, ImageSource, find_files
from hddm.data.sources.folder import open_described_folder, open_folder
from hddm.data.sources.parquet import open_parquet
from hddm.data.sources.tar import open_tars
from hddm.utils.errors import HddmError

log = logging.getLogger(__name__)


def open_source(
    path: Path, caption_column: str | None = None, label_column: str | None = None
) -> ImageSource:
    """Open the images at ``path``, which is one of these.

    - a folder of images, or of class folders;
    - a folder of images with ``metadata.jsonl``, as Hugging Face's ``imagefolder``;
    - a tar archive in WebDataset's naming, or a folder of them;
    - a Parquet file with encoded images, as Hugging Face's ``datasets`` writes it, or a folder of them.

    Captions are in ``caption_column``, else in ``text`` or ``caption`` (in tars ``txt``), if present; class
    labels in ``label_column``, else in ``label`` (in tars also ``cls``). Plain folders have no columns.
    Files of a folder that are not read are counted in a warning, by suffix.
    Raises `HddmError` for a path without images or with several kinds, and as the opener of its kind.
    """
    columns = caption_column, label_column
    if path.is_file():
        if path.suffix == TAR:
            return open_tars(path, [], *columns)
        if path.suffix == PARQUET:
            return open_parquet(path, [], *columns)
        raise HddmError(f"{path}: is not a folder, .tar or .parquet of images; unpack other archives first")
    if not path.is_dir():
        raise HddmError(f"{path}: no such folder of images")
    found = find_files(path)
    kinds = {"image files": found.images, TAR: found.tars, PARQUET: found.parquets}
    held = [f"{len(names)} {kind} (as {names[0]})" for kind, names in kinds.items() if names]
    if len(held) > 1:
        raise HddmError(f"{path}: holds {' and '.join(held)}; name a folder with one kind of them")
    if found.tars:
        return open_tars(path, found.tars, *columns)
    if found.parquets:
        return open_parquet(path, found.parquets, *columns)
    read = ", ".join(sorted(SUFFIXES))
    if found.others:
        left = ", ".join(f"{number} {suffix}" for suffix, number in Counter(found.others).most_common(9))
        log.warning("%s: left out %s; only %s are read as images", path, left, read)
    other = [name for name in found.tables if name != METADATA]
    if other:
        raise HddmError(
            f"{path / other[0]}: captions are read from {METADATA} in the folder that is named; name its "
            "folder, or write it there"
        )
    if found.tables:
        return open_described_folder(path, found.images, *columns)
    if not found.images:
        raise HddmError(f"{path}: holds no images ({read}, {TAR}, {PARQUET})")
    for option, value in zip(("--caption-column", "--label-column"), columns, strict=True):
        if value is not None:
            raise HddmError(f"{option} {value}: {path} is a plain folder; describe its images in {METADATA}")
    return open_folder(path, found.images)
