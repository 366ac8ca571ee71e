"""Which images are kept from training, and what share of them leaves every shard enough on both sides.

The hash of its pixels decides for each image. So equal images are on one side, and an image is on the same
side for any number of shards, any features, and after others were added or removed: what judges the experts
of one partition was not trained on in another. The price is that a share is met on average.
"""

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hddm.data.shard_records import MIN_IMAGES
from hddm.errors import HddmError
from hddm.wording import counted

_ROUNDING = 1e-9


def numbers_of(digests: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Numbers (M,) in [0, 1), the first 8 bytes of ``digests`` (M, 32); a share takes those below it."""
    numbers: NDArray[np.float64] = np.ascontiguousarray(digests[:, :8]).view(">u8")[:, 0] / 2.0**64
    return numbers


def images_needed(share: float) -> float:
    """Images that a shard needs, so that `MIN_IMAGES` are to be expected on both sides."""
    return MIN_IMAGES / (min(share, 1 - share) if share else 1)


def check_share(images: Path, num: int, num_shards: int, share: float) -> None:
    """Refuse a share in (0, 1) that leaves shards too few images on a side: known without their features.

    Args:
        images: for the message.
        num: how many there are.
        num_shards: K; num / K are in a shard.
        share: that is to be held out.

    Raises:
        HddmError: with the nearest share that works.
    """
    each = num / num_shards
    if each * (1 + _ROUNDING) >= images_needed(share):
        return
    start = f"{images}: --held-out {share:g} of {num} images in {counted(num_shards, 'shard')}"
    if each < 2 * MIN_IMAGES:
        raise HddmError(
            f"{start}: a shard has about {each:.0f}, and needs {MIN_IMAGES} to train on and {MIN_IMAGES} "
            "to be judged by; take fewer shards or hold none out"
        )
    if share <= 0.5:
        least = _rounded(MIN_IMAGES / each, up=True)
        raise HddmError(
            f"{start} are about {share * each:.1f} a shard, too few to judge its expert by; the "
            f"smallest share that works is {least:g}, or take fewer shards"
        )
    most = _rounded(1 - MIN_IMAGES / each, up=False)
    raise HddmError(
        f"{start} leaves about {(1 - share) * each:.1f} a shard to train on, and {MIN_IMAGES} are needed; "
        f"the largest share that can work is {most:g}, or take fewer shards"
    )


def check_rest(
    images: Path, numbers: NDArray[np.float64], shard: NDArray[np.int64], num_shards: int, share: float
) -> None:
    """Refuse a share that leaves a shard fewer than `MIN_IMAGES` images to train on.

    Args:
        images: for the message.
        numbers: (M,), as `numbers_of`.
        shard: (M,) in [0, num_shards).
        num_shards: K; each has `MIN_IMAGES` images.
        share: that is to be held out.

    Raises:
        HddmError: with a share that works.
    """
    left = np.bincount(shard[numbers >= share], minlength=num_shards)
    if left.min() >= MIN_IMAGES:
        return
    largest = min(float(np.sort(numbers[shard == k])[-MIN_IMAGES]) for k in range(num_shards))
    raise HddmError(
        f"{images}: with --shards {num_shards}, --held-out {share:g} shard {left.argmin()} has "
        f"{counted(int(left.min()), 'image')} left to train on and needs {MIN_IMAGES}; --held-out "
        f"{_rounded(largest, up=False):g} leaves every shard enough, or take fewer shards"
    )


def _rounded(value: float, up: bool) -> float:
    """``value`` in (0, 1) to three significant digits, so that its user is on the safe side."""
    factor = 10.0 ** (2 - math.floor(math.log10(value)))
    scaled = value * factor
    return (math.ceil(scaled - _ROUNDING) if up else math.floor(scaled + _ROUNDING)) / factor
