"""Other ways to turn an epsilon expert into samples, to show what the exact conversion is worth."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hddm.ensemble import Ensemble
from hddm.noise import Seeded
from hddm.running import pick_experts
from hddm.training.fitting import calibrate
from hddm.utils.tensors import append_dims
from hddm.velocity import VelocityField

TREATMENTS = ("raw", "x_0 clipped", "blend")
EXACT, SAME_TIME = "exact", "same x, same t"


class SameTimeField(VelocityField):
    """The naive conversion of an epsilon expert: the same x at the same number t.

    v = (eps - x)/(1 - t) with eps = network(x, t): neither is the noise level matched nor the state
    rescaled. v = x at t = 1, as in the exact field.
    """

    def raw_velocity(self, x: Tensor, t: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        eps = self.ask(x, t, conditions)
        wide = append_dims(t, x.ndim).to(x)
        return torch.where(wide == 1, x, (eps - x) / (1 - wide))


class _Clipped:
    """Bounds the estimate x_0 = x - t v to the range of the data, [-1, 1]."""

    def raw_velocity(self, x: Tensor, t: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        v: Tensor = super().raw_velocity(x, t, conditions)  # type: ignore[misc]
        wide = append_dims(t, x.ndim).to(x)
        return torch.where(wide == 0, v, (x - (x - wide * v).clamp(-1, 1)) / wide)


class _ClippedField(_Clipped, VelocityField):
    pass


class _ClippedSameTimeField(_Clipped, SameTimeField):
    pass


def variant(
    field: VelocityField,
    exact: bool,
    treatment: str,
    images: Tensor,
    conditions: Mapping[str, Tensor] | None = None,
) -> VelocityField:
    """``field`` under another conversion.

    ``images`` (N, C, H, W), with the ``conditions`` (N, …) that ``field`` takes, fit the blend of an inexact
    one.
    """
    if exact and treatment == "blend":
        return field
    clipped = treatment == "x_0 clipped"
    if exact:
        kind: type[VelocityField] = _ClippedField if clipped else VelocityField
    else:
        kind = _ClippedSameTimeField if clipped else SameTimeField
    changed = kind(
        field.network,
        field.schedule,
        field.prediction_type,
        field.time_scale,
        conditions=field.conditions,
        null_conditions=field.null_conditions,
        sample_shape=field.sample_shape,
        classes=field.classes,
        shift=field.shift,
    )
    if treatment == "blend":
        given = {name: value.to(field.device) for name, value in (conditions or {}).items()}
        changed.calibration = calibrate(changed.velocity, images.to(field.device), given)
    return changed


@torch.no_grad()
def sample_ddim(
    ensemble: Ensemble,
    num: int,
    seed: int,
    steps: int,
    batch_size: int = 512,
    on_batch: Callable[[int], None] | None = None,
    first: int = 0,
) -> Tensor:
    """Samples ``first`` … (num, C, H, W) by DDIM on the experts' own schedule, one drawn expert a sample.

        x_0 = clip((y - s eps)/a, -1, 1);  y' = a' x_0 + s' eps

    x_0 is clipped, as diffusers' DDIM does for pixels by default. Times are even from 0.999 of native
    time, where a 1,000-step schedule ends, to 0. States are where the experts are, and the samples on the
    CPU. Source: arXiv:2010.02502, equation 12, eta = 0.
    """
    schedule, shape = ensemble.experts[0].schedule, ensemble.sample_shape
    assert shape is not None
    times = torch.linspace(0.999 * schedule.end, 0, steps + 1, dtype=torch.float64)
    alphas, sigmas = schedule.alpha_sigma(times)
    batches = []
    for start in range(first, first + num, batch_size):
        stop = min(start + batch_size, first + num)
        expert = pick_experts(ensemble.prior, Seeded(seed).draws(range(start, stop)))
        y = Seeded(seed).initial(range(start, stop), shape).to(ensemble.device)
        for i in range(steps):
            eps = torch.zeros_like(y)
            for index, field in enumerate(ensemble.experts):
                rows = (expert == index).nonzero()[:, 0]
                if len(rows):
                    eps[rows] = field.ask(y[rows], times[i].expand(len(rows)), {})
            x_0 = ((y - float(sigmas[i]) * eps) / float(alphas[i])).clamp(-1, 1)
            y = float(alphas[i + 1]) * x_0 + float(sigmas[i + 1]) * eps
        batches.append(y.cpu())
        if on_batch is not None:
            on_batch(stop - start)
    return torch.cat(batches)
