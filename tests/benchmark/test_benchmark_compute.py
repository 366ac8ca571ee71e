"""Counted operations are those that a network's layers have on paper."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hddm.benchmark.compute import Cost, Costs, count_continued, count_expert, count_router
from hddm.benchmark.data import PartitionedImages
from hddm.benchmark.jobs import Store
from hddm.benchmark.models import SeedModels
from hddm.benchmark.samples import canonical, draw
from hddm.benchmark.settings import SamplingPoint
from hddm.calibration import LEVELS, STATES
from hddm.ensemble import Ensemble
from hddm.routers import Router
from hddm.schedules import LinearSchedule
from hddm.training.router import NOISED
from hddm.training.settings import size_config
from hddm.velocity import VelocityField
from tests.artefacts import SIDE, expert_settings, router_settings
from tests.benchmark_files import of_models, settings

TINY = size_config("tiny")
WIDTH, DEPTH, PATCH = TINY["hidden_size"], TINY["depth"], TINY["patch_size"]
TOKENS = (SIDE // PATCH) ** 2
FREQUENCIES = 256


@pytest.fixture(scope="module")
def divided(shards: Path, whole: Path) -> PartitionedImages:
    return PartitionedImages(shards, whole.parent)


def _linear(rows: int, inside: int, outside: int) -> int:
    return 2 * rows * inside * outside


def _attention(queries: int, keys: int) -> int:
    """Scores and their product with the values."""
    return 2 * (2 * queries * keys * WIDTH)


def test_a_training_step_costs_its_forward_and_twice_that_backward(shards: Path) -> None:
    embed = _linear(TOKENS, PATCH**2, WIDTH)
    first = _linear(1, FREQUENCIES, WIDTH)
    time = _linear(1, WIDTH, WIDTH) + _linear(1, WIDTH, 6 * WIDTH)
    block = (
        _linear(TOKENS, WIDTH, 3 * WIDTH)
        + _attention(TOKENS, TOKENS)
        + _linear(TOKENS, WIDTH, WIDTH)
        + 2 * _linear(TOKENS, WIDTH, 4 * WIDTH)
    )
    forward = embed + first + time + DEPTH * block + _linear(TOKENS, WIDTH, PATCH**2)
    # Nothing asks for the gradient of images and of times.
    step = 3 * forward - embed - first
    for objective in ("flow", "ddpm"):
        assert count_expert(shards / "shard_0", expert_settings(objective)) == Cost(step, forward)


def test_steps_batches_and_calibrations_are_counted() -> None:
    cost = Cost(step=300, forward=100)
    trained = 10 * 16 * 300
    assert cost.of_expert(expert_settings("flow")) == trained + LEVELS * STATES * 100
    assert cost.steps(expert_settings("flow")) == trained
    assert cost.of_router(router_settings()) == trained
    assert cost.of_router(router_settings(calibrate=True)) == trained + NOISED * 100


def test_muon_costs_its_matrix_products_once_a_step(shards: Path) -> None:
    """Five iterations, for G of shape (m, n), n <= m: G^T G, its square, and the product with G."""
    adamw = count_expert(shards / "shard_0", expert_settings("flow"))
    muon = count_expert(shards / "shard_0", expert_settings("flow", optimizer="muon"))

    def update(m: int, n: int) -> int:
        return 5 * (2 * _linear(n, m, n) + _linear(n, n, n))

    block = update(3 * WIDTH, WIDTH) + update(WIDTH, WIDTH) + 2 * update(4 * WIDTH, WIDTH)
    time = update(FREQUENCIES, WIDTH) + update(WIDTH, WIDTH) + update(6 * WIDTH, WIDTH)
    assert muon == Cost(adamw.step, adamw.forward, DEPTH * block + time)
    assert muon.steps(expert_settings("flow")) == adamw.steps(expert_settings("flow")) + 10 * muon.update


def test_training_on_costs_what_the_network_costs_that_is_trained_on(
    shards: Path, whole: Path, ddpm_expert: Path
) -> None:
    tiny = count_expert(shards / "shard_0", expert_settings("flow"))
    larger = expert_settings("flow", size="small")
    found = count_continued(ddpm_expert, shards / "shard_0", larger)
    assert found.forward == tiny.forward
    # The velocity is trained in its calibration.
    assert tiny.step < found.step < 1.1 * tiny.step < count_expert(shards / "shard_0", larger).step
    # Moments of more images are taken once, and not in a step.
    assert count_continued(ddpm_expert, whole, larger) == found


def test_costs_of_training_on_are_kept_by_what_it_starts_from(
    shards: Path, ddpm_expert: Path, flow_expert: Path, tmp_path: Path
) -> None:
    store, settings = Store(tmp_path / "jobs"), expert_settings("flow", size="small")
    for init, content in ((ddpm_expert, "a"), (flow_expert, "b"), (ddpm_expert, "a")):
        assert Costs(store, shards).expert(settings, init, content).forward < 1e6
    Costs(store, shards).expert(settings)
    assert len(list((tmp_path / "jobs").glob("cost-*"))) == 3


@pytest.mark.parametrize("changes", [{}, {"batch_size": 64}, {"size": "small"}, {"class_conditional": True}])
def test_the_single_model_gets_what_the_ensemble_costs_with_its_router(
    changes: dict[str, Any], divided: PartitionedImages, tmp_path: Path
) -> None:
    training = settings().training.model_dump() | {"single": {}}
    training["expert"] |= {"steps": 3000}
    chosen = of_models({"name": "single model", "kind": "single", "training": changes}, training=training)
    opener = SeedModels(chosen, 0, divided, Store(tmp_path / "jobs"))
    (single,) = opener.trainings(chosen.models[0])
    expert, router = chosen.expert("flow", 0), chosen.router(0)
    routing = count_router(divided.shards, router).of_router(router)
    budget = 2 * opener.costs.expert(expert).of_expert(expert) + routing
    cost = opener.costs.expert(single.settings)
    gap = budget - cost.of_expert(single.settings)
    assert 0 <= gap < cost.of_step(single.settings.batch_size)
    if not changes:
        assert single.settings.batch_size == 2 * expert.batch_size
        # Counted once: two kinds of networks.
        assert len(list((tmp_path / "jobs").glob("cost-*"))) == 2


def test_a_single_model_that_says_its_steps_takes_them(divided: PartitionedImages, tmp_path: Path) -> None:
    said = {"steps": 7, "batch_size": 64}
    chosen = of_models({"name": "single model", "kind": "single", "training": said})
    (single,) = SeedModels(chosen, 0, divided, Store(tmp_path / "jobs")).trainings(chosen.models[0])
    assert (single.settings.steps, single.settings.batch_size) == (7, 64)


class _Counted(torch.nn.Module):
    """A network of one linear layer over the pixels, that counts what it is asked for."""

    def __init__(self, outside: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, outside)
        self.rows = 0

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        self.rows += len(x)
        out: torch.Tensor = self.layer(x.flatten(1))
        return out.view_as(x) if out.shape[1] == 16 else out


@pytest.mark.parametrize(
    ("strategy", "solver", "experts", "routed"),
    [("draw", "euler", 5, 0), ("top-1", "euler", 5, 5), ("full", "euler", 10, 5), ("full", "heun", 20, 10)],
)
def test_sampling_costs_what_the_networks_were_asked_for(
    strategy: str, solver: str, experts: int, routed: int
) -> None:
    torch.manual_seed(0)
    networks = [_Counted(16), _Counted(16)]
    fields = [
        VelocityField(network, LinearSchedule(), "flow_prediction", sample_shape=(1, 4, 4))
        for network in networks
    ]
    ensemble = Ensemble(fields, Router(_Counted(2)), "full")
    point = SamplingPoint(strategy=strategy, solver=solver, steps=5)
    drawn = draw(ensemble, point, 0, 0, 7)
    assert sum(drawn.expert_rows) == 7 * experts
    assert drawn.router_rows == 7 * routed
    assert drawn.flop == 7 * (experts * 2 * 16 * 16 + routed * 2 * 16 * 2)


def test_what_has_no_effect_does_not_tell_samples_apart() -> None:
    assert canonical(SamplingPoint(strategy="top-2"), True) == canonical(SamplingPoint(strategy="full"), True)
    drawn = SamplingPoint(strategy="draw", router_temperature=2.0)
    assert canonical(SamplingPoint(guide_by="weak"), True) == canonical(SamplingPoint(), True)
    guided = SamplingPoint(guide_by="weak", guidance_scale=1.5)
    assert canonical(guided, True) != canonical(SamplingPoint(guidance_scale=1.5), True)
    assert canonical(drawn, False) == canonical(SamplingPoint(strategy="draw", calibration="experts"), False)
    assert canonical(SamplingPoint(strategy="full", router_temperature=2.0), False) != canonical(
        SamplingPoint(strategy="full"), False
    )
