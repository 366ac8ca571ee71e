r"""Noise schedules: (alpha, sigma) as functions of native time, and the inverse of the log-SNR.

    x_t = alpha_t x_0 + sigma_t eps;  x_0 is data, eps is unit noise;  log_snr = 2 log(alpha/sigma)

Time runs from data to noise. Every schedule has its own *native time*: t in [0, 1] for the continuous
ones, the timestep index 0 … T-1, fractions allowed, for a DDPM schedule. The *common path* that all
experts are compared on is `LinearSchedule`: alpha = 1 - t, sigma = t.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hddm.errors import HddmError
from hddm.tensors import to_float64


class Schedule(ABC):
    """A noise schedule. Values are computed in float64 and returned in the dtype of the argument."""

    end: float
    """Native time of the most noise; the least is at 0."""

    def alpha(self, time: Tensor) -> Tensor:
        """Signal scale at native ``time``, any shape; integer times give float32.

        Raises:
            HddmError: for a time outside [0, ``end``].
        """
        return self._evaluate(time, lambda exact: self.alpha_sigma(exact)[0])

    def sigma(self, time: Tensor) -> Tensor:
        """Noise scale at native ``time``; as `alpha`."""
        return self._evaluate(time, lambda exact: self.alpha_sigma(exact)[1])

    def log_snr(self, time: Tensor) -> Tensor:
        """2 log(alpha/sigma) at native ``time``: +inf where sigma = 0, -inf where alpha = 0."""
        return self._evaluate(time, self._log_snr)

    def time(self, log_snr: Tensor) -> Tensor:
        """Native time of a log-SNR, continuous for every schedule.

        Beyond the schedule's own log-SNRs, ±inf included, it is the end point on that side.
        """
        return self._evaluate(log_snr, self._time, is_time=False)

    def match(self, t: Tensor) -> Tensor:
        """Native time, in float64, with the log-SNR of the common path at ``t`` in [0, 1]."""
        exact = to_float64(t)
        return self._time(2 * (torch.log1p(-exact) - exact.log()))

    @property
    def range(self) -> tuple[float, float]:
        """(t_min, t_max) on the common path: the noise levels that the schedule covers."""
        return self.common_time(0.0), self.common_time(self.end)

    def common_time(self, time: float) -> float:
        """Time t on the common path with the log-SNR of native ``time``: t/(1-t) = exp(-log_snr/2)."""
        log_snr = self._log_snr(torch.tensor(time, dtype=torch.float64))
        return torch.sigmoid(-log_snr / 2).item()

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Plain values from which `from_config` builds the schedule again."""

    @abstractmethod
    def alpha_sigma(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """(alpha, sigma) of float64 native times, without a check of their range."""

    def derivatives(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """(d alpha/d time, d sigma/d time) of float64 native times; continuous schedules only."""
        raise HddmError(
            f"{type(self).__name__} is defined at discrete steps and has no time derivative: "
            "flow_prediction needs LinearSchedule or CosineSchedule"
        )

    def _log_snr(self, time: Tensor) -> Tensor:
        alpha, sigma = self.alpha_sigma(time)
        return 2 * (alpha.log() - sigma.log())

    @abstractmethod
    def _time(self, log_snr: Tensor) -> Tensor: ...

    def _evaluate(
        self, argument: Tensor, function: Callable[[Tensor], Tensor], is_time: bool = True
    ) -> Tensor:
        argument = torch.as_tensor(argument)
        dtype = argument.dtype if argument.is_floating_point() else torch.float32
        exact = to_float64(argument)
        if is_time and not ((exact >= 0) & (exact <= self.end)).all():
            raise HddmError(
                f"native times of {type(self).__name__} lie in [0, {self.end:g}], "
                f"not in [{exact.min().item():g}, {exact.max().item():g}]"
            )
        return function(exact).to(argument.device, dtype)
