"""Models that start from an expert that exists: what they cost, and that they are trained."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from hddm.benchmark.compute import Costs
from hddm.benchmark.store import Store
from hddm.calibration import LEVELS, STATES
from hddm.errors import HddmError
from tests.benchmark_files import Finished, run_inline, settings

# Of its experts the miniature has one.
UNTRAINED = {"name": "homogeneous DDPM", "objectives": "ddpm"}


def _jobs(miniature: Finished, folder: Path) -> Path:
    return Path(shutil.copytree(miniature.out / "jobs", folder / "jobs"))


def _experts(jobs: Path) -> set[str]:
    return {path.name for path in jobs.glob("expert-*")}


def _of(*models: dict[str, Any]) -> dict[str, Any]:
    return {"models": list(models), "compare": {}, "tables": [{"name": "models"}]}


def test_what_an_expert_is_trained_on_from_decides_what_training_costs(
    miniature: Finished, ddpm_expert: Path, flow_expert: Path, tmp_path: Path
) -> None:
    jobs = _jobs(miniature, tmp_path)
    chosen = settings(
        **_of(
            {"name": "from DDPM", "init": str(ddpm_expert), "training": {"size": "small"}},
            {"name": "from flow", "init": str(flow_expert)},
            {"name": "adapted", "init": str(ddpm_expert), "training": {"lora_rank": 2}},
        )
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


@pytest.mark.parametrize(
    "model",
    [
        {"name": "adapted", "training": {"lora_rank": 2}},
        {"name": "adapted", "kind": "single", "training": {"lora_rank": 2}},
        {"name": "adapted", "converted": 0.5, "training": {"lora_rank": 2}},
    ],
)
def test_an_adapter_of_nothing_is_refused_before_anything_is_trained(
    model: dict[str, Any], miniature: Finished, tmp_path: Path
) -> None:
    jobs = _jobs(miniature, tmp_path)
    changed = settings(**_of(UNTRAINED, model))
    with pytest.raises(HddmError, match=r"model 'adapted': lora_rank 2: .* give the model an init"):
        run_inline(changed, tmp_path / "out", miniature.data, jobs=jobs)
    assert _experts(jobs) == _experts(miniature.out / "jobs")


def test_an_init_that_does_not_fit_is_refused_before_anything_is_trained(
    miniature: Finished, router: Path, tmp_path: Path
) -> None:
    jobs = _jobs(miniature, tmp_path)
    changed = settings(**_of(UNTRAINED, {"name": "mine", "init": str(router)}))
    with pytest.raises(HddmError, match=r"model 'mine': .*no expert folder"):
        run_inline(changed, tmp_path / "out", miniature.data, jobs=jobs)
    assert _experts(jobs) == _experts(miniature.out / "jobs")
