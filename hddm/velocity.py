r"""Any expert as a velocity field on the common path: match, rescale, convert.

For an expert with schedule (a, s) in its own time, at a state x and common time t:

1. match:   the native time u with s(u)/a(u) = t/(1 - t), inverting the schedule continuously;
2. rescale: the network gets y = (a + s) x at u;
3. convert: its output becomes eps - x_0 (`hddm.predictions.velocity`).

With an exact denoiser the result is exact for every t in the expert's noise range [t_min, t_max].

**Outside the range** one rule holds at both ends. The network is asked at the nearer end. The state is
rescaled so that its dominant part has the size that the network expects there: y = s(u_max) x/t above
t_max (the noise keeps its level), y = a(u_min) x/(1 - t) below t_min (the signal does). Of the two
estimates, the one that the state no longer determines fades with its share in the state:

    t > t_max:  v = (x - r x_0)/t,          r = [(1-t)/t] / [(1-t_max)/t_max]
    t < t_min:  v = (r eps - x)/(1 - t),    r = [t/(1-t)] / [t_min/(1-t_min)]

This is how the posterior means of a smooth, centred density behave, to first order. It is continuous at
the ends, v = x at t = 1 and v = -x at t = 0. A form that is singular *inside* its schedule's range
(epsilon where alpha = 0, sample where sigma = 0) has its range end there: at the last alpha > 0 of a
discrete schedule, `SINGULAR_MARGIN` before the end of a continuous one.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hddm.calibration import LABELS, MAX_GAIN, Calibration
from hddm.conditions import (
    SETTINGS,
    can_guide,
    check_conditions,
    check_labels,
    check_times,
    refuse_missing,
    refuse_undeclared,
)
from hddm.errors import HddmError
from hddm.guidance import Guidance
from hddm.predictions import Point, PredictionType, velocity, x_0_and_eps
from hddm.schedules import DiscreteSchedule, LinearSchedule, Schedule
from hddm.tensors import append_dims, device_of, parameter_dtype

SINGULAR_MARGIN = 1e-6


class VelocityField:
    """An expert: a network with what it predicts, on which schedule, as a velocity field.

    Args:
        network: ``network(x, timestep, **conditions)``, x (batch, …), timestep (batch,), to a tensor
            of x's shape. A module runs in the dtype of its parameters.
        schedule: the one that it was trained on.
        prediction_type: what it predicts, a `hddm.predictions.PredictionType` or its name.
        time_scale: the network is fed native time × ``time_scale`` (SD3: 1000, Flux: 1).
        calibration: moments and weights that improve on the network near t = 1 (`hddm.calibration`).
        conditions: the keywords that the network takes; None passes all on, and leaves the refusal to
            the network.
        null_conditions: per condition, the value that stands for none, as a tensor without batch
            dimension; guidance falls back on it where no ``negative`` is given.
        sample_shape: shape (C, H, W) of a sample; by default read off ``network.config``.
        classes: names of the classes that ``class_labels`` counts.
        shift: of the time grid that its samples want (`hddm.sampling.time_grid`).

    Raises:
        HddmError: for an unknown prediction type, or flow_prediction on a discrete schedule.
    """

    def __init__(
        self,
        network: Callable[..., Tensor],
        schedule: Schedule,
        prediction_type: str,
        time_scale: float = 1.0,
        calibration: Calibration | None = None,
        conditions: Sequence[str] | None = None,
        null_conditions: Mapping[str, Tensor] | None = None,
        sample_shape: tuple[int, ...] | None = None,
        classes: Sequence[str] = (),
        shift: float = 1.0,
    ) -> None:
        self.network = network
        self.schedule = schedule
        self.prediction_type = PredictionType.parse(prediction_type)
        self.time_scale = time_scale
        self.calibration = calibration
        self.conditions = None if conditions is None else tuple(conditions)
        self.null_conditions = dict(null_conditions or {})
        self.sample_shape = sample_shape or _shape_from_config(network)
        if self.prediction_type is PredictionType.FLOW_PREDICTION:
            schedule.derivatives(torch.zeros(1, dtype=torch.float64))
        self.classes = tuple(classes)
        self.shift = shift
        self.range = _exact_range(schedule, self.prediction_type)

    @property
    def device(self) -> torch.device:
        """Where the network's parameters are; the CPU for one without any."""
        return device_of(self.network)

    @property
    def dtype(self) -> torch.dtype:
        """Of the network's parameters; float32 for one without any."""
        return parameter_dtype(self.network) or torch.float32

    def velocity(
        self,
        x_t: Tensor,
        t: Tensor,
        guidance_scale: float | Guidance = 1.0,
        negative: Mapping[str, Tensor] | None = None,
        **conditions: Tensor,
    ) -> Tensor:
        """Velocity dx/dt = E[eps - x_0 | x_t] on the common path.

        With guidance, v = v_negative + guidance_scale (v_conditional - v_negative) (arXiv:2207.12598), both
        in one batch, or one after the other where their conditions have texts of different lengths.

        Args:
            x_t: (batch, …), any floating dtype.
            t: (batch,) in [0, 1]; a scalar stands for a batch of it.
            guidance_scale: 1 for none, or a `Guidance`.
            negative: conditions of the negative branch; by default the null ones, and of those of
                `hddm.conditions.SETTINGS` that have none the same as in ``conditions``.
            conditions: keywords of the network's forward, each (batch, …); a declared one that is
                left out takes its null value.

        Returns:
            Velocity in x_t's shape and dtype, finite on the closed interval.

        Raises:
            HddmError: for a t outside [0, 1] or of another batch size, a condition that the expert
                does not declare, or guidance without anything to guide from.
        """
        times = check_times(x_t, t)
        negative = negative or {}
        for side in (conditions, negative):
            self._check(x_t, side)
        given = self._with_null(conditions, x_t)
        guidance = Guidance.of(guidance_scale)
        if guidance.scale != 1.0 and not can_guide(conditions, negative):
            raise HddmError("guidance needs a condition to guide to: pass one, or guidance_scale=1")
        refuse_missing(self.conditions or (), given)
        if guidance.scale == 1.0:
            return self._convert(x_t, times, given).to(x_t.dtype)
        against = self._negative(given, negative, x_t)
        acts = guidance.acts(times)
        if not acts.any():
            return self._convert(x_t, times, given).to(x_t.dtype)
        if all(given[key].shape == against[key].shape for key in given):
            both = {key: torch.cat([given[key], against[key]]) for key in given}
            v = self._convert(x_t.repeat(2, *[1] * (x_t.ndim - 1)), times.repeat(2), both)
            conditional, unguided = v.chunk(2)
        else:
            # Texts of different lengths: padding one would change what a network without a mask gives.
            conditional, unguided = (self._convert(x_t, times, side) for side in (given, against))
        return guidance.combine(conditional, unguided, acts).to(x_t.dtype)

    def _convert(self, x_t: Tensor, t: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        x = x_t.to(torch.promote_types(x_t.dtype, torch.float32))
        raw = self.raw_velocity(x, t, conditions)
        if self.calibration is None:
            return raw
        bound = MAX_GAIN if self.prediction_type is PredictionType.EPSILON else None
        return self.calibration.apply(raw, x, t, conditions.get(LABELS), bound)

    def raw_velocity(self, x: Tensor, t: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        """The exact conversion without calibration, by the rule of the module's head.

        ``x`` is float32 or float64, ``t`` (batch,) in float64.
        """
        if self._is_common_path:
            return self.ask(x, t, conditions)
        low, high = self.range
        inside = t.clamp(low, high)
        native = self.schedule.match(inside)
        alpha, sigma = self.schedule.alpha_sigma(native)
        ones = torch.ones_like(t)
        keep_noise = torch.where(t > inside, inside / t, ones)
        keep_signal = torch.where(t < inside, (1 - inside) / (1 - t), ones)
        scale = (alpha + sigma) * keep_noise * keep_signal

        def wide(values: Tensor) -> Tensor:
            return append_dims(values, x.ndim).to(x.device, x.dtype)

        y = wide(scale) * x
        output = self.ask(y, native, conditions)
        at = Point(
            x,
            y,
            wide(inside),
            wide(alpha),
            wide(sigma),
            lambda: tuple(map(wide, self.schedule.derivatives(native))),  # type: ignore[arg-type,return-value]
        )
        v = velocity(self.prediction_type, output, at)
        if bool((t == inside).all()):
            return v
        x_0, eps = x_0_and_eps(self.prediction_type, output, at)
        is_above, is_below = t > inside, t < inside
        # Masked before they meet the state: an inf in the row not taken would make its gradient nan.
        fade_signal = torch.where(is_above, (1 - t) / t * inside / (1 - inside), 0)
        fade_noise = torch.where(is_below, t / (1 - t) * (1 - inside) / inside, 0)
        above = (x - wide(fade_signal) * x_0) / wide(torch.where(is_above, t, ones))
        below = (wide(fade_noise) * eps - x) / wide(torch.where(is_below, 1 - t, ones))
        v = torch.where(wide(is_above).bool(), above, v)
        return torch.where(wide(is_below).bool(), below, v)

    @property
    def _is_common_path(self) -> bool:
        return (
            isinstance(self.schedule, LinearSchedule)
            and self.prediction_type is PredictionType.FLOW_PREDICTION
        )

    def ask(self, y: Tensor, native: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        """The network's own prediction at a state ``y`` of its path, at ``native`` times (batch,)."""
        dtype = parameter_dtype(self.network) or y.dtype
        timestep = (native * self.time_scale).to(y.device, y.dtype)
        output = self.network(y.to(dtype), timestep, **conditions)
        if output.shape != y.shape:
            raise HddmError(
                f"the network returned {tuple(output.shape)} for a state of {tuple(y.shape)}: a head "
                "with more channels than the state needs an adapter that drops the rest"
            )
        return output.to(y.dtype)

    def _check(self, x_t: Tensor, conditions: Mapping[str, Tensor]) -> None:
        if self.conditions is not None:
            refuse_undeclared(self.conditions, conditions)
        check_conditions(x_t, conditions)
        null = self.null_conditions.get("class_labels")
        check_labels(conditions, len(self.classes), null)

    def _with_null(self, conditions: Mapping[str, Tensor], x_t: Tensor) -> Mapping[str, Tensor]:
        """``conditions``, and the null value of each that is left out."""
        return {
            name: null.to(x_t.device).expand(len(x_t), *null.shape)
            for name, null in self.null_conditions.items()
        } | dict(conditions)

    def _negative(
        self, given: Mapping[str, Tensor], negative: Mapping[str, Tensor], x_t: Tensor
    ) -> Mapping[str, Tensor]:
        """The negative branch: ``negative``, completed by null values and the settings of ``given``."""
        settings = {name: value for name, value in given.items() if name in SETTINGS}
        against = settings | dict(self._with_null(negative, x_t))
        sides = {"the negative conditions": given.keys() - against, "the conditions": against.keys() - given}
        missing = [f"{side} lack {' and '.join(sorted(names))}" for side, names in sides.items() if names]
        if missing:
            raise HddmError(
                f"guidance needs the same keywords on both sides: {', '.join(missing)}, and this expert "
                "knows no value that stands for none"
            )
        return against


def _exact_range(schedule: Schedule, prediction_type: PredictionType) -> tuple[float, float]:
    low, high = schedule.range
    if prediction_type is PredictionType.EPSILON and high == 1.0:
        if isinstance(schedule, DiscreteSchedule):
            # zero terminal SNR: the last index holds no signal
            high = schedule.common_time(schedule.end - 1)
        else:
            high = 1.0 - SINGULAR_MARGIN
    if prediction_type is PredictionType.SAMPLE and low == 0.0:
        low = SINGULAR_MARGIN
    return low, high


def _shape_from_config(network: object) -> tuple[int, ...] | None:
    config = getattr(network, "config", None)
    side, channels = getattr(config, "sample_size", None), getattr(config, "in_channels", None)
    if side is None or channels is None:
        return None
    height, width = (side, side) if isinstance(side, int) else side
    return (channels, height, width)
