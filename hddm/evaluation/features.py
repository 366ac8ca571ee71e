"""Image features for distances: Inception, or a small classifier of the data.

Inception's weights are found on disk, checked, and never downloaded; its features are those of clean-fid.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from hddm.data.images import ImageSet, to_bytes, to_unit_range
from hddm.evaluation.feature_names import (
    DIGITS,
    INCEPTION,
    INCEPTION_FILE,
    find_inception,
    inception_file,
    refuse_unknown,
)
from hddm.evaluation.score_records import FeaturesRecord
from hddm.networks.efficientnet import (
    DIMENSIONS,
    EFFICIENTNET,
    RESIZE,
    SHA256,
    EfficientNetFeatures,
)
from hddm.utils.errors import HddmError
from hddm.utils.files import write_whole
from hddm.utils.progress import Progress
from hddm.utils.streams import Use, generator, seed_of
from hddm.utils.tensors import read_safetensors

REQUESTED = "requested"
_BATCH = 32

FEATURES = 64
MOST_STEPS = 3000
"""Training steps: a few minutes on one core for images of 32 pixels."""


class FeatureClassifier(nn.Module):
    """Convolutional classifier whose last hidden layer (64 numbers) serves as image features.

    A Fréchet distance on them ranks models of one data set under one classifier; it does not compare with
    published FIDs, nor across classifiers.
    """

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 32, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(32, 64, 3, padding=1, stride=2),
            nn.GELU(),
            nn.Conv2d(64, 64, 3, padding=1, stride=2),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(256, FEATURES),
            nn.GELU(),
        )
        self.head = nn.Linear(FEATURES, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (n, classes) of images (n, C, H, W) in [-1, 1]."""
        logits: Tensor = self.head(self.body(images))
        return logits

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Features (n, 64) of images (n, C, H, W) in [-1, 1]."""
        features: Tensor = self.body(images)
        return features

    @torch.no_grad()
    def probabilities(self, features: Tensor) -> Tensor:
        """Probability (n, classes) of each class, from features (n, 64)."""
        logits: Tensor = self.head(features.to(self.head.weight))
        return logits.softmax(1)


def train_classifier(
    images: Tensor, labels: Tensor, seed: int = 0, epochs: int = 30, batch_size: int = 64
) -> FeatureClassifier:
    """Train on ``images`` (n, C, H, W) in [-1, 1] with labels (n,), for at most `MOST_STEPS` steps.

    Images are shifted by up to one pixel, since otherwise features of 8-pixel images overfit.
    """
    classes = int(labels.max()) + 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, Use.CLASSIFIER_WEIGHTS))
        model = FeatureClassifier(images.shape[1], classes)
    steps = min(epochs * max(len(images) // batch_size, 1), MOST_STEPS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    draws = generator(seed, Use.CLASSIFIER_STEPS)
    with Progress(steps, "train a classifier for features") as progress:
        for _ in range(steps):
            rows = torch.randint(len(images), (batch_size,), generator=draws)
            down, right = torch.randint(-1, 2, (2,), generator=draws).tolist()
            shifted = F.pad(images[rows], (1, 1, 1, 1), value=-1.0).roll((down, right), (2, 3))
            loss = F.cross_entropy(model(shifted[..., 1:-1, 1:-1]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            progress(1)
    return model.eval()


def save_classifier(classifier: FeatureClassifier, path: Path) -> None:
    """Write the weights to a new safetensors file, so that others measure on the same features.

    Raises `HddmError` for an existing file, or one that cannot be written.
    """
    weights = classifier.state_dict()
    write_whole(path, lambda draft: save_file(weights, draft, {"format": "pt"}), overwrite=False)


def load_classifier(path: Path, channels: int) -> FeatureClassifier:
    """Load a classifier that `save_classifier` wrote, for images with ``channels``.

    Raises `HddmError` for a missing file, another network, or other channels.
    """
    weights = read_safetensors(path)
    try:
        classifier = FeatureClassifier(channels, len(weights["head.weight"]))
        classifier.load_state_dict(weights)
    except (KeyError, TypeError, RuntimeError) as error:
        text = f"is not a classifier of hddm for images of {channels} channels"
        raise HddmError(f"{path}: {text}; `save_classifier` writes one") from error
    return classifier.eval()


def weights_hash(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, shapes and values, in hexadecimal digits."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


FeatureFunction = Callable[[Tensor], Tensor]
"""Images (n, C, H, W) in [-1, 1] to features (n, dimensions) on the CPU."""


@dataclass(frozen=True)
class FeatureExtractor:
    """``features`` turns images (n, C, H, W) in [-1, 1] into (n, dimensions).

    ``classifier`` is the network whose features they are, if that is a small classifier.
    """

    record: FeaturesRecord
    features: FeatureFunction
    classifier: FeatureClassifier | None = None


def open_extractor(features: str, training: ImageSet, fewest: int) -> FeatureExtractor:
    """Open the extractor that ``--features`` names.

    ``features`` is ``inception``, ``classifier`` (trained on ``training``), ``digits-classifier``,
    ``efficientnet-lite0``, the file of a saved classifier, or ``auto``: Inception if its weights are on disk
    and every side has more images than its 2048 features, otherwise a classifier, named as such, since its
    numbers do not compare with published FIDs. The extractor's ``choice`` is the reason. The smallest side to
    be measured has ``fewest`` images.

    Raises `HddmError` for anything else, for weights missing on disk (with file name, URL, SHA-256 and
    folder), and for a classifier of fewer than two classes.
    """
    option = f"`features` {features}"
    if features == "auto":
        few = INCEPTION.dimensions
        if find_inception() is None:
            why = f"its weights ({INCEPTION_FILE}) are not on disk"
        elif fewest <= few:
            why = f"it needs more than {few} images per side and there are {fewest}"
        else:
            choice = f"auto: its weights are on disk, and every side has more than {few} images"
            return open_inception(option, choice)
        return of_classifier(classifier_of(training), f"auto: not Inception, since {why}")
    if features == "inception":
        return open_inception(option)
    if features == "classifier":
        return of_classifier(classifier_of(training))
    if features == DIGITS:
        return of_digits(training)
    if features == EFFICIENTNET:
        return open_efficientnet(option)
    refuse_unknown(features)
    return of_classifier(load_classifier(Path(features), training.pixels.shape[1]))


def classifier_of(training: ImageSet) -> FeatureClassifier:
    """Train a classifier on the ``training`` images; raises `HddmError` for fewer than two classes.

    It sees them in an order of their own, so it depends on the images and not on their names or shards.
    """
    if training.labels is None or len(training.classes) < 2:
        text = "has no class folders to train a classifier on; use `features` inception"
        raise HddmError(f"{training.root}: {text}")
    labels = training.labels.tolist()
    content = []
    for pixels, label in zip(training.pixels, labels, strict=True):
        content.append((pixels.numpy().tobytes(), label))
    order = sorted(range(len(content)), key=content.__getitem__)
    return train_classifier(to_unit_range(training.pixels[order]), training.labels[order])


def of_classifier(classifier: FeatureClassifier, choice: str = REQUESTED) -> FeatureExtractor:
    """Features of a small classifier."""
    record = FeaturesRecord(
        name="small classifier of the training images",
        dimensions=FEATURES,
        hash=weights_hash(classifier.state_dict()),
        choice=choice,
    )
    return FeatureExtractor(record, classifier.features, classifier)


DIGITS_FILE = Path(__file__).parent / "classifiers" / "digits.safetensors"
DIGITS_HASH = "df5c245b089dd04c8ff65309132e05532d2aedb1d35d417a5b79b0aa77120f8a"
"""Of the weights. They were trained by `classifier_of` on the training images of ``hddm data digits``.

Distances by classifiers of other seeds differ by a common factor, of 11 % (docs/results.md): one file for all
makes them comparable.
"""


def of_digits(training: ImageSet) -> FeatureExtractor:
    """Features of the classifier of digits that comes with hddm.

    Raises `HddmError` for images of other classes, and for a file that is not the known one.
    """
    classes = tuple(map(str, range(10)))
    if training.classes != classes or training.pixels.shape[1:] != (1, 8, 8):
        raise HddmError(
            f"{training.root}: `features` {DIGITS} is for the digits of hddm data digits, gray images of 8×8 "
            "in the classes 0 to 9; use `features` classifier"
        )
    found = of_classifier(load_classifier(DIGITS_FILE, 1))
    if found.record.hash != DIGITS_HASH:
        raise HddmError(f"{DIGITS_FILE}: is not the known file; install hddm again")
    record = found.record.model_copy(update={"name": "small classifier of digits, of hddm"})
    return replace(found, record=record)


def open_efficientnet(option: str) -> FeatureExtractor:
    """Features of `hddm.networks.efficientnet`; raises as `EfficientNetFeatures`."""
    network = EfficientNetFeatures(option)
    record = FeaturesRecord(
        name="EfficientNet-lite0 (ImageNet)",
        dimensions=DIMENSIONS,
        hash=SHA256,
        resize=RESIZE,
        choice=REQUESTED,
        device=network.device,
    )

    def features(images: Tensor) -> Tensor:
        colour = to_bytes(images).expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
        return torch.from_numpy(network(list(map(np.ascontiguousarray, colour))))

    return FeatureExtractor(record, features)


def open_inception(option: str, choice: str = REQUESTED) -> FeatureExtractor:
    """Features of the checked file; ``option`` is the option that needs them, for the message.

    Raises `HddmError` if it is missing, with all that is needed to add it, or has another hash.
    """
    path = inception_file(option)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record = INCEPTION.model_copy(update={"choice": choice, "device": device})
    return FeatureExtractor(record, inception_features(path, device))


def inception_features(weights: Path, device: str) -> FeatureFunction:
    """clean-fid's network with its resizing ``clean``, one image at a time: (n, 2048) (arXiv:2104.11222)."""
    from cleanfid.inception_torchscript import InceptionV3W
    from cleanfid.resize import build_resizer

    network = InceptionV3W(str(weights.parent), download=False, resize_inside=False)
    network = network.eval().to(device)
    resized = build_resizer("clean")

    @torch.no_grad()
    def features(images: Tensor) -> Tensor:
        colour = to_bytes(images).expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
        batches = []
        for start in range(0, len(colour), _BATCH):
            batch = map(np.ascontiguousarray, colour[start : start + _BATCH])
            ready = np.stack([resized(image) for image in batch])
            pixels = torch.from_numpy(ready).permute(0, 3, 1, 2).float().to(device)
            batches.append(network(pixels).float().cpu())
        return torch.cat(batches)

    return features
