"""The images of a shard by its manifest, read as those of any other source."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hddm.data.encoding_records import is_encoded
from hddm.data.shard_records import MANIFEST, Manifest, image_path, read_content, read_manifest
from hddm.errors import HddmError


@dataclass(frozen=True)
class ShardSource:
    """Images of a shard; each is held against its hash when it is read.

    The fields are those of `hddm.data.sources.base.ImageSource`.
    """

    root: Path
    manifest: Manifest

    @classmethod
    def of(cls, folder: Path) -> "ShardSource":
        """The shard in ``folder``.

        Raises:
            HddmError: for an encoded one, and as `hddm.data.shard_records.read_manifest`.
        """
        if (folder / MANIFEST).is_file() and is_encoded(folder):
            raise HddmError(
                f"{folder}: is an encoded shard, which holds no images; name the shard it was made of"
            )
        return cls(folder, read_manifest(folder))

    @property
    def files(self) -> Sequence[str]:
        return [entry.file for entry in self.manifest.images]

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.manifest.classes)

    @property
    def labels(self) -> Sequence[int] | None:
        labels = [entry.label for entry in self.manifest.images if entry.label is not None]
        return labels if len(labels) == len(self) else None

    @property
    def captions(self) -> Sequence[str] | None:
        captions = [entry.caption for entry in self.manifest.images if entry.caption is not None]
        return captions if len(captions) == len(self) else None

    def __len__(self) -> int:
        return len(self.manifest.images)

    def read(self, i: int) -> bytes:
        return read_content(self.root, self.manifest.images[i])

    def size(self, i: int) -> int:
        return self.path(i).stat().st_size

    def path(self, i: int) -> Path:
        return image_path(self.root, self.manifest.images[i])
