"""Fresh networks of a named size for images of a given shape."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from diffusers import ModelMixin

from hddm.errors import HddmError
from hddm.models.sizes import size_config

Network = TypeVar("Network", bound=ModelMixin)


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
