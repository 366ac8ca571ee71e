"""Calibrating an expert that is already on disk."""

import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from hddm.calibration import FILE_NAME, Calibration, calibrate
from hddm.data.open_shard import open_shard
from hddm.errors import HddmError
from hddm.expert_files import foreign_weights
from hddm.experts import EXPERT_FILE, ExpertFacts, open_expert, write_records
from hddm.files import link_or_copy, new_folder, restore, writing
from hddm.loading import field_of, load
from hddm.manifest import MANIFEST
from hddm.training.native_samples import native_conditions, native_samples
from hddm.training.shard_calibration import calibrated_on
from hddm.training.shard_fit import check_fit, check_own, conditions_of
from hddm.velocity import VelocityField
from hddm.verified import RECORD

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
    """Fit ``calibration.safetensors`` of an expert folder, which is replaced as a whole, manifest and all.

    Its other files are hard-linked where the file system allows.

    Args:
        folder: the expert.
        shard_folder: images to fit it to; None draws them from the expert itself.
        seed: of the noise, and of the samples.
        num_images: samples to draw. Their mean is off by sqrt(variance/num_images), which is all that counts
            at t = 1: 4 % of a deviation for 512.
        steps: of the expert's own sampler.
        on_batch: called with the number of samples after each batch.

    Raises:
        HddmError: for anything but an expert folder, one whose other files are not those that were written,
            images of another shape than its samples or of another shard, samples that are not finite, or an
            expert whose calibration is part of its training.
    """
    restore(folder.resolve())
    if not (folder / EXPERT_FILE).exists():
        # Says what else it is, if it is nothing to be sampled from.
        load(folder)
        raise HddmError(f"{folder}: an ensemble; calibrate its experts one by one")
    expert = open_expert(folder, with_calibration=False)
    facts = expert.facts
    if facts.training_calibration:
        raise HddmError(
            f"{folder}: was trained on in its calibration, which must stay as it is; there is nothing to fit"
        )
    if foreign := foreign_weights(folder, facts):
        raise HddmError(f"{folder}: {foreign}")
    field = field_of(expert.read(torch.float32))
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
    _replace_calibration(folder, facts, calibration)


def _replace_calibration(folder: Path, facts: ExpertFacts, calibration: Calibration) -> None:
    # A link stays, and what it leads to is replaced.
    target = folder.resolve()
    with writing(folder), new_folder(target, EXPERT_FILE, overwrite=True) as draft:
        shutil.copymode(target, draft)
        for path in target.rglob("*"):
            name = path.relative_to(target)
            if path.is_dir():
                (draft / name).mkdir()
            elif name.as_posix() not in (FILE_NAME, EXPERT_FILE, MANIFEST, RECORD):
                link_or_copy(path, draft / name)
        calibration.save(draft)
        write_records(draft, facts, {})


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
