"""What the errors of an expert on images say against it."""

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hddm.data.shards import Shard
from hddm.experts import Expert
from hddm.training.denoising import Denoising, denoising
from hddm.training.shard_fit import conditions_at, conditions_of
from hddm.velocity import VelocityField

IMAGES = 512
"""Images that are looked at, at most, spread evenly over all."""
SURE = 2.0
"""Deviations that an expert must be better than a Gaussian by."""
UNCALIBRATED = "it has no calibration; hddm calibrate fits one"


@dataclass(frozen=True)
class Judged:
    """Errors on so many ``images``, and what they say against an expert, or for its user to know.

    ``unconditional`` are errors with null values for all conditions, None where there are none.
    """

    images: int
    denoising: Denoising
    unconditional: Denoising | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def judge(expert: Expert, field: VelocityField, shard: Shard, seed: int) -> Judged:
    """Hold the errors of an expert against those of a Gaussian and of v = 0 (`hddm.training.denoising`).

    - It must have less than a Gaussian, by `SURE` deviations, over all noise levels and where its network
      stands alone; without its conditions too, since guidance asks so, unless it never learned that.
    - Near t = 1 it must not have more than v = 0 by its calibration. A network that has so by itself, as one
      that predicts noise may, is worth a note.

    Args:
        expert: the expert.
        field: the same, where it is to run.
        shard: images.
        seed: of the noise.

    Raises:
        HddmError: for classes other than its own, and fewer than 2 images.
    """
    rows = torch.linspace(0, len(shard) - 1, min(len(shard), IMAGES)).round().long()
    given, images = conditions_at(rows, conditions_of(shard, field), shard, field), shard.take(rows)
    found = denoising(field, images, given, seed)
    is_calibrated = expert.calibration is not None
    problems, notes = _doubts(found, len(rows), is_calibrated), list[str]()
    unconditional = None
    if given and set(given) <= set(field.null_conditions):
        nulls = {name: _repeated(field.null_conditions[name], len(rows)) for name in given}
        unconditional = denoising(field, images, nulls, seed)
        without = f"without {', '.join(nulls)}"
        doubts = _doubts(unconditional, len(rows), is_calibrated)
        if problems and doubts:
            problems = [f"{text} ({without}: error {unconditional.expert:.4f})" for text in problems]
        else:
            is_learned = expert.facts.training.get("condition_dropout") != 0
            (problems if is_learned else notes).extend(f"{without}: {text}" for text in doubts)
    worse = [level for level in found.late if not level.expert <= level.zero]
    if worse:
        spoilt = worse
        if not expert.facts.training_calibration:
            alone = denoising(_uncalibrated(field), images, given, seed)
            errors = {level.t: level.expert for level in alone.late}
            spoilt = [level for level in worse if not level.expert <= errors[level.t]]
        at = (spoilt or worse)[0]
        text = f"at t = {at.t:g} its error is {at.expert:.4f}, and that of no velocity at all {at.zero:.4f}"
        (problems if spoilt else notes).append(f"{text}: {_remedy(expert, bool(spoilt))}")
    return Judged(len(rows), found, unconditional, tuple(problems), tuple(notes))


def _doubts(found: Denoising, images: int, is_calibrated: bool) -> list[str]:
    """What speaks against errors on so many images, at most one thing."""
    if not math.isfinite(found.expert):
        return ["its velocities are not finite"]
    if found.margin <= 0:
        cause = "it is untrained, or its record says wrongly what it predicts"
        if not is_calibrated and found.low > 0:
            cause = UNCALIBRATED
        return [
            f"it denoises no better than a Gaussian: error {found.expert:.4f}, the Gaussian's "
            f"{found.gaussian:.4f}; {cause}"
        ]
    alone = "up to t = 0.5, where its network stands alone, its error is"
    if found.low <= 0:
        return [
            f"{alone} {-found.low:.4f} above a Gaussian's; it is hardly trained, or its record says wrongly "
            "what it predicts"
        ]
    remedy = f"take more held-out images than {images}" if images < IMAGES else "train it for longer"
    return [
        f"{what} {gain:.4f} ± {deviation:.4f} below a Gaussian's, so it is not shown to be better; {remedy}"
        for what, gain, deviation in (
            ("its error is", found.margin, found.deviation),
            (alone, found.low, found.low_deviation),
        )
        if not gain >= SURE * deviation
    ][:1]


def _remedy(expert: Expert, is_spoilt: bool) -> str:
    if expert.calibration is None:
        return UNCALIBRATED
    if not is_spoilt:
        return "its calibration mends only a part of what its network does there; train it for longer"
    if expert.facts.training_calibration:
        return "the calibration that it was trained in is spoilt; take the expert anew"
    return "its calibration is spoilt; hddm calibrate fits another"


def _uncalibrated(field: VelocityField) -> VelocityField:
    alone = copy.copy(field)
    alone.calibration = None
    return alone


def _repeated(null: Tensor, number: int) -> Tensor:
    return null.expand(number, *null.shape)
