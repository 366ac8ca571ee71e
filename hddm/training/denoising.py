r"""How well an expert denoises images: its squared error by noise level, beside what needs no training.

At time t of the common path, x_t = (1 - t) x_0 + t eps, the error of a velocity v is

    E || v(x_t, t) - (eps - x_0) ||² / D,

whose least value, the posterior variance, no v comes below. Beside the expert stand v = 0 and the best v for
isotropic Gaussian data with the images' mean m and variance c,

    v_gauss = g (x_t - (1 - t) m) - m,    g = (t - (1 - t) c) / ((1 - t)² c + t²).

m is the mean of the other images for each image, so that few images do not flatter it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hddm.calibration import START
from hddm.errors import HddmError
from hddm.tensors import generator
from hddm.velocity import VelocityField

TIMES = tuple(k / 10 for k in range(1, 10))
LATE_TIMES = (0.95, 0.99, 1.0)
"""Where a calibration has the say. The Gaussian is next to exact there, so nothing tells experts apart."""
# Beside the streams (seed, i) and (seed, i, 1) of sampling, 2 of training and 3 of native samples' classes.
_STREAM = 4


@dataclass(frozen=True)
class Level:
    """Mean squared errors at one time, a number a sample's element."""

    t: float
    expert: float
    gaussian: float
    zero: float


@dataclass(frozen=True)
class Denoising:
    """Errors by noise level; ``margin`` is by how much the Gaussian's is larger, and ``deviation`` its own.

    ``low`` and ``low_deviation`` are the same up to `START`, where the network stands alone: later on a
    calibration helps it. ``late`` are errors at `LATE_TIMES`, which count in none of these.
    """

    levels: tuple[Level, ...]
    margin: float
    deviation: float
    low: float
    low_deviation: float
    late: tuple[Level, ...]

    @property
    def expert(self) -> float:
        """Mean error over ``levels``."""
        return sum(level.expert for level in self.levels) / len(self.levels)

    @property
    def gaussian(self) -> float:
        """Mean error of the Gaussian."""
        return sum(level.gaussian for level in self.levels) / len(self.levels)


@torch.no_grad()
def denoising(
    field: VelocityField,
    images: Tensor,
    conditions: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    batch_size: int = 64,
) -> Denoising:
    """Errors of ``field`` on images, at `TIMES` and `LATE_TIMES`, with the same noise for all compared.

    Args:
        field: the expert.
        images: (N, C, H, W), float32, in the units that the expert works in.
        conditions: what comes with them, each (N, …).
        seed: of the noise.
        batch_size: states a call.

    Raises:
        HddmError: for fewer than 2 images.
    """
    number = len(images)
    if number < 2:
        raise HddmError(f"denoising is judged on at least 2 images, not {number}")
    noise = generator(seed, _STREAM)

    def errors_at(times: tuple[float, ...]) -> Tensor:
        return _errors(field, images, conditions or {}, times, noise, batch_size)

    errors, late = errors_at(TIMES), errors_at(LATE_TIMES)
    gains = errors[:, 1] - errors[:, 0]
    early = torch.tensor([time < START for time in TIMES])
    margin, deviation = _mean(gains)
    low, low_deviation = _mean(gains[early])
    return Denoising(_levels(TIMES, errors), margin, deviation, low, low_deviation, _levels(LATE_TIMES, late))


def _errors(
    field: VelocityField,
    images: Tensor,
    conditions: Mapping[str, Tensor],
    times: Sequence[float],
    noise: torch.Generator,
    batch_size: int,
) -> Tensor:
    """Errors (times, 3, images) of the expert, the Gaussian and v = 0."""
    number = len(images)
    total = images.double().sum(0)
    variance = (images.double() - total / number).square().sum().item() / ((number - 1) * images[0].numel())
    errors = torch.zeros(len(times), 3, number, dtype=torch.float64)
    velocity: Callable[..., Tensor] = field.velocity
    for start in range(0, number, batch_size):
        rows = slice(start, start + batch_size)
        x_0 = images[rows]
        others = ((total - x_0.double()) / (number - 1)).float()
        given = {name: value[rows].to(field.device) for name, value in conditions.items()}
        for place, time in enumerate(times):
            eps = torch.randn(x_0.shape, generator=noise)
            x_t, target = (1 - time) * x_0 + time * eps, eps - x_0
            t = torch.full((len(x_0),), time, dtype=torch.float64, device=field.device)
            gain = (time - (1 - time) * variance) / ((1 - time) ** 2 * variance + time**2)
            found = (
                velocity(x_t.to(field.device), t, **given).cpu(),
                gain * (x_t - (1 - time) * others) - others,
                torch.zeros_like(target),
            )
            for what, v in enumerate(found):
                errors[place, what, rows] = (v - target).double().square().flatten(1).mean(1)
    return errors


def _levels(times: Sequence[float], errors: Tensor) -> tuple[Level, ...]:
    return tuple(Level(time, *errors[k].mean(1).tolist()) for k, time in enumerate(times))


def _mean(gains: Tensor) -> tuple[float, float]:
    """Mean of gains (times, images), and its standard deviation over images."""
    by_image = gains.mean(0)
    return by_image.mean().item(), (by_image.std() / len(by_image) ** 0.5).item()
