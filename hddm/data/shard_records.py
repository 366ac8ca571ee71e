"""Shards on disk: self-contained folders that a contributor can take away and train on.

shards/
  partition.json                 how the shards were made, and their sizes
  clusters.safetensors           fine centres and their shard
  report.html, pictures/         the report
  held_out/shard_0/…             images kept from training, where any were; shards of their own
  shard_0/manifest.json          files with SHA-256 and label, one hash of it all, one of all shards
  shard_0/images/<file>          hard links where the file system allows, copies otherwise

An encoded shard has instead:

shard_0/manifest.json            the source shard's identity, how it was encoded, every other file's SHA-256
shard_0/images.jsonl             the source's list of images, one `ImageEntry` a line
shard_0/data-00000.safetensors   rows of tensors, in the order of the images
shard_0/null.safetensors         tokens of the empty prompt, where captions were encoded
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from hddm.data.sources.base import ImageSource
from hddm.networks.identity import TextEncoderRecord, VaeRecord
from hddm.utils.errors import HddmError, UsageError
from hddm.utils.files import read_json
from hddm.utils.records import ENSEMBLE_FILE, EXPERT_FILE, ROUTER_FILE, Record, read_record

FORMAT = "1.3"
MANIFEST = "manifest.json"
PARTITION_FILE = "partition.json"
HELD_OUT = "held_out"
"""Folder of a partition in which ``shard_k`` are images that the expert of shard k is judged by."""
MIN_IMAGES = 16
LARGEST_MANIFEST = 2**29
"""Bytes; some two million images."""


class ImageEntry(Record):
    """One image of a shard: its path inside the folder, its SHA-256 and its label."""

    file: str
    sha256: str
    label: int | None
    caption: str | None = None


class ShardIdentity(Record):
    """The shard of a partition, of images or encoded; ``hash`` covers every file, content and label."""

    format: str
    shard: int
    num_shards: int
    classes: list[str]
    hash: str
    partition: str | None = None
    """Hash of the hashes of all shards, which those of one partition share; format 1.0 has none."""
    held_out_of: str | None = None
    """Hash of the shard that these images were kept from, so that its expert can be judged by them."""


class ShardManifest(ShardIdentity):
    """``manifest.json`` of a shard of images."""

    images: list[ImageEntry]


class PartitionRecord(Record):
    """``partition.json``: how the shards were made; ``images`` counts those held out, not those skipped."""

    format: str
    images: int
    features: str
    extractor: str | None = None
    """Hash of the settings and weights that features came from; older partitions have none."""
    fine_clusters: int
    seed: int
    sizes: list[int]
    hashes: list[str]
    held_out_share: float = 0.0
    held_out: tuple[int, ...] = ()
    """Images of each shard that are held out; empty where none are."""
    skipped: tuple[str, ...] = ()
    """Files that could not be read."""
    copies: int | None = None
    """Images that are equal, in every pixel, to another one that is counted; older partitions do not say."""
    proposal: dict[int, float] | None = None
    """Silhouette by number of shards, where that number was proposed."""


def read_manifest(folder: Path) -> ShardManifest:
    """Read the manifest of the shard in ``folder``; its images are not opened.

    Raises:
        HddmError: for a missing or newer manifest, and as `check_entries`.
    """
    _refuse_other_folder(folder, MANIFEST)
    manifest = read_record(folder / MANIFEST, ShardManifest, FORMAT, LARGEST_MANIFEST)
    check_entries(folder / MANIFEST, manifest.images, manifest.classes, manifest.hash)
    return manifest


def check_entries(path: Path, entries: Sequence[ImageEntry], classes: Sequence[str], digest: str) -> None:
    """Refuse a list of images, from ``path``, that does not match its hash, or has labels of no class."""
    if content_hash(entries, classes) != digest:
        raise HddmError(f"{path}: its list of images does not match its hash; take the shard anew")
    for entry in entries:
        if entry.label is not None and not 0 <= entry.label < len(classes):
            raise HddmError(f"{path}: {entry.file} has label {entry.label} of {len(classes)} classes")


def image_path(folder: Path, entry: ImageEntry) -> Path:
    """Path of the image of an entry.

    Raises:
        HddmError: for a place outside ``folder``.
    """
    path = folder / entry.file
    if not path.resolve().is_relative_to(folder.resolve()):
        raise HddmError(f"{folder}: its manifest names {entry.file!r}, outside the folder; refused")
    return path


def read_content(folder: Path, entry: ImageEntry) -> bytes:
    """The encoded image of an entry, checked against its hash.

    Raises:
        HddmError: for a file that is outside ``folder``, missing or changed.
    """
    path = image_path(folder, entry)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise HddmError(f"{path}: named by the manifest, but {error.strerror}") from error
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise HddmError(f"{path}: its content changed since the partition; take the shard anew")
    return content


def find_shards(folder: Path) -> list[Path]:
    """The shard folders of a partition, in order.

    Raises:
        HddmError: where ``folder`` holds no partition.
    """
    _refuse_other_folder(folder, PARTITION_FILE)
    record = read_record(folder / PARTITION_FILE, PartitionRecord, FORMAT)
    return [folder / f"shard_{k}" for k in range(len(record.sizes))]


def find_held_out(folder: Path) -> list[Path]:
    """The shards of held-out images of a partition, in order: those that are there.

    Raises:
        HddmError: where ``folder`` holds no partition.
    """
    found = [folder / HELD_OUT / shard.name for shard in find_shards(folder)]
    return [shard for shard in found if shard.is_dir()]


def holds_shard(folder: Path) -> bool:
    """True if ``folder`` is a shard's: a model's has a manifest of the same name."""
    return (folder / MANIFEST).is_file() and not _holds_model(folder)


def _holds_model(folder: Path) -> bool:
    return any((folder / record).exists() for record in (EXPERT_FILE, ROUTER_FILE, ENSEMBLE_FILE))


def _refuse_other_folder(folder: Path, record: str) -> None:
    """Refuse a folder that holds no ``record``, and say what it is instead."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder")
    kind = "shard" if record == MANIFEST else "partition"
    if _holds_model(folder):
        raise UsageError(f"{folder}: is no {kind}, but a model's folder; hddm partition writes the other")
    if (folder / record).exists():
        return
    if (folder / PARTITION_FILE).exists():
        shard = folder / "shard_0"
        raise UsageError(f"{folder}: is a partition, not a shard; name one of its folders, as {shard}")
    if (folder / MANIFEST).exists():
        hint = f", {folder.parent}" if (folder.parent / PARTITION_FILE).exists() else ""
        raise UsageError(f"{folder}: is a shard, not a partition; name the folder of all shards{hint}")
    raise UsageError(f"{folder}: is no {kind}, since it holds no {record}; hddm partition writes them")


def labels_of(entries: Sequence[ImageEntry]) -> list[int] | None:
    """Labels (N,) where every entry has one."""
    labels = [entry.label for entry in entries if entry.label is not None]
    return labels if len(labels) == len(entries) else None


def captions_of(entries: Sequence[ImageEntry]) -> tuple[str, ...] | None:
    """Captions (N,) where every entry has one."""
    captions = tuple(entry.caption for entry in entries if entry.caption is not None)
    return captions if len(captions) == len(entries) else None


def content_hash(entries: Sequence[ImageEntry], classes: Sequence[str]) -> str:
    """SHA-256 of what a shard holds: files, contents, labels and captions."""
    lines = [json.dumps(list(classes))]
    for one in entries:
        caption = "" if one.caption is None else f" {json.dumps(one.caption)}"
        lines.append(f"{one.file} {one.sha256} {one.label}{caption}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


ENCODED_FORMAT = "1.1"
IMAGES = "images.jsonl"
NULL = "null.safetensors"

PIXELS = "pixels"
MEAN, DEVIATION = "mean", "std"
MIRRORED = "mirrored_"
TOKENS = "tokens"

Dtype = Literal["float16", "bfloat16", "float32"]


class EncodingRecord(Record):
    """How images became rows of tensors.

    ``shape`` (C, H, W) is that of a row. ``resolution`` is the side of the square that images were fitted to,
    None where they were taken as they are, and ``crop`` what was kept of a longer side; the crop of image i
    depends on (``seed``, i) alone. ``mirrored``: latents of the mirrored images are there too.
    """

    space: Literal["pixels", "latents"]
    shape: tuple[int, int, int]
    dtype: Literal["uint8"] | Dtype
    resolution: int | None = None
    crop: Literal["center", "random"] | None = None
    interpolation: str | None = None
    mirrored: bool = False
    text_dtype: Dtype | None = None
    seed: int = 0


class Computed(Record):
    """Device and batches of the networks; with others their rows differ by rounding."""

    device: str
    batch_size: int
    torch: str
    """Its version."""


class FileRecord(Record):
    """A file of an encoded shard, and how many rows (or lines) it holds."""

    file: str
    sha256: str
    rows: int


class Skipped(Record):
    """An image that could not be read, and why."""

    file: str
    reason: str


class EncodedManifest(ShardIdentity):
    """``manifest.json`` of an encoded shard.

    ``hash``, ``partition`` and ``held_out_of`` are the source's, so that experts and routers match by them.
    Row k of the data is the k-th image of ``images`` that is not in ``skipped``; of ``cut_captions`` the
    end is not in the tokens. ``computed`` has each way in which networks ran, in the order of the files:
    several where a killed encoding continued with others, none where images passed no network.
    """

    encoding: EncodingRecord
    vae: VaeRecord | None = None
    text_encoder: TextEncoderRecord | None = None
    images: FileRecord
    data: list[FileRecord]
    null: FileRecord | None = None
    skipped: tuple[Skipped, ...] = ()
    cut_captions: int = 0
    computed: tuple[Computed, ...] = ()

    @property
    def num_rows(self) -> int:
        """Samples in the shard."""
        return sum(one.rows for one in self.data)


def is_encoded(folder: Path) -> bool:
    """True if the ``manifest.json`` in ``folder``, which must be there, is of an encoded shard."""
    return "encoding" in read_json(folder / MANIFEST, LARGEST_MANIFEST)


def read_encoded_manifest(folder: Path) -> EncodedManifest:
    """The record of an encoded shard.

    Raises:
        HddmError: as `read_record`.
    """
    return read_record(folder / MANIFEST, EncodedManifest, ENCODED_FORMAT)


def write_entries(path: Path, entries: Iterable[ImageEntry]) -> None:
    """Write a list of images, one a line: a list of millions is no JSON file to read at once."""
    with path.open("w", encoding="utf-8") as file:
        for entry in entries:
            file.write(json.dumps(entry.model_dump(exclude_none=True), ensure_ascii=False) + "\n")


def read_entries(path: Path) -> list[ImageEntry]:
    """The list that `write_entries` wrote.

    Raises:
        HddmError: for a line that is no entry.
    """
    entries = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                entries.append(ImageEntry.model_validate({"label": None, **json.loads(line)}))
            except (ValueError, TypeError, ValidationError) as error:
                raise HddmError(f"{path}: line {number} is no image of a shard; encode it again") from error
    return entries


@dataclass(frozen=True)
class ShardImages(ImageSource):
    """Images of a shard; each is held against its hash when it is read."""

    entries: Sequence[ImageEntry]

    def read(self, i: int) -> bytes:
        return read_content(self.root, self.entries[i])

    def size(self, i: int) -> int:
        return self.path(i).stat().st_size

    def path(self, i: int) -> Path:
        return image_path(self.root, self.entries[i])


def open_images(folder: Path) -> ShardImages:
    """The images of the shard in ``folder``.

    Raises:
        HddmError: for an encoded one, and as `read_manifest`.
    """
    if (folder / MANIFEST).is_file() and is_encoded(folder):
        raise HddmError(
            f"{folder}: is an encoded shard, which holds no images; name the shard it was made of"
        )
    manifest = read_manifest(folder)
    entries, classes = manifest.images, tuple(manifest.classes)
    files = [entry.file for entry in entries]
    return ShardImages(folder, files, classes, labels_of(entries), captions_of(entries), entries)
