"""Pictures of a partition's images."""

from collections.abc import Sequence
from pathlib import Path

from hddm.data.contact_sheets import contact_sheet, lines_of
from hddm.data.decoding import open_image
from hddm.data.sources import ImageSource

COLUMNS = 8


def write_grid(source: ImageSource, rows: Sequence[int], path: Path) -> None:
    """Write images ``rows`` of ``source`` as one PNG, `COLUMNS` a line."""
    contact_sheet(
        lines_of(rows, COLUMNS),
        lambda row: open_image(source.read(row), source.root / source.files[row]),
        COLUMNS,
    ).save(path)
