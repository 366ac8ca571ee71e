"""What one process of this experiment does: it opens a source, or divides it."""

import json
import sys
import time
from pathlib import Path

from benchmarks.manifests.steps import peak
from hddm.data.sources import open_source
from hddm_cli.app import run_words

SHARDS = 8


def run(step: str, source: Path) -> None:
    """Open ``source``, or divide it as ``hddm partition`` does."""
    if step == "open":
        open_source(source)
    elif step == "partition":
        out = source.with_name(f"{source.name}-shards")
        run_words(["partition", str(source), "--out", str(out), "--shards", str(SHARDS)])


if __name__ == "__main__":
    import pyarrow.parquet  # noqa: F401
    import sklearn.decomposition  # noqa: F401

    import hddm.data.partition  # noqa: F401

    began, before = time.perf_counter(), time.process_time()
    run(sys.argv[1], Path(sys.argv[2]))
    taken = {
        "seconds": time.perf_counter() - began,
        "processor": time.process_time() - before,
        "peak": peak(),
    }
    print(json.dumps(taken))
