"""Images that are files of their own, in a folder or in folders by class."""

from dataclasses import dataclass
from pathlib import Path

from hddm.data.sources.base import SUFFIXES
from hddm.data.sources.metadata import METADATA, read_metadata
from hddm.errors import HddmError


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

    def path(self, i: int) -> Path:
        return self.root / self.files[i]


def open_folder(root: Path) -> FolderSource:
    """The images ``root/<class>/…/<file>`` or ``root/<file>``; other files are left alone.

    They have labels where each lies in a folder of its class.

    Raises:
        HddmError: for a missing folder, or one without images.
    """
    files = image_files(root)
    parents = [name.split("/")[0] if "/" in name else None for name in files]
    if None in parents:
        return FolderSource(root, tuple(files))
    classes = tuple(sorted({str(parent) for parent in parents}))
    number = {name: index for index, name in enumerate(classes)}
    return FolderSource(root, tuple(files), classes, tuple(number[str(parent)] for parent in parents))


def open_described_folder(
    root: Path, caption_column: str | None = None, label_column: str | None = None
) -> FolderSource:
    """The images that ``root/metadata.jsonl`` describes, with its captions and labels.

    As in Hugging Face's ``imagefolder``, folders then name no classes.

    Raises:
        HddmError: as `read_metadata`; where it names a file that is missing, or leaves out an image.
    """
    described = read_metadata(root, caption_column, label_column)
    found = set(image_files(root))
    missing = [name for name in described.files if name not in found]
    if missing:
        raise HddmError(
            f"{root / METADATA}: names {len(missing)} images that are not in {root}; fetch them, or remove "
            "their lines",
            missing[:20],
        )
    others = sorted(found - set(described.files))
    if others:
        raise HddmError(
            f"{root}: {len(others)} images are not in {METADATA}; describe them there, or move them away",
            others[:20],
        )
    return FolderSource(root, described.files, described.classes, described.labels, described.captions)


def image_files(root: Path) -> list[str]:
    """Names of the image files below ``root``, sorted.

    Raises:
        HddmError: for a missing folder, or one without images.
    """
    if not root.is_dir():
        raise HddmError(f"{root}: no such folder of images")
    files = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*")
        if path.suffix.lower() in SUFFIXES and path.is_file()
    )
    if not files:
        raise HddmError(f"{root}: holds no images ({', '.join(sorted(SUFFIXES))})")
    return files
