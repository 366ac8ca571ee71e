"""Evaluation of a folder of images: every figure, with every setting that it depends on."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hddm.evaluation.features import FEATURES, open_extractor, save_classifier
from hddm.evaluation.images import (
    ImageGroup,
    alike,
    class_numbers,
    conditions,
    read_data,
    read_sampling,
)
from hddm.evaluation.measures import has_few
from hddm.evaluation.results import Evaluation, EvaluationData, versions_of, write_result
from hddm.evaluation.score_records import Role, SamplingRecord
from hddm.evaluation.scores import Scorer, Side
from hddm.settings import EvaluationSettings, keywords
from hddm.utils.errors import HddmError, UsageError, counted
from hddm.utils.files import check_result_file

RESAMPLES = 100
_PACKAGES = ("hddm-diffusion", "torch", "numpy", "pillow", "clean-fid", "transformers")


@keywords
def evaluate(
    images: Path,
    reference: Path,
    settings: EvaluationSettings,
    *,
    out: Path | None = None,
    overwrite: bool = False,
) -> Evaluation:
    """Scores of ``images`` against training images, and against held-out or validation ones.

    The result records the measured data, the features, the record of ``hddm sample``, versions, and whether
    it is comparable, with reasons if not.

    Args:
        images: folder of samples.
        reference: training images, or their partition (`hddm.evaluation.images.read_data`).
        settings: its fields are keywords: see `hddm.settings.EvaluationSettings`.
        out: JSON file for the result, which `hddm.evaluation.results.read_groups` reads.
        overwrite: replace a result in ``out``.

    Raises:
        HddmError: for unreadable folders or images, single images, images of different shapes, JPEG samples,
            missing weights, a ``save_classifier`` that cannot be written, too few images, and unknown classes
            of a domain.
    """
    if out is not None:
        check_result_file(out, overwrite)
    features, domain, allow_few = settings.features, settings.domain or {}, settings.allow_few
    save = settings.save_classifier
    if save is not None and (save.exists() or not os.access(save.parent, os.W_OK)):
        text = "exists, or is in no writable folder; choose another file"
        raise HddmError(f"`save_classifier` {save}: {text}")
    if settings.held_out is not None and settings.validation is not None:
        raise UsageError(
            "`held_out` and `validation`: settings are chosen by one and confirmed by the other"
        )
    paths: dict[Role, Path | None] = {"images": images, "reference": reference}
    paths |= {"validation": settings.validation, "held_out": settings.held_out}
    named = {role: path for role, path in paths.items() if path is not None}
    groups = alike(read_data(named, settings.max_bad))
    samples, training = groups["images"].images, groups["reference"].images
    counts = [group.record.images for group in groups.values()]
    sampling = read_sampling(images)
    labels, of_classes = conditions(samples, sampling, training.classes)
    if features in ("auto", "classifier") and training.labels is not None:
        # Checked before minutes of training: for so few images, auto can only take a classifier.
        has_few(FEATURES, counts, allow_few)
    extractor = open_extractor(features, training, min(counts))
    reasons = _reasons(
        counts, extractor.record.dimensions, sampling, len(groups["images"].record.skipped)
    )
    has_few(extractor.record.dimensions, counts, allow_few)
    sides = [_side(role, groups, of_classes or bool(domain)) for role in groups if role != "images"]
    if domain and (extractor.classifier is None or any(side.labels is None for side in sides)):
        text = "needs a classifier's features, and class folders of the same classes"
        raise HddmError(f"`domain`: {text}")
    scorer = Scorer(
        extractor,
        sides,
        RESAMPLES,
        complete=not settings.brief,
        mirrored=settings.mirrored,
        classes=training.classes,
        domains=_numbers(domain, training.classes),
    )
    scores = scorer.score(samples.pixels, labels)
    if save is not None and extractor.classifier is not None:
        # Last, so that a refusal leaves no file that would block the next run.
        save_classifier(extractor.classifier, save)
    records = {role: group.record for role, group in groups.items()}
    chosen = settings.model_dump(include={"allow_few", "mirrored", "brief"})
    result = Evaluation(
        **dict(scores),
        kind="evaluation",
        features=extractor.record,
        data=EvaluationData(**records),
        sampling=sampling,
        settings={"resamples": RESAMPLES, **chosen},
        versions=versions_of(_PACKAGES),
        comparable=not reasons,
        reasons=tuple(reasons),
    )
    if out is not None:
        write_result(out, result, overwrite)
    return result


def _side(role: str, groups: Mapping[str, ImageGroup], with_labels: bool) -> Side:
    """The images of ``role``, labelled by the classes of the training images where that can be done."""
    found = groups[role].images
    classes = groups["reference"].images.classes
    labels = None
    if with_labels and found.labels is not None and set(found.classes) <= set(classes):
        labels = class_numbers(found.classes, classes)[found.labels]
    return Side("training" if role == "reference" else role, found.pixels, labels)  # type: ignore[arg-type]


def _numbers(domains: Mapping[str, Sequence[str]], classes: Sequence[str]) -> dict[str, list[int]]:
    """Class numbers by domain; refuses classes that the training images do not have."""
    numbers = {}
    for domain, names in domains.items():
        unknown = sorted(set(names) - set(classes))
        if unknown:
            text = f"no class {unknown[0]}; classes are {', '.join(classes)}"
            raise HddmError(f"`domain` {domain}: {text}")
        numbers[domain] = [classes.index(name) for name in names]
    return numbers


def _reasons(
    counts: Sequence[int], dimensions: int, sampling: SamplingRecord | None, skipped: int
) -> list[str]:
    """Reasons why a result compares with no other."""
    reasons = []
    if has_few(dimensions, counts):
        reasons.append(
            f"too few images: {dimensions} features, and sides of {', '.join(map(str, counts))}"
        )
    sampled = None if sampling is None else sampling.num_images
    if sampled is not None and sampled != counts[0]:
        reasons.append(f"unequal counts: {sampled} images were sampled and there are {counts[0]}")
    if skipped:
        reasons.append(f"{counted(skipped, 'sample')} could not be read")
    return reasons
