"""What trainings begin with: fresh networks of a named size for images of a given shape, or an expert."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers import ModelMixin

from hddm.adapters import ADAPTER_WEIGHTS
from hddm.errors import HddmError
from hddm.files import sha256_of
from hddm.model_folders import WEIGHTS
from hddm.models.sizes import size_config

Network = TypeVar("Network", bound=ModelMixin)


def begun_with(init: Path) -> dict[str, str]:
    """What a record says of the expert folder that a training began with."""
    weights = WEIGHTS if (init / WEIGHTS).is_file() else ADAPTER_WEIGHTS
    return {"init": init.resolve().name, "init_sha256": sha256_of(init / weights)}


def new_network(kind: type[Network], size: str, shape: Sequence[int], seed: int, **arguments: Any) -> Network:
    """A ``kind`` of network of named ``size`` for images of ``shape`` (C, H, W).

    Its weights depend on ``seed`` alone; torch's global generator is left as it was.

    Raises:
        HddmError: for an unknown size, or images that are not squares of whole patches.
    """
    channels, height, width = shape
    config = size_config(size)
    if height != width or height % config["patch_size"]:
        raise HddmError(
            f"images are {width}×{height}; --size {size} takes squares with a side divisible by "
            f"{config['patch_size']}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network: Network = kind(sample_size=height, in_channels=channels, **config, **arguments)
    return network
