"""Calibrate an expert folder, on a shard or on samples that the expert draws itself (`native_samples`)."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hddm.calibration import FILE_NAME, Calibration
from hddm.conditions import LABELS
from hddm.data.shards import open_shard
from hddm.experts.ensemble_folders import replace_file
from hddm.experts.loading import load
from hddm.experts.records import EXPERT_FILE, field_of, open_expert
from hddm.networks.wrappers import OPTIONAL_CONDITIONS
from hddm.noise import Seeded
from hddm.schedules import DiscreteSchedule
from hddm.solvers import euler
from hddm.training.denoising import misread
from hddm.training.expert import check_fit, check_own
from hddm.training.fitting import calibrate, conditions_of, fit_on_shard
from hddm.utils.errors import HddmError
from hddm.utils.files import restore
from hddm.utils.progress import Progress
from hddm.utils.records import WHOLE
from hddm.utils.streams import Use, generator
from hddm.velocity import PredictionType, VelocityField

# The end of DDPM's schedule. Beyond it the estimate x_0 = (y - s eps)/a is the network's error alone.
LAST_EPSILON_TIME = 0.994


@torch.no_grad()
def native_samples(
    field: VelocityField,
    num: int,
    seed: int = 0,
    steps: int = 50,
    conditions: Mapping[str, Tensor] | None = None,
    batch_size: int = 64,
) -> Tensor:
    """Draw samples (num, C, H, W) by the expert's own DDIM, in float32 on the CPU.

    DDIM is Euler's method on the converted velocity (`hddm.solvers.euler`), from x = y/(alpha + sigma) with
    y ~ N(0, I) at the end of the trained range. Native times are evenly spaced ("trailing" in diffusers: the
    last step goes to x_0 itself); there is no calibration and no guidance. Source: arXiv:2010.02502, equation
    12, eta = 0.

    Sample i depends on (``seed``, i) alone and costs ``steps`` calls of the network. ``conditions`` are
    keywords of the network, each (num, …). Raises `HddmError` for an expert without a sample shape.
    """
    if field.sample_shape is None:
        raise HddmError("this expert does not record the shape of a sample")
    times, scale = native_times(field, steps)
    batches = []
    with Progress(num, "sample") as progress:
        for rows in torch.arange(num).split(batch_size):
            given = {name: value[rows].to(field.device) for name, value in (conditions or {}).items()}

            def velocity(x: Tensor, t: Tensor, _: Tensor, given: Mapping[str, Tensor] = given) -> Tensor:
                return field.raw_velocity(x, t.expand(len(x)), given)

            x = Seeded(seed).initial(rows.tolist(), field.sample_shape, Use.NATIVE_NOISE)
            batches.append(euler(velocity, x.to(field.device) / scale, times).cpu())
            progress(len(rows))
    return torch.cat(batches)


def native_times(field: VelocityField, steps: int) -> tuple[Tensor, float]:
    """Return times (steps + 1,) on the common path, falling to 0, and alpha + sigma at the first of them."""
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
    """Draw conditions (num, …) for native samples: uniform classes, else null values with a warning."""
    conditions = {}
    for name in field.conditions or ():
        if name == LABELS and field.classes:
            draws = [generator(seed, Use.NATIVE_CLASSES, i) for i in range(num)]
            labels = [torch.randint(len(field.classes), (), generator=draw) for draw in draws]
            conditions[name] = torch.stack(labels)
        elif (null := field.null_conditions.get(name)) is not None:
            conditions[name] = null.expand(num, *null.shape)
            text = f"calibrated without {name}, so near t = 1 a given one has less effect than it should"
            remedy = "hddm.training.fitting.calibrate takes data with values of their own"
            warnings.warn(f"{text}; {remedy}", stacklevel=2)
        elif name not in OPTIONAL_CONDITIONS:
            text = f"its samples need {name}, and it has neither classes nor an empty default"
            raise HddmError(f"{text}; pass `data`")
    return conditions


NUM_IMAGES, STEPS = 512, 50


def recalibrate(
    folder: Path,
    shard_folder: Path | None = None,
    seed: int = 0,
    num_images: int = NUM_IMAGES,
    steps: int = STEPS,
) -> None:
    """Fit ``calibration.safetensors`` of an expert folder, which is replaced as a whole with its manifest.

    An ensemble around it is replaced as a whole with its own, so that a process that is killed at any moment
    leaves all as before or as after. Other files are hard-linked where the file system allows.

    Without a ``shard_folder`` the fit is to ``num_images`` `native_samples`; their mean, which alone counts
    at t = 1, is off by sqrt(variance/num_images). ``seed`` is that of the noise and of the samples.

    Raises:
        HddmError: for a folder that is no expert or has changed since it was written, images of another shape
            or another shard, samples that are not finite, or an expert that was trained in its calibration.
    """
    restore(folder.resolve())
    if not (folder / EXPERT_FILE).exists():
        # Says what else it is, if it is nothing to be sampled from.
        load(folder)
        raise HddmError(f"{folder}: is an ensemble; calibrate its experts one by one")
    expert = open_expert(folder, with_calibration=False)
    record = expert.facts
    record.refuse_student(
        str(folder), "a calibration is for velocities, but a student of few steps predicts means over steps"
    )
    if record.training_calibration:
        raise HddmError(f"{folder}: was trained together with its calibration, which must not change")
    field = field_of(expert.read(torch.float32))
    if shard_folder is None:
        calibration = _on_native_samples(folder, field, seed, num_images, steps)
    else:
        shard = open_shard(shard_folder)
        check_fit(shard, record, field.network)
        check_own(shard, record)
        calibration = fit_on_shard(shard, field, conditions_of(shard, field), seed)
        if (doubt := misread(field, shard, seed)) is not None:
            warnings.warn(f"{folder}: {doubt}", stacklevel=2)
    replace_file(folder, record, FILE_NAME, calibration.save)


def _on_native_samples(folder: Path, field: VelocityField, seed: int, num: int, steps: int) -> Calibration:
    if field.noise_range != WHOLE:
        raise HddmError(f"{folder}: covers only a part of t, so it cannot sample alone; pass `data`")
    conditions = native_conditions(field, num, seed)
    images = native_samples(field, num, seed, steps, conditions)
    if not images.isfinite().all():
        raise HddmError(f"{folder}: its samples are not finite; pass `data`, or more `steps` than {steps}")
    calibration = calibrate(field.velocity, images, conditions, seed)
    origin = {"data": "native samples", "images": str(num), "seed": str(seed), "steps": str(steps)}
    return replace(calibration, record=origin)
