"""The experiments on a finished benchmark: objectives by error, blended experts, other conversions."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.conversion.grid import grid
from benchmarks.heterogeneity.blending import blended, choice
from benchmarks.heterogeneity.by_error import assigned, by_error
from benchmarks.heterogeneity.scaling import CIFAR, DIGITS, Sweep, settings_of
from hddm.benchmark.compute import count_expert, count_router
from hddm.data.partition import partition
from hddm.data.shards import load_shard
from hddm.schedules import CosineSchedule, LinearSchedule
from hddm.velocity import VelocityField
from tests.artefacts import write_images
from tests.benchmark_files import Finished, run_inline, settings
from tests.oracles import GaussianMixture


class _Network(torch.nn.Module):
    """An exact network of either kind, which counts what it is asked for."""

    def __init__(self, data: GaussianMixture, is_ddpm: bool) -> None:
        super().__init__()
        self.data, self.is_ddpm, self.asked = data, is_ddpm, 0
        self.schedule = CosineSchedule() if is_ddpm else LinearSchedule()

    def forward(self, y: torch.Tensor, native: torch.Tensor) -> torch.Tensor:
        self.asked += len(y)
        x_0, eps = self.data.x_0_and_eps(y.double(), *self.schedule.alpha_sigma(native.double()))
        return (eps if self.is_ddpm else eps - x_0).to(y)

    def field(self) -> VelocityField:
        kind = "epsilon" if self.is_ddpm else "flow_prediction"
        return VelocityField(self, self.schedule, kind, sample_shape=(1, 2, 2))


def test_each_noise_level_is_the_lower_errors_and_costs_one_evaluation() -> None:
    data = GaussianMixture.random(3, 2, 4)
    flow, ddpm = _Network(data, False), _Network(data, True)
    levels = [0.2, 0.4, 0.6]
    errors = {
        "ddpm": {"levels": [{"t": t, "expert": e} for t, e in zip(levels, (0.1, 0.5, 0.2), strict=True)]},
        "flow": {"levels": [{"t": t, "expert": e} for t, e in zip(levels, (0.2, 0.4, 0.3), strict=True)]},
    }
    field = blended(flow.field(), ddpm.field(), choice(errors["ddpm"], errors["flow"]))
    # Levels reach to the middle between their neighbours, the outer ones to the ends.
    t = torch.tensor([0.0, 0.29, 0.31, 0.49, 0.51, 0.99], dtype=torch.float64)
    states = data.states(t, seed=1, shape=(1, 2, 2))
    v = field.velocity(states, t)
    assert (ddpm.asked, flow.asked) == (4, 2)
    x_0, eps = data.x_0_and_eps(states, 1 - t, t)
    assert (v - (eps - x_0)).abs().max() < 1e-4


def test_by_error_each_shard_is_ddpm_where_that_loses_least() -> None:
    ddpm, flow = ([{"mean": mean} for mean in means] for means in ((0.3, 0.2, 0.5), (0.2, 0.3, 0.1)))
    assert assigned(ddpm, flow) == [False, True, False]
    assert assigned(ddpm, flow, most=2) == [True, True, False]


def test_experiments_run_on_a_finished_benchmark(miniature: Finished, tmp_path: Path) -> None:
    models = [
        {"name": "homogeneous flow", "objectives": "flow"},
        {"name": "homogeneous DDPM", "objectives": "ddpm"},
    ]
    out = tmp_path / "out"
    run_inline(settings(models=models, compare={}, tables=[{"name": "models"}]), out, miniature.data)
    (line,) = by_error(out)
    assert line.startswith("by error (")
    assert ", seed 0: " in line
    (line,) = by_error(out, blended=True)
    assert line.startswith("blended, seed 0: ")
    lines = list(grid(out))
    assert len(lines) == 7
    assert len({line.partition(": ")[2] for line in lines}) > 3
    # What was drawn once is not scored again.
    assert list(grid(out)) == lines


@pytest.mark.parametrize("sweep", [DIGITS, CIFAR], ids=lambda sweep: sweep.name)
def test_every_cell_of_the_sweep_costs_its_budget(sweep: Sweep, tmp_path: Path) -> None:
    """As the benchmark counts it, on a shard of images of the same shape; calibrations come on top."""
    (shard,) = partition(write_images(tmp_path / "images", side=sweep.shape[1]), tmp_path / "shards", 1)
    shape = load_shard(shard).shape
    for size in (sweep.sizes[0], sweep.sizes[-1]):
        for count in sweep.counts:
            chosen = settings_of(replace(sweep, shape=shape), size, sweep.budgets[-1], count, 1)
            expert, router = chosen.expert("flow", 0), chosen.router(0)
            assert expert.batch_size * count == 128
            spent = count * count_expert(shard, expert).steps(expert) + count_router(
                shard.parent, router
            ).steps(router)
            assert spent == pytest.approx(sweep.budgets[-1], rel=0.01)
