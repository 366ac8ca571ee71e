"""The inference benchmark in small, and that it times and counts what it says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.inference.memory import CASES
from benchmarks.inference.models import CPU, CUDA, QUICK, Models, Settings
from benchmarks.inference.times import (
    LOOP,
    operations,
    ways_of,
)


@pytest.mark.parametrize("settings", [CPU, CUDA], ids=["cpu", "cuda"])
def test_the_router_of_a_full_run_takes_at_most_8_percent_of_an_experts_operations(
    settings: Settings,
) -> None:
    expert, router = operations(settings)
    assert 0.04 < router / expert <= 0.08


def test_the_loop_over_all_experts_gives_what_the_full_ensemble_gives() -> None:
    ways = ways_of(Models(QUICK, "cpu", torch.float32), QUICK, "cpu")
    torch.testing.assert_close(ways[LOOP][0](), ways["ensemble, full"][0]())


@pytest.mark.slow
def test_the_quick_command_measures_memory_in_processes_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.inference", "--quick", "--dtype", "float32"]
    command += ["--results", str(tmp_path / "results"), "--work", str(tmp_path / "work")]
    written = Path(subprocess.check_output(command, text=True).splitlines()[-1])
    rows = json.loads(written.with_suffix(".json").read_text())["memory"]["float32"]["rows"]
    assert len(rows) == len(CASES)
    assert not any((tmp_path / "work").iterdir())
