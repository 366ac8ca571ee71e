"""Which images of a source go to which shard, and the shards as they are written, also by a killed run.

A division knows the list of each shard before an image is copied, so the hashes of all lists decide the
content of a partition, and a run finds what an earlier one of the same content has written:

.NAME.partition/draft.json              the partition's record, and the hashes of held-out shards
.NAME.partition/whole/…                 becomes the partition
.NAME.partition/parts/SHARD/00000…      which of its images are written and on the disk, `WRITTEN` at a time
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hddm.data.clustering import Indices
from hddm.data.entries import NO_LABEL, PART, Entries, ShardHash, Texts
from hddm.data.features import ImageFeatures
from hddm.data.shard_records import FORMAT, HELD_OUT, ShardManifest, write_list, write_manifest
from hddm.data.sources.base import ImageSource
from hddm.utils.copies import link_or_copy
from hddm.utils.errors import HddmError
from hddm.utils.files import sha256_of
from hddm.utils.progress import Progress
from hddm.utils.syncing import sync_all
from hddm.utils.work import Draft

WRITTEN = 4096
"""Images that are written at a time; a killed run writes up to as many again."""


class ShardPart(NamedTuple):
    """The images of one shard of a partition, or those held out of it."""

    shard: int
    is_held_out: bool

    @property
    def name(self) -> str:
        """Folder in the partition."""
        own = f"shard_{self.shard}"
        return f"{HELD_OUT}/{own}" if self.is_held_out else own


@dataclass(frozen=True)
class Division:
    """The images with features, ``found``, by shard (M,), and whether each is held out (M,)."""

    source: ImageSource
    found: ImageFeatures
    shard: Indices
    is_held_out: NDArray[np.bool_]
    num_shards: int

    def parts(self) -> list[ShardPart]:
        """Every shard, then those that hold images out."""
        all_parts = [ShardPart(k, False) for k in range(self.num_shards)]
        for k in np.unique(self.shard[self.is_held_out]).tolist():
            all_parts.append(ShardPart(k, True))
        return all_parts

    def places(self, part: ShardPart) -> Indices:
        """Indices of a part's images in ``found``."""
        return np.flatnonzero((self.shard == part.shard) & (self.is_held_out == part.is_held_out))

    def entries(self, part: ShardPart) -> Iterator[Entries]:
        """The list of a part's images, `PART` at a time."""
        places = self.places(part)
        for first in range(0, len(places), PART):
            yield self._entries(places[first : first + PART])

    def _entries(self, places: Indices) -> Entries:
        source = self.source
        rows = self.found.rows[places]
        numbers = rows.tolist()
        labels = np.full(len(rows), NO_LABEL, dtype=np.int32)
        if source.labels is not None:
            labels = np.asarray(source.labels, dtype=np.int32)[rows]
        captions = Texts.of("" for _ in numbers)
        if source.captions is not None:
            captions = Texts.of(source.captions[row] for row in numbers)
        return Entries(
            Texts.of(_name(source, row) for row in numbers),
            self.found.files[places],
            labels,
            captions,
            np.full(len(rows), source.captions is not None),
        )

    def hash(self, part: ShardPart) -> str:
        """Hash of a part's list."""
        digest = ShardHash(self.source.classes)
        for entries in self.entries(part):
            digest.update(entries)
        return digest.hexdigest()


def _name(source: ImageSource, row: int) -> str:
    """Name of an image in its shard."""
    return f"images/{source.files[row]}"


def write_shards(
    division: Division, hashes: dict[ShardPart, str], draft: Draft, cache: Path | None
) -> None:
    """Write every shard, whose ``hashes`` are known, but for images that the draft has already.

    Raises `HddmError`, and clears the draft, for an image that changed since its features were computed.
    """
    of_shards = [hashes[ShardPart(k, False)] for k in range(division.num_shards)]
    of_all = hashlib.sha256("\n".join(of_shards).encode()).hexdigest()
    source, found = division.source, division.found
    with Progress(len(found), "write") as advance:
        for part, number, some in _written_at_a_time(division, hashes):
            folder = draft.whole / part.name
            folder.mkdir(parents=True, exist_ok=True)
            record = draft.parts / part.name / f"{number:05d}"
            if draft.done(record) is not None:
                advance.skip(len(some))
                continue
            changed = _write_images(division, some, folder)
            if changed is not None:
                draft.clear()
                remedy = "partition again"
                if cache:
                    remedy = f"remove {cache}, or name another folder with `cache`"
                text = f"changed since its features were computed; {remedy}"
                raise HddmError(f"{source.root / source.files[changed]}: {text}")
            draft.finish(record, {"images": len(some)})
            advance(len(some))
    for part, content in hashes.items():
        folder = draft.whole / part.name
        places = division.places(part)
        listed = write_list(folder, division.entries(part), len(places), source.classes)
        shapes = found.shapes[places]
        is_one_size = (shapes[:, :2] == shapes[0, :2]).all()
        manifest = ShardManifest(
            format=FORMAT,
            shard=part.shard,
            num_shards=division.num_shards,
            classes=list(source.classes),
            hash=content,
            partition=of_all,
            held_out_of=of_shards[part.shard] if part.is_held_out else None,
            channels=3 if (shapes[:, 2] == 3).any() else 1,
            size=(int(shapes[0, 0]), int(shapes[0, 1])) if is_one_size else None,
            images=listed.images,
            table=listed.table,
        )
        write_manifest(folder, manifest)


def _written_at_a_time(
    division: Division, parts: Iterable[ShardPart]
) -> list[tuple[ShardPart, int, Indices]]:
    """Places of images that are written together, with their part and number, in the source's order.

    So archives that are fetched when they are read are fetched about once, and not once for every shard.
    """
    found: list[tuple[ShardPart, int, Indices]] = []
    for part in parts:
        places = division.places(part)
        for number, first in enumerate(range(0, len(places), WRITTEN)):
            found.append((part, number, places[first : first + WRITTEN]))
    return sorted(found, key=lambda one: int(one[2][0]))


def _write_images(division: Division, places: Indices, folder: Path) -> int | None:
    """Write images as hard links if the source has files and the file system allows, else as copies.

    All are on the disk when this returns. Returns the number of the first that has changed.
    """
    source, found = division.source, division.found
    copies: list[Path] = []
    folders: set[Path] = set()
    for place, row in zip(places.tolist(), found.rows[places].tolist(), strict=True):
        copy = folder / _name(source, row)
        if copy.parent not in folders:
            copy.parent.mkdir(parents=True, exist_ok=True)
            folders.add(copy.parent)
        # A killed run may have left it, half-written.
        copy.unlink(missing_ok=True)
        path = source.images[row].path
        if path is None:
            content = source.read(row)
            copy.write_bytes(content)
            sha256 = hashlib.sha256(content).digest()
        else:
            link_or_copy(path, copy)
            sha256 = bytes.fromhex(sha256_of(copy))
        if sha256 != found.files[place].tobytes():
            return int(row)
        copies.append(copy)
    sync_all([*copies, *folders], folder)
    return None
