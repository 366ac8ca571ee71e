"""Which features a distance is measured on: Inception, CLIP, or a small classifier of the data."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from hddm.data.images import ImageSet
from hddm.errors import HddmError, UsageError, did_you_mean
from hddm.evaluation.classifier import (
    FEATURES,
    FeatureClassifier,
    load_classifier,
    train_classifier,
    weights_hash,
)
from hddm.evaluation.networks import (
    CLIP_RESIZE,
    INCEPTION_FEATURES,
    INCEPTION_RESIZE,
    clip_features,
    device,
    inception_features,
)
from hddm.evaluation.published import CLIP, INCEPTION

NAMES = ("auto", "inception", "clip", "classifier")
CLIP_FEATURES = 512
ASKED = "asked for"
_AS_THEY_ARE = "none"


@dataclass(frozen=True)
class Extractor:
    """Named features: ``features`` turns images (n, C, H, W) in [-1, 1] into (n, dimensions).

    ``hash`` is of the weights, ``resize`` says how images are brought to the network's size, ``choice`` why
    these features were taken, ``device`` where the network runs.
    """

    name: str
    dimensions: int
    features: Callable[[Tensor], Tensor]
    hash: str = ""
    resize: str = _AS_THEY_ARE
    choice: str = ASKED
    device: str = "cpu"


def open_extractor(features: str, training: ImageSet, fewest: int) -> Extractor:
    """The extractor that ``--features`` names.

    Args:
        features: ``inception``, ``clip``, ``classifier`` (trained on ``training``), the file of a classifier
            that was saved, or ``auto``, as `choose_extractor`.
        training: the images of the training side.
        fewest: number of images of the smallest side that will be measured.

    Raises:
        HddmError: for anything else, for weights that are not on disk, with file name, URL, SHA-256 and
            folder, and for a classifier of images without two classes.
    """
    option = f"--features {features}"
    if features == "auto":
        return choose_extractor(training, fewest)
    if features == "inception":
        return _inception(INCEPTION.require(option), ASKED)
    if features == "clip":
        path = CLIP.require(option)
        network = clip_features(path)
        return Extractor("CLIP ViT-B/32", CLIP_FEATURES, network, CLIP.sha256, CLIP_RESIZE, ASKED, device())
    if features == "classifier":
        return of_classifier(trained(training))
    if features.endswith(".safetensors"):
        return of_classifier(load_classifier(Path(features), training.pixels.shape[1]))
    raise UsageError(
        f"{option}: choose one of {', '.join(NAMES)}, or the .safetensors file of a saved classifier"
        f"{did_you_mean(features, NAMES)}"
    )


def choose_extractor(training: ImageSet, fewest: int) -> Extractor:
    """Inception where its weights are on disk and every side has more images than its 2048 features.

    Otherwise a small classifier, trained on the labelled ``training`` images and named as such: its
    numbers are not comparable with published FIDs. ``choice`` of the extractor says which was the case.

    Args:
        training: the images of the training side.
        fewest: number of images of the smallest side that will be measured.

    Raises:
        HddmError: where neither is possible.
    """
    there, many = INCEPTION.find() is not None, fewest > INCEPTION_FEATURES
    if there and many:
        choice = f"auto: its weights are on disk, and every side has more than {INCEPTION_FEATURES} images"
        return _inception(INCEPTION.require("--features auto"), choice)
    few = f"it needs more than {INCEPTION_FEATURES} images a side and there are {fewest}"
    why = few if there else f"its weights ({INCEPTION.name}) are not on disk"
    if training.labels is not None and len(training.classes) > 1:
        return of_classifier(trained(training), f"auto: not Inception, since {why}")
    raise HddmError(
        f"--features auto: no features to measure on: not Inception, since {why}; and {training.root} has no "
        "class folders to train a classifier on; take --features inception or clip, or give labelled images"
    )


def trained(training: ImageSet) -> FeatureClassifier:
    """A classifier of the ``training`` images.

    Raises:
        HddmError: for images without labels.
    """
    if training.labels is None:
        raise HddmError(
            f"--features classifier: {training.root} has no class folders to train on; take inception or clip"
        )
    return train_classifier(training.normalised, training.labels)


def of_classifier(classifier: FeatureClassifier, choice: str = ASKED) -> Extractor:
    """The features of a small classifier."""
    name = "small classifier of the training images"
    return Extractor(
        name, FEATURES, classifier.features, weights_hash(classifier.state_dict()), choice=choice
    )


def _inception(path: Path, choice: str) -> Extractor:
    network = inception_features(path)
    return Extractor(
        "Inception (clean-fid)",
        INCEPTION_FEATURES,
        network,
        INCEPTION.sha256,
        INCEPTION_RESIZE,
        choice,
        device(),
    )
