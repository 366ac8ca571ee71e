"""Which features a distance is measured on: Inception where its weights are, else a classifier."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hddm.data.images import ImageSet, to_bytes
from hddm.errors import HddmError
from hddm.evaluation.classifier import FEATURES, train_classifier

INCEPTION_FILE = "inception-2015-12-05.pt"
INCEPTION_FEATURES = 2048
_BATCH = 32


@dataclass(frozen=True)
class Extractor:
    """Named features: ``features`` turns images (n, C, H, W) in [-1, 1] into (n, dimensions)."""

    name: str
    dimensions: int
    features: Callable[[Tensor], Tensor]


def choose_extractor(training: ImageSet, fewest: int) -> Extractor:
    """Inception where its weights are on disk and every side has more images than its 2048 features.

    Otherwise a small classifier, trained on the labelled ``training`` images and named as such: its
    numbers are not comparable with published FIDs.

    Args:
        training: the images of the training side.
        fewest: number of images of the smallest side that will be measured.

    Raises:
        HddmError: where neither is possible.
    """
    weights = inception_weights()
    if weights is not None and fewest > INCEPTION_FEATURES:
        return Extractor("Inception (clean-fid)", INCEPTION_FEATURES, _inception(weights))
    if training.labels is not None and len(training.classes) > 1:
        classifier = train_classifier(training.normalised, training.labels)
        return Extractor("small classifier of the training images", FEATURES, classifier.features)
    found = f"found, but there are only {fewest} images a side" if weights else "not on disk"
    raise HddmError(
        f"no features to measure on: {INCEPTION_FILE} is {found} (it needs more than "
        f"{INCEPTION_FEATURES}), and {training.root} has no class folders to train a classifier on; "
        f"put the file into {_inception_folders()[0]}, or give labelled reference images"
    )


def inception_weights() -> Path | None:
    """Inception's TorchScript file where it is on disk: in $HDDM_INCEPTION or ~/.cache/clean-fid."""
    paths = (folder / INCEPTION_FILE for folder in _inception_folders())
    return next((path for path in paths if path.is_file()), None)


def _inception_folders() -> list[Path]:
    chosen = os.environ.get("HDDM_INCEPTION")
    return [*([Path(chosen)] if chosen else []), Path.home() / ".cache" / "clean-fid"]


def _inception(weights: Path) -> Callable[[Tensor], Tensor]:
    """clean-fid's own network and resizing, one image at a time as it does."""
    from cleanfid.inception_torchscript import InceptionV3W
    from cleanfid.resize import build_resizer

    network = InceptionV3W(str(weights.parent), download=False, resize_inside=False).eval()
    resize = build_resizer("clean")

    @torch.no_grad()
    def features(images: Tensor) -> Tensor:
        colour = to_bytes(images).expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
        batches = []
        for start in range(0, len(colour), _BATCH):
            resized = np.stack([resize(image) for image in colour[start : start + _BATCH]])
            batches.append(network(torch.from_numpy(resized).permute(0, 3, 1, 2)))
        return torch.cat(batches)

    return features
