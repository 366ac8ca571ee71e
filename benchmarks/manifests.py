"""Memory and time that the list of a shard's images takes, as a list in JSON and as a table.

Records are synthetic: without images. Each case runs in a process of its own: it writes a manifest of that
many images with labels and captions, as `hddm partition` does, and another one reads it, with its checks,
computes the hash and the sketch again, and goes through all entries. Before both, a process that only imports
the same modules shows how much of the peak is theirs.

    python -m benchmarks.manifests
"""

import hashlib
import shutil
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from benchmarks.harness import RESULTS, QuickOption, ResultsOption, Start, WorkOption, apart, main
from hddm.data import shard_records
from hddm.data.entries import ImageEntry, in_parts, shard_hash
from hddm.data.shard_records import (
    FORMAT,
    SHARD_FILE,
    ShardManifest,
    read_manifest,
    sketch_of,
    write_list,
    write_manifest,
)

SIZES = (100_000, 300_000, 1_000_000)
QUICK_SIZES = (1_000, 3_000, 10_000)
FORMS = {"JSON": 10**9, "table": 0}
"""Form of the list, and the most images that are listed in JSON."""
GOAL = 10**9
"""Bytes of the largest table's process."""
CLASSES = ("cat", "dog")


class Taken(NamedTuple):
    """Seconds of each step of a process, and its peak in bytes."""

    seconds: dict[str, float]
    peak: int


def peak() -> int:
    """Peak bytes of this process, mapped files included."""
    # The counter in getrusage begins with the peak of the process that started this one.
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in one]
    return int(line.split()[1]) * 1024


def only_imports() -> Taken:
    """What the modules take."""
    import pyarrow.parquet  # noqa: F401

    return Taken({}, peak())


def images(num: int) -> Iterator[ImageEntry]:
    """Records with paths and captions of usual lengths."""
    for number in range(num):
        yield ImageEntry(
            file=f"images/part-{number % 1000:05d}/{number:012d}.jpg",
            sha256=hashlib.sha256(number.to_bytes(8, "little")).hexdigest(),
            label=number % 2,
            caption=f"picture {number}: a cat and a dog on a bench in a park, photographed at noon",
        )


def write(folder: Path, num: int, form: str) -> Taken:
    """Write a manifest of ``num`` images."""
    shard_records.LARGEST_LIST = FORMS[form]
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
    return Taken({"write": time.perf_counter() - began}, peak())


def read(folder: Path) -> Taken:
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
    return Taken(dict(zip(steps, spans, strict=True)), peak())


def measure(work: Path, num: int, form: str) -> dict[str, object]:
    """One row of the result."""
    folder = work / "manifests" / f"{form}-{num}"
    shutil.rmtree(folder, ignore_errors=True)
    written = apart(1, write, folder, num, form)
    size = sum(path.stat().st_size for path in folder.iterdir())
    found: dict[str, object] = {"form": form, "images": num, "bytes": size}
    found |= {"write_peak": written.peak, "seconds": written.seconds}
    if (folder / SHARD_FILE).stat().st_size > shard_records.LARGEST_MANIFEST:
        return found | {"read_peak": None}
    opened = apart(1, read, folder)
    shutil.rmtree(folder)
    return found | {"read_peak": opened.peak, "seconds": {**written.seconds, **opened.seconds}}


app = typer.Typer(add_completion=False)


@app.command()
def run(
    results: ResultsOption = RESULTS,
    work: WorkOption = Path("runs"),
    is_quick: QuickOption = False,
    sizes: Annotated[list[int] | None, typer.Option("--images", help="Images of a shard.")] = None,
) -> None:
    """Measure both forms at every size."""
    start = Start(results=results, work=work)
    bare = apart(1, only_imports)
    rows: list[dict[str, object]] = []
    for form in FORMS:
        for num in sizes or (QUICK_SIZES if is_quick else SIZES):
            rows.append(measure(work, num, form))
            print(rows[-1], flush=True)
    steps = ("write", "open", "hash", "sketch", "iterate")
    lines = [
        "# The list of a shard's images: memory and time",
        f"Peaks are of whole processes; importing the modules alone takes {bare.peak / 1e6:.0f} MB.",
        "",
        f"| form | images | MB on disk | MB to write | MB to read | {' | '.join(steps)} |",
        f"|---|---:|---:|---:|---:|{'---:|' * len(steps)}",
    ]
    for row in rows:
        seconds = row["seconds"]
        assert isinstance(seconds, dict)
        cells = [str(row["form"]), f"{row['images']:,}"]
        for key in ("bytes", "write_peak", "read_peak"):
            value = row[key]
            cells.append(f"{value / 1e6:,.0f}" if isinstance(value, int) else "refused")
        cells += [f"{seconds[step]:.1f} s" if step in seconds else "" for step in steps]
        lines.append(f"| {' | '.join(cells)} |")
    largest = max(int(str(row["read_peak"] or 0)) for row in rows if row["form"] == "table")
    lines += [
        "",
        f"The goal of a table is at most {GOAL / 1e6:,.0f} MB to read: {largest / 1e6:,.0f} MB.",
    ]
    content = {"threads": 1, "imports_peak": bare.peak, "rows": rows, "goal": GOAL}
    print(start.write("manifests", lines, content))


if __name__ == "__main__":
    main(app)
