"""The inference benchmark in small, and that it times and counts what it says."""

import torch

from benchmarks.inference.models import QUICK, Models
from benchmarks.inference.times import (
    LOOP,
    ways_of,
)


def test_the_loop_over_all_experts_gives_what_the_full_ensemble_gives() -> None:
    ways = ways_of(Models(QUICK, "cpu", torch.float32), QUICK, "cpu")
    torch.testing.assert_close(ways[LOOP][0](), ways["ensemble, full"][0]())
