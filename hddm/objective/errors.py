"""Errors of a velocity on held-out data, by noise level: what training minimises.

With data x_0 and noise eps, which are the same for every model,

    e(t) = || v(x_t, t) - (eps - x_0) ||² / D,    x_t = (1 - t) x_0 + t eps.

Its mean over data and noise is least for the exact velocity, at every t, so it is a proper score. It needs no
features.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hddm.utils.streams import Use, generator

TIMES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Noise levels of errors."""

Velocity = Callable[[Tensor, Tensor], Tensor]


def noise_of(
    numbers: Sequence[int], shape: Sequence[int], seed: int, use: Use, part: int = 0
) -> Tensor:
    """Noise ``(n, *shape)`` in float64; that of image i depends on (seed, i) alone."""
    rows = []
    for number in numbers:
        one = generator(seed, use, number, part)
        rows.append(torch.randn(tuple(shape), generator=one, dtype=torch.float64))
    return torch.stack(rows)


@torch.no_grad()
def velocity_errors(
    velocity: Velocity, x_0: Tensor, numbers: Sequence[int], time: float, seed: int, draws: int = 1
) -> Tensor:
    """Mean squared error (n,) of a velocity at one time, in float64, on the CPU.

    Args:
        velocity: of states (n, …) at times (n,), in float64 on the CPU.
        x_0: data (n, …).
        numbers: of the images (n,), which decide their noise.
        time: in (0, 1].
        seed: of the noise.
        draws: of noise per image, over which the error is averaged.
    """
    total = torch.zeros(len(x_0), dtype=torch.float64)
    for draw in range(draws):
        eps = noise_of(numbers, x_0.shape[1:], seed, Use.OBJECTIVE, draw).to(x_0)
        x_t = (1 - time) * x_0 + time * eps
        v = velocity(x_t, torch.full((len(x_0),), time, dtype=torch.float64))
        total += (v.cpu() - (eps - x_0)).double().square().flatten(1).mean(1)
    return total / draws
