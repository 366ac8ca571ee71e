r"""Any expert as a velocity field on the common path.

`hddm.conversion` matches the noise level of a state x at time t, rescales the state and converts what the
network predicts to a velocity. Guidance and an expert's calibration act on the velocity.

**A noise range** is another thing than the range of a schedule: the part [low, high] of t that an expert was
trained for, whatever its schedule could express. Nothing stands in for the expert outside it: its velocity is
refused there, and an ensemble uses another expert of the same domain (`hddm.ensemble`).
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hddm.calibration import MAX_GAIN, Calibration
from hddm.classes import check_label_range
from hddm.condition_names import LABELS
from hddm.conditions import Inputs, can_guide, check_names, check_negative, check_rows
from hddm.conversion import SINGULAR_MARGIN, Matched, exact_range
from hddm.guidance import Guidance as Guidance
from hddm.networks.calls import Calls, NetworkCall, finished
from hddm.networks.families import sample_settings
from hddm.networks.sample_sizes import SampleSizes, Size, words_of
from hddm.networks.wrappers import declared_shape, missing_from
from hddm.predictions import Prediction
from hddm.predictions import PredictionType as PredictionType
from hddm.schedules import LinearSchedule, Schedule
from hddm.units import Units
from hddm.utils.errors import HddmError, an, one_line
from hddm.utils.records import WHOLE, NoiseRange, composed
from hddm.utils.tensors import device_of, parameter_dtype, sent, to_float64

ROUNDING = 1e-6
"""A t in float32 may miss the end of a noise range by this much."""
TIME_SCALE = 1000.0
"""Factor on native times in [0, 1] before a network that hddm trains embeds them."""


def check_times(x_t: Tensor, t: Tensor) -> Tensor:
    """``t`` as (batch,) in float64.

    Raises:
        HddmError: for a shape other than (batch,) or (), or a value outside [0, 1], NaN included.
    """
    times = to_float64(torch.as_tensor(t))
    if times.ndim == 0:
        times = times.expand(len(x_t))
    if times.shape != x_t.shape[:1] or not ((times >= 0) & (times <= 1)).all():
        raise HddmError(
            f"t is {len(x_t)} numbers from 0 (data) to 1 (noise), not {one_line(times.tolist(), 80)}"
        )
    return times


def check_states(x_t: Tensor, sample_shape: Sequence[int] | None) -> None:
    """Raise an `HddmError` for states with other channels than a sample (C, H, W); H and W may differ.

    ``sample_shape`` is None where it is not known.
    """
    if sample_shape is None:
        return
    if x_t.ndim != len(sample_shape) + 1 or x_t.shape[1] != sample_shape[0]:
        raise HddmError(
            f"x_t has shape {tuple(x_t.shape)}; this model takes states (batch, {sample_shape[0]}, H, W)"
        )


@dataclass(frozen=True)
class Resizing:
    """What an expert needs for samples of another size than its own.

    Args:
        sizes: those that its network takes; None for its own alone.
        defaults: conditions that follow from the shape (C, H, W) of a sample.
    """

    sizes: SampleSizes | None
    defaults: Callable[[tuple[int, int, int]], Mapping[str, Tensor]]


class VelocityField:
    """An expert: a network with what it predicts, on which schedule, as a velocity field.

    Ensembles and samplers call `guided`, which `velocity` calls after checks; a subclass overrides `guided`.
    Where experts share the weights of their base, ensembles run the network calls of `guided_calls` together.

    Args:
        network: ``network(x, timestep, **conditions)``, x (batch, …), timestep (batch,), to a tensor
            of x's shape, alone or first in a tuple or an output of diffusers. A module runs in the dtype of
            its parameters.
        schedule: the one that it was trained on.
        prediction_type: what it predicts, a `hddm.velocity.PredictionType` or its name.
        time_scale: the network is fed native time × ``time_scale`` (SD3: 1000, Flux: 1).
        calibration: moments and weights that improve on the network near t = 1 (`hddm.calibration`).
        conditions: the keywords that the network takes; None passes all on, unchecked.
        null_conditions: per condition, the value that stands for none, as a tensor without batch
            dimension; guidance falls back on it where no ``negative`` is provided.
        sample_shape: shape (C, H, W) of a sample; by default read off ``network.config``.
        classes: names of the classes that ``class_labels`` counts.
        shift: of the time grid that its samples want (`hddm.times.time_grid`).
        weak: the same expert with weights of an early step of its training, to guide by.
        noise_range: (low, high) in t, the part of [0, 1] that it was trained for.
        sampling_steps: number of steps of a student of few steps; None for any other expert. A student's
            velocity is the mean over a step, which Euler's method takes exactly; its network takes
            ``interval`` (batch,), the step's length.
        inner_guidance: guidance scale that a student of few steps learned from its teacher; 1 for none.
        data_scale: the expert's own data are ``data_scale`` * x_0 + ``data_shift``, of the samples x_0 that
            it gives: 0.5 and 0.5 for one that was trained on pixels in [0, 1]. One positive number.
        data_shift: a number, or a tensor (C, 1, 1).

    Raises:
        HddmError: for an unknown prediction type, flow_prediction on a discrete schedule, a noise range that
            is none or lies beyond the schedule's, or a data scale or shift of another kind.
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
        weak: "VelocityField | None" = None,
        noise_range: NoiseRange = WHOLE,
        sampling_steps: int | None = None,
        inner_guidance: float = 1.0,
        data_scale: float = 1.0,
        data_shift: float | Tensor = 0.0,
    ) -> None:
        self.network = network
        self.schedule = schedule
        self.prediction_type = PredictionType.parse(prediction_type)
        self.time_scale = time_scale
        self.calibration = calibration
        self.conditions = None if conditions is None else tuple(conditions)
        self.null_conditions = dict(null_conditions or {})
        self.sample_shape = sample_shape or declared_shape(network)
        if self.prediction.is_velocity:
            schedule.derivatives(torch.zeros(1, dtype=torch.float64))
        self.classes = tuple(map(composed, classes))
        self.shift = shift
        self.weak = weak
        self.sampling_steps, self.inner_guidance = sampling_steps, inner_guidance
        if isinstance(data_shift, Tensor):
            data_shift = data_shift.detach().cpu()
        self.units = Units(data_scale, data_shift)
        self.units.check_channels(self.sample_shape)
        self.path_units = self.units.times(schedule.data_scale)
        self.range = exact_range(schedule, self.prediction, self.path_units.scale)
        self.noise_range = low, high = noise_range
        if not (0 <= low < high <= 1 and low < self.range[1] and high > self.range[0]):
            raise HddmError(
                f"`noise_range` {low:g}:{high:g}: must be LOW:HIGH, with 0 <= LOW < HIGH <= 1, and meet the "
                f"schedule's own range, {self.range[0]:.4g}:{self.range[1]:.4g}"
            )

    resizing: Resizing | None = None
    """Set for experts of folders; a network of the caller's own takes what the caller states."""

    def at_size(self, size: Size, pixels: int = 1) -> "VelocityField":
        """The same expert for samples of another height and width, itself for its own.

        Conditions that follow from the size are those of the new one. A calibration holds for its own size
        alone and is left out. Raises `HddmError` for a size that the network does not take, with the nearest
        ones that it does, in pictures of ``pixels`` to one side of a sample's.
        """
        own = self.sample_shape
        if own is None or tuple(own[1:]) == size:
            return self
        shape = (own[0], *size)
        other = copy.copy(self)
        other.sample_shape, other.calibration = shape, None
        if self.weak is not None:
            other.weak = self.weak.at_size(size, pixels)
        if self.resizing is None:
            return other
        sizes = self.resizing.sizes
        if sizes is None:
            alone, wanted = words_of((own[1], own[2]), pixels), words_of(size, pixels)
            raise HddmError(f"its network takes {alone} alone, not {wanted}")
        sizes.check(size, pixels)
        other.null_conditions = {**self.null_conditions, **self.resizing.defaults(shape)}
        return other

    def __repr__(self) -> str:
        predicts = self.prediction_type.value
        return f"<VelocityField of a network that predicts {predicts}, samples {self.sample_shape}>"

    @property
    def prediction(self) -> Prediction:
        """What its network predicts."""
        return self.prediction_type.prediction

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
        then: Tensor | None = None,
        **conditions: Tensor,
    ) -> Tensor:
        """Velocity dx/dt = E[eps - x_0 | x_t] on the common path.

        Guidance by condition runs both branches in one batch, or one after the other where their conditions
        have texts of different lengths.

        Args:
            x_t: (batch, …), any floating dtype.
            t: (batch,) in [0, 1]; a scalar stands for a batch of it.
            guidance_scale: 1 for none, or a `Guidance`.
            negative: conditions of the negative branch; by default the null values, and for
                `sample_settings` without a null value the same as in ``conditions``.
            then: (batch,) or a scalar, the end of the step, which only a student of few steps uses; None for
                its velocity at ``t``.
            conditions: keywords of the network's forward, each (batch, …); one left out takes its null value.

        Returns:
            Velocity in x_t's shape and dtype, finite on the closed interval.

        Raises:
            HddmError: for states of other channels, a t outside the noise range or of another batch size, a
                condition that the expert does not declare, guidance without conditions, or by a weak model
                that it lacks, and negative conditions without guidance by condition.
        """
        check_states(x_t, self.sample_shape)
        times = check_times(x_t, t)
        self.refuse_beyond(times)
        check_names(conditions, self.conditions, self.velocity)
        guidance = Guidance.of(guidance_scale)
        inputs = self.inputs(x_t, guidance, negative or {}, conditions)
        check_negative(guidance, negative or {})
        for branch in (conditions, negative or {}):
            self.check_range(branch)
        return self.guided(x_t, times, inputs, then)

    def inputs(
        self,
        x_t: Tensor,
        guidance: Guidance,
        negative: Mapping[str, Tensor],
        conditions: Mapping[str, Tensor],
    ) -> Inputs:
        """Check and complete what `velocity` is called with, for all states (batch, …) of a batch like x_t.

        Raises:
            HddmError: as `velocity`.
        """
        for branch in (conditions, negative):
            check_names(branch, self.conditions)
            check_rows(len(x_t), branch)
        given = self._with_null(conditions, x_t)
        if guidance.by_condition and not can_guide(conditions, negative):
            raise HddmError(f"guidance needs a condition to guide to; {self._remedies}")
        if guidance.by_weak and self.weak is None:
            raise HddmError(f"this expert has no weak model to guide by; {self._remedies}")
        missing = missing_from(given, self.conditions or ())
        if missing:
            raise HddmError(
                f"this expert needs {' and '.join(missing)} and has no empty default; pass a value"
            )
        if not guidance.by_condition:
            return Inputs(guidance, given, {})
        settings = {name: value for name, value in given.items() if name in sample_settings()}
        against = settings | self._with_null(negative, x_t)
        lacks = []
        for name in sorted(given.keys() - against.keys()):
            lacks.append(f"the negative conditions lack {name}")
        for name in sorted(against.keys() - given.keys()):
            lacks.append(f"the conditions lack {name}")
        if lacks:
            raise HddmError(
                f"guidance needs the same keywords on both sides: {', '.join(lacks)}, and this expert has "
                "no empty default"
            )
        return Inputs(guidance, given, against)

    def guided(
        self, x_t: Tensor, times: Tensor, inputs: Inputs, then: Tensor | None = None
    ) -> Tensor:
        """As `velocity`, for checked ``times`` (batch,) and ``inputs``; nothing is read from the device."""
        return finished(self.guided_calls(x_t, times, inputs, then))

    def guided_calls(
        self, x_t: Tensor, times: Tensor, inputs: Inputs, then: Tensor | None = None
    ) -> Calls:
        """The network calls of `guided`, and its result."""
        given, against, guidance = inputs.conditions, inputs.negative, inputs.guidance
        if self.sampling_steps is not None:
            over = torch.zeros_like(times) if then is None else times - to_float64(then)
            step = {"interval": sent(over.float(), x_t.device)}
            given, against = {**given, **step}, {**against, **step}
        acts = guidance.acts(times)
        if not acts.any():
            v = yield from self._converted(x_t, times, given)
            return v.to(x_t.dtype)
        if self.weak is not None and guidance.by_weak:
            conditional = yield from self._converted(x_t, times, given)
            unguided = yield from self.weak._converted(x_t, times, given)
        elif all(given[key].shape == against[key].shape for key in given):
            both = {key: torch.cat([given[key], against[key]]) for key in given}
            twice = x_t.repeat(2, *[1] * (x_t.ndim - 1))
            v = yield from self._converted(twice, times.repeat(2), both)
            conditional, unguided = v.chunk(2)
        else:
            # Texts of different lengths: padding one would change what a network without a mask gives.
            conditional = yield from self._converted(x_t, times, given)
            unguided = yield from self._converted(x_t, times, against)
        return guidance.combine(conditional, unguided, acts).to(x_t.dtype)

    @property
    def _remedies(self) -> str:
        """What there is to guide by, in words."""
        remedies = ["take `guidance_scale` 1"]
        if self.weak is not None:
            remedies.insert(0, "guide by the weak model")
        if self.conditions != ():
            remedies.insert(0, "pass a condition to guide by")
        return ", or ".join(remedies)

    def refuse_beyond(self, t: Tensor) -> None:
        """Raise an `HddmError` where a t (n,) lies outside the noise range."""
        low, high = self.noise_range
        beyond = (t < low - ROUNDING) | (t > high + ROUNDING)
        if beyond.any():
            raise HddmError(
                f"t = {float(t[beyond][0]):.4g} is outside the noise range {low:g}:{high:g} of this expert; "
                "sample it in an ensemble with an expert of the remaining range (hddm assemble)"
            )

    @property
    def end(self) -> float:
        """The t from which on samples follow this expert, if they begin with noise: at most its range's end.

        Without a calibration a network of noise ends at 1 - 1/G, G = `MAX_GAIN`, since above its errors count
        more than G times. A schedule that only `SINGULAR_MARGIN` keeps from t = 1 ends there.
        """
        high = self.range[1]
        if high >= 1 - SINGULAR_MARGIN:
            return 1.0
        if self.prediction.is_of_noise and self.calibration is None:
            return min(high, 1 - 1 / MAX_GAIN)
        return high

    def covers(self, t: Tensor) -> Tensor:
        """True (n,) where this expert of its domain runs: low <= t < high, and t = high = 1 too."""
        low, high = self.noise_range
        return (t >= low) & ((t < high) | (high == 1))

    def _converted(self, x_t: Tensor, t: Tensor, conditions: Mapping[str, Tensor]) -> Calls:
        x = x_t.to(torch.promote_types(x_t.dtype, torch.float32))
        raw = yield from self.raw_calls(x, t, conditions)
        calibration = self.calibration_of(x)
        if calibration is None:
            return raw
        bound = MAX_GAIN if self.prediction.is_of_noise else None
        return calibration.apply(raw, x, t, conditions.get(LABELS), bound)

    def calibration_of(self, x: Tensor) -> Calibration | None:
        """Its calibration; `HddmError` where that is of samples of another shape than states (batch, …)."""
        if self.calibration is None:
            return None
        if self.sample_shape is not None and x.shape[1:] != self.sample_shape:
            raise HddmError(
                f"its calibration is of samples {self.sample_shape}, not of {tuple(x.shape[1:])}; "
                "sample at that size"
            )
        return self.calibration

    def raw_velocity(self, x: Tensor, t: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        """The exact conversion, uncalibrated; ``x`` in float32 or float64, ``t`` (batch,) in float64."""
        return finished(self.raw_calls(x, t, conditions))

    def raw_calls(self, x: Tensor, t: Tensor, conditions: Mapping[str, Tensor]) -> Calls:
        """The network call of `raw_velocity`, and its result."""
        own = self.path_units
        is_straight = self.prediction.is_velocity and isinstance(self.schedule, LinearSchedule)
        if is_straight and own.is_common:
            return (yield from self.output_calls(x, t, conditions))
        matched = Matched(self.schedule, self.prediction, own, self.range, x, t)
        output = yield from self.output_calls(matched.y, matched.native, conditions)
        return matched.velocity(output)

    def output_of(self, y: Tensor, native: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        """The network's own prediction for a state ``y`` on its path, at ``native`` times (batch,)."""
        return finished(self.output_calls(y, native, conditions))

    def output_calls(self, y: Tensor, native: Tensor, conditions: Mapping[str, Tensor]) -> Calls:
        """The network call of `output_of`, and its result."""
        dtype = parameter_dtype(self.network) or y.dtype
        timestep = sent(native * self.time_scale, y.device, y.dtype)
        output: Any = yield NetworkCall(self.network, y.to(dtype), timestep, conditions)
        if isinstance(output, tuple) or hasattr(output, "to_tuple"):
            output = output[0]
        if not isinstance(output, Tensor) or output.shape != y.shape:
            found = tuple(output.shape) if isinstance(output, Tensor) else an(type(output).__name__)
            raise HddmError(
                f"the network returned {found} for a state of {tuple(y.shape)}, and must return a tensor "
                "of that shape; a head with more channels than the state needs an adapter that drops the rest"
            )
        return output.to(y.dtype)

    def check_range(self, conditions: Mapping[str, Tensor]) -> None:
        """Raise an `HddmError` for class labels that the network has no embedding of."""
        labels, null = conditions.get(LABELS), self.null_conditions.get(LABELS)
        if labels is not None and self.classes:
            check_label_range(labels, len(self.classes), None if null is None else int(null))

    def _with_null(self, conditions: Mapping[str, Tensor], x_t: Tensor) -> dict[str, Tensor]:
        """``conditions``, and the null value of each that is left out."""
        rows = dict(conditions)
        for name, null in self.null_conditions.items():
            if name not in rows:
                rows[name] = sent(null, x_t.device).expand(len(x_t), *null.shape)
        return rows
