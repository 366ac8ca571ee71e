r"""The exact conversion: one state as an expert's network sees it, and the velocity that its output implies.

For an expert with schedule (a, s) = (alpha, sigma) in its own time, at a state x and common time t:

1. match:   the native time u with s(u)/a(u) = t/(1 - t), inverting the schedule continuously;
2. rescale: the network gets y = (a + s) x, which is a x_0 + s eps, at u;
3. convert: its output becomes eps - x_0 (`hddm.predictions.Prediction.velocity`).

An expert may have data z = d x_0 + b of its own (`hddm.units`). Then s(u)/(a(u) d) = t/(1 - t), the network
gets y = (a d + s) x + a b, which is a z + s eps, and its output gives z and eps, of which x_0 = (z - b)/d.
Outside the schedule's range a b is added to the rescaled state in the same way.

With an exact denoiser the result is exact for every t in [t_min, t_max], the range of the expert's schedule.

**Outside the schedule's range** one rule holds at both ends. The network is evaluated at the nearer end. The
state is rescaled so that its dominant part has the size that the network expects there: y = s(u_max) x/t
above t_max (the noise keeps its level), y = a(u_min) x/(1 - t) below t_min (the signal does). Of the two
estimates, the one that the state no longer determines fades with its share in the state:

    t > t_max:  v = (x - r x_0)/t,          r = [(1-t)/t] / [(1-t_max)/t_max]
    t < t_min:  v = (r eps - x)/(1 - t),    r = [t/(1-t)] / [t_min/(1-t_min)]

This is how the posterior means of a smooth, centred density behave, to first order. It is continuous at the
ends, v = x at t = 1 and v = -x at t = 0. A prediction that is singular *inside* its schedule's range (epsilon
where alpha = 0, sample where sigma = 0) has its range end there: at the last alpha > 0 of a discrete
schedule, `SINGULAR_MARGIN` before the end of a continuous one.

Diffusers is not imported, so that other programs can convert with torch alone.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hddm.predictions import PathPoint, Prediction
from hddm.schedules import DiscreteSchedule, Schedule
from hddm.units import Units
from hddm.utils.tensors import append_dims, sent

SINGULAR_MARGIN = 1e-6


def derivatives_at(
    schedule: Schedule, native: Tensor, wide: Callable[[Tensor], Tensor]
) -> Callable[[], tuple[Tensor, Tensor]]:
    """`hddm.predictions.Level.derivatives` at native times (batch,), each made ``wide`` as states are."""

    def derivatives() -> tuple[Tensor, Tensor]:
        d_alpha, d_sigma = schedule.derivatives(native)
        return wide(d_alpha), wide(d_sigma)

    return derivatives


def exact_range(
    schedule: Schedule, prediction: Prediction, data_scale: float = 1.0
) -> tuple[float, float]:
    """(t_min, t_max): the times at which a network of this schedule and prediction can be asked."""
    low, high = schedule.range_of(data_scale)
    if prediction.is_of_noise and high == 1.0:
        # With zero terminal SNR the last index holds no signal.
        if isinstance(schedule, DiscreteSchedule):
            high = schedule.common_time(schedule.end - 1, data_scale)
        else:
            high = 1.0 - SINGULAR_MARGIN
    if prediction.is_singular_at_data and low == 0.0:
        low = SINGULAR_MARGIN
    return low, high


class Matched:
    """States on the common path, matched to a network's own: ``y`` at ``native`` is what the network gets.

    Args:
        schedule: the network's.
        prediction: what it predicts.
        units: of its own data; those of the path, where a schedule has its own (`Schedule.data_scale`).
        limits: (t_min, t_max), as `exact_range` or narrower.
        x: states (batch, …), in float32 or float64.
        t: their times (batch,), in float64.
    """

    def __init__(
        self,
        schedule: Schedule,
        prediction: Prediction,
        units: Units,
        limits: tuple[float, float],
        x: Tensor,
        t: Tensor,
    ) -> None:
        self.schedule, self.prediction, self.units = schedule, prediction, units
        self.x, self.t = x, t
        low, high = limits
        self.inside = inside = t.clamp(low, high)
        self.native = schedule.match(inside, units.scale)
        self._alpha, self._sigma = schedule.alpha_sigma(self.native)
        ones = torch.ones_like(t)
        keep_noise = torch.where(t > inside, inside / t, ones)
        keep_signal = torch.where(t < inside, (1 - inside) / (1 - t), ones)
        scale = (self._alpha * units.scale + self._sigma) * keep_noise * keep_signal
        y = self._wide(scale) * x
        if not units.is_common:
            y = y + self._wide(self._alpha) * units.shift_like(x)
        self.y = y

    def _wide(self, values: Tensor) -> Tensor:
        return sent(append_dims(values, self.x.ndim), self.x.device, self.x.dtype)

    def velocity(self, output: Tensor) -> Tensor:
        """Velocity (batch, …) on the common path that the network's ``output`` for ``y`` implies."""
        wide, units, x, t, inside = self._wide, self.units, self.x, self.t, self.inside
        alpha, sigma = wide(self._alpha), wide(self._sigma)
        derivatives = derivatives_at(self.schedule, self.native, wide)
        at = PathPoint(alpha, sigma, derivatives, x, self.y, wide(inside))
        is_inside = bool((t == inside).all())
        if units.is_common:
            v = self.prediction.velocity(output, at)
            if is_inside:
                return v
        x_0, eps = self.prediction.x_0_and_eps(output, at)
        if not units.is_common:
            x_0 = units.common(x_0)
            v = eps - x_0
        if is_inside:
            return v
        ones = torch.ones_like(t)
        is_above, is_below = t > inside, t < inside
        # Masked before they meet the state: an inf in the row not taken would make its gradient nan.
        fade_signal = torch.where(is_above, (1 - t) / t * inside / (1 - inside), 0)
        fade_noise = torch.where(is_below, t / (1 - t) * (1 - inside) / inside, 0)
        above = (x - wide(fade_signal) * x_0) / wide(torch.where(is_above, t, ones))
        below = (wide(fade_noise) * eps - x) / wide(torch.where(is_below, 1 - t, ones))
        v = torch.where(wide(is_above).bool(), above, v)
        return torch.where(wide(is_below).bool(), below, v)
