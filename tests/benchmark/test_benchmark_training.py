"""The training benchmark in small, and that its ways are the same training."""

import json
from pathlib import Path

import pytest

from benchmarks.harness import Start
from benchmarks.timing import Taken
from benchmarks.training.__main__ import measure_training
from benchmarks.training.checklist import (
    covered,
)
from benchmarks.training.networks import QUICK
from benchmarks.training.report import lines
from benchmarks.training.times import DIFFUSERS, OWN, OWN_PRODUCTS, PLAIN, PRODUCTS, ZERO

WAYS = [DIFFUSERS, OWN, PLAIN, ZERO, PRODUCTS, OWN_PRODUCTS]


@pytest.mark.slow
def test_the_quick_run_writes_a_report_that_says_what_was_met(tmp_path: Path) -> None:
    written = measure_training(
        Start(tmp_path, command="training --quick"), "cpu", ["float32"], threads=1, quick=True
    )
    content = json.loads(written.with_suffix(".json").read_text())
    assert list(content["times"]["float32"]) == WAYS
    assert content["waited"].keys() == {"float32"}
    seconds = {DIFFUSERS: 1.1, OWN: 1.0, PLAIN: 1.0, ZERO: 1.0, PRODUCTS: 0.88, OWN_PRODUCTS: 0.9}
    taken = {name: [Taken(value, value)] for name, value in seconds.items()}
    text = "\n".join(lines(QUICK, content | {"waited": {"float32": 0.03}}, {"float32": taken}))
    assert "diffusers' DiT, plain loop; target at least 1.05: met." in text
    assert "waits 3.00% of a step for its inputs; target at most 3 %: met." in text


def test_the_time_that_kernels_run_counts_what_overlaps_once() -> None:
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.75)]) == 4
