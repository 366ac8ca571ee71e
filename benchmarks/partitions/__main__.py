"""Memory and time of `hddm partition` for many images, by the kind of their source.

Images are synthetic: noise of 4×4 pixels, with a caption and one of two classes each, in WebDataset's tars
and in Parquet files of 10,000 images, or in class folders. Each source is opened in a process of its own, and
divided in another, into 8 shards by the principal components of pixels (the default). A process that only
imports the same modules shows how much of a peak is theirs. Peaks are of whole processes, with the features
that are mapped from disk.

    python -m benchmarks.partitions
"""

import io
import json
import shutil
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer

from benchmarks.harness import RESULTS, QuickOption, ResultsOption, Start, WorkOption, main

SIZES = (30_000, 100_000, 300_000)
QUICK_SIZES = (1_000, 3_000)
IN_A_FILE = 10_000
SIDE = 4
_HEADER = b"BM" + struct.pack("<IHHI", 54 + 3 * SIDE * SIDE, 0, 0, 54)
_HEADER += struct.pack("<IiiHHIIiiII", 40, SIDE, SIDE, 1, 24, 0, 3 * SIDE * SIDE, 2835, 2835, 0, 0)


def images(first: int, number: int) -> Iterator[tuple[bytes, str, int]]:
    """Content (BMP), caption and class of images; of one number they are always the same."""
    pixels = np.random.default_rng(first).integers(0, 256, (number, 3 * SIDE * SIDE), np.uint8)
    for k, one in enumerate(pixels):
        caption = f"picture {first + k}: a cat and a dog on a bench in a park, photographed at noon"
        yield _HEADER + one.tobytes(), caption, (first + k) % 2


def _write_tar(folder: Path, first: int, number: int) -> None:
    with tarfile.open(folder / f"{first // IN_A_FILE:05d}.tar", "w") as archive:
        for k, (content, caption, label) in enumerate(images(first, number)):
            parts = {"bmp": content, "txt": caption.encode(), "cls": str(label).encode()}
            for suffix, part in parts.items():
                member = tarfile.TarInfo(f"{first + k:012d}.{suffix}")
                member.size = len(part)
                archive.addfile(member, io.BytesIO(part))


def _write_parquet(folder: Path, first: int, number: int) -> None:
    contents, captions, labels = zip(*images(first, number), strict=True)
    table = pa.table({"image": contents, "text": captions, "label": labels})
    pq.write_table(table, folder / f"{first // IN_A_FILE:05d}.parquet", row_group_size=1000)


def _write_files(folder: Path, first: int, number: int) -> None:
    for k, (content, _, label) in enumerate(images(first, number)):
        path = folder / ("cat", "dog")[label] / f"{first + k:012d}.bmp"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)


KINDS: dict[str, Callable[[Path, int, int], None]] = {
    "tar": _write_tar,
    "parquet": _write_parquet,
    "folders": _write_files,
}


def write_source(folder: Path, kind: str, num: int) -> None:
    """Write a source of ``num`` images."""
    folder.mkdir(parents=True)
    for first in range(0, num, IN_A_FILE):
        KINDS[kind](folder, first, min(IN_A_FILE, num - first))


def taken(*words: object) -> dict[str, Any]:
    """Run a step in a process of its own; its seconds, and its peak in bytes."""
    command = [sys.executable, "-m", "benchmarks.partitions.steps", *map(str, words)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(work: Path, kind: str, num: int) -> dict[str, object]:
    """One row of the result."""
    place = work / "partitions"
    shutil.rmtree(place, ignore_errors=True)
    source = place / kind
    write_source(source, kind, num)
    row: dict[str, object] = {"source": kind, "images": num}
    for step in ("open", "partition"):
        row[step] = taken(step, source)
    shutil.rmtree(place)
    return row


app = typer.Typer(add_completion=False)


@app.command()
def run(
    results: ResultsOption = RESULTS,
    work: WorkOption = Path("runs"),
    is_quick: QuickOption = False,
    sizes: Annotated[list[int] | None, typer.Option("--images", help="Images.")] = None,
    kinds: Annotated[list[str] | None, typer.Option("--source", help="Kinds of sources.")] = None,
) -> None:
    """Measure every kind of source at every size."""
    start = Start(results=results, work=work)
    bare = int(taken("import", work)["peak"])
    rows: list[dict[str, Any]] = []
    for kind in kinds or KINDS:
        for num in sizes or (QUICK_SIZES if is_quick else SIZES):
            rows.append(measure(work, kind, num))
            print(rows[-1], flush=True)
            # A run may take hours, and what is measured stays if it is cut off.
            content = {"threads": 1, "imports_peak": bare, "rows": rows}
            print(start.write("partitions", report(rows, bare), content), flush=True)


def report(rows: Sequence[Mapping[str, Any]], bare: int) -> list[str]:
    """The table of ``rows``; ``bare`` are bytes of a process that only imports the modules."""
    lines = [
        "# Memory and time of a partition",
        f"Peaks are of whole processes, with the pages of files that they map, which the system may drop; "
        f"importing the modules alone takes {bare / 1e6:.0f} MB.",
        "",
        "| source | images | MB to open it | s | MB to divide it | s | processor s | per 100,000 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [row["source"], f"{row['images']:,}"]
        for step in ("open", "partition"):
            cells += [f"{row[step]['peak'] / 1e6:,.0f}", f"{row[step]['seconds']:,.0f}"]
        processor = row["partition"]["processor"]
        cells += [f"{processor:,.0f}", f"{processor * 1e5 / row['images']:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main(app)
