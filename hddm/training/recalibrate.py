"""Calibrating an expert that is already on disk."""

import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hddm.calibration import FILE_NAME, Calibration, calibrate
from hddm.data.open_shard import open_shard
from hddm.errors import HddmError
from hddm.experts import EXPERT_FILE, FORMAT, ExpertFacts
from hddm.facts import read_facts
from hddm.files import read_json, sha256_of, write_json, write_whole
from hddm.loading import load
from hddm.training.native_samples import native_conditions, native_samples
from hddm.training.shard_calibration import calibrated_on
from hddm.training.shard_fit import check_fit, check_own, conditions_of
from hddm.velocity import VelocityField

NUM_IMAGES = 512
FEW_IMAGES = 64
STEPS = 50


def recalibrate(
    folder: Path,
    shard_folder: Path | None = None,
    seed: int = 0,
    num_images: int = NUM_IMAGES,
    steps: int = STEPS,
    on_batch: Callable[[int], None] | None = None,
) -> None:
    """Fit ``calibration.safetensors`` of an expert folder, replacing it and its hash in ``expert.json``.

    Either file is replaced in one step, which also leaves hard-linked copies of the folder as they were.

    Args:
        folder: the expert.
        shard_folder: images to fit it to; None draws them from the expert itself.
        seed: of the noise, and of the samples.
        num_images: samples to draw. Their mean is off by sqrt(variance/num_images), which is all that counts
            at t = 1: 4 % of a deviation for 512.
        steps: of the expert's own sampler.
        on_batch: called with the number of samples after each batch.

    Raises:
        HddmError: for anything but an expert folder, images of another shape than its samples or of another
            shard, samples that are not finite, or an expert whose calibration is part of its training.
    """
    field = load(folder)
    if not isinstance(field, VelocityField):
        raise HddmError(f"{folder}: an ensemble; calibrate its experts one by one")
    facts = read_facts(folder / EXPERT_FILE, ExpertFacts, FORMAT)
    if facts.training_calibration:
        raise HddmError(
            f"{folder}: was trained on in its calibration, which must stay as it is; there is nothing to fit"
        )
    field.calibration = None
    if shard_folder is None:
        if num_images < FEW_IMAGES:
            warnings.warn(
                f"{num_images} samples say little about the moments that take over near t = 1; "
                f"{NUM_IMAGES} are the default",
                stacklevel=2,
            )
        calibration = _on_native_samples(folder, facts, field, seed, num_images, steps, on_batch)
    else:
        shard = open_shard(shard_folder)
        check_fit(shard, facts, field.network)
        check_own(shard, facts)
        calibration = calibrated_on(shard, field, conditions_of(shard, field), seed)
    _replace_calibration(folder, calibration)


def _replace_calibration(folder: Path, calibration: Calibration) -> None:
    """Replace a calibration so that at no moment the record states the hash of another one."""

    def write(draft: Path) -> None:
        calibration.write(draft)
        shutil.copymode(folder / EXPERT_FILE, draft)
        # Two files cannot change in one step, so in between the record says nothing.
        if _stated(folder) != sha256_of(draft):
            _state(folder, None)

    write_whole(folder / FILE_NAME, write)
    _state(folder, sha256_of(folder / FILE_NAME))


def _stated(folder: Path) -> str | None:
    return read_facts(folder / EXPERT_FILE, ExpertFacts, FORMAT).calibration_sha256


def _state(folder: Path, sha256: str | None) -> None:
    if _stated(folder) == sha256:
        return
    path = folder / EXPERT_FILE
    changed = read_json(path) | {"calibration_sha256": sha256}

    def write(draft: Path) -> None:
        write_json(draft, changed)
        shutil.copymode(path, draft)

    write_whole(path, write)


def _on_native_samples(
    folder: Path,
    facts: ExpertFacts,
    field: VelocityField,
    seed: int,
    num: int,
    steps: int,
    on_batch: Callable[[int], None] | None,
) -> Calibration:
    try:
        conditions = native_conditions(field, num, seed)
    except HddmError as error:
        remedy = ": pass --data" if facts.space == "pixels" else ""
        raise HddmError(f"{folder}: {error}{remedy}") from error
    images = native_samples(field, num, seed, steps, conditions, on_batch=on_batch)
    if not images.isfinite().all():
        raise HddmError(f"{folder}: its samples are not finite; pass --data, or more --steps than {steps}")
    record = {"data": "native samples", "images": str(num), "seed": str(seed), "steps": str(steps)}
    return replace(calibrate(field.velocity, images, conditions, seed), record=record)
