"""What one process of this experiment does; it imports no more than reading a shard takes."""

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from hddm.data import shard_records
from hddm.data.entries import ImageEntry, in_parts, shard_hash
from hddm.data.shard_records import (
    FORMAT,
    ShardManifest,
    read_manifest,
    sketch_of,
    write_list,
    write_manifest,
)

CLASSES = ("cat", "dog")


def peak() -> int:
    """Peak bytes of this process, mapped files included."""
    # The counter in getrusage begins with the peak of the process that started this one.
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in one]
    return int(line.split()[1]) * 1024


def images(num: int) -> Iterator[ImageEntry]:
    """Records with paths and captions of usual lengths."""
    for number in range(num):
        yield ImageEntry(
            file=f"images/part-{number % 1000:05d}/{number:012d}.jpg",
            sha256=hashlib.sha256(number.to_bytes(8, "little")).hexdigest(),
            label=number % 2,
            caption=f"picture {number}: a cat and a dog on a bench in a park, photographed at noon",
        )


def write(folder: Path, num: int, most: int) -> dict[str, float]:
    """Write a manifest of ``num`` images, up to ``most`` of them in JSON."""
    shard_records.LARGEST_LIST = most
    folder.mkdir(parents=True)
    began = time.perf_counter()
    listed = write_list(folder, in_parts(images(num)), num, CLASSES)
    manifest = ShardManifest(
        format=FORMAT,
        shard=0,
        num_shards=1,
        classes=list(CLASSES),
        hash=listed.hash,
        channels=3,
        images=listed.images,
        table=listed.table,
    )
    write_manifest(folder, manifest)
    return {"write": time.perf_counter() - began}


def read(folder: Path) -> dict[str, float]:
    """Read the manifest, and use all that it holds."""
    marks = [time.perf_counter()]
    manifest = read_manifest(folder)
    marks.append(time.perf_counter())
    assert shard_hash(manifest.images, manifest.classes) == manifest.hash
    marks.append(time.perf_counter())
    sketch_of(manifest.images.hashes())
    marks.append(time.perf_counter())
    letters = sum(len(one.caption or "") for one in manifest.rows)
    assert letters > len(manifest.images)
    marks.append(time.perf_counter())
    steps = ("open", "hash", "sketch", "iterate")
    spans = [after - before for before, after in pairwise(marks)]
    return dict(zip(steps, spans, strict=True))


if __name__ == "__main__":
    import pyarrow.parquet  # noqa: F401

    seconds: dict[str, float] = {}
    if sys.argv[1] == "write":
        seconds = write(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1] == "read":
        seconds = read(Path(sys.argv[2]))
    print(json.dumps({"seconds": seconds, "peak": peak()}))
