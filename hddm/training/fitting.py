"""Calibrate an expert on its shard: choose images and conditions, fit moments and their blend with a network.

`hddm.calibration` says what a calibration is.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import replace

import torch
from torch import Tensor, nn

from hddm.calibration import FADE, LEVELS, MAX_GAIN, POOL, START, STATES, Calibration, Moments
from hddm.conditions import LABELS
from hddm.data.shard_records import MIN_IMAGES
from hddm.data.shards import Shard
from hddm.training.settings import TEXT
from hddm.utils.errors import HddmError, counted
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
        batch_size: states a call; `STATES` states are drawn at each of `LEVELS` times.
        noise_range: the part of t that the expert covers; elsewhere the weights mean nothing.
    """
    if len(images) < 4:
        raise HddmError(f"a calibration needs at least 4 images, not {len(images)}")
    labels = (conditions or {}).get(LABELS)
    if labels is not None and (labels.ndim != 1 or labels.is_floating_point()):
        labels = None
    moments = Moments.of(images, labels)
    low, high = noise_range
    if high <= START:
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
                drawn = unseen[torch.randint(len(unseen), (STATES // 2,), generator=noise)]
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
        shares = torch.minimum((1 - last) * fade[:, None] ** 2, (MAX_GAIN * (1 - late[:-1, None])).square())
        last = torch.cat([1 - shares, torch.ones_like(last)])
    none = torch.zeros(1 + at_start, len(moments.variances))
    early = torch.cat([torch.zeros(1), times[:at_start], measured])
    return Calibration(moments, torch.cat([early, late]), torch.cat([none, weights, last]))


def _weights(sums: Tensor, coordinates: Tensor) -> Tensor:
    """Least-squares weights (levels, directions), shrunk by their sampling error, clipped to [0, 1].

    ``sums`` (levels, 3, directions) of target·gauss, gauss² and target²; ``coordinates`` says over how many
    numbers a state each direction sums. Neighbouring levels are pooled, since weights change slowly with
    t and a level alone is noisy.
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


CALIBRATION_COST = LEVELS * STATES // 4
"""Images whose training takes about as long as a calibration: a state is one call of the network."""
CALIBRATION_IMAGES, CALIBRATION_BYTES = 4096, 2**30
"""Most images, and most bytes of them, in a calibration: samples in float64, tokens in float32."""


def fit_on_shard(shard: Shard, field: VelocityField, given: Mapping[str, Tensor], seed: int) -> Calibration:
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


def conditions_of(shard: Shard, field: VelocityField) -> dict[str, Tensor]:
    """Return the conditions that ``field`` takes for the images of ``shard``: their labels, or none."""
    if not field.classes:
        return {}
    return {LABELS: labels_of(shard, field.classes, "the expert")}


def labels_of(shard: Shard, classes: tuple[str, ...], name: str, remedy: str = "") -> Tensor:
    """Return the labels of a shard, which must be of these ``classes``, those of ``name``.

    The `HddmError` asks for images of the same classes ``remedy``, which is another way out.
    """
    if shard.labels is None or shard.classes != classes:
        text = f"its classes are {list(shard.classes)}, those of {name} {list(classes)}"
        raise HddmError(f"{shard.folder}: {text}; use images of the same classes{remedy}")
    return shard.labels


def conditions_of_rows(
    rows: Tensor, given: Mapping[str, Tensor], shard: Shard, field: VelocityField
) -> dict[str, Tensor]:
    """Select conditions (n, …) of samples ``rows`` (n,): ``given``, and tokens where ``field`` takes any."""
    conditions = {name: value[rows] for name, value in given.items()}
    if shard.texts is not None and TEXT in (field.conditions or ()):
        conditions[TEXT] = shard.texts.take(rows)
    return conditions


@contextlib.contextmanager
def placed(network: nn.Module, device: torch.device) -> Iterator[None]:
    """Move ``network`` to ``device`` for a block, and to the CPU afterwards."""
    network.to(device)
    try:
        yield
    finally:
        network.to("cpu")


def calibration_rows(shard: Shard) -> Tensor:
    """Select the samples that moments are taken of: all or a limited number, spread evenly over the shard."""
    size = 8 * torch.Size(shard.shape).numel() + 4 * (0 if shard.texts is None else shard.texts.null.numel())
    return evenly_spaced(shard, min(CALIBRATION_IMAGES, max(CALIBRATION_BYTES // size, MIN_IMAGES)))


def evenly_spaced(samples: Sized, most: int) -> Tensor:
    """Select all samples, or ``most`` of them, spread evenly."""
    return torch.linspace(0, len(samples) - 1, min(len(samples), most)).round().long()


def calibration_origin(shard: Shard) -> dict[str, str]:
    """Return a calibration's record of its shard."""
    return {"data": f"shard {shard.hash}", "images": str(len(calibration_rows(shard)))}
