"""Prediction types against their definitions, on paths of every kind."""

import math

import pytest
import torch
from torch import Tensor

from hddm.utils.errors import HddmError
from hddm.velocity import PathPoint, PredictionType, velocity, x_0_and_eps
from tests.cases import cosine_path, linear_path
from tests.oracles import AlphaSigma, slopes


def _neither_vp_nor_linear(time: Tensor) -> tuple[Tensor, Tensor]:
    return torch.exp(-3 * time**2), 0.1 + 2 * time


def _variance_exploding(time: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones_like(time) + 0 * time, 0.01 + 50 * time**2


PATHS = [linear_path, cosine_path, _neither_vp_nor_linear, _variance_exploding]
each_path = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__.strip("_"))
each_type = pytest.mark.parametrize("prediction_type", list(PredictionType))


def _known_state(
    path: AlphaSigma, prediction_type: PredictionType
) -> tuple[Tensor, Tensor, Tensor, PathPoint]:
    """x_0 and eps, the output that a perfect network would give for them, and the state."""
    noise = torch.Generator().manual_seed(0)
    x_0, eps = torch.randn(2, 9, 5, generator=noise, dtype=torch.float64)
    time = torch.linspace(0.05, 0.95, 9, dtype=torch.float64)
    (a, s), (d_a, d_s) = path(time), slopes(path, time)
    a, s, d_a, d_s = (value[:, None] for value in (a, s, d_a, d_s))
    output = {
        "epsilon": eps,
        "sample": x_0,
        "v_prediction": a * eps - s * x_0,
        "flow_prediction": d_a * x_0 + d_s * eps,
    }[prediction_type.value]
    y = a * x_0 + s * eps
    return x_0, eps, output, PathPoint(y / (a + s), y, s / (a + s), a, s, lambda: (d_a, d_s))


@each_path
@each_type
def test_data_noise_and_velocity_come_out_of_predictions(
    path: AlphaSigma, prediction_type: PredictionType
) -> None:
    x_0, eps, output, at = _known_state(path, prediction_type)
    found_x_0, found_eps = x_0_and_eps(prediction_type, output, at)
    torch.testing.assert_close(found_x_0, x_0, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found_eps, eps, rtol=1e-9, atol=1e-11)
    v = velocity(prediction_type, output, at)
    torch.testing.assert_close(v, eps - x_0, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("end", [0.0, 1.0], ids=["data end", "noise end"])
def test_v_prediction_is_singular_at_neither_end(end: float) -> None:
    x_0, eps = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1)).double()
    a, s = (torch.tensor(value, dtype=torch.float64) for value in (1 - end, end))
    at = PathPoint(a * x_0 + s * eps, a * x_0 + s * eps, s, a, s, lambda: (-a, a))
    output = a * eps - s * x_0
    assert torch.equal(velocity(PredictionType.V_PREDICTION, output, at), eps - x_0)


def test_an_error_in_the_noise_grows_by_one_over_one_minus_t() -> None:
    x_0, eps, output, at = _known_state(linear_path, PredictionType.EPSILON)
    error = velocity(PredictionType.EPSILON, output + 0.01, at) - (eps - x_0)
    torch.testing.assert_close(error, (0.01 / (1 - at.t)).expand_as(error))


def test_names_are_those_of_diffusers_and_others_are_refused_with_them() -> None:
    known = ["epsilon", "sample", "v_prediction", "flow_prediction"]
    assert [PredictionType.parse(name) for name in known] == list(PredictionType) == known
    for name in ("eps", "Epsilon", "velocity", ""):
        with pytest.raises(HddmError, match=", ".join(known)):
            PredictionType.parse(name)


def test_variance_preserving_v_is_the_derivative_by_angle() -> None:
    # Salimans & Ho define v so that on the cosine path dy/d(angle) = v; angle = pi/2 time.
    _, _, v, at = _known_state(cosine_path, PredictionType.V_PREDICTION)
    flow = math.pi / 2 * v
    torch.testing.assert_close(
        velocity(PredictionType.FLOW_PREDICTION, flow, at), velocity(PredictionType.V_PREDICTION, v, at)
    )
