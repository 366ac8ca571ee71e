"""Images that cannot be read: all of them by name, or as many as may be left out."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hddm.data.decoding import decode
from hddm.data.sources import ImageSource
from hddm.errors import HddmError
from hddm.progress import Progress
from hddm.wording import counted, shown

_THREADS = 8
"""That decode; Pillow works outside Python's lock."""
_BATCH = 1024
"""Images that wait for a thread at a time."""


def why_bad(source: ImageSource, row: int) -> str | None:
    """Why an image cannot be read, None where it can."""
    try:
        decode(source.read(row), source.root / source.files[row])
    except HddmError as error:
        return error.message
    return None


def find_bad(source: ImageSource, rows: range) -> dict[int, str]:
    """Why images cannot be read, by number, for those of ``rows`` that cannot."""
    found: dict[int, str] = {}
    if not rows:
        return found
    with Progress(len(rows), "look for other bad images") as advance, ThreadPoolExecutor(_THREADS) as pool:
        for start in range(rows.start, rows.stop, _BATCH):
            part = range(start, min(start + _BATCH, rows.stop))
            reasons = pool.map(lambda row: why_bad(source, row), part)
            found |= {row: reason for row, reason in zip(part, reasons, strict=True) if reason is not None}
            advance(len(part))
    return found


def too_many_bad(origin: Path | str, reasons: Sequence[str], max_bad: int) -> HddmError:
    """The error of more bad images, in ``origin``, than ``max_bad``; ``reasons`` name one each."""
    them = "it" if len(reasons) == 1 else "them"
    return HddmError(
        f"{origin}: {counted(len(reasons), 'image')} cannot be read, and {max_bad} may be; mend or remove "
        f"{them}, or leave {them} out with --max-bad {len(reasons)} where that is an option",
        shown(reasons),
    )
