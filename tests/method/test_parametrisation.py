"""The blend that experts are trained on in: exact, bounded, and the expert itself at the start."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hddm.calibration import Moments
from hddm.training.continuation import KAPPA, bounded_gain
from hddm.utils.errors import HddmError
from hddm.velocity import PredictionType, VelocityField
from tests.cases import case_named
from tests.oracles import BoundedNetwork, GaussianMixture, OracleNetwork, rms_error

DIM, SHAPE = 16, (1, 4, 4)
GAUSSIAN = GaussianMixture.random(seed=0, modes=1, dim=DIM)
TIMES = [0.0, 0.1, 0.3, 0.5, 0.7, 0.75, 0.8, 0.9, 0.97, 0.99, 0.999, 1 - 1e-6, 1.0]


def _moments(gaussian: GaussianMixture) -> Moments:
    """The exact ones, all directions kept."""
    variances, basis = torch.linalg.eigh(gaussian.covariances[0])
    return Moments(gaussian.mean, basis, torch.cat([variances, variances[:1]]))


def _field(network: Any, case: str, kind: str, kappa: float | None = KAPPA) -> VelocityField:
    schedule = case_named(case).schedule
    field = VelocityField(network, schedule, kind, sample_shape=SHAPE)
    if kappa is not None:
        field.calibration = bounded_gain(field.prediction_type, field.range[1], _moments(GAUSSIAN), kappa)
    return field


def _states(t: float, num: int = 64) -> tuple[Tensor, Tensor]:
    times = torch.full((num,), t, dtype=torch.float64)
    return GAUSSIAN.states(times, seed=3, shape=SHAPE), times


@pytest.mark.parametrize("t", TIMES[1:])
@pytest.mark.parametrize("kind", ["epsilon", "sample"])
@pytest.mark.parametrize("kappa", [2.0, 8.0])
def test_the_velocity_is_the_hand_written_blend(kind: str, kappa: float, t: float) -> None:
    x, times = _states(t)
    network = BoundedNetwork()
    found = _field(network, "linear", kind, kappa).velocity(x, times)
    output = network.calls[-1][2]
    share = min(1.0, kappa * (1 - t if kind == "epsilon" else t))
    # As K · gain · (output - x), which no division by 0 spoils; the margin of the range is 1e-6.
    if kind == "epsilon":
        net = min(1 / max(1 - t, 1e-9), kappa) * (output - x) if t < 1 else 0 * x
    else:
        net = min(1 / t, kappa) * (x - output)
    expected = net + (1 - share) * GAUSSIAN.velocity(x, times)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["cosine", "linear", "sd-scaled-linear", "ddpm-linear-ztsnr"])
@pytest.mark.parametrize("kappa", [2.0, 16.0])
def test_the_function_is_kept_where_the_gain_is_below_its_bound(case: str, kappa: float) -> None:
    raw, blended = (_field(BoundedNetwork(), case, "epsilon", k) for k in (None, kappa))
    end = min(1 - 1 / kappa, raw.range[1])
    for t in torch.linspace(0, end, 9).tolist():
        x, times = _states(min(t, end))
        torch.testing.assert_close(blended.velocity(x, times), raw.velocity(x, times), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("case", ["cosine", "sd-scaled-linear", "ddpm-linear-ztsnr"])
@pytest.mark.parametrize("kappa", [2.0, 8.0])
def test_no_output_of_the_network_counts_more_than_the_bound(case: str, kind: str, kappa: float) -> None:
    output = torch.zeros(1, *SHAPE, dtype=torch.float64)

    def gain(t: float) -> float:
        """By automatic differentiation: the norm of dv/d output."""
        x, times = _states(t, 1)

        def velocity(value: Tensor) -> Tensor:
            return _field(lambda y, u: value, case, kind, kappa).velocity(x, times)

        jacobian = torch.autograd.functional.jacobian(velocity, output).view(DIM, DIM)
        return torch.linalg.matrix_norm(jacobian, 2).item()

    t_max = _field(None, case, kind, None).range[1]
    for t in [*TIMES, t_max]:
        assert gain(t) <= max(kappa, 2**0.5) * (1 + 1e-6)
        if kind == "epsilon" and 0.01 < t < t_max:
            assert gain(t) == pytest.approx(min(1 / (1 - t), kappa), rel=1e-4)


@pytest.mark.parametrize("kind", ["epsilon", "sample"])
@pytest.mark.parametrize("case", ["cosine", "linear"])
def test_an_exact_network_stays_exact_on_gaussian_data(case: str, kind: str) -> None:
    oracle = OracleNetwork(GAUSSIAN, case_named(case).alpha_sigma, kind)
    for t in TIMES:
        x, times = _states(t)
        assert rms_error(_field(oracle, case, kind).velocity(x, times), GAUSSIAN.velocity(x, times)) < 1e-6


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
def test_beyond_the_trained_range_the_gaussian_takes_over(kind: str) -> None:
    oracle = OracleNetwork(GAUSSIAN, case_named("sd-scaled-linear").alpha_sigma, kind)
    raw, blended = (_field(oracle, "sd-scaled-linear", kind, kappa) for kappa in (None, 16.0))
    for t in (0.94, 0.96, 0.99, 1.0):
        x, times = _states(t)
        truth = GAUSSIAN.velocity(x, times)
        assert rms_error(blended.velocity(x, times), truth) <= rms_error(raw.velocity(x, times), truth)
    assert rms_error(blended.velocity(x, times), truth) < 1e-6


def test_a_bounded_gain_needs_no_blend_and_a_bound_of_one_is_refused() -> None:
    for kind in (PredictionType.FLOW_PREDICTION, PredictionType.V_PREDICTION):
        assert bounded_gain(kind, 1.0, _moments(GAUSSIAN)) is None
    with pytest.raises(HddmError, match="kappa must be above 1, not 1"):
        bounded_gain(PredictionType.EPSILON, 1.0, _moments(GAUSSIAN), 1.0)
