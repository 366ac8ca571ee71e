"""Features of images for clustering: what is near in them becomes one shard."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hddm.data.sources import ImageSource

PIXELS = "pixels"
SHORT_NAMES = {"dinov2": "facebook/dinov2-base", "clip": "openai/clip-vit-large-patch14"}
"""Names on Hugging Face's hub for which a word is enough."""


class Extractor(Protocol):
    """Images → features (n, d) in float32.

    ``batch`` images are taken at once, in the order of the source, so that equal settings give equal bits on
    one device.
    """

    name: str
    batch: int

    @property
    def identity(self) -> str:
        """What features depend on beside the images: settings and weights, in 64 hexadecimal digits.

        Not the device: on another one they differ by rounding alone, and are worth keeping.
        """

    def prepare(self, source: ImageSource, folder: Path) -> None:
        """Learn from ``source`` what is needed, kept in ``folder`` for the next time."""

    def __call__(self, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        """Features (n, d) of images (H, W, 3), of any sizes."""


def open_extractor(features: str, seed: int = 0) -> Extractor:
    """The extractor that ``--features`` names.

    Args:
        features: ``pixels``, ``dinov2``, ``clip``, a local folder of a DINOv2 or CLIP vision model, or such a
            model's name on Hugging Face's hub. Only hub names use the network, and only for files that are
            not in the cache.
        seed: of the images on which principal components are fitted.

    Raises:
        HddmError: as `hddm.data.features_vision.open_vision_model`.
    """
    if features == PIXELS:
        from hddm.data.features_pixels import PixelPca

        return PixelPca(seed=seed)
    from hddm.data.features_vision import open_vision_model

    return open_vision_model(SHORT_NAMES.get(features, features))


def in_colour(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pixels (H, W, 3) of a gray (H, W) or colour image."""
    return pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, axis=2)
