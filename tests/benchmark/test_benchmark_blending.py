"""Two experts of a shard as one: who is asked at which noise level, and what it costs."""

import shutil
from pathlib import Path

import pytest
import torch

from hddm.benchmark.blending import blended, choice
from hddm.schedules import CosineSchedule, LinearSchedule
from hddm.utils.errors import HddmError
from hddm.velocity import VelocityField
from tests.benchmark_files import Finished, run_inline, settings
from tests.oracles import GaussianMixture

MODELS = [
    {"name": "homogeneous flow", "objectives": "flow"},
    {"name": "blended", "blended": 0.5},
]
TABLES = [{"name": "models"}]


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


def test_a_blended_model_trains_both_on_every_shard_and_is_sampled(
    miniature: Finished, tmp_path: Path
) -> None:
    changed = settings(models=MODELS, compare={}, tables=TABLES)
    out = tmp_path / "out"
    # Its own copy: other tests count the jobs of the miniature.
    jobs = shutil.copytree(miniature.out / "jobs", tmp_path / "jobs")
    results = run_inline(changed, out, miniature.data, jobs=jobs)
    flow, both = results.models
    assert both.objectives == ("ddpm", "ddpm", "flow", "flow")
    assert both.steps == (3, 3, 3, 3)
    assert both.images_seen == flow.images_seen
    record = next(one for one in results.records if one.model == "blended")
    assert record.expert_evaluations == pytest.approx(
        next(one for one in results.records if one.model != "blended").expert_evaluations
    )
    assert {(out / both.folder / name / "experts" / "0").is_dir() for name in ("flow", "ddpm")} == {True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objectives": "1:1"}, "blended is an ensemble of both"),
        ({"converted": 0.5}, "is blended, or starts from other experts"),
        ({"blended": 1.0}, "must be below 1"),
    ],
)
def test_what_blended_does_not_go_with_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(HddmError, match=message):
        settings(models=[MODELS[0], MODELS[1] | changes], compare={})


def test_blending_needs_validation_images() -> None:
    data = {"source": "folder", "training": "train", "held_out": "test"}
    with pytest.raises(HddmError, match=r"give a data\.validation_share"):
        settings(models=MODELS, compare={}, tables=TABLES, data=data, score_on="held-out")
