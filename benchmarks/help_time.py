"""Seconds that `hddm --help` takes: `python -m benchmarks.help_time`; the target is half a second.

Each run is a process of its own. The fastest counts: the others waited for the machine.
"""

import subprocess
import sys
import time
from pathlib import Path

HDDM = Path(sys.executable).with_name("hddm")
RUNS = 10


def seconds() -> float:
    """Seconds of one run."""
    start = time.perf_counter()
    subprocess.run([HDDM, "--help"], check=True, capture_output=True)
    return time.perf_counter() - start


if __name__ == "__main__":
    taken = sorted(seconds() for _ in range(RUNS))
    print(
        f"hddm --help: {taken[0]:.2f} s at best, {taken[RUNS // 2]:.2f} s in the middle of {RUNS} runs"
    )
