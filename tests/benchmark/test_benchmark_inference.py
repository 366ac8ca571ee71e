"""The inference benchmark in small, and that it times and counts what it says."""

import gc
import json
import mmap
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks.inference.memory import ALL, CASES, FEW, memory_of, peak, write_ensembles
from benchmarks.inference.models import CPU, CUDA, QUICK, Models, Settings
from benchmarks.inference.times import (
    BARE,
    EVERY,
    LOOP,
    SINGLE,
    TOP_1,
    TOP_2,
    measure_times,
    operations,
    ways_of,
)
from hddm.ensemble import Ensemble
from hddm.experts.loading import load

BATCH, K = 2 * QUICK.experts, QUICK.experts


@pytest.fixture(scope="module")
def models() -> Models:
    return Models(QUICK, "cpu", torch.float32)


def state() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(BATCH, *QUICK.sample_shape), torch.full((BATCH,), 0.5, dtype=torch.float64)


@pytest.mark.parametrize(("strategy", "each"), [("top-1", 1), ("top-2", 2), ("full", K)])
def test_the_even_router_gives_every_expert_the_same_number_of_samples(
    models: Models, strategy: str, each: int
) -> None:
    x, t = state()
    chosen = Ensemble(models.experts.fields(), models.router, strategy).weights(x, t) > 0
    assert chosen.sum(1).tolist() == [each] * BATCH
    assert chosen.sum(0).tolist() == [each * BATCH // K] * K
    assert chosen[torch.arange(BATCH), torch.arange(BATCH) % K].all()


@pytest.mark.parametrize("settings", [CPU, CUDA], ids=["cpu", "cuda"])
def test_the_router_of_a_full_run_takes_at_most_8_percent_of_an_experts_operations(
    settings: Settings,
) -> None:
    expert, router = operations(settings)
    assert 0.04 < router / expert <= 0.08


def test_the_loop_over_all_experts_gives_what_the_full_ensemble_gives(models: Models) -> None:
    ways = ways_of(models, QUICK, "cpu")
    torch.testing.assert_close(ways[LOOP][0](), ways["ensemble, full"][0]())


def test_every_way_is_timed_once_a_round() -> None:
    times = measure_times(QUICK, "cpu", "bfloat16", compiled=False)
    assert {SINGLE, BARE, TOP_1, TOP_2, LOOP, f"{EVERY}1", f"{EVERY}4"} <= set(times)
    for each in times.values():
        assert len(each) == QUICK.repeats
        assert all(one.seconds > 0 for one in each)


def test_the_peak_of_memory_sees_what_is_gone_again_and_mapped_files_apart(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(bytes(64 << 20))
    gc.collect()
    with peak("cpu") as before:
        pass
    # Pages of the kernel's own: malloc might give out again what earlier tests left.
    with peak("cpu") as during, mmap.mmap(-1, 64 << 20) as gone:
        gone.write(bytes([1]) * (32 << 20))
    assert 30 << 20 < during[0] - before[0] < 100 << 20
    with peak("cpu") as after:
        pass
    assert after[0] - before[0] < 30 << 20
    with peak("cpu") as during:
        mapped = torch.from_file(str(path), shared=True, size=64 << 18)
        mapped.sum()
    assert during[0] - before[0] > 60 << 20
    assert during[1] - before[1] < 30 << 20


def test_all_and_a_few_experts_are_written_as_ensembles_that_load(tmp_path: Path) -> None:
    size, router = write_ensembles(QUICK, tmp_path)
    assert size > 4 * router > 0
    for folder, count in ((ALL, K), (FEW, QUICK.few)):
        model = load(tmp_path / folder)
        assert isinstance(model, Ensemble)
        assert len(model.experts) == count
        assert model.strategy == "top-1"
    settings = json.loads(json.dumps(asdict(QUICK)))
    for case in CASES:
        limit = None if case.room is None else case.room * size + router
        ask = {"path": f"{tmp_path}/{case.folder}", "offload": case.offload, "max_memory": limit}
        found = memory_of({**ask, "settings": settings, "device": "cpu", "dtype": "float32"})
        assert found.resident >= found.resident_opened
        assert found.seconds_a_step > 0


@pytest.mark.slow
def test_the_quick_command_measures_memory_in_processes_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.inference", "--quick", "--dtype", "float32"]
    command += ["--results", str(tmp_path / "results"), "--work", str(tmp_path / "work")]
    written = Path(subprocess.check_output(command, text=True).splitlines()[-1])
    rows = json.loads(written.with_suffix(".json").read_text())["memory"]["float32"]["rows"]
    assert len(rows) == len(CASES)
    assert not any((tmp_path / "work").iterdir())
