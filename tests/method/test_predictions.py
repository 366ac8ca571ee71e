"""Every type of prediction against its definition: conversion, singular ends, weights and gain."""

import copy
import pickle

import pytest
import torch
from torch import Tensor

from hddm.predictions import BOUND, PathPoint, PredictionType
from tests.artefacts import refusal
from tests.cases import cosine_path, linear_path
from tests.oracles import AlphaSigma, predicted, slopes, solved

each_type = pytest.mark.parametrize("kind", list(PredictionType))


def _neither_vp_nor_linear(time: Tensor) -> tuple[Tensor, Tensor]:
    return torch.exp(-3 * time**2), 0.1 + 2 * time


def _variance_exploding(time: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones_like(time) + 0 * time, 0.01 + 50 * time**2


PATHS = [linear_path, cosine_path, _neither_vp_nor_linear, _variance_exploding]
each_path = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__.strip("_"))


def _states(path: AlphaSigma, time: Tensor) -> tuple[Tensor, Tensor, PathPoint]:
    """x_0, eps and the state (9, 5) that they make at each time (9,)."""
    noise = torch.Generator().manual_seed(0)
    x_0, eps = torch.randn(2, len(time), 5, generator=noise, dtype=torch.float64)
    (a, s), (d_a, d_s) = path(time), slopes(path, time)
    a, s, d_a, d_s = (value[:, None] for value in (a, s, d_a, d_s))
    y = a * x_0 + s * eps
    at = PathPoint(a, s, lambda: (d_a, d_s), x=y / (a + s), y=y, t=s / (a + s))
    return x_0, eps, at


def _perfect(kind: str, x_0: Tensor, eps: Tensor, at: PathPoint) -> Tensor:
    return predicted(kind, x_0, eps, at.alpha, at.sigma, at.derivatives)


MIDDLE = torch.linspace(0.05, 0.95, 9, dtype=torch.float64)


@each_path
@each_type
def test_data_noise_and_velocity_come_out_of_what_a_perfect_network_gives(
    path: AlphaSigma, kind: PredictionType
) -> None:
    prediction = kind.prediction
    x_0, eps, at = _states(path, MIDDLE)
    output = prediction.output(x_0, eps, at)
    close = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(output, _perfect(kind, x_0, eps, at), **close)
    found_x_0, found_eps = prediction.x_0_and_eps(output, at)
    torch.testing.assert_close(found_x_0, x_0, **close)
    torch.testing.assert_close(found_eps, eps, **close)
    torch.testing.assert_close(prediction.velocity(output, at), eps - x_0, **close)
    assert prediction.error(output, x_0, eps, at).abs().max() < 1e-5
    if not prediction.is_velocity:
        torch.testing.assert_close(solved(kind, output, at.y, at.alpha, at.sigma), (x_0, eps))


@each_type
def test_a_conversion_is_singular_where_its_type_says(kind: PredictionType) -> None:
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    x_0, eps, at = _states(linear_path, ends)
    estimates = kind.prediction.x_0_and_eps(_perfect(kind, x_0, eps, at), at)
    is_finite = torch.stack(estimates).isfinite().all(dim=2).all(dim=0).tolist()
    prediction = kind.prediction
    assert is_finite == [not prediction.is_singular_at_data, not prediction.is_of_noise]


@each_path
@each_type
def test_weights_of_velocity_make_the_squared_error_that_of_the_velocity(
    path: AlphaSigma, kind: PredictionType
) -> None:
    """Between the bounds; what is a velocity itself is trained on the linear path alone."""
    prediction = kind.prediction
    if prediction.is_velocity and path is not linear_path:
        return
    x_0, eps, at = _states(path, MIDDLE)
    wrong = _perfect(kind, x_0, eps, at) + 0.3
    weights = prediction.velocity_weights(at.alpha[:, 0], at.sigma[:, 0])
    found = prediction.error(wrong, x_0, eps, at).square()[:, 0]
    expected = (prediction.velocity(wrong, at) - (eps - x_0)).square()[:, 0]
    is_between = (at.t[:, 0] > BOUND) & (at.t[:, 0] < 1 - BOUND)
    if weights is not None:
        found = found * weights
    torch.testing.assert_close(
        found[is_between], expected.float()[is_between], rtol=1e-4, atol=0, check_dtype=False
    )


@each_type
def test_a_gain_that_grows_without_bound_reaches_it_where_its_type_says(
    kind: PredictionType,
) -> None:
    """On the common path, where a unit of noise or data is a unit of the output."""
    low, high = kind.prediction.bounded_part(1.5)
    assert 0 <= low < high <= 1
    assert (high < 1) == kind.prediction.is_of_noise
    ends = torch.tensor([one for one in (low, high) if 0 < one < 1], dtype=torch.float64)
    x_0, eps, at = _states(linear_path, ends)
    perfect = _perfect(kind, x_0, eps, at)
    changed = perfect + 1e-3
    error = kind.prediction.error(changed, x_0, eps, at).double()
    gain = (kind.prediction.velocity(changed, at) - (eps - x_0)) / error
    torch.testing.assert_close(gain.abs(), torch.full_like(gain, 1.5), rtol=1e-2, atol=0)


@each_type
def test_a_type_is_found_by_its_name_alone(kind: PredictionType) -> None:
    assert PredictionType(kind.value) is PredictionType.parse(kind.value) is kind
    assert pickle.loads(pickle.dumps(kind)) is copy.deepcopy(kind) is kind
    assert kind == f"{kind}" == kind.value
    assert kind.prediction.words
    for other in PredictionType:
        assert not set(kind.prediction.aliases) & {other.value}


def test_an_unknown_type_is_refused_with_those_that_exist() -> None:
    told = refusal(PredictionType.parse, "epsilom")
    assert told.startswith("unknown prediction type 'epsilom': choose one of epsilon, sample")
    assert told.endswith("did you mean 'epsilon'?")
