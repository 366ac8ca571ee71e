"""All figures of one set of images, against both sides of a split."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hddm.data.images import to_unit_range
from hddm.errors import HddmError
from hddm.evaluation.diversity import diversity, nearest_ratio
from hddm.evaluation.extractors import Extractor
from hddm.evaluation.frechet import Distance, Features, measure


@dataclass(frozen=True)
class Scores:
    """Figures of a set of images; ``extractor`` names the features, without which they mean nothing."""

    extractor: str
    images: int
    to_training: Distance
    to_held_out: Distance | None
    diversity: float
    nearest_ratio: float | None


class Scorer:
    """Scores sets of images against training images and held-out images.

    Args:
        extractor: of the features.
        training, held_out: the two sides, as bytes (n, C, H, W); without held-out images, what needs
            them is None.
        resamples: of the bootstrap.
        allow_few: whether fewer images than features are measured all the same, and marked.
    """

    def __init__(
        self,
        extractor: Extractor,
        training: Tensor,
        held_out: Tensor | None,
        resamples: int = 100,
        allow_few: bool = False,
    ) -> None:
        self._extractor, self._resamples, self._allow_few = extractor, resamples, allow_few
        self._training = to_unit_range(training)
        self._held_out = None if held_out is None else to_unit_range(held_out)
        self._training_features = self._of(self._training)
        self._held_out_features = None if self._held_out is None else self._of(self._held_out)

    def real(self) -> Distance:
        """Distance of the held-out images themselves to the training images.

        Raises:
            HddmError: where there are none.
        """
        if self._held_out_features is None:
            raise HddmError("there are no held-out images to measure")
        return self._distance(self._held_out_features, self._training_features)

    def score(self, pixels: Tensor) -> Scores:
        """Figures of images (n, C, H, W) in bytes.

        Raises:
            HddmError: as `hddm.evaluation.frechet.measure`, for too few images.
        """
        images = to_unit_range(pixels)
        features = self._of(images)
        return Scores(
            extractor=self._extractor.name,
            images=len(images),
            to_training=self._distance(features, self._training_features),
            to_held_out=None
            if self._held_out_features is None
            else self._distance(features, self._held_out_features),
            diversity=diversity(torch.from_numpy(features), torch.from_numpy(self._training_features)),
            nearest_ratio=None
            if self._held_out is None
            else nearest_ratio(images, self._training, self._held_out),
        )

    def _distance(self, features: Features, reference: Features) -> Distance:
        return measure(features, reference, self._resamples, allow_few=self._allow_few)

    def _of(self, images: Tensor) -> Features:
        return self._extractor.features(images).double().numpy()
