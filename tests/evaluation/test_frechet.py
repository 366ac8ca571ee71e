"""The Fréchet distance: against closed forms, other implementations and fresh samples."""

import re
import warnings

import numpy as np
import pytest
import scipy.linalg
from cleanfid import fid
from numpy.typing import NDArray

from hddm.evaluation.distances import Gaussian, frechet_distance, measure
from tests.artefacts import refusal

Array = NDArray[np.float64]


def _features(seed: int, num: int, dim: int, scale: float = 1.0, shift: float = 0.0) -> Array:
    """Correlated features around an offset."""
    draws = np.random.default_rng(seed)
    mixing = np.random.default_rng(99).normal(size=(dim, dim)) / dim**0.5 + np.eye(dim)
    return scale * draws.normal(size=(num, dim)) @ mixing + shift


def _gaussian(seed: int, dim: int) -> Gaussian:
    draws = np.random.default_rng(seed)
    factor = draws.normal(size=(dim, dim)) / dim**0.5
    return Gaussian(draws.normal(size=dim), factor @ factor.T + 0.01 * np.eye(dim))


PAIRS = [
    pytest.param(_gaussian(1, 3), _gaussian(2, 3), id="3"),
    pytest.param(_gaussian(1, 64), _gaussian(2, 64), id="64"),
    pytest.param(
        Gaussian.of(_features(1, 500, 16)), Gaussian.of(_features(2, 400, 16, 1.3, 0.5)), id="samples"
    ),
]


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_it_agrees_with_the_matrix_square_root(a: Gaussian, b: Gaussian) -> None:
    root = scipy.linalg.sqrtm(a.covariance @ b.covariance)
    expected = np.sum((a.mean - b.mean) ** 2) + np.trace(a.covariance + b.covariance - 2 * root.real)
    assert frechet_distance(a, b) == pytest.approx(expected, abs=1e-3)


DEFICIENT = [
    pytest.param(
        Gaussian.of(_features(1, num, 64)),
        Gaussian.of(_features(2, other, 64, 1.5, 0.2)),
        id=f"{num}-{other}",
    )
    for num, other in ((20, 30), (20, 1000), (40, 40))
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("a", "b"), [*PAIRS, *DEFICIENT])
def test_it_agrees_with_clean_fid(a: Gaussian, b: Gaussian) -> None:
    try:
        expected = fid.frechet_distance(a.mean, a.covariance, b.mean, b.covariance)
    except TypeError:
        pytest.skip("this clean-fid does not run on this scipy")
    assert frechet_distance(a, b) == pytest.approx(expected, abs=1e-3)


def test_it_is_the_closed_form_of_gaussians_with_common_axes() -> None:
    """||m_a - m_b||² + sum of (s_a - s_b)² over the axes, in any rotation."""
    rotation, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(5, 5)))
    first, second = np.array([1.0, 2.0, 0.5, 0.0, 3.0]), np.array([2.0, 2.0, 0.1, 0.7, 0.0])
    a = Gaussian(np.arange(5.0), rotation @ np.diag(first**2) @ rotation.T)
    b = Gaussian(np.ones(5), rotation @ np.diag(second**2) @ rotation.T)
    expected = np.sum((np.arange(5.0) - 1) ** 2) + np.sum((first - second) ** 2)
    assert frechet_distance(a, b) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_it_is_symmetric_and_zero_on_itself(a: Gaussian, b: Gaussian) -> None:
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), abs=1e-6)
    assert frechet_distance(a, b) > 0.1
    assert 0 <= frechet_distance(a, a) < 1e-6
    # One feature is enough.
    a, b = Gaussian.of(np.array([[0.0], [2.0]])), Gaussian.of(np.array([[5.0], [5.0]]))
    assert frechet_distance(a, b) == pytest.approx(16 + 2)


@pytest.mark.parametrize(("num", "other"), [(20, 30), (20, 1000), (2, 2)])
def test_fewer_samples_than_features_give_the_true_real_distance(num: int, other: int) -> None:
    """With C_a = A A^T and C_b = B B^T, tr (C_a^½ C_b C_a^½)^½ is the sum of singular values of A^T B."""
    x, y = _features(1, num, 64), _features(2, other, 64, 1.5, 0.2)
    a, b = ((rows - rows.mean(0)).T / (len(rows) - 1) ** 0.5 for rows in (x, y))
    cross = np.linalg.svd(a.T @ b, compute_uv=False).sum()
    expected = np.sum((x.mean(0) - y.mean(0)) ** 2) + np.sum(a**2) + np.sum(b**2) - 2 * cross
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distance = frechet_distance(Gaussian.of(x), Gaussian.of(y))
        assert frechet_distance(Gaussian.of(x), Gaussian.of(x)) >= 0
    assert distance == pytest.approx(expected, abs=1e-3)


def test_moments_are_those_of_numpy() -> None:
    features = _features(3, 50, 6).astype(np.float32)
    gaussian = Gaussian.of(features)
    centred = features.astype(np.float64) - features.mean(0, dtype=np.float64)
    np.testing.assert_allclose(gaussian.covariance, centred.T @ centred / 49, atol=1e-12)
    assert gaussian.mean.dtype == np.float64


@pytest.mark.parametrize("features", [np.zeros((1, 4)), np.zeros(4), np.array([[0.0], [np.nan]])])
def test_features_without_moments_are_refused(features: Array) -> None:
    assert "features" in refusal(Gaussian.of, features)


def test_the_half_width_is_how_far_other_samples_would_move_the_distance() -> None:
    reference = _features(0, 4000, 4)
    target = Gaussian.of(reference)
    measured = measure(_features(1, 400, 4, shift=0.4), reference, resamples=300)
    others = [
        frechet_distance(Gaussian.of(_features(seed, 400, 4, shift=0.4)), target) for seed in range(2, 302)
    ]
    assert measured.half_width == pytest.approx(1.96 * np.std(others), rel=0.3)
    assert abs(measured.value - np.mean(others)) < 2 * measured.half_width
    assert not measured.few_images


@pytest.mark.parametrize(("num", "other"), [(8, 100), (100, 8), (3, 3)])
def test_too_few_images_are_refused_or_marked(num: int, other: int) -> None:
    a, b = _features(0, num, 8), _features(1, other, 8)
    told = refusal(measure, a, b, resamples=2)
    assert re.search(f"8 features needs more images.*{num} and {other}.*allow_few=True", told)
    measured = measure(a, b, resamples=2, allow_few=True)
    assert measured.few_images
    assert measured.value >= 0
    assert not measure(_features(0, 9, 8), _features(1, 9, 8), resamples=2).few_images
