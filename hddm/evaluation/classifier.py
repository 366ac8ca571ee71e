"""A small classifier whose features suit images that Inception was not trained for."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from hddm.utils.errors import HddmError
from hddm.utils.files import write_whole
from hddm.utils.progress import Progress
from hddm.utils.streams import Use, generator, seed_of
from hddm.utils.tensors import read_safetensors

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
    def features(self, images: Tensor, batch_size: int = 512) -> Tensor:
        """Features (n, 64) of images (n, C, H, W) in [-1, 1]."""
        return torch.cat([self.body(batch) for batch in images.split(batch_size)])

    @torch.no_grad()
    def probabilities(self, features: Tensor) -> Tensor:
        """Probability (n, classes) of each class, from features (n, 64)."""
        logits: Tensor = self.head(features.to(self.head.weight))
        return logits.softmax(1)


def train_classifier(
    images: Tensor, labels: Tensor, seed: int = 0, epochs: int = 30, batch_size: int = 64
) -> FeatureClassifier:
    """Train on ``images`` (n, C, H, W) in [-1, 1] with labels (n,), for at most `MOST_STEPS` steps.

    Images are shifted by up to one pixel, since otherwise features of 8-pixel images overfit. Raises
    `HddmError` for fewer than two classes.
    """
    classes = int(labels.max()) + 1
    if classes < 2:
        raise HddmError("a feature classifier needs images of at least two classes")
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
        known = weights["body.0.weight"].shape[1]
        classifier = FeatureClassifier(known, len(weights["head.weight"]))
        classifier.load_state_dict(weights)
    except (KeyError, IndexError, TypeError, RuntimeError) as error:
        text = "is not a classifier of hddm; `save_classifier` writes one"
        raise HddmError(f"{path}: {text}") from error
    if known != channels:
        raise HddmError(f"{path}: is for images of {known} channels and these have {channels}; train another")
    return classifier.eval()


def weights_hash(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, shapes and values, in hexadecimal digits."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
