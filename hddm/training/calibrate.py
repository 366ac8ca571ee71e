"""Calibrate an expert: fit moments and their blend with a network, on a shard or on `native_samples`.

`hddm.calibration` says what a calibration is.
"""

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hddm.calibration import FADE, LEVELS, MAX_GAIN, POOL, START, STATES, Calibration, Moments
from hddm.calibration_records import FILE_NAME
from hddm.condition_names import LABELS
from hddm.data.shard_records import MIN_IMAGES
from hddm.data.shards import Shard, open_shard
from hddm.experts.denoising import misread
from hddm.experts.ensemble_folders import replace_file
from hddm.experts.expert_folders import field_of, open_expert
from hddm.experts.shard_images import (
    check_fit,
    check_own,
    conditions_of,
    conditions_of_rows,
    evenly_spaced,
)
from hddm.networks.wrappers import OPTIONAL_CONDITIONS
from hddm.noise import Seeded
from hddm.schedules import DiscreteSchedule
from hddm.settings import CalibrationSettings, keywords
from hddm.solvers import euler
from hddm.utils.errors import HddmError, counted
from hddm.utils.files import restore
from hddm.utils.progress import Progress
from hddm.utils.records import WHOLE, NoiseRange
from hddm.utils.streams import Use, generator
from hddm.utils.tensors import to_float64
from hddm.velocity import VelocityField

log = logging.getLogger(__name__)


@torch.no_grad()
def calibrate(
    velocity: Callable[..., Tensor],
    images: Tensor,
    conditions: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    batch_size: int = 512,
    noise_range: NoiseRange = WHOLE,
) -> Calibration:
    """Fit moments and blend weights to an expert and its shard.

    Args:
        velocity: the uncalibrated velocity, of (x_t, t, **conditions).
        images: (N, C, H, W) of the shard, in the units that the expert works in.
        conditions: of the images, each (N, …). Of them the moments know ``class_labels`` alone; the more
            others say, the less weight the moments get.
        seed: of the noise.
        batch_size: states per call; `STATES` states are drawn at each of `LEVELS` times.
        noise_range: the part of t that the expert covers; elsewhere the weights mean nothing.
    """
    labels = (conditions or {}).get(LABELS)
    if labels is not None and (labels.ndim != 1 or labels.is_floating_point()):
        labels = None
    moments = Moments.of(images, labels)
    low, high = noise_range
    if not fitted_states(noise_range):
        return Calibration(moments, torch.tensor(WHOLE), torch.zeros(2, len(moments.variances)))
    # Weights at START are 0, and at 1 they are known; any other end of the range is measured as well.
    at_start, at_end = int(low <= START), int(high == 1)
    times = torch.linspace(max(low, START), high, LEVELS + at_start + at_end)
    measured = times[at_start : at_start + LEVELS]
    noise = generator(seed, Use.CALIBRATION)
    halves = torch.randperm(len(images), generator=noise).chunk(2)
    sums = torch.zeros(LEVELS, 3, len(moments.variances), dtype=torch.float64)
    with Progress(LEVELS * STATES, "calibrate") as progress:
        for seen, unseen in (halves, halves[::-1]):
            of_seen = None if labels is None else labels[seen.to(labels.device)]
            known = Moments.of(images[seen.to(images.device)], of_seen).to(images)
            for level, time in enumerate(measured.tolist()):
                drawn = unseen[torch.randint(len(unseen), (AT_ONCE,), generator=noise)]
                for rows in drawn.to(images.device).split(batch_size):
                    x_0 = images[rows]
                    eps = torch.randn(x_0.shape, generator=noise).to(x_0)
                    t = torch.full((len(x_0),), time, dtype=x_0.dtype, device=x_0.device)
                    x_t = (1 - time) * x_0 + time * eps
                    given = {name: value[rows] for name, value in (conditions or {}).items()}
                    net = velocity(x_t, t, **given).flatten(1)
                    own = None if labels is None else labels[rows]
                    to_gauss = known.velocity(x_t.flatten(1), t, own) - net
                    to_target = (eps - x_0).flatten(1) - net
                    pairs = ((to_target, to_gauss), (to_gauss, to_gauss), (to_target, to_target))
                    products = torch.stack([_inner(known, a, b) for a, b in pairs])
                    # Half the images may span fewer directions; what they lack counts among the rest.
                    sums[level, :, : products.shape[1] - 1] += products[:, :-1]
                    sums[level, :, -1] += products[:, -1]
                    progress(len(rows))
    coordinates = torch.ones(len(moments.variances), dtype=torch.float64)
    coordinates[-1] = max(moments.mean.numel() - moments.basis.shape[1], 1)
    weights = _weights(sums, coordinates).float()
    late, last = torch.ones(1), weights[-1:]
    # Under any other condition the moments' velocity is not exact at t = 1: they get no more than before it.
    if at_end and not set(conditions or ()) - (set() if labels is None else {LABELS}):
        fade = torch.logspace(-1, 1 - FADE, FADE - 1, base=2)
        late = torch.cat([1 - (1 - measured[-1]) * fade, late])
        shares = torch.minimum(
            (1 - last) * fade[:, None] ** 2, (MAX_GAIN * (1 - late[:-1, None])).square()
        )
        last = torch.cat([1 - shares, torch.ones_like(last)])
    none = torch.zeros(1 + at_start, len(moments.variances))
    early = torch.cat([torch.zeros(1), times[:at_start], measured])
    return Calibration(moments, torch.cat([early, late]), torch.cat([none, weights, last]))


AT_ONCE = STATES // 2
"""States of one level that `calibrate` evaluates together."""


def fitted_states(noise_range: NoiseRange) -> int:
    """Number of states at which `calibrate` evaluates the network of an expert of this noise range."""
    _, high = noise_range
    return 0 if high <= START else LEVELS * STATES


def _weights(sums: Tensor, coordinates: Tensor) -> Tensor:
    """Least-squares weights (levels, directions), shrunk by their sampling error, clipped to [0, 1].

    ``sums`` (levels, 3, directions) of target·gauss, gauss² and target²; ``coordinates`` says over how many
    numbers per state each direction sums. Neighbouring levels are pooled, since weights change slowly with
    t and a single level is noisy.
    """
    reach = len(POOL) // 2
    offsets = torch.arange(len(sums))[None] - torch.arange(len(sums))[:, None] + reach
    kernel = torch.tensor((*POOL, 0.0), dtype=sums.dtype)[
        torch.where((offsets >= 0) & (offsets < len(POOL)), offsets, len(POOL))
    ]
    total, squares = kernel.sum(1), kernel.square().sum(1)
    states = STATES * total**2 / squares
    pooled = torch.einsum("lk,kpd->lpd", kernel * (total / squares)[:, None], sums)
    product, gauss, target = pooled.unbind(1)
    weights = torch.where(gauss > 0, product / gauss, 0.0)
    error = (target - weights * product).clamp(0) / (states[:, None] * coordinates * gauss)
    shrunk = weights * (1 - error / weights**2).clamp(0)
    return torch.where((weights > 0) & (gauss > 0), shrunk, 0.0).clamp(0, 1)


def _inner(moments: Moments, a: Tensor, b: Tensor) -> Tensor:
    """Products of ``a`` and ``b`` (N, D) summed over rows: one for each direction, one for the rest."""
    (a_along, a_rest), (b_along, b_rest) = moments.split(a), moments.split(b)
    along = to_float64(a_along * b_along).sum(0)
    return torch.cat([along, to_float64(a_rest * b_rest).sum()[None]]).cpu()


CALIBRATION_IMAGES, CALIBRATION_BYTES = 4096, 2**30
"""Most images, and most bytes of them, in a calibration: samples in float64, tokens in float32."""


def fit_on_shard(
    shard: Shard, field: VelocityField, given: Mapping[str, Tensor], seed: int
) -> Calibration:
    """Fit a calibration of ``field``, which has none yet, to `calibration_rows` of ``shard``.

    ``given`` are conditions (N, …) of all samples, without the tokens of the shard; ``seed`` is the noise's.
    """
    rows = calibration_rows(shard)
    log.info("calibrating on %s …", counted(len(rows), "image"))
    found = conditions_of_rows(rows, given, shard, field)
    conditions = {name: value.to(field.device) for name, value in found.items()}
    images = shard.take(rows).to(field.device)
    calibration = calibrate(field.velocity, images, conditions, seed, noise_range=field.noise_range)
    return replace(calibration, record=calibration_origin(shard) | {"seed": str(seed)})


def calibration_rows(shard: Shard) -> Tensor:
    """Select the samples that moments are taken of: all or a limited number, spread evenly over the shard."""
    size = 8 * torch.Size(shard.shape).numel() + 4 * (
        0 if shard.texts is None else shard.texts.null.numel()
    )
    return evenly_spaced(shard, min(CALIBRATION_IMAGES, max(CALIBRATION_BYTES // size, MIN_IMAGES)))


def calibration_origin(shard: Shard) -> dict[str, str]:
    """Return a calibration's record of its shard."""
    return {"data": f"shard {shard.hash}", "images": str(len(calibration_rows(shard)))}


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

    DDIM is Euler's method on the converted velocity (`hddm.solvers.euler`), from the common state x of
    y ~ N(0, I) at the end of the trained range, y/(alpha + sigma) in common units. Native times are evenly
    spaced ("trailing" in diffusers: the last step goes to x_0 itself); there is no calibration and no
    guidance. Source: arXiv:2010.02502, equation 12, eta = 0.

    Sample i depends on (``seed``, i) alone and costs ``steps`` calls of the network. ``conditions`` are
    keywords of the network, each (num, …).
    """
    assert field.sample_shape is not None
    times, alpha, sigma = native_times(field, steps)
    units = field.path_units
    conditions = conditions or {}
    batches = []
    with Progress(num, "sample") as progress:
        for rows in torch.arange(num).split(batch_size):
            given = {name: value[rows].to(field.device) for name, value in conditions.items()}

            def velocity(
                x: Tensor, t: Tensor, _: Tensor, given: Mapping[str, Tensor] = given
            ) -> Tensor:
                return field.raw_velocity(x, t.expand(len(x)), given)

            y = Seeded(seed).initial(rows.tolist(), field.sample_shape, Use.NATIVE_NOISE)
            if not units.is_common:
                y = y - alpha * units.shift_like(y)
            x = y.to(field.device) / (alpha * units.scale + sigma)
            batches.append(euler(velocity, x, times).cpu())
            progress(len(rows))
    return torch.cat(batches)


def native_times(field: VelocityField, steps: int) -> tuple[Tensor, float, float]:
    """Return times (steps + 1,) on the common path, falling to 0, and alpha and sigma at the first one."""
    schedule, units, last = field.schedule, field.path_units, field.range[1]
    if field.prediction.is_of_noise:
        last = min(last, LAST_EPSILON_TIME)
    first = schedule.match(torch.tensor([last], dtype=torch.float64), units.scale).item()
    # Index 0 of a discrete schedule is noised already; clean data would be index -1.
    clean = -1.0 if isinstance(schedule, DiscreteSchedule) else schedule.start
    native = torch.linspace(first, clean, steps + 1, dtype=torch.float64)[:-1]
    alpha, sigma = schedule.alpha_sigma(native.clamp_min(schedule.start))
    times = (sigma / (alpha * units.scale + sigma)).clamp(*field.range)
    return torch.cat([times, times.new_zeros(1)]), float(alpha[0]), float(sigma[0])


def native_conditions(field: VelocityField, num: int, seed: int = 0) -> dict[str, Tensor]:
    """Draw conditions (num, …) for native samples: uniform classes, else null values with a warning."""
    conditions = {}
    for name in field.conditions or ():
        null = field.null_conditions.get(name)
        if name == LABELS and field.classes:
            labels = []
            for i in range(num):
                draw = generator(seed, Use.NATIVE_CLASSES, i)
                labels.append(torch.randint(len(field.classes), (), generator=draw))
            conditions[name] = torch.stack(labels)
        elif null is not None:
            conditions[name] = null.expand(num, *null.shape)
            text = f"calibrated without {name}, so near t = 1 a given one has less effect than it should"
            remedy = "hddm.training.calibrate.calibrate takes data with values of their own"
            warnings.warn(f"{text}; {remedy}", stacklevel=2)
        elif name not in OPTIONAL_CONDITIONS:
            text = f"its samples need {name}, and it has neither classes nor an empty default"
            raise HddmError(f"{text}; pass `data`")
    return conditions


@keywords
def recalibrate(
    folder: Path, shard_folder: Path | None = None, *, settings: CalibrationSettings
) -> None:
    """Fit ``calibration.safetensors`` of an expert folder, which is replaced as a whole with its manifest.

    An ensemble around it is replaced as a whole with its own, so that a process that is killed at any moment
    leaves all as before or as after. Other files are hard-linked where the file system allows.

    Without a ``shard_folder`` the fit is to ``num_images`` `native_samples`; their mean, which alone counts
    at t = 1, is off by sqrt(variance/num_images). Fields of ``settings`` are keywords.

    Raises:
        HddmError: for a folder that is no expert or has changed since it was written, images of another shape
            or another shard, or an expert that was trained in its calibration.
    """
    num_images, steps, seed = settings.num_images, settings.steps, settings.seed
    restore(folder.resolve())
    expert = open_expert(folder, with_calibration=False)
    record = expert.record
    why = "a calibration is for velocities, but a student of few steps predicts means over steps"
    record.refuse_student(str(folder), why)
    if record.training_calibration:
        raise HddmError(
            f"{folder}: was trained together with its calibration, which must not change"
        )
    field = field_of(expert.read())
    if shard_folder is None:
        if field.noise_range != WHOLE:
            raise HddmError(
                f"{folder}: covers only a part of t, so it cannot sample alone; pass `data`"
            )
        conditions = native_conditions(field, num_images, seed)
        images = native_samples(field, num_images, seed, steps, conditions)
        origin = {
            "data": "native samples",
            "images": str(num_images),
            "seed": str(seed),
            "steps": str(steps),
        }
        calibration = replace(calibrate(field.velocity, images, conditions, seed), record=origin)
    else:
        shard = open_shard(shard_folder)
        check_fit(shard, record, field.network)
        check_own(shard, record)
        calibration = fit_on_shard(shard, field, conditions_of(shard, field), seed)
        doubt = misread(field, shard, seed)
        if doubt is not None:
            warnings.warn(f"{folder}: {doubt}", stacklevel=2)
    replace_file(folder, record, FILE_NAME, calibration.save)
