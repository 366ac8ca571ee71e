"""A benchmark of two experts and little else, which tests change."""

from pathlib import Path
from typing import Any

from hddm.benchmark.file import BenchmarkFile
from hddm.benchmark.plan import SeedPlan
from hddm.benchmark.results import Results
from hddm.utils.records import parse_record
from hddm.utils.work import Work
from hddm_cli.lines import LINES

TRAIN = "train expert $parts/shard_0 --size tiny"
SMALL: dict[str, Any] = {
    "name": "small",
    "defaults": {
        "train expert": "--batch-size 8 --objective flow --steps 2 --threads 1",
        "sample": "--num-images 12 --solver euler --steps 1 --strategy draw",
    },
    "steps": {
        "parts": "partition $data/train --shards 2 --held-out 0.4",
        "one": TRAIN,
        "other": "train expert $parts/shard_1 --size tiny --steps 4",
        "pair": "assemble $one $other",
    },
    "rows": {"one": "$one"},
    "evaluate": {
        "reference": "$parts",
        "held_out": "$data/test",
        "features": "classifier",
        "options": "--allow-few --brief",
    },
    "seeds": [0],
}


def small(**changes: Any) -> BenchmarkFile:
    return parse_record(SMALL | changes, BenchmarkFile, "small")


def plan_of(data: Path, jobs: Path, **changes: Any) -> SeedPlan:
    return SeedPlan(small(**changes), 0, Work(jobs), LINES, data)


def costs(results: Results) -> dict[str, int | None]:
    return {one.model: one.training_flop for one in results.models}
