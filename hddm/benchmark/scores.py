"""Scores of samples, against training images and those of the split that a benchmark is judged by."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from hddm.benchmark.data import read_reference
from hddm.benchmark.jobs import RECORD, Job, Store, end_with_parent, making
from hddm.benchmark.samples import read_samples
from hddm.benchmark.settings import BenchmarkSettings, Split
from hddm.data.images import ImageSet
from hddm.evaluation.classifier import FeatureClassifier, save_classifier
from hddm.evaluation.diversity import SMALLEST, why_not_lpips
from hddm.evaluation.features import INCEPTION, open_extractor
from hddm.evaluation.scores import Scorer, Scores
from hddm.utils.files import read_json
from hddm.utils.processes import Call, Report

_CLASSIFIER = "classifier.safetensors"
_HELD_OUT = "held_out"


def features_job_of(settings: BenchmarkSettings, reference: Job, fewest: int) -> Job:
    """The job that settles the features; ``fewest`` images is the smallest set that will be measured."""
    chosen: dict[str, Any] = {"features": settings.features, "fewest": fewest}
    if settings.features == "auto":
        chosen["inception_on_disk"] = INCEPTION.find() is not None
    # Of the training images alone: both splits are scored on the same features.
    return Job("features", chosen, {"training": reference.inputs["training"]})


def write_features(store: Store, job: Job, reference: Job) -> None:
    """Do `features_job_of`: choose an extractor, and train it where it is a classifier."""
    record = store.result(reference)
    with making(store.folder, job) as (draft, result):
        images = training_set(store.path(reference), record["classes"])
        extractor = open_extractor(job.settings["features"], images, job.settings["fewest"])
        owner = getattr(extractor.features, "__self__", None)
        if isinstance(owner, FeatureClassifier):
            save_classifier(owner, draft / _CLASSIFIER)
        result |= {key: value for key, value in vars(extractor).items() if key != "features"}
        result["is_classifier"] = isinstance(owner, FeatureClassifier)
        result["option"] = "clip" if extractor.name.startswith("CLIP") else "inception"


def score_job_of(settings: BenchmarkSettings, samples: Sequence[Job], reference: Job, features: Job) -> Job:
    """The job that scores samples."""
    chosen: dict[str, Any] = {
        "resamples": settings.resamples,
        "allow_few": settings.allow_few,
        "complete": settings.complete,
        # What is measured; samples are scored anew when there is more of it.
        "figures": sorted(field.name for field in fields(Scores)),
        "lpips_on_disk": why_not_lpips(SMALLEST) is None,
    }
    if _sees_mirrored(settings):
        chosen["mirrored"] = True
    inputs = {
        "samples": [job.hash for job in samples],
        "reference": reference.hash,
        "features": features.hash,
    }
    return Job("scores", chosen, inputs)


def score_call(store: Store, job: Job, samples: Sequence[Job], reference: Job, features: Job) -> Call:
    """Work of one process."""
    arguments = {
        "store": store,
        "job": job,
        "samples": list(samples),
        "reference": reference,
        "features": features,
    }
    return Call(score_job, arguments, 1)


def score_job(
    store: Store, job: Job, samples: Sequence[Job], reference: Job, features: Job, report: Report
) -> None:
    """Score samples."""
    end_with_parent()
    chosen = job.settings
    with making(store.folder, job) as (_, result):
        measure = _scorer(
            store.path(reference),
            store.path(features),
            chosen["resamples"],
            chosen["allow_few"],
            chosen["complete"],
            chosen.get("mirrored", False),
        )
        result |= of_split(
            asdict(measure.score(*read_samples(store, samples))), reference.settings["score_on"]
        )
    report(1)


def real_scores(store: Store, settings: BenchmarkSettings, reference: Job, features: Job) -> dict[str, Any]:
    """The distance of the split's own images from the training images: what a perfect model reaches."""
    job = score_job_of(settings, (), reference, features)
    if not store.has(job):
        with making(store.folder, job) as (_, result):
            places = store.path(reference), store.path(features)
            chosen = settings.resamples, settings.allow_few, settings.complete, _sees_mirrored(settings)
            measure = _scorer(*places, *chosen)
            result["to_training"] = asdict(measure.real())
    return store.result(job)


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
    parts = (training.expert, training.ddpm, training.flow, training.single)
    return any(part.get("random_flip") for part in (*parts, *(one.training for one in settings.models)))


def training_set(reference: Path, classes: Sequence[str]) -> ImageSet:
    """The images that were trained on, in an order of their own, since a classifier is trained in it."""
    tensors = read_reference(reference)
    pixels, labels = tensors["training"], tensors.get("labels")
    tags = [0] * len(pixels) if labels is None else labels.tolist()
    order = sorted(range(len(pixels)), key=lambda k: (pixels[k].numpy().tobytes(), tags[k]))
    names = tuple(f"{k}" for k in order)
    return ImageSet(
        reference, names, pixels[order], None if labels is None else labels[order], tuple(classes)
    )


@functools.lru_cache(maxsize=1)
def _scorer(
    reference: Path, features: Path, resamples: int, allow_few: bool, complete: bool, mirrored: bool
) -> Scorer:
    """A scorer, which a worker makes once: features of all training images take long."""
    tensors = read_reference(reference)
    record, made = read_json(reference / RECORD)["result"], read_json(features / RECORD)["result"]
    option = str(features / _CLASSIFIER) if made["is_classifier"] else made["option"]
    training = tensors["training"]
    extractor = open_extractor(option, training_set(reference, record["classes"]), len(training))
    shards = [training[tensors["shard"] == k] for k in tensors["shard"].unique().tolist()]
    return Scorer(
        extractor,
        training,
        tensors["fresh"],
        resamples,
        allow_few,
        complete=complete,
        training_labels=tensors.get("labels"),
        shards=shards if complete else (),
        mirrored=mirrored,
    )
