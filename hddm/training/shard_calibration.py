"""Calibrating an expert on a shard: on which of its samples, and what is remembered of them."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from hddm.calibration import Calibration, calibrate
from hddm.data.shards import Shard
from hddm.training.shard_fit import conditions_at
from hddm.velocity import VelocityField

CALIBRATION_IMAGES = 4096
"""A calibration looks at so many images of a shard at most, spread evenly over it."""


def calibrated_on(shard: Shard, field: VelocityField, given: Mapping[str, Tensor], seed: int) -> Calibration:
    """A calibration of ``field``, which has none yet, that says which shard it was fitted to.

    Args:
        shard: of which `calibration_rows` are looked at.
        field: the expert.
        given: conditions (N, …) of all samples; tokens come from the shard where the expert takes them.
        seed: of the noise.
    """
    rows = calibration_rows(shard)
    conditions = conditions_at(rows, given, shard, field)
    calibration = calibrate(field.velocity, shard.take(rows), conditions, seed)
    return replace(calibration, record=shard_record(shard) | {"seed": str(seed)})


def calibration_rows(shard: Shard) -> Tensor:
    """The samples that moments are taken of: all, or `CALIBRATION_IMAGES` spread evenly over the shard."""
    return torch.linspace(0, len(shard) - 1, min(len(shard), CALIBRATION_IMAGES)).round().long()


def shard_record(shard: Shard) -> dict[str, str]:
    """What a calibration remembers of its shard."""
    return {"data": f"shard {shard.hash}", "images": str(len(calibration_rows(shard)))}
