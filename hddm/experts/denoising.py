"""Denoising errors of an expert by noise level, compared with a Gaussian model and with v = 0.

At time t of the common path, x_t = (1 - t) x_0 + t eps, the error of a velocity v is

    E || v(x_t, t) - (eps - x_0) ||² / D,

whose minimum is the posterior variance. The best v for isotropic Gaussian data of mean m and variance c is

    v_gauss = g (x_t - (1 - t) m) - m,    g = (t - (1 - t) c) / ((1 - t)² c + t²).

For each image m is the mean of the other images, since few images would otherwise flatter the Gaussian.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from diffusers import DDPMScheduler
from scipy.special import ndtr, stdtrit
from torch import Tensor, nn

from hddm.calibration import START
from hddm.data.shards import Shard
from hddm.experts.shard_images import conditions_of, conditions_of_rows, evenly_spaced
from hddm.predictions import PredictionType
from hddm.schedules import (
    CosineSchedule,
    DiscreteSchedule,
    EDMSchedule,
    LinearSchedule,
    Schedule,
    from_diffusers,
)
from hddm.units import Units
from hddm.utils.streams import Use, generator
from hddm.velocity import TIME_SCALE, VelocityField

TIMES = tuple(k / 10 for k in range(1, 10))
"""Shares of the expert's noise range."""
LOWEST = 3
"""Times of least noise, at which a network is judged alone if all of `TIMES` lie beyond `START`."""
LATE_TIMES = (0.95, 0.99, 1.0)
"""Times at which a calibration is judged; the Gaussian is almost exact there, so experts hardly differ."""
_BATCH = 64


@dataclass(frozen=True)
class LevelError:
    """Mean squared errors per element at one time."""

    t: float
    expert: float
    gaussian: float
    zero: float


@dataclass(frozen=True)
class Denoising:
    """Errors by noise level; ``margin`` is how far they lie below the Gaussian's, and ``deviation`` its own.

    ``low`` and ``low_deviation`` are the same up to `START`, before any calibration helps the network; in a
    noise range beyond it, at the `LOWEST` times, without the calibration. ``late`` are errors at
    `LATE_TIMES`, which count in none of these.
    """

    levels: tuple[LevelError, ...]
    margin: float
    deviation: float
    low: float
    low_deviation: float
    late: tuple[LevelError, ...]

    @property
    def expert(self) -> float:
        return sum(level.expert for level in self.levels) / len(self.levels)

    @property
    def gaussian(self) -> float:
        return sum(level.gaussian for level in self.levels) / len(self.levels)


@torch.no_grad()
def denoising(
    field: VelocityField,
    images: Tensor,
    conditions: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    alone: VelocityField | None = None,
) -> Denoising:
    """Measure ``field`` at the `TIMES` and `LATE_TIMES` that it covers, with the same noise for all.

    ``images`` (N, C, H, W), float32 and at least 2, are in the expert's units; ``conditions`` are (N, …) by
    keyword; ``alone`` is the expert without its calibration.
    """
    noise, given = generator(seed, Use.DENOISING), conditions or {}
    low, high = field.noise_range
    times = [low + (high - low) * share for share in TIMES]
    ends = [t for t in LATE_TIMES if low <= t <= high]
    early = torch.tensor([time < START for time in times])
    levels = velocity_errors(field, images, given, times, noise)
    late = velocity_errors(field, images, given, ends, noise)
    lows = levels[early]
    if not early.any():
        lows = velocity_errors(alone or field, images, given, times[:LOWEST], noise)
    gain = _mean_and_deviation(levels[:, 1] - levels[:, 0])
    low_gain = _mean_and_deviation(lows[:, 1] - lows[:, 0])
    return Denoising(_levels(times, levels), *gain, *low_gain, _levels(ends, late))


def velocity_errors(
    field: VelocityField,
    images: Tensor,
    conditions: Mapping[str, Tensor],
    times: Sequence[float],
    noise: torch.Generator,
) -> Tensor:
    """Return errors (times, 3, images) of the expert, the Gaussian and v = 0."""
    number = len(images)
    total = images.double().sum(0)
    variance = (images.double() - total / number).square().sum().item() / (
        (number - 1) * images[0].numel()
    )
    errors = torch.zeros(len(times), 3, number, dtype=torch.float64)
    velocity: Callable[..., Tensor] = field.velocity
    for rows in torch.arange(number).split(_BATCH):
        x_0 = images[rows]
        others = ((total - x_0.double()) / (number - 1)).float()
        given = {name: value[rows].to(field.device) for name, value in conditions.items()}
        for place, time in enumerate(times):
            eps = torch.randn(x_0.shape, generator=noise)
            x_t, target = (1 - time) * x_0 + time * eps, eps - x_0
            t = torch.full((len(x_0),), time, dtype=torch.float64, device=field.device)
            gain = (time - (1 - time) * variance) / ((1 - time) ** 2 * variance + time**2)
            v = velocity(x_t.to(field.device), t, **given).cpu()
            gauss = gain * (x_t - (1 - time) * others) - others
            for index, each in enumerate((v, gauss, torch.zeros_like(target))):
                errors[place, index, rows] = (each - target).double().square().flatten(1).mean(1)
    return errors


def _levels(times: Sequence[float], errors: Tensor) -> tuple[LevelError, ...]:
    return tuple(LevelError(time, *errors[k].mean(1).tolist()) for k, time in enumerate(times))


def _mean_and_deviation(gains: Tensor) -> tuple[float, float]:
    """Return the mean of gains (times, images), and its standard deviation over images."""
    by_image = gains.mean(0)
    return by_image.mean().item(), (by_image.std() / len(by_image) ** 0.5).item()


IMAGES = 512
"""Most images that are judged, spread evenly over all."""
SURE = 2.0
"""Standard deviations by which an expert must be better than a Gaussian."""


def usual_schedules() -> list[Schedule]:
    """Schedules that weights may be of, whatever their record says."""
    names = ("linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid")
    ddpm = [DDPMScheduler(beta_schedule=name) for name in names]
    ddpm.append(DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012))
    return [LinearSchedule(), CosineSchedule(), *map(from_diffusers, ddpm)]


USUAL_RANGES = ((-1.0, 1.0), (0.0, 1.0), (-0.5, 0.5))
"""Pixels of black and white that networks are trained on."""
READ_IMAGES = 64
CLEARLY = 0.95
"""Another reading is clearly right if its error is below this part of the recorded reading's error."""


class _Cached(nn.Module):
    """A network and its outputs, kept for several readings of its record."""

    def __init__(self, network: Callable[..., Tensor]) -> None:
        super().__init__()
        self.network = network
        self.answers = deque[tuple[Tensor, Tensor, Tensor]](maxlen=len(TIMES))

    def forward(self, y: Tensor, timestep: Tensor, **conditions: Tensor) -> Tensor:
        for state, time, known in self.answers:
            if torch.equal(time, timestep) and torch.equal(state, y):
                return known
        self.answers.append((y, timestep, self.network(y, timestep, **conditions)))
        return self.answers[-1][2]


class _Negative(nn.Module):
    """The negative of what a network gives."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, y: Tensor, timestep: Tensor, **conditions: Tensor) -> Tensor:
        negative: Tensor = -self.network(y, timestep, **conditions)
        return negative


@dataclass(frozen=True)
class _Reading:
    """A way to read weights, besides what they predict."""

    schedule: Schedule
    time_scale: float
    units: Units
    is_turned: bool = False
    """The sign of the output is not the recorded one."""


def _readings(field: VelocityField, are_pixels: bool) -> list[_Reading]:
    """The readings that are tried of the weights of ``field``, beside every prediction type."""
    own, path, found = field.units, field.schedule, list[_Reading]()
    for factor in (1.0, 0.5, 2.0):
        found.append(_Reading(path, field.time_scale * factor, own))
    for one in (path, *usual_schedules()):
        found.append(_Reading(one, 1.0, own))
        if not isinstance(one, DiscreteSchedule):
            found.append(_Reading(one, TIME_SCALE, own))
    for low, high in USUAL_RANGES if are_pixels else ():
        units = Units.of_range(low, high)
        if (units.scale, units.shifts) != (own.scale, own.shifts):
            found.append(_Reading(path, field.time_scale, units))
    if isinstance(path, EDMSchedule):
        # Its schedulers' word for the sign is easily mistaken.
        found.append(_Reading(path, field.time_scale, own, is_turned=True))
    return found


def misread(field: VelocityField, shard: Shard, seed: int) -> str | None:
    """Say how the weights of ``field`` are to be read, if another reading fits clearly better (`judged`)."""
    return judged(field, shard, seed).doubt


@dataclass(frozen=True)
class Judgement:
    """What images tell of the reading of weights that a record states.

    ``doubt`` says how they are to be read, if that is clearly better; ``is_shown`` is true if the recorded
    reading denoises better than a Gaussian, as surely as `SURE` deviations are.
    """

    doubt: str | None
    is_shown: bool


@torch.no_grad()
def judged(field: VelocityField, shard: Shard, seed: int) -> Judgement:
    """Try several readings of the weights of ``field`` on images of ``shard``.

    Readings differ in prediction type, and in schedule, time scale, range of pixels or, for EDM, sign: the
    four types, the recorded schedule and `usual_schedules`, half and double the recorded scale, and the
    `USUAL_RANGES`. All see the same images and noise, at levels that
    both schedules cover. The other one must be better than a Gaussian, as surely as `SURE` deviations are,
    and its error, which a trained network has least where it is read as trained, below `CLEARLY` of the
    recorded one's, as surely as four deviations are, by Student's distribution over images. Of several as
    good, the one most like the record is named; of a single image none. Raises `HddmError` as `judge`.
    """
    rows, (low, high) = evenly_spaced(shard, READ_IMAGES), field.noise_range
    if len(rows) < 2:
        return Judgement(None, is_shown=False)
    given = conditions_of_rows(rows, conditions_of(shard, field), shard, field)
    images = shard.take(rows)
    times = [low + (high - low) * share for share in TIMES[::2]]
    readings = _readings(field, shard.space == "pixels")
    fits: list[tuple[float, list[tuple[str, str]], list[Tensor]]] = []
    network = _Cached(field.network)

    def errors_of(reading: VelocityField) -> Tensor:
        return velocity_errors(reading, images, given, times, generator(seed, Use.DENOISING))

    recorded, nulls = errors_of(field), field.null_conditions
    gain, deviation = _mean_and_deviation(recorded[:, 1] - _capped(recorded))
    is_shown = bool(gain > stdtrit(len(rows) - 1, ndtr(SURE)) * deviation)
    for reading, kind in itertools.product(readings, PredictionType):
        if kind.prediction.is_velocity and isinstance(reading.schedule, DiscreteSchedule):
            continue
        other = VelocityField(
            _Negative(network) if reading.is_turned else network,
            reading.schedule,
            kind,
            reading.time_scale,
            field.calibration,
            field.conditions,
            nulls,
            data_scale=reading.units.scale,
            data_shift=reading.units.shift,
        )
        low, high = max(field.range[0], other.range[0]), min(field.range[1], other.range[1])
        covered = torch.tensor([low <= time <= high for time in times])
        as_recorded, as_other = recorded[covered], errors_of(other)[covered]
        mine, theirs = _capped(as_recorded), _capped(as_other)
        shown = [as_recorded[:, 0].mean(), as_other[:, 0].mean()]
        parts_of = (theirs.mean() / mine.mean()).item(), (shown[1] / shown[0]).item()
        is_clear = 2 * int(covered.sum()) > len(times) and all(part < CLEARLY for part in parts_of)
        for worse, sure in ((mine, 4.0), (as_other[:, 1], SURE)):
            gain, deviation = _mean_and_deviation(worse - theirs)
            is_clear = is_clear and bool(gain > stdtrit(len(rows) - 1, ndtr(sure)) * deviation)
        if is_clear:
            words = zip(_description(other, reading.is_turned), _description(field), strict=True)
            differences = [one for one in words if one[0] != one[1]]
            fits.append((math.prod(parts_of), differences, shown))
    if not fits:
        return Judgement(None, is_shown)
    best = min(fits)[0]
    as_good = [fit for fit in fits if 0.96 * fit[0] <= best]
    _, differences, shown = min(as_good, key=lambda fit: (len(fit[1]), fit[0]))
    true = " and ".join(ours for ours, _ in differences)
    stated = " and ".join(recorded_as for _, recorded_as in differences)
    verb = "predict" if differences[0][0] in list(PredictionType) else "take"
    figures = f"{shown[1]:.2f} against {shown[0]:.2f}"
    return Judgement(f"these weights {verb} {true}, the record says {stated}: {figures}", is_shown)


def _capped(errors: Tensor) -> Tensor:
    """The expert's errors (times, images), scaled at levels where their mean is above a Gaussian's to that.

    How much worse a network is there tells little of how it is to be read, and would outweigh all else.
    """
    means = errors.mean(2, keepdim=True)
    return errors[:, 0] * (means[:, 1] / means[:, 0]).clamp(max=1)


def _description(reading: VelocityField, is_turned: bool = False) -> tuple[str, ...]:
    config = reading.schedule.config
    betas = "{beta_schedule} betas ({beta_start}…{beta_end}, {num_train_timesteps} steps)"
    path = betas.format(**config) if "beta_schedule" in config else f"the {config['name']} path"
    ends = reading.units.own(torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1))
    low, high = ends.amin().item(), ends.amax().item()
    return (
        reading.prediction_type.value,
        path,
        f"time_scale {reading.time_scale:g}",
        f"data from {low:g} to {high:g}",
        "the other sign" if is_turned else "the sign that it has",
    )
