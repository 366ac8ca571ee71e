"""Evaluation of a folder of images: every figure, with every setting that it depends on."""

import hashlib
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from hddm.data.images import to_bytes
from hddm.data.shard_records import find_shards
from hddm.data.shards import open_shard
from hddm.evaluation.classifier import FEATURES, save_classifier
from hddm.evaluation.distances import are_few, too_few
from hddm.evaluation.features import FeatureExtractor, of_classifier, open_extractor, trained
from hddm.evaluation.images import Role, alike, conditions, read_data, read_sampling
from hddm.evaluation.results import FORMAT, KIND
from hddm.evaluation.scores import Scorer
from hddm.utils.errors import HddmError, counted
from hddm.utils.progress import Progress

RESAMPLES = 100
_FEATURES = ("name", "dimensions", "hash", "resize", "choice", "device")
_PACKAGES = ("hddm-diffusion", "torch", "numpy", "pillow", "clean-fid", "transformers")


def evaluate_folder(
    images: Path,
    reference: Path,
    held_out: Path | None = None,
    allow_few: bool = False,
    *,
    features: str = "auto",
    shards: Path | None = None,
    classifier: Path | None = None,
    max_bad: int = 0,
) -> dict[str, Any]:
    """Scores of ``images`` against training images and held-out ones, as plain values.

    Besides the fields of `hddm.evaluation.scores.Scores` the result records the measured ``data``, the
    features, the record of ``hddm sample`` (``sampling``), versions, and if it is ``comparable``, with
    ``reasons`` if not. Memorisation is measured against training images as they are, so mirrored copies are
    missed.

    Args:
        images: folder of samples.
        reference: training images, or their partition (`hddm.evaluation.images.read_images`).
        held_out: images unseen in training, or the partition that holds them out.
        allow_few: accept no more images than features, and mark the result.
        features: as in `hddm.evaluation.features.open_extractor`.
        shards: partition of the training images, for distances to each shard.
        classifier: new file for a classifier that is trained here, written last.
        max_bad: most unreadable images of all sides; they are left out and named, and a result with missing
            samples compares with nothing.

    Raises:
        HddmError: for unreadable folders or images, single images, images of different shapes, JPEG samples,
            missing weights, a ``classifier`` that cannot be saved there, and too few images.
    """
    if classifier is not None:
        _check_file(classifier, features)
    paths: dict[Role, Path] = {"images": images, "reference": reference}
    if held_out is not None:
        paths["held-out"] = held_out
    groups = alike(read_data(paths, max_bad))
    samples, training = groups["images"].images, groups["reference"].images
    counts = [group.record.images for group in groups.values()]
    sampling = read_sampling(images)
    labels, of_classes = conditions(samples, sampling, training.classes)
    shard_pixels, shard_record = ([], None) if shards is None else _read_shards(shards, training.pixels)
    if features in ("auto", "classifier") and training.labels is not None:
        # Checked before minutes of training: for so few images, auto can only take a classifier.
        _refuse_few(FEATURES, counts, allow_few)
    network = None if classifier is None else trained(training)
    extractor = open_extractor(features, training, min(counts)) if network is None else of_classifier(network)
    _refuse_few(extractor.dimensions, counts, allow_few)
    with Progress(sum(counts) + sum(map(len, shard_pixels)), "features") as progress:
        scorer = Scorer(
            _counted(extractor, progress),
            training.pixels,
            groups["held-out"].images.pixels if held_out is not None else None,
            RESAMPLES,
            allow_few,
            complete=True,
            training_labels=training.labels if of_classes else None,
            shards=shard_pixels,
        )
        scores = asdict(scorer.score(samples.pixels, labels))
    if network is not None and classifier is not None:
        # Last, so that a refusal leaves no file that would block the next run.
        save_classifier(network, classifier)
    reasons = _reasons(counts, extractor, sampling, len(groups["images"].record.skipped))
    data: dict[str, Any] = {}
    for role, group in groups.items():
        lists = {"shape": list(group.record.shape), "skipped": list(group.record.skipped)}
        data[role.replace("-", "_")] = {**asdict(group.record), **lists}
    return {
        "format": FORMAT,
        "kind": KIND,
        **scores,
        "shards": list(scores["shards"]),
        "features": {key: getattr(extractor, key) for key in _FEATURES},
        "data": {**data, "shards": shard_record},
        "sampling": sampling,
        "settings": {"resamples": RESAMPLES, "allow_few": allow_few},
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
        "comparable": not reasons,
        "reasons": reasons,
    }


def _counted(extractor: FeatureExtractor, progress: Progress) -> FeatureExtractor:
    def features(images: Tensor) -> Tensor:
        found = extractor.features(images)
        progress(len(images))
        return found

    return replace(extractor, features=features)


def _check_file(classifier: Path, features: str) -> None:
    """Refuse a path where no classifier can be saved, before the work."""
    option = f"--save-classifier {classifier}"
    if features != "classifier":
        raise HddmError(f"{option}: needs --features classifier")
    folder = classifier.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise HddmError(f"{option}: {folder} is not a writable folder; create it, or choose another")
    if classifier.exists():
        raise HddmError(f"{option}: exists; choose another file")


def _refuse_few(dimensions: int, counts: Sequence[int], allow_few: bool) -> None:
    if are_few(dimensions, counts) and not allow_few:
        raise too_few(dimensions, counts)


def _reasons(
    counts: Sequence[int], extractor: FeatureExtractor, sampling: dict[str, Any] | None, skipped: int
) -> list[str]:
    """Reasons why a result compares with no other."""
    reasons = []
    if are_few(extractor.dimensions, counts):
        sides = ", ".join(map(str, counts))
        reasons.append(f"too few images: {extractor.dimensions} features, and sides of {sides}")
    asked = (sampling or {}).get("num_images")
    if asked is not None and asked != counts[0]:
        reasons.append(f"unequal counts: {asked} images were sampled and there are {counts[0]}")
    if skipped:
        reasons.append(f"{counted(skipped, 'sample')} could not be read")
    return reasons


def _read_shards(partition: Path, training: Tensor) -> tuple[list[Tensor], dict[str, Any]]:
    """Pixels of the shards of a partition, shaped like ``training``, and their record."""
    pixels, hashes = [], []
    for folder in find_shards(partition):
        shard = open_shard(folder)
        if shard.space != "pixels" or shard.shape[1:] != training.shape[2:]:
            content = "latents" if shard.space == "latents" else f"images of shape {shard.shape}"
            raise HddmError(
                f"--shards {partition}: {folder.name} holds {content}; name the partition of the images"
            )
        pixels.append(to_bytes(shard.images).expand(-1, training.shape[1], -1, -1))
        hashes.append(shard.hash)
    digest = hashlib.sha256("\n".join(hashes).encode()).hexdigest()
    return pixels, {"path": str(partition), "images": [len(shard) for shard in pixels], "hash": digest}
