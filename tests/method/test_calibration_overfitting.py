"""A calibration fitted on few images must not spoil a network that needs none."""

import pytest
import torch
from torch import Tensor

from hddm.calibration import MAX_DIRECTIONS, Calibration, calibrate

FRESH = 1000


def _gaussian(dim: int) -> tuple[Tensor, tuple[int, ...]]:
    return torch.logspace(1, -2, dim), (1, 8, dim // 8)


def _images(num: int, dim: int, seed: int) -> Tensor:
    variances, shape = _gaussian(dim)
    noise = torch.Generator().manual_seed(seed)
    return (torch.randn(num, dim, generator=noise) * variances.sqrt()).view(num, *shape)


def _exact(x_t: Tensor, t: Tensor) -> Tensor:
    """Velocity of centred Gaussian data with independent pixels."""
    variances, _ = _gaussian(x_t[0].numel())
    gain = (t[:, None] - (1 - t[:, None]) * variances) / ((1 - t[:, None]) ** 2 * variances + t[:, None] ** 2)
    return (gain * x_t.flatten(1)).view_as(x_t)


def _relative_error(calibration: Calibration, dim: int, t: float) -> float:
    x_0, times = _images(FRESH, dim, seed=1), torch.full((FRESH,), t)
    eps = torch.randn(x_0.shape, generator=torch.Generator().manual_seed(2))
    x_t = (1 - t) * x_0 + t * eps
    exact = _exact(x_t, times)
    error = calibration.apply(exact, x_t, times) - exact
    return (error.square().mean() / exact.square().mean()).item()


# More images than pixels, fewer, and more pixels than directions are kept.
@pytest.mark.parametrize(("dim", "num"), [(64, 360), (256, 512), (256, 128), (2 * MAX_DIRECTIONS, 600)])
def test_an_exact_network_is_left_alone_on_images_it_was_not_fitted_on(dim: int, num: int) -> None:
    calibration = calibrate(_exact, _images(num, dim, seed=0))
    # At t = 1 the mean of the images is all that counts, and its own sampling error is variance/num.
    mean_error = _gaussian(dim)[0].mean().item() / num
    for t in (0.55, 0.6, 0.8, 0.95, 1.0):
        assert _relative_error(calibration, dim, t) < 0.004 + 1.5 * mean_error
