"""Models that start from an expert that exists: what they cost, and what their samples keep of training."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hddm.benchmark.compute import Costs
from hddm.benchmark.jobs import Store
from hddm.benchmark.samples import SampledModel, pieces, prepared
from hddm.benchmark.settings import SamplingPoint
from hddm.calibration import LEVELS, STATES
from hddm.data.shards import load_shard
from hddm.experts.loading import load
from hddm.training.continuation import continue_expert
from hddm.utils.errors import HddmError
from tests.artefacts import expert_settings
from tests.benchmark_files import Finished, of_models, run_inline

STRIPPING = [SamplingPoint(calibration="none"), SamplingPoint(calibration="router")]
# Of its experts the miniature has one.
UNTRAINED = {"name": "homogeneous DDPM", "objectives": "ddpm"}


def _jobs(miniature: Finished, folder: Path) -> Path:
    return Path(shutil.copytree(miniature.out / "jobs", folder / "jobs"))


def _experts(jobs: Path) -> set[str]:
    return {path.name for path in jobs.glob("expert-*")}


def test_what_an_expert_is_trained_on_from_decides_what_training_costs(
    miniature: Finished, ddpm_expert: Path, flow_expert: Path, tmp_path: Path
) -> None:
    jobs = _jobs(miniature, tmp_path)
    chosen = of_models(
        {"name": "from DDPM", "init": str(ddpm_expert), "training": {"size": "small"}},
        {"name": "from flow", "init": str(flow_expert)},
        {"name": "adapted", "init": str(ddpm_expert), "training": {"lora_rank": 2}},
    )
    results = run_inline(chosen, tmp_path / "out", miniature.data, jobs=jobs)
    cost = Costs(Store(jobs), next(jobs.glob("shards-*")) / "shards").expert(chosen.expert("flow", 0))
    steps, fitted = 2 * 6 * 8 * cost.step, 2 * LEVELS * STATES * cost.forward
    flop = {one.model: one.experts_flop for one in results.models}
    # As large as the init is, and calibrated in training.
    assert steps < flop["from DDPM"] < 1.1 * steps
    # Flow experts are calibrated when they are trained.
    assert flop["from flow"] == steps + fitted
    assert 0.5 * steps < flop["adapted"] < 1.5 * steps
    assert flop["adapted"] != flop["from DDPM"]


@pytest.fixture(scope="module")
def converted(ddpm_expert: Path, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DDPM expert, trained on with flow matching."""
    out = tmp_path_factory.mktemp("converted") / "expert"
    continue_expert(ddpm_expert, shards / "shard_1", out, expert_settings("flow"))
    return out


@pytest.mark.parametrize("point", STRIPPING)
def test_a_calibration_that_was_trained_in_is_left_in_place(
    point: SamplingPoint, converted: Path, shards: Path
) -> None:
    whole, shard = load(converted), shards / "shard_1"
    changed = prepared(load(converted), point, [True])
    x, t = load_shard(shard).images[:4], torch.full((4,), 0.9)
    assert torch.equal(changed.velocity(x, t), whole.velocity(x, t))
    stripped = prepared(load(converted), point)
    assert not torch.equal(stripped.velocity(x, t), whole.velocity(x, t))


@pytest.mark.parametrize("point", STRIPPING)
def test_samples_without_a_calibration_that_was_trained_in_are_not_found_again(point: SamplingPoint) -> None:
    before = SampledModel(Path("model"), "hash", False, (False, False))
    after = replace(before, trained_in=(False, True))
    (drawn,), (same,) = pieces(before, point, 0), pieces(replace(before, trained_in=()), point, 0)
    assert drawn.job == same.job
    assert pieces(after, point, 0)[0].job != drawn.job
    assert pieces(after, SamplingPoint(), 0)[0].job == pieces(before, SamplingPoint(), 0)[0].job


def test_a_converted_model_is_sampled_as_it_was_trained(miniature: Finished, tmp_path: Path) -> None:
    tables = [{"name": "calibration", "vary": {"calibration": ["none", "experts"]}}]
    chosen = of_models(
        {"name": "converted", "converted": 0.5, "training": {"prediction": "epsilon"}}, tables=tables
    )
    results = run_inline(chosen, tmp_path / "out", miniature.data, jobs=_jobs(miniature, tmp_path))
    first, second = [one.scores for one in results.scored]
    assert first == second


@pytest.mark.parametrize(
    "model",
    [
        {"training": {"lora_rank": 2}},
        {"kind": "single", "training": {"lora_rank": 2}},
        {"converted": 0.5, "training": {"lora_rank": 2}},
        {"init": "router"},
    ],
)
def test_a_start_that_cannot_be_is_refused_before_anything_is_trained(
    model: dict[str, Any], miniature: Finished, router: Path, tmp_path: Path
) -> None:
    jobs, message = _jobs(miniature, tmp_path), r"lora_rank 2: .* give the model an init"
    if "init" in model:
        model, message = {"init": str(router)}, "not an expert folder"
    with pytest.raises(HddmError, match=rf"model 'mine': .*{message}"):
        run_inline(
            of_models(UNTRAINED, {"name": "mine"} | model), tmp_path / "out", miniature.data, jobs=jobs
        )
    assert _experts(jobs) == _experts(miniature.out / "jobs")
