"""All figures of one set of images, against both sides of a split."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hddm.data.images import to_unit_range
from hddm.evaluation.diversity import diversity, nearest_ratio
from hddm.evaluation.frechet import Distance, measure


@dataclass(frozen=True)
class Scores:
    """Figures of a set of images; ``extractor`` names the features, without which they mean nothing."""

    extractor: str
    images: int
    to_training: Distance
    to_held_out: Distance
    diversity: float
    nearest_ratio: float


class Scorer:
    """Scores sets of images against training images and held-out images.

    Args:
        extractor: name of the features, for the record.
        features: images (n, C, H, W) in [-1, 1] to features (n, d).
        training, held_out: the two sides, as bytes (n, C, H, W).
        resamples: of the bootstrap.
    """

    def __init__(
        self,
        extractor: str,
        features: Callable[[Tensor], Tensor],
        training: Tensor,
        held_out: Tensor,
        resamples: int = 100,
    ) -> None:
        self._extractor, self._features, self._resamples = extractor, features, resamples
        self._training, self._held_out = to_unit_range(training), to_unit_range(held_out)
        self._training_features = self._of(self._training)
        self._held_out_features = self._of(self._held_out)

    def score(self, pixels: Tensor) -> Scores:
        """Figures of images (n, C, H, W) in bytes.

        Raises:
            HddmError: as `hddm.evaluation.frechet.measure`, for too few images.
        """
        images = to_unit_range(pixels)
        features = self._of(images)
        return Scores(
            extractor=self._extractor,
            images=len(images),
            to_training=measure(features, self._training_features, self._resamples),
            to_held_out=measure(features, self._held_out_features, self._resamples),
            diversity=diversity(torch.from_numpy(features), torch.from_numpy(self._training_features)),
            nearest_ratio=nearest_ratio(images, self._training, self._held_out),
        )

    def _of(self, images: Tensor) -> np.ndarray:
        return self._features(images).double().numpy()
