"""How near --dry-run comes: what it says of memory and time, and what the command then takes.

Trains an expert on noise pictures and samples it, each first with --dry-run, in processes of their own. The
peak of a process is what the system counts, mapped files included; its time is that of the whole command, of
which the start, before anything is trained or sampled, is shown apart.

    python -m benchmarks.dry_runs
"""

import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.commands import Used, used_by
from benchmarks.harness import main

IMAGES, SIDE, SIZE = 512, 32, "4x128/2"
TRAINING = ("--objective", "flow", "--size", SIZE, "--batch-size", "32", "--steps", "25")
SAMPLING = ("--num-images", "64", "--batch-size", "32")


def taken(*words: object) -> Used:
    """What a command of hddm used."""
    return used_by(sys.executable, "-m", "hddm_cli", *words)


def estimated(said: str) -> tuple[str, str]:
    """Memory and time in all, as a dry run says them."""
    memory, seconds = re.findall(r"in all +about ([\d.,]+ \w+)", said)[:2]
    return memory, seconds


def compare(name: str, words: Sequence[object]) -> None:
    """Print a row: what was said before, and what was taken then."""
    dry = taken(*words, "--dry-run")
    real = taken(*words)
    memory, seconds = estimated(dry.said)
    row = [name, memory, f"{real.peak / 1e9:.2f} GB", seconds, f"{real.seconds:.0f} s"]
    print("|", " | ".join([*row, f"{dry.seconds:.0f} s"]), "|", flush=True)
    print(dry.said, flush=True)


def dry_runs() -> None:
    """Make the pictures and compare."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "images").mkdir()
        draws = np.random.default_rng(0)
        for number in range(IMAGES):
            pixels = draws.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(here / "images" / f"{number}.png")
        taken("partition", here / "images", "--shards", 1, "--out", here / "shards")
        start = taken("inspect", here / "shards" / "shard_0")
        print(f"a command that only looks takes {start.seconds:.0f} s")
        expert = here / "expert"
        compare(
            "train", ["train", "expert", here / "shards" / "shard_0", "--out", expert, *TRAINING]
        )
        compare("sample", ["sample", expert, "--out", here / "samples", *SAMPLING])


if __name__ == "__main__":
    main(dry_runs)
