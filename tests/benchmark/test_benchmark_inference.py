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

from benchmarks.harness import Start
from benchmarks.inference.__main__ import measure_inference
from benchmarks.inference.memory import ALL, CASES, FEW, memory_of, peak, write_ensembles
from benchmarks.inference.models import (
    CPU,
    CUDA,
    QUICK,
    EvenRouter,
    Models,
    Settings,
    random_router,
)
from benchmarks.inference.report import lines
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
from benchmarks.reports import met
from benchmarks.timing import Taken, quartiles, ratios
from hddm.benchmark.compute import forward_flop
from hddm.ensemble import Ensemble
from hddm.experts.loading import load
from hddm.routers import Router

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


def test_the_even_router_costs_what_the_router_inside_it_costs() -> None:
    router = random_router(QUICK.router, QUICK.sample_shape, QUICK.patch, K)
    x = torch.zeros(1, *QUICK.sample_shape)
    costs = [forward_flop(Router(network), x, torch.ones(1)) for network in (router, EvenRouter(router))]
    assert costs[0] == costs[1] > 0


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


def test_ratios_are_taken_within_a_round_and_held_against_their_target() -> None:
    times = {SINGLE: [Taken(1, 1), Taken(2, 1)], TOP_1: [Taken(1.5, 1), Taken(2, 1)]}
    assert ratios(times, TOP_1, SINGLE) == [1.5, 1.0]
    assert (quartiles([5, 1, 4, 2, 3]), quartiles([7])) == ((2, 3, 4), (7, 7, 7))
    assert [met(1.15, 1.15), met(1.16, 1.15)] == ["met", "missed"]
    assert [met(5.0, 5.0, at_most=False), met(4.9, 5.0, at_most=False)] == ["met", "missed"]


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


def test_a_report_says_what_was_met_and_what_was_missed(tmp_path: Path) -> None:
    start = Start(tmp_path, tmp_path, command="inference --quick --no-memory")
    written = measure_inference(start, "cpu", ["float32"], memory=False, quick=True)
    assert "· `inference --quick --no-memory` ·" in written.read_text()
    content = json.loads(written.with_suffix(".json").read_text())
    taken = {name: [Taken(seconds, 1.0)] for name, seconds in _SECONDS.items()}
    rows = [{**asdict(case), **_ROW, "resident": place} for place, case in enumerate(CASES, start=10)]
    text = "\n".join(lines(QUICK, content, {"float32": taken}, {"float32": (10**6, rows)}))
    for line in (
        "top-1: 1.10 [1.10, 1.10] × the single model; target at most 1.15: met.",
        "top-2: 2.50 [2.50, 2.50] × the single model; target at most 2.25: missed.",
        "top-1 is 7.3 [7.3, 7.3] × as fast as the loop over all experts; target at least 5: met.",
        "target less: missed.",
        "3 experts, none",
        "8 experts, disk, max_memory 1 MB",
    ):
        assert line in text


_SECONDS = {SINGLE: 1.0, TOP_1: 1.1, TOP_2: 2.5, LOOP: 8.03, f"{EVERY}1": 1.1, f"{EVERY}4": 1.0}
_ROW = {"max_memory": 10**6, "resident_opened": 0, "own": 0, "own_opened": 0, "seconds_a_step": 1.0}


@pytest.mark.slow
def test_the_quick_command_measures_memory_in_processes_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.inference", "--quick", "--dtype", "float32"]
    command += ["--results", str(tmp_path / "results"), "--work", str(tmp_path / "work")]
    written = Path(subprocess.check_output(command, text=True).splitlines()[-1])
    rows = json.loads(written.with_suffix(".json").read_text())["memory"]["float32"]["rows"]
    assert len(rows) == len(CASES)
    assert not any((tmp_path / "work").iterdir())
