"""Errors and likelihoods against mixtures of Gaussians, whose velocities and densities are known."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from hddm.calibration import Moments
from hddm.ensemble import Ensemble
from hddm.objective.errors import noise_of, velocity_errors
from hddm.objective.flows import flows_of
from hddm.objective.likelihood import (
    Flow,
    LikelihoodSettings,
    bits_per_dimension,
    divergence,
    log_likelihood,
)
from hddm.utils.errors import HddmError
from hddm.utils.streams import Use
from tests.cases import LINEAR, Case, case_named, in_parts, oracle_field
from tests.oracles import GaussianMixture, exact_router

SHAPE = (1, 2, 3)
DIMENSIONS = 6
PRIOR = (0.3, 0.7)
SEED = 5
COSINE = case_named("cosine")
SHARDS = [GaussianMixture.random(seed, modes=2, dim=DIMENSIONS, spread=1.5) for seed in (1, 2)]
WHOLE = GaussianMixture.union(SHARDS, PRIOR)


def _data(num: int) -> Tensor:
    return WHOLE.sample(num, 3, SHAPE)


def _density(mixture: GaussianMixture, x_0: Tensor, numbers: range, s: float) -> Tensor:
    """log of the true density of x_0 + s/(1 - s) eps (n,)."""
    eps = noise_of(numbers, SHAPE, SEED, Use.LIKELIHOOD)
    x_s, times = (1 - s) * x_0 + s * eps, torch.full((len(x_0),), s, dtype=torch.float64)
    constant = -DIMENSIONS / 2 * math.log(2 * math.pi) + DIMENSIONS * math.log(1 - s)
    return mixture.log_density(x_s, 1 - times, times) + constant


def _mixed(strategy: str, cases: tuple[Case, Case] = (LINEAR, COSINE)) -> Ensemble:
    fields = []
    for shard, case, kind in zip(SHARDS, cases, ("flow_prediction", "sample"), strict=True):
        fields.append(oracle_field(shard, case, kind, sample_shape=SHAPE))
    return Ensemble(fields, exact_router(SHARDS, PRIOR), strategy, PRIOR)


@pytest.mark.parametrize("time", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("strategy", ["full", "top-1"])
def test_errors_are_those_of_the_known_velocity(time: float, strategy: str) -> None:
    x_0, numbers = _data(20), range(100, 120)
    model = _mixed(strategy)
    (flow,), _ = flows_of(model, {}, len(x_0))
    found = velocity_errors(flow.velocity, x_0, numbers, time, SEED)
    eps = noise_of(numbers, SHAPE, SEED, Use.OBJECTIVE)
    x_t, times = (1 - time) * x_0 + time * eps, torch.full((20,), time, dtype=torch.float64)
    p = exact_router(SHARDS, PRIOR)(x_t, times)
    if strategy == "top-1":
        p = torch.nn.functional.one_hot(p.argmax(1), 2).double()
    v = torch.zeros_like(x_t)
    for k, shard in enumerate(SHARDS):
        v += p[:, k].view(-1, 1, 1, 1) * shard.velocity(x_t, times)
    expected = (v - (eps - x_0)).square().flatten(1).mean(1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_an_image_keeps_its_noise_in_any_batch_and_more_draws_average() -> None:
    x_0, velocity = _data(6), WHOLE.velocity
    whole = velocity_errors(velocity, x_0, range(6), 0.4, SEED)
    parts = [velocity_errors(velocity, x_0[k : k + 1], [k], 0.4, SEED) for k in range(6)]
    torch.testing.assert_close(torch.cat(parts), whole)
    many = velocity_errors(velocity, x_0, range(6), 0.4, SEED, draws=64)
    assert (whole - many).abs().max() > 0.01
    # What is left of the mean error is the spread of the data around their mean given x_t.
    more = velocity_errors(velocity, x_0, range(1000, 1006), 0.4, SEED, draws=64)
    torch.testing.assert_close(more.mean(), many.mean(), rtol=0.2, atol=0)


@pytest.mark.parametrize("strategy", ["full", "draw"])
def test_bits_are_those_of_the_known_density(strategy: str) -> None:
    """Either the velocities are mixed exactly, or the densities are: both are the whole data's."""
    x_0, numbers = _data(8), range(8)
    flows, shares = flows_of(_mixed(strategy), {}, len(x_0))
    assert len(flows) == (2 if strategy == "draw" else 1)
    settings = LikelihoodSettings(smallest=0.05, steps=40)
    found = [log_likelihood(flow, x_0, numbers, SEED, settings)[0] for flow in flows]
    total = (torch.stack(found) + shares).logsumexp(0)
    expected = _density(WHOLE, x_0, numbers, 0.05)
    bits, exact = (bits_per_dimension(one, DIMENSIONS, False) for one in (total, expected))
    torch.testing.assert_close(bits, exact, rtol=0, atol=1e-3)


def test_a_wrong_model_has_more_bits() -> None:
    x_0, numbers = _data(50), range(50)
    settings = LikelihoodSettings(smallest=0.05, steps=16)
    mean = []
    for mixture in (WHOLE, SHARDS[0]):
        density = log_likelihood(Flow(mixture.velocity), x_0, numbers, SEED, settings)
        mean.append(bits_per_dimension(density[0], DIMENSIONS, False).mean())
    assert mean[1] > mean[0] + 0.1


@pytest.mark.parametrize("end", [0.7, 0.999])
def test_the_error_of_the_integral_falls_with_the_fourth_power_of_the_steps(end: float) -> None:
    """For Gaussian data, whose density is exact at the time where samples begin, whichever it is."""
    data = GaussianMixture.random(4, modes=1, dim=DIMENSIONS)
    x_0, numbers = data.sample(6, 3, SHAPE), range(6)
    values, vectors = torch.linalg.eigh(data.covariance)
    moments = Moments(data.mean, vectors, torch.cat([values, values[:1]]))
    flow, expected = Flow(data.velocity, end, [moments]), _density(data, x_0, numbers, 0.05)
    errors = []
    for steps in (8, 16, 32):
        settings = LikelihoodSettings(smallest=0.05, steps=steps)
        found = log_likelihood(flow, x_0, numbers, SEED, settings)[0]
        errors.append((found - expected).abs().max())
    for coarse, fine in itertools.pairwise(errors):
        assert coarse / fine > 10


def test_estimates_of_the_trace_are_unbiased_and_their_spread_is_there() -> None:
    x = _data(4)
    t = torch.full((4,), 0.3, dtype=torch.float64)
    exact = divergence(WHOLE.velocity, x, t, None)
    signs = [noise_of(range(4), SHAPE, SEED, Use.PROBES, part).sign() for part in range(2000)]
    rows = divergence(WHOLE.velocity, x, t, torch.stack(signs))
    assert rows.shape == (2000, 4)
    error = rows.std(0) / 2000**0.5
    assert (rows.std(0) > 0).all()
    assert ((rows.mean(0) - exact[0]).abs() < 4 * error).all()


def test_the_exact_trace_is_that_of_finite_differences_through_the_router() -> None:
    model = _mixed("full")
    (flow,), _ = flows_of(model, {}, 3)
    x, t = WHOLE.states_at(0.5, 3, 1, SHAPE)
    found = divergence(flow.velocity, x, t, None)
    expected, width = torch.zeros(3, dtype=torch.float64), 1e-5
    for place in range(DIMENSIONS):
        moved = torch.zeros_like(x)
        moved.flatten(1)[:, place] = width
        slope = (flow.velocity(x + moved, t) - flow.velocity(x - moved, t)) / (2 * width)
        expected += slope.flatten(1)[:, place]
    torch.testing.assert_close(found[0], expected, rtol=1e-6, atol=1e-6)


def test_pixels_are_counted_in_eight_bits() -> None:
    # Uniform over one grey level: its density is 127.5 per dimension, and it costs no bit.
    density = torch.tensor([DIMENSIONS * math.log(127.5)], dtype=torch.float64)
    assert bits_per_dimension(density, DIMENSIONS, True).item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("smallest", [0.0, 1.0])
def test_a_smallest_time_at_the_ends_is_refused(smallest: float) -> None:
    with pytest.raises(HddmError, match="`smallest_noise`"):
        LikelihoodSettings(smallest=smallest)


def test_a_class_that_an_expert_never_saw_leaves_its_flow_out() -> None:
    """Its share is 0, which must not become 0/0."""
    fields = [
        oracle_field(shard, LINEAR, "flow_prediction", sample_shape=SHAPE) for shard in SHARDS
    ]
    for field in fields:
        field.classes = ("a", "b")
    model = Ensemble(in_parts(fields, class_prior=[[1.0, 0.0], [0.5, 0.5]]), strategy="draw")
    flows, shares = flows_of(model, {"class_labels": torch.tensor([0, 1])}, 2)
    assert shares.exp().tolist() == [[1.0, 0.5], [0.0, 0.5]]
    for flow in flows:
        assert flow.shares.isfinite().all()
