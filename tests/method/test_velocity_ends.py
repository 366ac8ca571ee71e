"""The closed interval: finite everywhere, bounded at the ends, one rule outside the range."""

import pytest
import torch
from torch import Tensor

from hddm.velocity import VelocityField
from tests.cases import LEGAL, Case, each_legal, oracle_field
from tests.oracles import BoundedNetwork, GaussianMixture, relative_error

SHAPE = (3, 4, 4)
SHARD = GaussianMixture.random(seed=0, modes=3, dim=48)
DTYPES = [torch.float32, torch.float64]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])


def _ends_below_one(case: Case, prediction_type: str) -> bool:
    has_zero_snr = case.name in ("linear", "cosine") or case.name.endswith("ztsnr")
    return prediction_type == "epsilon" or not has_zero_snr


def _starts_above_zero(case: Case, prediction_type: str) -> bool:
    return prediction_type == "sample" or case.name not in ("linear", "cosine")


each_end = pytest.mark.parametrize(
    ("case", "prediction_type", "is_above"),
    [
        pytest.param(*one.values, is_above, id=f"{one.id}-{'above' if is_above else 'below'}")
        for is_above, is_inside in ((True, _ends_below_one), (False, _starts_above_zero))
        for one in LEGAL
        if one.values[1] != "flow_prediction" and is_inside(*one.values)
    ],
)


def _fields(case: Case, prediction_type: str) -> list[VelocityField]:
    """Any expert, and the perfect one."""
    anyone = VelocityField(BoundedNetwork(), case.schedule, prediction_type)
    return [anyone, oracle_field(SHARD, case, prediction_type)]


def _states(t: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    noise = torch.Generator().manual_seed(0)
    return torch.randn(len(t), *SHAPE, generator=noise, dtype=torch.float64).to(dtype)


@each_legal
@each_dtype
def test_velocity_is_finite_everywhere(case: Case, prediction_type: str, dtype: torch.dtype) -> None:
    low, high = case.schedule.range
    zero, one = torch.tensor(0.0, dtype=dtype), torch.tensor(1.0, dtype=dtype)
    edges = torch.stack([zero, zero.nextafter(one), one.nextafter(zero), one])
    around = [1e-30, 1e-12, 1e-6, low, 0.3, high, 1 - 1e-6, 1 - 1e-7]
    t = torch.cat([edges, torch.tensor(around, dtype=dtype), torch.linspace(0, 1, 21, dtype=dtype)])
    for field in _fields(case, prediction_type):
        assert field.velocity(_states(t, dtype), t).isfinite().all()


@each_legal
@each_dtype
def test_velocity_at_full_noise_is_bounded(case: Case, prediction_type: str, dtype: torch.dtype) -> None:
    t = torch.ones(32, dtype=dtype)
    x_t = _states(t, dtype)
    for field in _fields(case, prediction_type):
        v = field.velocity(x_t, t)
        assert (v.flatten(1).norm(dim=1) <= 3 * x_t.flatten(1).norm(dim=1)).all()


@each_legal
def test_float32_states_lose_no_more_than_rounding(case: Case, prediction_type: str) -> None:
    t = torch.cat([torch.linspace(0, 1, 201), 1 - torch.logspace(-7, -2, 30)])
    x_t = SHARD.states(t, seed=3, shape=SHAPE)
    field = oracle_field(SHARD, case, prediction_type)
    narrow, wide = field.velocity(x_t.float(), t), field.velocity(x_t, t)
    # State and timestep are rounded to 6e-8; dividing by 1 - t or t multiplies the former.
    growth = {"epsilon": 1 / (1 - t).clamp_min(1e-6), "sample": 1 / t.clamp_min(1e-6)}
    bound = 1e-5 + 1e-6 * (growth.get(prediction_type, torch.zeros_like(t)))
    error = (narrow - wide).flatten(1).norm(dim=1) / x_t.flatten(1).norm(dim=1)
    assert (error <= bound).all()


@each_legal
def test_gradients_are_finite_on_the_closed_interval(case: Case, prediction_type: str) -> None:
    field = VelocityField(BoundedNetwork(), case.schedule, prediction_type)
    t = torch.tensor([0.0, 1e-12, 0.3, 1 - 1e-12, 1.0], dtype=torch.float64)
    x_t = _states(t).requires_grad_()
    field.velocity(x_t, t).square().sum().backward()
    assert x_t.grad.isfinite().all()


@each_legal
def test_velocity_of_data_is_minus_the_data_for_a_perfect_expert(case: Case, prediction_type: str) -> None:
    t = torch.zeros(8, dtype=torch.float64)
    x_t = SHARD.sample(8, seed=0, shape=SHAPE)
    v = oracle_field(SHARD, case, prediction_type).velocity(x_t, t)
    torch.testing.assert_close(v, -x_t, rtol=1e-9, atol=1e-9)


@each_end
def test_beyond_the_range_one_estimate_fades(case: Case, prediction_type: str, is_above: bool) -> None:
    network = BoundedNetwork()
    field = VelocityField(network, case.schedule, prediction_type)
    end = field.range[is_above]
    shares = torch.tensor([0.0, 0.1, 0.5, 0.8, 0.999], dtype=torch.float64)
    t = 1 - (1 - end) * shares if is_above else end * shares
    x_t = _states(t)
    v = field.velocity(x_t, t)
    ((y, u, output),) = network.calls
    asked = case.schedule.match(torch.tensor([end], dtype=torch.float64))
    torch.testing.assert_close(u, asked.expand(5), rtol=1e-6, atol=1e-9)
    assert (u == u[0]).all()
    t = t.view(-1, 1, 1, 1)
    a, s = (value.view(-1, 1, 1, 1) for value in case.alpha_sigma(u))
    torch.testing.assert_close(y, (s / t if is_above else a / (1 - t)) * x_t, rtol=1e-9, atol=0)
    norm = a**2 + s**2
    x_0, eps = {
        "epsilon": ((y - s * output) / a, output),
        "sample": (output, (y - a * output) / s),
        "v_prediction": ((a * y - s * output) / norm, (s * y + a * output) / norm),
    }[prediction_type]
    odds = (1 - t) / t / ((1 - end) / end)
    expected = (x_t - odds * x_0) / t if is_above else (eps / odds - x_t) / (1 - t)
    torch.testing.assert_close(v, expected, rtol=1e-7, atol=1e-7)


@each_legal
def test_outside_the_range_the_rule_is_right_to_first_order(case: Case, prediction_type: str) -> None:
    # For centred data the error is of second order in the smaller of (alpha, sigma) at the end.
    eye = 0.5 * torch.eye(48, dtype=torch.float64)
    centred = GaussianMixture(torch.ones(1).double(), torch.zeros(1, 48).double(), eye[None])
    field = oracle_field(centred, case, prediction_type)
    low, high = field.range
    t = torch.cat([torch.linspace(0, low, 9), torch.linspace(high, 1, 9)]).double().clamp(0, 1)
    x_t = centred.states(t, seed=2, shape=SHAPE)
    share = max(low / (1 - low), (1 - high) / high)
    bound = 2 * share**2 + 1e-6
    assert relative_error(field.velocity(x_t, t), centred.velocity(x_t, t)) < bound
