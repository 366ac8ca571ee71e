"""Calibrating an expert that is already on disk."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from hddm.calibration import FILE_NAME, calibrate
from hddm.data.shards import load_shard
from hddm.errors import HddmError
from hddm.load import load
from hddm.training.expert import conditions_of
from hddm.velocity import VelocityField


def recalibrate(folder: Path, shard_folder: Path, seed: int = 0) -> None:
    """Fit ``calibration.safetensors`` of an expert folder to a shard, replacing it in one step.

    Raises:
        HddmError: for anything but an expert folder, or images of another shape than its samples.
    """
    field = load(folder)
    if not isinstance(field, VelocityField):
        raise HddmError(f"{folder}: an ensemble; calibrate its experts one by one")
    shard = load_shard(shard_folder)
    if tuple(shard.images.shape[1:]) != field.sample_shape:
        raise HddmError(
            f"{shard_folder}: images are {tuple(shard.images.shape[1:])}, the expert's samples "
            f"{field.sample_shape}"
        )
    field.calibration = None
    calibration = calibrate(field.velocity, shard.images, conditions_of(shard, field), seed)
    with TemporaryDirectory(dir=folder) as draft:
        calibration.save(Path(draft))
        # A rename also leaves hard-linked copies of the folder as they were.
        os.replace(Path(draft, FILE_NAME), folder / FILE_NAME)
