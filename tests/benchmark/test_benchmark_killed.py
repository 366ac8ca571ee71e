"""`hddm benchmark` as a user starts it: killed or told to stop with its workers at work, and gone on with."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from hddm.benchmark.results import read_results
from tests.benchmark_files import CONTENT, write_sides

pytestmark = pytest.mark.slow

TRAINING = CONTENT["training"]
LONG = TRAINING | {"expert": TRAINING["expert"] | {"steps": 60}, "single": {"steps": 60}}


def _command(folder: Path) -> list[str]:
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump(CONTENT | {"training": LONG, "workers": 2}))
    write_sides(folder / "data")
    images = ["--data", str(folder / "data"), "--out", str(folder / "out")]
    return [sys.executable, "-m", "hddm_cli", "benchmark", str(file), *images]


def _until(condition: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    for _ in range(60_000):
        if condition():
            return
        assert process.poll() is None
        time.sleep(0.02)
    raise AssertionError("it did not come so far")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_goes_on_whatever_stopped_it(number: signal.Signals, tmp_path: Path) -> None:
    command, jobs = _command(tmp_path), tmp_path / "out" / "jobs"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=environment)
    _until(lambda: any(jobs.glob(".expert-*.work/model.run/checkpoints/step_*")), process)
    process.send_signal(number)
    code = process.wait(120)
    assert code == (-9 if number == signal.SIGKILL else 128 + number)
    assert not (tmp_path / "out" / "results.json").exists()
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    results = read_results(tmp_path / "out")
    assert results.complete
    assert {steps for one in results.models for steps in one.steps} == {60}
    assert not list(jobs.glob(".*"))
