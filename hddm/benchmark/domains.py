"""Domains of a benchmark whose images are divided by class: what a model still makes of each.

A classifier, trained on all training images, says which class and so which domain a sample is of. Of each
domain there are the share of samples, their Fréchet distance to the domain's images, and the share of its
fresh images that samples come near to (recall). All are measured on features of the same classifier.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hddm.benchmark.jobs import Job, Store
from hddm.benchmark.samples import SampledModel, canonical, prepared
from hddm.benchmark.settings import SamplingPoint, Split
from hddm.data.images import to_unit_range
from hddm.ensemble import Ensemble
from hddm.evaluation.classifier import FeatureClassifier
from hddm.evaluation.distances import are_few, measure, precision_recall
from hddm.experts.loading import load
from hddm.noise import Seeded
from hddm.running import pick_experts
from hddm.sampling import sample
from hddm.utils.processes import Report

CHECKED = 64
"""Samples of a grown model that are held against the old model's."""


def domain_scores(
    known: "KnownDomains", split: Split, resamples: int, pixels: Tensor, labels: Tensor | None
) -> dict[str, Any]:
    """Scores by domain of images (n, C, H, W) in bytes, asked for by ``labels`` (n,) if by any.

    ``of_images`` is the domain of each.
    """
    features, found = _classified(known.classifier, pixels)
    domain, name = known.domain_of[found], split.replace("-", "_")
    result: dict[str, Any] = {"domains": [], "of_images": domain.tolist()}
    for k, (training, fresh) in enumerate(zip(known.training, known.fresh, strict=True)):
        own = features[domain == k]
        of_domain: dict[str, Any] = {"share": len(own) / len(features), "images": len(own)}
        for side, images in (("training", training), (name, fresh)):
            of_domain[f"to_{side}"] = None
            if not are_few(features.shape[1], [len(own), len(images)]):
                of_domain[f"to_{side}"] = asdict(measure(own.numpy(), images.numpy(), resamples))
        of_domain[f"on_{name}"] = asdict(precision_recall(features, fresh))
        result["domains"].append(of_domain)
    if labels is not None:
        result["label_accuracy"] = float((found == labels).double().mean())
        result["domain_accuracy"] = float((domain == known.domain_of[labels]).double().mean())
    return result


@dataclass(frozen=True)
class KnownDomains:
    """A classifier, the domain of each of its classes, and features of each domain's images."""

    classifier: FeatureClassifier
    domain_of: Tensor
    training: Sequence[Tensor]
    fresh: Sequence[Tensor]

    @classmethod
    def of(
        cls,
        classifier: FeatureClassifier,
        tensors: Mapping[str, Tensor],
        classes: Sequence[str],
        domains: Sequence[Sequence[str]],
    ) -> "KnownDomains":
        """What is known of the images in ``tensors`` (`read_reference`), which are of these classes."""
        domain_of = torch.tensor(
            [next(k for k, names in enumerate(domains) if one in names) for one in classes]
        )
        sides = []
        for name, labels in (("training", "labels"), ("fresh", "fresh_labels")):
            domain = domain_of[tensors[labels]]
            found, _ = _classified(classifier, tensors[name])
            sides.append([found[domain == k] for k in range(len(domains))])
        return cls(classifier, domain_of, *sides)


@torch.no_grad()
def _classified(classifier: FeatureClassifier, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Features (n, d), in float64, and class numbers (n,) of images in bytes."""
    features = torch.cat([classifier.features(to_unit_range(batch)) for batch in pixels.split(512)])
    return features.double(), classifier.head(features).argmax(1)


@dataclass(frozen=True)
class Unchanged:
    """Check of a grown model: samples of its first expert are those of the old model alone, bit for bit.

    Samples are drawn one at a time, since a batch of others changes their rounding.
    """

    old: SampledModel
    grown: SampledModel
    point: SamplingPoint
    seed: int
    units: int = 1

    @property
    def job(self) -> Job:
        chosen = canonical(self.point, False).model_dump(mode="json") | {"num_images": CHECKED}
        inputs = {"old": self.old.hash, "grown": self.grown.hash}
        return Job("unchanged", chosen | {"seed": self.seed}, inputs)

    def do(self, store: Store, report: Report) -> None:
        store.once(self.job, lambda _: self._check())
        report(1)

    def _check(self) -> Mapping[str, int]:
        point, found = self.point, []
        for source in (self.old, self.grown):
            model = prepared(load(source.folder), canonical(point, source.is_single), source.trained_in)
            labels: dict[str, Any] = {}
            if model.classes:
                labels["class_labels"] = torch.arange(CHECKED) % len(model.classes)
            how = (point.steps, "draw", point.solver, point.guidance)
            found.append(sample(model, CHECKED, self.seed, *how, batch_size=1, **labels))
        assert isinstance(model, Ensemble)
        is_old = pick_experts(model.prior_of(CHECKED, labels), Seeded(self.seed).draws(range(CHECKED))) == 0
        is_equal = (found[0] == found[1]).flatten(1).all(1)
        return {"images": int(is_old.sum()), "equal": int((is_old & is_equal).sum())}
