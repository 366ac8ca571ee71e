"""Noise levels of a model of ComfyUI's, and the same levels on the common path.

`model_sampling` adds noise as a(sigma) latent + s(sigma) noise. It is asked for a and s, and nothing is
concluded from the names of its classes. Two forms of it exist:

    a = 1,         s = sigma    models of noise, v, EDM or x_0:    t = sigma/(1 + sigma)
    a = 1 - sigma, s = sigma    flow matching:                     t = sigma
"""

from typing import Any

import torch
from torch import Tensor

from hddm.conversion import Matched, exact_range
from hddm.predictions import PredictionType
from hddm.schedules import LinearSchedule
from hddm.units import Units
from hddm.utils.errors import HddmError

_SAMPLE = PredictionType.SAMPLE.prediction
_COMMON = LinearSchedule()
_UNITS = Units()


class Levels:
    """The noise levels of ``model_sampling``.

    Raises:
        HddmError: if it adds noise in another form; ``name`` says which model that is.
    """

    def __init__(self, model_sampling: Any, name: str) -> None:
        low, high = float(model_sampling.sigma_min), float(model_sampling.sigma_max)
        middle = torch.tensor([(low * high) ** 0.5])
        one, zero = torch.ones(1, 1), torch.zeros(1, 1)
        signal = model_sampling.noise_scaling(middle, zero.clone(), one.clone()).item()
        noise = model_sampling.noise_scaling(middle, one.clone(), zero.clone()).item()
        sigma = middle.item()
        is_flow = abs(signal - (1 - sigma)) < 1e-5
        if abs(noise - sigma) > 1e-5 * sigma or not (is_flow or abs(signal - 1) < 1e-5):
            raise HddmError(
                f"{name}: at sigma {sigma:.4g} it has {signal:.4g} of the picture and {noise:.4g} of noise, "
                "which is neither 1 and sigma, nor 1 - sigma and sigma; it cannot be mixed"
            )
        self.is_flow = is_flow
        least, most = exact_range(_COMMON, _SAMPLE)
        own = self.times(torch.tensor([low, high], dtype=torch.float64)).tolist()
        self.limits = max(own[0], least), min(own[1], most)

    def times(self, sigma: Tensor) -> Tensor:
        """T of the common path at ``sigma``, of any shape, in float64 on the CPU."""
        exact = sigma.double().cpu()
        return exact if self.is_flow else exact / (1 + exact)

    def sigmas(self, t: Tensor) -> Tensor:
        """The inverse of `times`: sigma in float64, infinite at t = 1 where a = 1."""
        return t if self.is_flow else t / (1 - t)

    def common(self, x: Tensor, t: Tensor) -> Tensor:
        """States x (batch, …) of this model at t (batch,) on the common path, in float32 at least."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return wide if self.is_flow else wide * _beside(1 - t, wide)

    def matched(self, x: Tensor, t: Tensor) -> "MatchedModel":
        """States x (batch, …) of the common path at t (batch,), as this model gets them."""
        return MatchedModel(self, Matched(_COMMON, _SAMPLE, _UNITS, self.limits, x, t))


class MatchedModel:
    """States as a model gets them: ``x`` at ``sigma`` (batch,)."""

    def __init__(self, levels: Levels, matched: Matched) -> None:
        self._matched, t = matched, matched.native
        self.x = matched.y if levels.is_flow else matched.y / _beside(1 - t, matched.y)
        self.sigma = levels.sigmas(t).to(matched.y)

    def velocity(self, denoised: Tensor) -> Tensor:
        """Velocity (batch, …) on the common path by the model's ``denoised`` picture."""
        return self._matched.velocity(denoised)


def denoised_of(x: Tensor, t: Tensor, velocity: Tensor) -> Tensor:
    """The denoised picture x - t v of states x (batch, …) of the common path at t (batch,)."""
    return x - _beside(t, x) * velocity


def _beside(values: Tensor, x: Tensor) -> Tensor:
    return values.to(x).reshape(-1, *[1] * (x.ndim - 1))
