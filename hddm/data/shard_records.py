"""Shards on disk: self-contained folders that a contributor can take away and train on.

shards/
  partition.json                 how the shards were made, and their sizes
  report.html, pictures/         the report
  held_out/shard_0/…             images kept from training, where any were; shards of their own
  shard_0/manifest.json          files with SHA-256 and label, one hash of it all, one of all shards
  shard_0/images.parquet         the list of files, in place of that in the manifest, where it is long
  shard_0/images/<file>          hard links where the file system allows, copies otherwise

An encoded shard has the same manifest, with how it was encoded and the SHA-256 of its files, and in place of
the images:

shard_0/data-00000.safetensors   rows of tensors, in the order of the images
shard_0/null.safetensors         tokens of the empty prompt, where captions were encoded
"""

import hashlib
import heapq
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from hddm.data.entries import NO_LABEL, Entries, ImageEntry, ShardHash, Texts, shard_hash
from hddm.data.entry_tables import open_arrow, read_table, write_table
from hddm.data.sources.base import LARGEST_FILE, ImageSource, SourceImage
from hddm.networks.identity import TextEncoderRecord, VaeRecord
from hddm.utils.errors import HddmError, UsageError
from hddm.utils.files import inside, read_whole, sha256_of, write_json
from hddm.utils.records import (
    ENSEMBLE_FILE,
    EXPERT_FILE,
    ROUTER_FILE,
    OpenRecord,
    Record,
    read_record,
)

FORMAT = "1.5"
SHARD_FILE = "manifest.json"
TABLE_FILE = "images.parquet"
PARTITION_FILE = "partition.json"
HELD_OUT = "held_out"
"""Folder of a partition; its ``shard_k`` has the images that evaluate the expert of shard k."""
MIN_IMAGES = 16
SKETCH = 128
"""Hashes of images that an expert records of its shard."""
LARGEST_LIST = 100_000
"""Images that a manifest lists itself; a longer list is a table beside it."""
LARGEST_MANIFEST = 2**29
"""Bytes: about two million images, as shards before format 1.5 list them."""


NULL = "null.safetensors"

PIXELS = "pixels"
MEAN, DEVIATION = "mean", "std"
MIRRORED = "mirrored_"
TOKENS = "tokens"

StoredDtype = Literal["float16", "bfloat16", "float32"]


class EncodingRecord(Record):
    """How images became rows of tensors.

    ``shape`` is (C, H, W) of a row. ``resolution`` is the side of the square that images were fitted to, None
    if unchanged; ``crop`` is the part of a longer side that was kept. ``mirrored`` adds latents of the
    mirrored images. In older shards crops may be random, by ``seed``.
    """

    space: Literal["pixels", "latents"]
    shape: tuple[int, int, int]
    dtype: Literal["uint8"] | StoredDtype
    resolution: int | None = None
    crop: Literal["center", "random"] | None = None
    interpolation: str | None = None
    mirrored: bool = False
    text_dtype: StoredDtype | None = None
    seed: int = 0


class FileRecord(Record):
    """A file of an encoded shard, with its number of rows."""

    file: str
    sha256: str
    rows: int


class Skipped(Record):
    """An image that could not be read, and why."""

    file: str
    reason: str


class ShardManifest(Record):
    """``manifest.json`` of a shard, of images or encoded.

    ``hash`` covers every file, content and label. An encoded shard has ``images``, ``hash``, ``partition``
    and ``held_out_of`` of its source, so that experts and routers match by them. Row k of its data is the
    k-th of ``images`` that is not in ``skipped``. The file has either ``images`` or a ``table`` of them.
    """

    oldest: ClassVar[str | None] = "1.4"
    remedy: ClassVar[str] = "make the shard again, by hddm partition and hddm encode"

    format: str
    shard: int
    num_shards: int
    classes: list[str]
    hash: str
    partition: str | None = None
    """Hash of the hashes of all shards, equal within a partition."""
    held_out_of: str | None = None
    """Hash of the shard that these images were held out of, to evaluate its expert."""
    channels: Literal[1, 3]
    """1 if all images are gray."""
    size: tuple[int, int] | None = None
    """(H, W) of all images; None if they differ."""
    images: Entries = Entries.of(())
    table: FileRecord | None = None
    """`TABLE_FILE` with the list of images, where it is long."""
    encoding: EncodingRecord | None = None
    vae: VaeRecord | None = None
    text_encoder: TextEncoderRecord | None = None
    data: tuple[FileRecord, ...] = ()
    null: FileRecord | None = None
    skipped: tuple[Skipped, ...] = ()

    @property
    def num_rows(self) -> int:
        """Samples in the shard."""
        return len(self.images) - len(self.skipped)

    @property
    def rows(self) -> Entries:
        """The image of each sample."""
        if not self.skipped:
            return self.images
        skipped = {one.file for one in self.skipped}
        return self.images[np.array([file not in skipped for file in self.images.files])]


class PartitionRecord(OpenRecord):
    """``partition.json``: how shards were made; ``images`` includes held-out ones, not skipped ones."""

    format: str
    images: int
    features: str
    extractor: str | None = None
    """Hash of the extractor's settings and weights; older partitions have none."""
    fine_clusters: int
    """0 where images were divided by class."""
    seed: int
    sizes: list[int]
    hashes: list[str]
    held_out_share: float = 0.0
    held_out: tuple[int, ...] = ()
    """Number of held-out images by shard; empty for none."""
    skipped: tuple[str, ...] = ()
    """Files that could not be read."""
    copies: int | None = None
    """Images whose pixels all equal those of another counted image; None in older partitions."""


def read_content(folder: Path, entry: ImageEntry) -> bytes:
    """Encoded image of an entry; raises `HddmError` if it is outside ``folder``, missing or changed."""
    inside(folder, entry.file)
    path = folder / entry.file
    content = read_whole(path, LARGEST_FILE)
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise HddmError(f"{path}: its content changed since the partition; copy the shard again")
    return content


def find_shards(folder: Path) -> list[Path]:
    """Shard folders of a partition, in order; raises `HddmError` if ``folder`` is no partition."""
    _refuse_other_folder(folder, PARTITION_FILE)
    record = read_record(folder / PARTITION_FILE, PartitionRecord, FORMAT)
    return [folder / f"shard_{k}" for k in range(len(record.sizes))]


def find_held_out(folder: Path) -> list[Path]:
    """Existing held-out shards of a partition, in order; raises `HddmError` if ``folder`` is no partition."""
    found: list[Path] = []
    for shard in find_shards(folder):
        held_out = folder / HELD_OUT / shard.name
        if held_out.is_dir():
            found.append(held_out)
    return found


def named_shards(path: Path, are_held_out: bool) -> list[Path]:
    """Shards of the images that ``path`` names; empty for a folder of images, or another source of them.

    A shard stands for itself, and the folder ``held_out`` of a partition for all shards in it. A partition
    stands for its held-out images where images that no model was trained on are wanted (``are_held_out``),
    else for its training images. Raises `HddmError` for a partition that holds none out.
    """
    if holds_shard(path):
        return [path]
    is_held_out_part = path.name == HELD_OUT and (path.parent / PARTITION_FILE).is_file()
    partition = path.parent if is_held_out_part else path
    if not (partition / PARTITION_FILE).is_file():
        return []
    if not (are_held_out or is_held_out_part):
        return find_shards(partition)
    found = find_held_out(partition)
    if not found:
        text = "holds no held-out images; hddm partition --held-out keeps some"
        raise HddmError(f"{partition}: {text}, or name a shard that no model was trained on")
    return found


def holds_shard(folder: Path) -> bool:
    """True for a shard's folder; a model's folder has a manifest of the same name."""
    return (folder / SHARD_FILE).is_file() and not _holds_model(folder)


def _holds_model(folder: Path) -> bool:
    return any((folder / record).exists() for record in (EXPERT_FILE, ROUTER_FILE, ENSEMBLE_FILE))


def refuse_no_shard(folder: Path) -> None:
    """Raise `UsageError` for a folder that holds no shard, or a file; it names what is there instead."""
    _refuse_other_folder(folder, SHARD_FILE)


def _refuse_other_folder(folder: Path, record: str) -> None:
    """Refuse a folder without ``record``, and name its kind."""
    if (folder / record).exists() and not _holds_model(folder):
        return
    kind = "shard" if record == SHARD_FILE else "partition"
    if folder.is_file():
        why = f"is a file, and a {kind} is a folder; hddm partition writes one"
    elif not folder.is_dir():
        why = "no such folder"
    elif _holds_model(folder):
        why = f"is a model folder, not a {kind}; hddm partition writes one"
    elif (folder / PARTITION_FILE).exists():
        why = f"is a partition, not a shard; name one of its folders, as {folder / 'shard_0'}"
    elif (folder / SHARD_FILE).exists():
        why = "is a shard, not a partition; name the folder of all shards"
    else:
        why = f"is not a {kind} (it has no {record}); hddm partition writes one"
    raise UsageError(f"{folder}: {why}")


def sketch_of(hashes: Iterable[str]) -> tuple[str, ...]:
    """The `SKETCH` smallest of distinct SHA-256, each by its first 16 digits, in order.

    Two such lists give the overlap of two sets of images (bottom-k sketch, Broder, "On the resemblance and
    containment of documents", 1997), without a list of either.
    """
    kept: set[str] = set()
    for one in hashes:
        kept.add(one[:16])
        # Of a million hashes, few are held at a time.
        if len(kept) > 64 * SKETCH:
            kept = set(heapq.nsmallest(SKETCH, kept))
    return tuple(heapq.nsmallest(SKETCH, kept))


def overlap(mine: Sequence[str], theirs: Sequence[str], num_mine: int, num_theirs: int) -> float:
    """The part of my images that is among theirs, in 0 … 1, by the sketches of both.

    Exact where both have at most `SKETCH` images, else good to about 1 / sqrt(SKETCH) of their union.
    """
    union = sketch_of([*mine, *theirs])
    both = set(mine) & set(theirs)
    similarity = sum(one in both for one in union) / max(1, len(union))
    return min(1.0, similarity * (num_mine + num_theirs) / (1 + similarity) / max(1, num_mine))


def entry_labels(entries: Entries) -> list[int] | None:
    """Labels (N,), None unless every entry has one."""
    labels: list[int] = entries.labels.tolist()
    return None if NO_LABEL in labels else labels


def captions_of(entries: Entries) -> Texts | None:
    """Captions (N,), None unless every entry has one."""
    return entries.captions if entries.are_captioned.all() else None


class ImageList(NamedTuple):
    """The list of a shard's images as it was written: its hash, and the ``images`` or a ``table`` of them."""

    hash: str
    images: Entries
    table: FileRecord | None


def refuse_without_tables(num: int) -> None:
    """Raise `HddmError` without pyarrow, if a list of ``num`` images takes it."""
    if num > LARGEST_LIST:
        open_arrow(f"a shard of {num} images (more than {LARGEST_LIST})")


def write_list(
    folder: Path, parts: Iterable[Entries], num: int, classes: Sequence[str]
) -> ImageList:
    """Write the list of the ``num`` images in ``parts`` to a table in ``folder``, if it is long.

    A part is held in memory at a time.
    """
    digest = ShardHash(classes)

    def hashed() -> Iterator[Entries]:
        for part in parts:
            digest.update(part)
            yield part

    if num <= LARGEST_LIST:
        images = Entries.joined(hashed())
        return ImageList(digest.hexdigest(), images, None)
    path = folder / TABLE_FILE
    rows = write_table(path, hashed())
    table = FileRecord(file=TABLE_FILE, sha256=sha256_of(path), rows=rows)
    return ImageList(digest.hexdigest(), Entries.of(()), table)


def write_manifest(folder: Path, manifest: ShardManifest) -> None:
    """Write ``manifest.json``; a ``table`` was written by `write_list`."""
    left_out = "table" if manifest.table is None else "images"
    write_json(folder / SHARD_FILE, manifest.model_dump(mode="json", exclude={left_out}))


def read_manifest(folder: Path) -> ShardManifest:
    """Manifest of the shard in ``folder``, of images or encoded.

    Raises `HddmError` for a missing or newer manifest, a folder of another kind by its kind, a table of
    images that was changed or cannot be read, and a list of images that does not match its hash, names a file
    twice or one outside the folder.
    """
    refuse_no_shard(folder)
    path = folder / SHARD_FILE
    manifest = read_record(path, ShardManifest, FORMAT, LARGEST_MANIFEST)
    has_list = "images" in manifest.model_fields_set
    if has_list == (manifest.table is not None):
        problem = "has to hold either images or a table of them"
        raise HddmError(f"{path}: {problem}; copy the shard again")
    if manifest.table is not None:
        images = _read_list(folder, manifest.table)
        manifest = manifest.model_copy(update={"images": images})
    if shard_hash(manifest.images, manifest.classes) != manifest.hash:
        raise HddmError(f"{path}: its list of images does not match its hash; copy the shard again")
    _refuse_odd_names(folder, manifest.images.files)
    return manifest


def _read_list(folder: Path, table: FileRecord) -> Entries:
    path = inside(folder, table.file)
    if sha256_of(path) != table.sha256:
        raise HddmError(f"{path}: changed since it was written; copy the shard again")
    return read_table(path, table.rows)


_ODD = re.compile(r"^/|^.:|(^|/)\.\.(/|$)|^[./]*$|[\\\0\n\r]")
"""Names that `inside` may refuse whatever is on the disk."""


def _refuse_odd_names(folder: Path, files: Texts) -> None:
    """Refuse a path that leads out of ``folder``, and one that is there twice."""
    hashes = np.zeros(len(files), dtype=np.int64)
    for number, file in enumerate(files):
        if _ODD.search(file):
            inside(folder, file)
        hashes[number] = hash(file)
    if len(np.unique(hashes)) == len(files):
        return
    seen: set[str] = set()
    for file in files:
        if file in seen:
            path = folder / SHARD_FILE
            raise HddmError(f"{path}: lists {file} twice; copy the shard again")
        seen.add(file)


def read_images_manifest(folder: Path) -> ShardManifest:
    """Manifest of a shard of images; raises as `read_manifest`, and for an encoded shard."""
    manifest = read_manifest(folder)
    if manifest.encoding is not None:
        raise UsageError(
            f"{folder}: is an encoded shard, which holds no images; name the original shard"
        )
    return manifest


@dataclass(frozen=True)
class ShardImages:
    """Images of the shard in ``folder``, of unknown sizes."""

    folder: Path
    entries: Entries

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, i: int, /) -> SourceImage:
        return SourceImage(partial(read_content, self.folder, self.entries[i]), 0)


def open_images(folder: Path) -> ImageSource:
    """Images of the shard in ``folder``, of unknown sizes, each checked against its hash when read.

    Raises as `read_images_manifest`.
    """
    manifest = read_images_manifest(folder)
    entries = manifest.images
    images = ShardImages(folder, entries)
    labels, captions = entry_labels(entries), captions_of(entries)
    return ImageSource(folder, entries.files, tuple(manifest.classes), labels, captions, images)
