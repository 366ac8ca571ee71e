"""Calibrating an expert on a shard: on which of its samples, and what is remembered of them."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from hddm.calibration import Calibration, calibrate
from hddm.data.shard_records import MIN_IMAGES
from hddm.data.shards import Shard
from hddm.training.shard_fit import conditions_at
from hddm.velocity import VelocityField
from hddm.wording import counted

CALIBRATION_IMAGES = 4096
"""A calibration looks at so many images of a shard at most, spread evenly over it."""
CALIBRATION_BYTES = 2**30
"""And at so many bytes of them: samples in float64, as moments are taken, and tokens in float32."""

log = logging.getLogger(__name__)


def calibrated_on(shard: Shard, field: VelocityField, given: Mapping[str, Tensor], seed: int) -> Calibration:
    """A calibration of ``field``, which has none yet, that says which shard it was fitted to.

    Args:
        shard: of which `calibration_rows` are looked at.
        field: the expert; it is asked where it is.
        given: conditions (N, …) of all samples; tokens come from the shard where the expert takes them.
        seed: of the noise.
    """
    rows = calibration_rows(shard)
    log.info("calibrating on %s …", counted(len(rows), "image"))
    conditions = {
        name: value.to(field.device) for name, value in conditions_at(rows, given, shard, field).items()
    }
    calibration = calibrate(field.velocity, shard.take(rows).to(field.device), conditions, seed)
    return replace(calibration, record=shard_record(shard) | {"seed": str(seed)})


@contextlib.contextmanager
def placed(network: nn.Module, device: torch.device) -> Iterator[None]:
    """Within the block ``network`` is on ``device``, and afterwards on the CPU."""
    network.to(device)
    try:
        yield
    finally:
        network.to("cpu")


def calibration_rows(shard: Shard) -> Tensor:
    """The samples that moments are taken of: all, or as many as may be, spread evenly over the shard."""
    size = 8 * torch.Size(shard.shape).numel()
    if shard.texts is not None:
        size += 4 * shard.texts.null.numel()
    number = min(len(shard), CALIBRATION_IMAGES, max(CALIBRATION_BYTES // size, MIN_IMAGES))
    return torch.linspace(0, len(shard) - 1, number).round().long()


def shard_record(shard: Shard) -> dict[str, str]:
    """What a calibration remembers of its shard."""
    return {"data": f"shard {shard.hash}", "images": str(len(calibration_rows(shard)))}
