"""All scores of a set of images, against training images, images not trained on, and each domain."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hddm.data.images import to_unit_range
from hddm.evaluation.features import FeatureExtractor
from hddm.evaluation.measures import (
    Features,
    diversity,
    has_few,
    kernel_distance,
    measure,
    memorisation,
    nearest_distances,
    precision_recall,
    within_conditions,
)
from hddm.evaluation.score_records import (
    FEWEST_IMAGES,
    RECOGNISED,
    ConditionDiversity,
    DomainScores,
    Recognised,
    Scores,
    Split,
    SplitScores,
)
from hddm.utils.progress import Progress

_BATCH = 512
SHOWN = 24
"""Samples whose classes are recorded, for the pictures of a report."""


@dataclass(frozen=True)
class Side:
    """Images (n, C, H, W) in bytes of one ``split``, and their class numbers (n,), if known."""

    split: Split
    pixels: Tensor
    labels: Tensor | None = None


@dataclass(frozen=True)
class Scorer:
    """Scores sets of images against ``sides``: training images first, and perhaps others, not trained on.

    Args:
        extractor: features that distances are measured on.
        sides: the images that models were trained on; perhaps validation or held-out images.
        resamples: number of the bootstrap.
        complete: add the slower scores, see `Scores`.
        mirrored: models were trained on mirrored images too, so a mirrored copy is a copy.
        classes: names of the classes of training images, which the extractor's classifier knows.
        domains: class numbers by domain; needs a classifier, and labels on all sides.
    """

    extractor: FeatureExtractor
    sides: Sequence[Side]
    resamples: int = 100
    complete: bool = False
    mirrored: bool = False
    classes: Sequence[str] = ()
    domains: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def score(self, pixels: Tensor, labels: Tensor | None = None) -> Scores:
        """Score images (n, C, H, W) in bytes, made under the conditions ``labels`` (n,).

        Labels are class numbers of the training images, if these have some.
        """
        features = self._features(pixels)
        training, *fresh = self.sides
        further = self._classified(torch.from_numpy(features), labels)
        for side in fresh:
            own = nearest_distances(pixels, training.pixels, self.mirrored)
            real = nearest_distances(side.pixels, training.pixels, self.mirrored)
            further["memorisation"] = memorisation(own, real, self.mirrored)
        if self.complete and labels is not None:
            further["within_conditions"] = self._within(torch.from_numpy(features), labels)
        splits = []
        for side, known in zip(self.sides, self._known, strict=True):
            splits.append(self._against(side.split, features, known))
        varied = diversity(torch.from_numpy(features), torch.from_numpy(self._known[0]))
        return Scores(images=len(pixels), splits=tuple(splits), diversity=varied, **further)

    @cached_property
    def _known(self) -> list[Features]:
        """Features of all sides."""
        return [self._features(side.pixels) for side in self.sides]

    def _against(self, split: Split, features: Features, known: Features) -> SplitScores:
        distance = measure(features, known, self.resamples)
        kernel = overlap = real_overlap = None
        if self.complete:
            kernel = kernel_distance(features, known)
        if self.complete or split != "training":
            overlap = precision_recall(torch.from_numpy(features), torch.from_numpy(known))
        if overlap is not None and split != "training":
            # As many, since both figures depend on the number.
            training = torch.from_numpy(self._known[0])
            real_overlap = precision_recall(training, torch.from_numpy(known), most=overlap.images)
        return SplitScores(
            split=split,
            distance=distance,
            kernel=kernel,
            overlap=overlap,
            real_overlap=real_overlap,
        )

    def _classified(self, features: Tensor, labels: Tensor | None) -> dict[str, Any]:
        """What a classifier says of samples with ``features`` (n, d), where there is one."""
        classifier = self.extractor.classifier
        if classifier is None:
            return {}
        probabilities = classifier.probabilities(features)
        real = classifier.probabilities(torch.from_numpy(self._known[-1]))
        found = probabilities.argmax(1)
        names = self.classes or [str(k) for k in range(probabilities.shape[1])]
        counts = found.bincount(minlength=len(names)).tolist()
        first = tuple(names[k] for k in found[:SHOWN].tolist())
        classes = dict(zip(names, counts, strict=False))
        recognised = Recognised(
            share=_recognised_share(probabilities),
            real=_recognised_share(real),
            classes=classes,
            first=first,
        )
        more: dict[str, Any] = {"recognised": recognised}
        if self.domains:
            domains = []
            for name, numbers in self.domains.items():
                domains.append(self._of_domain(name, features, found, torch.tensor(numbers)))
            more["domains"] = tuple(domains)
            if labels is not None:
                more["label_accuracy"] = (found == labels).double().mean().item()
        return more

    def _of_domain(
        self, name: str, features: Tensor, found: Tensor, classes: Tensor
    ) -> DomainScores:
        own = features[torch.isin(found, classes)]
        splits = []
        for side, known in zip(self.sides, self._known, strict=True):
            assert side.labels is not None
            real = torch.from_numpy(known)[torch.isin(side.labels, classes)]
            few = has_few(features.shape[1], (len(own), len(real)))
            distance = None if few else measure(own.numpy(), real.numpy(), self.resamples)
            is_measured = side.split != "training" and len(real) >= FEWEST_IMAGES
            overlap = precision_recall(features, real) if is_measured else None
            splits.append(SplitScores(split=side.split, distance=distance, overlap=overlap))
        share = len(own) / len(features)
        return DomainScores(domain=name, images=len(own), share=share, splits=tuple(splits))

    def _within(self, features: Tensor, labels: Tensor) -> ConditionDiversity | None:
        found = within_conditions(features, labels)
        if not found:
            return None
        reference = None
        classes = self.sides[0].labels
        if classes is not None:
            real = within_conditions(torch.from_numpy(self._known[0]), classes)
            if found.keys() <= real.keys():
                reference = statistics.fmean(real[label] for label in found)
        images = statistics.fmean(found.values())
        return ConditionDiversity(conditions=len(found), images=images, reference=reference)

    def _features(self, pixels: Tensor) -> Features:
        """Features (n, d) in float64."""
        batches = []
        with Progress(len(pixels), "features") as progress:
            for batch in pixels.split(_BATCH):
                batches.append(self.extractor.features(to_unit_range(batch)))
                progress(len(batch))
        features: Features = torch.cat(batches).double().numpy()
        return features


def _recognised_share(probabilities: Tensor) -> float:
    """Share of images whose class is recognised, from their probabilities (n, classes)."""
    return (probabilities.amax(1) > RECOGNISED).double().mean().item()
