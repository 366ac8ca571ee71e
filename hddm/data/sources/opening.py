"""Any path to images → their source."""

from pathlib import Path

from hddm.data.sources.base import ImageSource
from hddm.data.sources.folder import open_described_folder, open_folder
from hddm.data.sources.metadata import METADATA


def open_source(
    path: Path, caption_column: str | None = None, label_column: str | None = None
) -> ImageSource:
    """The images at ``path``.

    A folder of images, of class folders, or of images with ``metadata.jsonl``.

    Args:
        path: the folder.
        caption_column: where the captions are; without it ``text`` or ``caption``, if there is one.
        label_column: where the class labels are; without it ``label``, if there is one.

    Raises:
        HddmError: for a path without images, and as the opener of its format.
    """
    if (path / METADATA).exists():
        return open_described_folder(path, caption_column, label_column)
    return open_folder(path)
