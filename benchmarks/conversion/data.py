"""Two data sets, each in an old part to pretrain on and a new part to train on."""

import functools
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from hddm.data.images import load_images, to_unit_range, write_digits
from hddm.evaluation.features import FeatureClassifier, train_classifier

ANIMALS = ("bird", "cat", "deer", "dog", "frog", "horse")
VEHICLES = ("airplane", "automobile", "ship", "truck")
CLASSIFIER_IMAGES = 10_000


@dataclass(frozen=True)
class Part:
    """Images (n, C, H, W) in [-1, 1] of one part, and features of its training images."""

    training: Tensor
    held_out: Tensor
    features: Tensor


@dataclass(frozen=True)
class Parts:
    """Both parts of a data set, and the classifier of all its training images that gives the features."""

    old: Part
    new: Part
    classifier: FeatureClassifier


def write_digits_parts(path: Path, epochs: int = 30) -> None:
    """Scikit-learn's digits: 0-4 are old, 5-9 new; a fifth of all is held out."""
    training, held_out = (load_images(folder) for folder in write_digits(path.parent / "digits"))
    assert training.labels is not None
    assert held_out.labels is not None
    _write(path, training.pixels, training.labels, held_out.pixels, held_out.labels, range(5), epochs)


def write_cifar_parts(
    path: Path, archives: Path, side: int = 16, per_class: int = 2000, held_out: int = 250, epochs: int = 8
) -> None:
    """CIFAR-10 scaled down to ``side`` by averaging: animals are old, vehicles new.

    ``archives`` holds ``cifar10-train.tar.gz`` and ``cifar10-test.tar.gz`` with ``<split>/<class>/<n>.jpg``.
    The first ``per_class`` images of each class are taken, and ``held_out`` of the test split.
    """
    training, labels = _from_archive(archives / "cifar10-train.tar.gz", side, per_class)
    fresh, fresh_labels = _from_archive(archives / "cifar10-test.tar.gz", side, held_out)
    _write(path, training, labels, fresh, fresh_labels, range(len(ANIMALS)), epochs)


@functools.lru_cache(1)
def read_parts(path: Path) -> Parts:
    """What one of the writers wrote."""
    tensors = load_file(path)
    weights = {key[4:]: value for key, value in tensors.items() if key.startswith("net.")}
    classifier = FeatureClassifier(tensors["old.training"].shape[1], len(weights["head.bias"]))
    classifier.load_state_dict(weights)
    old, new = (
        Part(
            to_unit_range(tensors[f"{name}.training"]),
            to_unit_range(tensors[f"{name}.held_out"]),
            tensors[f"{name}.features"],
        )
        for name in ("old", "new")
    )
    return Parts(old, new, classifier.eval())


def _write(
    path: Path,
    pixels: Tensor,
    labels: Tensor,
    fresh: Tensor,
    fresh_labels: Tensor,
    old: range,
    epochs: int,
) -> None:
    mixed = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))[:CLASSIFIER_IMAGES]
    classifier = train_classifier(to_unit_range(pixels[mixed]), labels[mixed], epochs=epochs)
    with torch.no_grad():
        guessed = torch.cat([classifier(part).argmax(1) for part in to_unit_range(fresh).split(512)])
    right = (guessed == fresh_labels).double().mean().item()
    print(f"feature classifier: {100 * right:.0f} % of {len(fresh)} held-out images", flush=True)
    tensors = {f"net.{key}": value for key, value in classifier.state_dict().items()}
    for name in ("old", "new"):
        is_old, fresh_is_old = labels < len(old), fresh_labels < len(old)
        chosen = pixels[is_old if name == "old" else ~is_old]
        tensors[f"{name}.training"] = chosen
        tensors[f"{name}.held_out"] = fresh[fresh_is_old if name == "old" else ~fresh_is_old]
        tensors[f"{name}.features"] = classifier.features(to_unit_range(chosen))
    draft = path.with_suffix(".part")
    save_file({key: value.contiguous() for key, value in tensors.items()}, draft)
    draft.rename(path)


def _from_archive(archive: Path, side: int, per_class: int) -> tuple[Tensor, Tensor]:
    """Bytes (n, 3, side, side) and labels: animals first, then vehicles, each in the order above."""
    classes = (*ANIMALS, *VEHICLES)
    images: list[list[np.ndarray]] = [[] for _ in classes]
    with tarfile.open(archive) as tar:
        for member in tar:
            name = Path(member.name)
            if not member.isfile() or name.parent.name not in classes:
                continue
            found = images[classes.index(name.parent.name)]
            content = tar.extractfile(member)
            if len(found) < per_class and content is not None:
                with Image.open(content) as image:
                    small = image.convert("RGB").resize((side, side), Image.Resampling.BOX)
                    found.append(np.asarray(small))
    stacked = torch.from_numpy(np.stack([one for each in images for one in each]))
    labels = torch.repeat_interleave(torch.arange(len(classes)), torch.tensor([len(i) for i in images]))
    return stacked.permute(0, 3, 1, 2).contiguous(), labels
