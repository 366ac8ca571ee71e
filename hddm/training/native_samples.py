"""What an expert itself draws, by the sampler that it was trained for: data to calibrate on without data."""

import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hddm.errors import HddmError
from hddm.networks import OPTIONAL_CONDITIONS
from hddm.predictions import PredictionType
from hddm.sampling import initial_noise
from hddm.schedules import DiscreteSchedule
from hddm.solvers import euler
from hddm.tensors import generator
from hddm.velocity import VelocityField

# Beside the streams (seed, i) and (seed, i, 1) of sampling and (seed, shard, 2) of training.
CLASS_STREAM = 3
# Where DDPM's schedule ends. An estimate x_0 = (y - s eps)/a farther out is the network's error alone.
LAST_EPSILON_TIME = 0.994


@torch.no_grad()
def native_samples(
    field: VelocityField,
    num: int,
    seed: int = 0,
    steps: int = 50,
    conditions: Mapping[str, Tensor] | None = None,
    batch_size: int = 64,
    on_batch: Callable[[int], None] | None = None,
) -> Tensor:
    """Samples by the expert's own DDIM: native times evenly spaced, no calibration, no guidance.

    DDIM is Euler's method on the converted velocity (`hddm.solvers.euler`), from x = y/(alpha + sigma) with
    y ~ N(0, I) at the end of the trained range. Times are "trailing" in the words of diffusers: from that
    end, the last step goes from one step before clean data to x_0 itself.

    Args:
        field: the expert.
        num: number of samples.
        seed: sample i depends on (seed, i) alone.
        steps: calls of the network a sample.
        conditions: keywords of the network, each (num, …).
        batch_size: samples drawn together.
        on_batch: called with the number of samples after each batch.

    Returns:
        (num, C, H, W) in float32 on the CPU.

    Raises:
        HddmError: for an expert that does not tell the shape of its samples.

    Source: arXiv:2010.02502, equation 12, eta = 0.
    """
    if field.sample_shape is None:
        raise HddmError("this expert does not tell the shape of a sample")
    times, scale = native_times(field, steps)
    batches = []
    for start in range(0, num, batch_size):
        stop = min(start + batch_size, num)
        given = {name: value[start:stop].to(field.device) for name, value in (conditions or {}).items()}

        def velocity(x: Tensor, t: Tensor, given: Mapping[str, Tensor] = given) -> Tensor:
            return field.raw_velocity(x, t.expand(len(x)), given)

        x = initial_noise(seed, start, stop, field.sample_shape).to(field.device) / scale
        batches.append(euler(velocity, x, times).cpu())
        if on_batch is not None:
            on_batch(stop - start)
    return torch.cat(batches)


def native_times(field: VelocityField, steps: int) -> tuple[Tensor, float]:
    """Times (steps + 1,) on the common path, down to 0, and alpha + sigma at the first of them."""
    schedule, last = field.schedule, field.range[1]
    if field.prediction_type is PredictionType.EPSILON:
        last = min(last, LAST_EPSILON_TIME)
    first = schedule.match(torch.tensor([last], dtype=torch.float64)).item()
    # Index 0 of a discrete schedule is noised already; clean data would be index -1.
    clean = -1.0 if isinstance(schedule, DiscreteSchedule) else 0.0
    native = torch.linspace(first, clean, steps + 1, dtype=torch.float64)[:-1].clamp_min(0)
    alpha, sigma = schedule.alpha_sigma(native)
    times = (sigma / (alpha + sigma)).clamp(*field.range)
    return torch.cat([times, times.new_zeros(1)]), float(alpha[0] + sigma[0])


def native_conditions(field: VelocityField, num: int, seed: int = 0) -> dict[str, Tensor]:
    """Conditions (num, …) of native samples: classes drawn uniformly, null values of everything else.

    Warns where a null value stands for a condition that an expert would be asked with.

    Raises:
        HddmError: for a condition without class names and without a null value.
    """
    conditions = {}
    for name in field.conditions or ():
        if name == "class_labels" and field.classes:
            draws = [generator(seed, i, CLASS_STREAM) for i in range(num)]
            labels = [torch.randint(len(field.classes), (), generator=draw) for draw in draws]
            conditions[name] = torch.stack(labels)
        elif name in field.null_conditions:
            null = field.null_conditions[name]
            conditions[name] = null.expand(num, *null.shape)
            warnings.warn(
                f"calibrated with the stored null value of {name} for every sample: near t = 1 what a given "
                "one says will count for less than it should; hddm.calibration.calibrate takes data with "
                "their own",
                stacklevel=2,
            )
        elif name not in OPTIONAL_CONDITIONS:
            raise HddmError(
                f"its samples need {name}, and it has neither classes nor a value that stands for none"
            )
    return conditions
