"""Scores of samples, against training images and those of the split that a benchmark is judged by."""

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from hddm.benchmark.data import read_reference
from hddm.benchmark.domains import KnownDomains, domain_scores
from hddm.benchmark.jobs import Job, Store
from hddm.benchmark.samples import read_samples
from hddm.benchmark.settings import BenchmarkSettings, Split
from hddm.data.images import ImageSet
from hddm.evaluation.classifier import FeatureClassifier, load_classifier, save_classifier
from hddm.evaluation.diversity import SMALLEST, why_not_lpips
from hddm.evaluation.features import INCEPTION, open_extractor
from hddm.evaluation.scores import Scorer, Scores
from hddm.utils.processes import Report

CLASSIFIER = "classifier.safetensors"
_HELD_OUT = "held_out"


def features_job_of(settings: BenchmarkSettings, reference: Job, fewest: int) -> Job:
    """The job that settles the features; ``fewest`` images is the smallest set that will be measured."""
    chosen: dict[str, Any] = {"features": settings.features, "fewest": fewest}
    if settings.features == "auto":
        chosen["inception_on_disk"] = INCEPTION.find() is not None
    # Of the training images alone: both splits are scored on the same features.
    return Job("features", chosen, {"training": reference.inputs["training"]})


def write_features(store: Store, job: Job, reference: Job) -> dict[str, Any]:
    """Do `features_job_of`: choose an extractor, and train it where it is a classifier; return its record."""

    def make(folder: Path) -> dict[str, Any]:
        images = training_set(store, reference)
        extractor = open_extractor(job.settings["features"], images, job.settings["fewest"])
        owner = getattr(extractor.features, "__self__", None)
        if isinstance(owner, FeatureClassifier):
            save_classifier(owner, folder / CLASSIFIER)
        return {
            **{key: value for key, value in vars(extractor).items() if not callable(value)},
            "is_classifier": isinstance(owner, FeatureClassifier),
            "option": "clip" if extractor.name.startswith("CLIP") else "inception",
        }

    return store.once(job, make)


@dataclass(frozen=True)
class Scoring:
    """Scores of samples by the features and against the images of two jobs."""

    settings: BenchmarkSettings
    samples: tuple[Job, ...]
    reference: Job
    features: Job

    @property
    def job(self) -> Job:
        chosen: dict[str, Any] = {
            "resamples": self.settings.resamples,
            "allow_few": self.settings.allow_few,
            "complete": self.settings.complete,
            # What is measured; samples are scored anew when there is more of it.
            "figures": sorted(field.name for field in fields(Scores)),
            "lpips_on_disk": why_not_lpips(SMALLEST) is None,
        }
        if _sees_mirrored(self.settings):
            chosen["mirrored"] = True
        if (domains := self.settings.partition.classes) is not None:
            chosen["domains"] = [*domains.values()]
        inputs = {
            "samples": [job.hash for job in self.samples],
            "reference": self.reference.hash,
            "features": self.features.hash,
        }
        return Job("scores", chosen, inputs)

    @property
    def units(self) -> int:
        return 1

    def do(self, store: Store, report: Report) -> None:
        def make(_: Path) -> dict[str, Any]:
            (scorer, domains), (pixels, labels) = self._open(store), read_samples(store, self.samples)
            found = of_split(asdict(scorer.score(pixels, labels)), self.reference.settings["score_on"])
            return found | self._by_domain(domains, pixels, labels)

        store.once(self.job, make)
        report(1)

    def of_real(self, store: Store) -> dict[str, Any]:
        """Distance of the split's own images to the training images: what a perfect model reaches."""

        def make(_: Path) -> dict[str, Any]:
            (scorer, domains), tensors = self._open(store), read_reference(store.path(self.reference))
            by_domain = self._by_domain(domains, tensors["fresh"], tensors.get("fresh_labels"))
            return {"to_training": asdict(scorer.real())} | by_domain

        return store.once(replace(self, samples=()).job, make)

    def _open(self, store: Store) -> tuple[Scorer, KnownDomains | None]:
        return _opened(store.folder, replace(self, samples=()).job, self.reference, self.features)

    def _by_domain(self, known: KnownDomains | None, pixels: Tensor, labels: Tensor | None) -> dict[str, Any]:
        if known is None:
            return {}
        split = self.reference.settings["score_on"]
        return domain_scores(known, split, self.settings.resamples, pixels, labels)


def of_split(scores: Mapping[str, Any], split: Split) -> dict[str, Any]:
    """Figures by names that say which split they are of: of validation, ``to_validation``."""
    name = split.replace("-", "_")
    return {
        key.replace(_HELD_OUT, name): of_split(value, split) if isinstance(value, Mapping) else value
        for key, value in scores.items()
    }


def _sees_mirrored(settings: BenchmarkSettings) -> bool:
    """True where experts are trained on mirrored images too, so that mirrored copies count as copies."""
    training = settings.training
    trained = (training.expert, training.ddpm, training.flow, training.single)
    return any(part.get("random_flip") for part in (*trained, *(one.training for one in settings.models)))


def training_set(store: Store, reference: Job) -> ImageSet:
    """The images that were trained on, in an order of their own, since a classifier is trained in it."""
    folder, classes = store.path(reference), store.result(reference)["classes"]
    tensors = read_reference(folder)
    pixels, labels = tensors["training"], tensors.get("labels")
    tags = [0] * len(pixels) if labels is None else labels.tolist()
    order = sorted(range(len(pixels)), key=lambda k: (pixels[k].numpy().tobytes(), tags[k]))
    names = tuple(f"{k}" for k in order)
    return ImageSet(folder, names, pixels[order], None if labels is None else labels[order], tuple(classes))


@functools.lru_cache(maxsize=1)
def _opened(folder: Path, scoring: Job, reference: Job, features: Job) -> tuple[Scorer, KnownDomains | None]:
    """A scorer of the store in ``folder``, made once a worker: features of all training images take long."""
    store, chosen = Store(folder), scoring.settings
    tensors, made = read_reference(store.path(reference)), store.result(features)
    option = str(store.path(features) / CLASSIFIER) if made["is_classifier"] else made["option"]
    training = tensors["training"]
    shards = [training[tensors["shard"] == k] for k in tensors["shard"].unique().tolist()]
    known = None
    if domains := chosen.get("domains"):
        classifier = load_classifier(Path(option), training.shape[1])
        known = KnownDomains.of(classifier, tensors, store.result(reference)["classes"], domains)
    scorer = Scorer(
        open_extractor(option, training_set(store, reference), len(training)),
        training,
        tensors["fresh"],
        chosen["resamples"],
        chosen["allow_few"],
        complete=chosen["complete"],
        training_labels=tensors.get("labels"),
        shards=shards if chosen["complete"] else (),
        mirrored=chosen.get("mirrored", False),
    )
    return scorer, known
