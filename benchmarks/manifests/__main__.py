"""Memory and time that the list of a shard's images takes, as a list in JSON and as a table.

Records are synthetic: without images. Each case runs in a process of its own: it writes a manifest of that
many images with labels and captions, as `hddm partition` does, and another one reads it, with its checks,
computes the hash and the sketch again, and goes through all entries. Before both, a process that only imports
the same modules shows how much of the peak is theirs.

    python -m benchmarks.manifests
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness import RESULTS, QuickOption, ResultsOption, Start, WorkOption, main
from hddm.data.shard_records import LARGEST_MANIFEST, SHARD_FILE

SIZES = (100_000, 300_000, 1_000_000)
QUICK_SIZES = (1_000, 3_000, 10_000)
FORMS = {"table": 0, "JSON": 10**9}
"""Form of the list, and the most images that are listed in JSON."""
GOAL = 10**9
"""Bytes of the largest table's process."""


def taken(*words: object) -> dict[str, Any]:
    """Run a step in a process of its own; its seconds by name, and its peak in bytes."""
    command = [sys.executable, "-m", "benchmarks.manifests.steps", *map(str, words)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout))


def measure(work: Path, num: int, form: str) -> dict[str, object]:
    """One row of the result."""
    folder = work / "manifests" / f"{form}-{num}"
    shutil.rmtree(folder, ignore_errors=True)
    written = taken("write", folder, num, FORMS[form])
    size = sum(path.stat().st_size for path in folder.iterdir())
    found: dict[str, object] = {"form": form, "images": num, "bytes": size}
    found |= {"write_peak": written["peak"], "seconds": written["seconds"]}
    if (folder / SHARD_FILE).stat().st_size > LARGEST_MANIFEST:
        return found | {"read_peak": None}
    opened = taken("read", folder)
    shutil.rmtree(folder)
    return found | {
        "read_peak": opened["peak"],
        "seconds": {**written["seconds"], **opened["seconds"]},
    }


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
    bare = taken("import")["peak"]
    rows: list[dict[str, object]] = []
    for form in FORMS:
        for num in sizes or (QUICK_SIZES if is_quick else SIZES):
            rows.append(measure(work, num, form))
            print(rows[-1], flush=True)
    steps = ("write", "open", "hash", "sketch", "iterate")
    lines = [
        "# The list of a shard's images: memory and time",
        f"Peaks are of whole processes; importing the modules alone takes {bare / 1e6:.0f} MB.",
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
    content = {"threads": 1, "imports_peak": bare, "rows": rows, "goal": GOAL}
    print(start.write("manifests", lines, content))


if __name__ == "__main__":
    main(app)
