"""The conversions that an experiment compares, and what an evaluation costs."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import hddm
from benchmarks.conversion.conversions import TREATMENTS, SameTimeField, sample_ddim, variant
from hddm.benchmark.compute import evaluation_flop, forward_flop
from hddm.data.shards import load_shard
from hddm.ensemble import Ensemble
from hddm.velocity import VelocityField
from tests.cases import COSINE, Case, case_named

SHAPE = (1, 2, 2)
X = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(0))
TIMES = torch.tensor([0.0, 0.2, 0.5, 0.9, 0.999])


def _wide(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)


def _expert(mean: float, std: float, case: Case = COSINE) -> VelocityField:
    """The best network of noise in N(mean, std²)."""

    def noise(y: Tensor, time: Tensor) -> Tensor:
        a, s = map(_wide, case.schedule.alpha_sigma(time.double()))
        return (s * (y - a * mean) / (a**2 * std**2 + s**2)).float()

    return VelocityField(noise, case.schedule, "epsilon", sample_shape=SHAPE)


def test_the_naive_conversion_is_the_same_x_at_the_same_t() -> None:
    seen: list[Tensor] = []

    def network(y: Tensor, time: Tensor) -> Tensor:
        seen.extend((y, time))
        return 0.3 * y + _wide(time) / 1000

    field = SameTimeField(network, COSINE.schedule, "epsilon", 1000.0)
    eps = 0.3 * X + _wide(TIMES)
    torch.testing.assert_close(field.velocity(X, TIMES), (eps - X) / _wide(1 - TIMES), rtol=1e-4, atol=1e-5)
    assert torch.equal(seen[0], X)
    torch.testing.assert_close(seen[1], 1000 * TIMES)
    assert torch.equal(field.velocity(X, torch.ones(5)), X)


@pytest.mark.parametrize("exact", [True, False])
def test_clipping_bounds_the_estimate_of_the_data(exact: bool) -> None:
    field = _expert(mean=0.5, std=2.0)
    raw, clipped = (variant(field, exact, treatment, X) for treatment in TREATMENTS[:2])
    state = 2 * X
    x_0 = state - _wide(TIMES) * raw.velocity(state, TIMES)
    estimate = state - _wide(TIMES) * clipped.velocity(state, TIMES)
    assert x_0[1:].abs().max() > 1.5
    torch.testing.assert_close(estimate[1:], x_0[1:].clamp(-1, 1), rtol=1e-3, atol=1e-4)
    assert torch.equal(clipped.velocity(state, torch.zeros(5)), raw.velocity(state, torch.zeros(5)))


def test_raw_is_the_expert_without_its_calibration_and_blend_with_one(
    ddpm_expert: Path, shards: Path
) -> None:
    field, images = hddm.load(ddpm_expert), load_shard(shards / "shard_0").images
    assert isinstance(field, VelocityField)
    x, t = images[:4], torch.full((4,), 0.9)
    calibrated = field.velocity(x, t)
    blend = variant(field, True, "blend", images).velocity(x, t)
    torch.testing.assert_close(blend, calibrated)
    raw = variant(field, True, "raw", images).velocity(x, t)
    field.calibration = None
    assert torch.equal(raw, field.velocity(x, t))
    assert (raw - calibrated).abs().max() > 0.01
    naive = variant(field, False, "blend", images)
    assert isinstance(naive, SameTimeField)
    assert naive.calibration is not None


@pytest.mark.parametrize(
    ("name", "mean", "std", "steps"),
    [("cosine", 0.3, 0.15, 250), ("cosine", -0.5, 0.1, 250), ("ddpm-linear", 0.2, 0.1, 800)],
)
def test_ddim_reproduces_the_data_of_an_exact_network(name: str, mean: float, std: float, steps: int) -> None:
    samples = sample_ddim(Ensemble([_expert(mean, std, case_named(name))]), num=2000, seed=0, steps=steps)
    assert samples.mean().item() == pytest.approx(mean, abs=0.01)
    assert samples.std().item() == pytest.approx(std, rel=0.04)


def test_ddim_clips_the_estimate_and_draws_experts_by_the_prior() -> None:
    ensemble = Ensemble([_expert(0.8, 0.15), _expert(-0.5, 0.1)], prior=[1, 3])
    batches: list[int] = []
    samples = sample_ddim(ensemble, num=400, seed=1, steps=20, batch_size=150, on_batch=batches.append)
    beyond = samples.flatten(1).mean(1) > 0.5
    assert beyond.float().mean().item() == pytest.approx(0.25, abs=0.06)
    # Of the first expert's numbers, one in eleven would lie above 1.
    assert samples.max() == 1
    assert batches == [150, 150, 100]
    assert torch.equal(samples, sample_ddim(ensemble, num=400, seed=1, steps=20))


def test_ddim_walks_evenly_from_where_a_thousand_steps_end() -> None:
    seen: list[float] = []
    field = VelocityField(
        lambda y, time: (seen.append(time[0].item()), y)[1],
        COSINE.schedule,
        "epsilon",
        1000.0,
        sample_shape=SHAPE,
    )
    sample_ddim(Ensemble([field]), num=1, seed=0, steps=3)
    assert seen == pytest.approx([999, 666, 333])


def _block(tokens: int, width: int) -> int:
    """Operations of projections, attention over all pairs, and a perceptron four times as wide."""
    linear = 2 * tokens * width * (3 * width + width + 2 * 4 * width)
    return linear + 2 * 2 * tokens * tokens * width


def test_the_cost_is_the_count_of_every_multiplication_and_addition(ensemble: Path) -> None:
    width, depth, tokens, patch = 32, 2, 4, 4
    time = 2 * (256 * width + width * width)
    embed = 2 * tokens * patch * width
    expert = embed + time + 2 * width * 6 * width + depth * _block(tokens, width) + embed
    # The head reads one token, so the last block asks, mixes and makes that one alone.
    head, all_tokens = 2 * (width * width + width * 2), tokens + 1
    last = 2 * all_tokens * width * 2 * width + 2 * width * (width + width + 8 * width)
    last += 2 * 2 * all_tokens * width
    blocks = (depth - 1) * _block(all_tokens, width) + last + depth * 2 * width * 6 * width
    router = embed + time + blocks + head
    model = hddm.load(ensemble)
    state = torch.zeros(1, *model.sample_shape)
    for field in model.experts:
        field.calibration = None
    assert [evaluation_flop(field) for field in model.experts] == [expert] * len(model.experts)
    assert forward_flop(model.router, state, torch.ones(1)) == router
