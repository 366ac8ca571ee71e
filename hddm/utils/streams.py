"""Random numbers: one table of streams, so that no two uses of a seed share numbers.

A stream is decided by four whole numbers below 2^32: (seed, index, use, part). numpy pads a shorter key with
zeros, so streams of one use always have the same key, and every use has a number of its own:

    (seed, i), (seed, i, 1), (seed, i, 2)    sample i: its noise, its expert, noise for inpainting
    (seed, index, `Use`)                     everything else, from 3 on

``part`` separates trainings of one seed: an expert's is the number of its shard.
"""

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from hddm.utils.errors import HddmError

if TYPE_CHECKING:
    import torch

NUMBERS = 2**32
"""Seeds, indices and parts are below this."""
NOISE, DRAW, FRESH = 0, 1, 2
"""Uses of a sample: its initial noise, the draw of its expert, and fresh noise for inpainting."""


class Use(IntEnum):
    """What random numbers are for; a number is never used twice. See the module."""

    EXPERT_ORDER = 3
    """Order of the samples, by epoch."""
    EXPERT_STEPS = 4
    """All that a step draws, by step."""
    ROUTER_ORDER = 5
    ROUTER_STEPS = 6
    STUDENT_ORDER = 7
    STUDENT_STEPS = 8
    WEIGHTS = 9
    """Weights of a new network."""
    ADAPTER_WEIGHTS = 10
    STUDENT_WEIGHTS = 11
    """What a student of few steps has beside its init."""
    FRESH_WEIGHTS = 12
    """What a converted network gets that its checkpoint lacks."""
    CALIBRATION = 13
    """Halves, images and noise of a calibration."""
    NATIVE_NOISE = 14
    """Noise of an expert's native samples, by sample."""
    NATIVE_CLASSES = 15
    DENOISING = 16
    """Noise by which experts are verified."""
    ROUTER_CALIBRATION = 17
    TRAJECTORY_NOISE = 18
    """Noise of a teacher's trajectories, by trajectory."""
    TRAJECTORY_IMAGES = 19
    """Images whose conditions trajectories have."""
    TOPICS = 20
    """Starts of the clusters of captions."""
    CLUSTERS = 22
    """Orders and mini-batches of k-means, by run."""
    CLUSTER_STARTS = 23
    CLUSTER_START_POINTS = 24
    FEATURE_IMAGES = 26
    """Images on which pixel components are fitted."""
    FEATURE_COMPONENTS = 27
    REPORT_IMAGES = 28
    """Images that a partition's report shows."""
    CLASSIFIER_WEIGHTS = 30
    CLASSIFIER_STEPS = 31
    BOOTSTRAP = 32
    """Resamples of a Fréchet distance."""
    KERNEL_SUBSETS = 33
    PRECISION_ROWS = 34
    """Rows of precision and recall."""
    DIVERSITY_ROWS = 35
    DIVERSITY_PAIRS = 36
    CONVERSION_STATES = 37
    """States on which a converted network is compared with its source."""
    CONVERSION_CONDITIONS = 38
    OBJECTIVE = 40
    """Noise of images whose error is measured, by image; parts are draws."""
    LIKELIHOOD = 41
    """Noise of images whose likelihood is measured, by image."""
    PROBES = 42
    """Signs that estimate a trace, by image; parts are probes."""
    RELIABILITY = 43
    """Noise of images on which experts are weighed, by image."""


def stream(seed: int, use: int, index: int = 0, part: int = 0) -> np.random.SeedSequence:
    """The stream of random numbers for a use; numpy's generators take it as their seed.

    Raises:
        HddmError: for a number that is negative or not below `NUMBERS`.
    """
    for name, value in {"seed": seed, "index": index, "part": part}.items():
        if not 0 <= value < NUMBERS:
            raise HddmError(f"{name} {value}: must be a whole number from 0 to {NUMBERS - 1}")
    return np.random.SeedSequence((seed, index, int(use), part))


def seed_of(seed: int, use: int, index: int = 0, part: int = 0) -> int:
    """A seed in [0, 2^63) for torch, which takes signed 64-bit integers; arguments as for `stream`."""
    return int(stream(seed, use, index, part).generate_state(1, np.uint64)[0] >> np.uint64(1))


def generator(seed: int, use: int, index: int = 0, part: int = 0) -> "torch.Generator":
    """A generator of torch's on the CPU; arguments as for `stream`."""
    # Data modules need no torch, which takes seconds to import.
    import torch

    return torch.Generator().manual_seed(seed_of(seed, use, index, part))
