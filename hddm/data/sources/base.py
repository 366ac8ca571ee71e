"""What every image source offers, whatever holds its images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
"""Of image files, in lower case; files in upper case count too."""


class ImageSource(Protocol):
    """Images by number, in sorted order of their names, with what is known of each.

    Opening one reads names, labels and captions; `read` takes one image at a time, so that memory does not
    grow with the pixels. Reading in order is the fast way.
    """

    @property
    def root(self) -> Path:
        """What was opened; ``root / files[i]`` names image i in messages."""

    @property
    def files(self) -> Sequence[str]:
        """Names (N,): unique relative paths with ``/``, none of which leads out of a folder."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, empty for a source without."""

    @property
    def labels(self) -> Sequence[int] | None:
        """Class numbers (N,) in [0, len(classes)), None for a source without."""

    @property
    def captions(self) -> Sequence[str] | None:
        """Texts (N,), None for a source without."""

    def __len__(self) -> int: ...

    def read(self, i: int) -> bytes:
        """Image ``i`` as it is encoded.

        Raises:
            HddmError: where it is no longer to be read, by name.
        """

    def size(self, i: int) -> int:
        """Bytes of image ``i``, or of what it is stored among: what is known of its content unread.

        Raises:
            HddmError: where it is no longer there, by name.
        """

    def path(self, i: int) -> Path | None:
        """The file that is image ``i`` and nothing else, None where it lies in an archive."""
