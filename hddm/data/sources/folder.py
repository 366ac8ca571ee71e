"""Images that are files of their own, in a folder or in folders by class."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hddm.data.sources.columns import as_labels
from hddm.data.sources.metadata import read_metadata
from hddm.data.sources.names import METADATA
from hddm.errors import HddmError
from hddm.wording import counted, shown


@dataclass(frozen=True)
class FolderSource:
    """Image files below ``root``; the fields are those of `hddm.data.sources.base.ImageSource`."""

    root: Path
    files: tuple[str, ...]
    classes: tuple[str, ...] = ()
    labels: tuple[int, ...] | None = None
    captions: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.files)

    def read(self, i: int) -> bytes:
        path = self.path(i)
        try:
            return path.read_bytes()
        except OSError as error:
            raise HddmError(f"{path}: cannot be read: {error.strerror}") from error

    def size(self, i: int) -> int:
        path = self.path(i)
        try:
            return path.stat().st_size
        except OSError as error:
            raise HddmError(f"{path}: cannot be read: {error.strerror}") from error

    def path(self, i: int) -> Path:
        return self.root / self.files[i]


def open_folder(root: Path, files: Sequence[str]) -> FolderSource:
    """The images ``files`` below ``root``; they have labels where each lies in the folder of its class."""
    parents = [name.split("/")[0] if "/" in name else None for name in files]
    if None in parents:
        return FolderSource(root, tuple(files))
    labels, classes = as_labels(parents, files, root)
    return FolderSource(root, tuple(files), classes, labels)


def open_described_folder(
    root: Path, found: Sequence[str], caption_column: str | None = None, label_column: str | None = None
) -> FolderSource:
    """The images ``found`` below ``root``, as ``root/metadata.jsonl`` describes them.

    As in Hugging Face's ``imagefolder``, folders then name no classes. That library passes over images
    without a line; here they are refused, since a typo would lose them.

    Raises:
        HddmError: as `read_metadata`; where it names a file that is missing, or leaves out an image.
    """
    described = read_metadata(root, caption_column, label_column)
    there, named = set(found), set(described.files)
    missing = [name for name in described.files if name not in there]
    if missing:
        raise HddmError(
            f"{root / METADATA}: names {counted(len(missing), 'image')} not in {root}; fetch what is "
            "missing, or remove its lines",
            shown(missing),
        )
    others = [name for name in found if name not in named]
    if others:
        raise HddmError(
            f"{root}: {counted(len(others), 'image is', 'images are')} not in {METADATA}; describe "
            "what is missing there, or move it away",
            shown(others),
        )
    return FolderSource(root, described.files, described.classes, described.labels, described.captions)
