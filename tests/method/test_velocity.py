"""Exact conversion inside an expert's noise range: match, rescale, convert."""

import pytest
import torch

from hddm.velocity import VelocityField
from tests.cases import DISCRETE, LINEAR, Case, case_named, each_legal, oracle_field
from tests.oracles import GaussianMixture, OracleNetwork, relative_error

SHARD = GaussianMixture.random(seed=0, modes=5, dim=8)
SHAPE = (2, 2, 2)


def _inside(field: VelocityField, num: int = 64) -> torch.Tensor:
    """Times in the range: both ends, the rest at random."""
    low, high = field.range
    noise = torch.Generator().manual_seed(1)
    t = low + (high - low) * torch.rand(num, generator=noise, dtype=torch.float64)
    t[0], t[1] = low, high
    return t


@each_legal
def test_a_perfect_expert_becomes_the_velocity_of_the_linear_path(case: Case, prediction_type: str) -> None:
    """And the network is fed the rescaled state at the matched time."""
    field = oracle_field(SHARD, case, prediction_type)
    t = _inside(field)
    x_t = SHARD.states(t, seed=2, shape=SHAPE)
    assert relative_error(field.velocity(x_t, t), SHARD.velocity(x_t, t)) < 1e-9
    ((y, u),) = field.network.fed
    a, s = (value.view(-1, 1, 1, 1) for value in case.alpha_sigma(u))
    torch.testing.assert_close((s / (a + s)).flatten(), t, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(y, (a + s) * x_t, rtol=1e-9, atol=1e-12)


@each_legal
def test_time_scale_multiplies_what_the_network_is_fed(case: Case, prediction_type: str) -> None:
    plain, scaled = (oracle_field(SHARD, case, prediction_type, scale) for scale in (1.0, 1000.0))
    t = _inside(plain, 8)
    x_t = SHARD.states(t, seed=4, shape=SHAPE)
    torch.testing.assert_close(scaled.velocity(x_t, t), plain.velocity(x_t, t), rtol=1e-8, atol=0)
    torch.testing.assert_close(scaled.network.fed[0][1], 1000 * plain.network.fed[0][1])


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
def test_the_same_x_at_the_same_t_would_be_wrong(prediction_type: str) -> None:
    # The reading of the paper that skips matching: the oracle must tell it from the exact one.
    case = case_named("cosine")
    t = torch.full((256,), 0.25, dtype=torch.float64)
    x_t = SHARD.states(t, seed=5, shape=SHAPE)
    output = OracleNetwork(SHARD, case.alpha_sigma, prediction_type)(x_t, t)
    unmatched = VelocityField(lambda y, u: output, LINEAR.schedule, prediction_type)
    assert relative_error(unmatched.velocity(x_t, t), SHARD.velocity(x_t, t)) > 0.1


@pytest.mark.parametrize(
    "case", [c for c in DISCRETE if c.name.endswith("ztsnr")], ids=lambda case: case.name
)
def test_epsilon_with_zero_terminal_snr_ends_at_the_last_index_with_signal(case: Case) -> None:
    end = case.schedule.end
    epsilon, v = (oracle_field(SHARD, case, kind).range for kind in ("epsilon", "v_prediction"))
    assert epsilon[1] == pytest.approx(case.common_time(end - 1), rel=1e-12)
    assert epsilon[1] < 1.0 == v[1]
    assert epsilon[0] == v[0] == pytest.approx(case.common_time(0.0), rel=1e-10)


@each_legal
def test_range_is_the_schedule_s_but_for_a_margin_at_singularities(case: Case, prediction_type: str) -> None:
    low, high = oracle_field(SHARD, case, prediction_type).range
    assert 0 <= low < high <= 1
    expected_low, expected_high = (case.common_time(time) for time in (0.0, case.schedule.end))
    assert low == pytest.approx(expected_low, abs=1.1e-6)
    if not (prediction_type == "epsilon" and case.name.endswith("ztsnr")):
        assert high == pytest.approx(expected_high, abs=1.1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_flow_prediction_on_the_linear_path_is_the_network_s_output_bit_for_bit(dtype: torch.dtype) -> None:
    """And the state and the times are what it is fed."""
    fed: list[torch.Tensor] = []
    noise = torch.Generator().manual_seed(0)
    t = torch.cat([torch.tensor([0.0, 1.0]).double(), torch.rand(998, generator=noise).double() ** 3])
    x_t, output = torch.randn(2, len(t), 3, 2, 2, generator=noise, dtype=dtype)
    field = VelocityField(lambda *given: fed.extend(given) or output, LINEAR.schedule, "flow_prediction")
    assert torch.equal(field.velocity(1e6 * x_t, t), output)
    assert torch.equal(fed[0], 1e6 * x_t)
    assert torch.equal(fed[1], t.to(dtype))


@each_legal
def test_each_sample_has_its_own_time_when_batch_equals_width(case: Case, prediction_type: str) -> None:
    shard = GaussianMixture.random(seed=1, modes=2, dim=16)
    field = oracle_field(shard, case, prediction_type)
    t = torch.tensor([0.0, 0.2, 0.7, 1.0], dtype=torch.float64)
    x_t = shard.states(t, seed=7, shape=(1, 4, 4))
    together = field.velocity(x_t, t)
    alone = torch.cat([field.velocity(x_t[i : i + 1], t[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)
