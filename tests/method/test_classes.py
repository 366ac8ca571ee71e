"""Experts that number their classes in unlike ways, asked by name."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hddm.choice import pick_experts
from hddm.classes import join_classes
from hddm.ensemble import Ensemble
from hddm.sampling import sample
from hddm.schedules import LinearSchedule
from hddm.utils.errors import HddmError
from hddm.velocity import VelocityField
from tests.cases import Case, case_named, in_parts
from tests.oracles import GaussianMixture, OracleNetwork, exact_router, relative_error

SHAPE = (1, 2, 2)
MEANS = {"cat": 1.0, "dog": 2.0, "ship": 3.0, "plane": 4.0}


class _Of(nn.Module):
    """The exact velocity of data that is one picture a class, all of the class's number; 0 for no class."""

    def __init__(self, *classes: str) -> None:
        super().__init__()
        self.means = torch.tensor([*(MEANS[name] for name in classes), 0.0], dtype=torch.float64)

    def forward(self, x: Tensor, t: Tensor, class_labels: Tensor) -> Tensor:
        mean = self.means[class_labels].view(-1, 1, 1, 1)
        return (x - mean) / t.view(-1, 1, 1, 1)


def _expert(*classes: str) -> VelocityField:
    null = {"class_labels": torch.tensor(len(classes))}
    names = {"conditions": ("class_labels",), "null_conditions": null, "sample_shape": SHAPE}
    return VelocityField(
        _Of(*classes), LinearSchedule(), "flow_prediction", classes=classes, **names
    )


def _even(x: Tensor, t: Tensor) -> Tensor:
    return torch.full((len(x), 3), 1 / 3, dtype=torch.float64)


@pytest.fixture
def ensemble() -> Ensemble:
    """Three owners, who know some classes together, under unlike numbers."""
    experts = [_expert("cat", "dog"), _expert("ship", "plane", "dog"), _expert("plane")]
    return Ensemble(experts, _even, "draw", prior=[2, 1, 1])


def test_classes_are_numbered_once_by_name() -> None:
    joint = join_classes((("cat", "dog"), ("ship", "dog", "plane"), ()))
    assert joint.names == ("cat", "dog", "ship", "plane")
    assert joint.numbers is not None
    assert joint.numbers.tolist() == [[0, 1, -1, -1], [-1, 1, 0, 2], [0, 1, 2, 3]]
    for lists in ((("cat", "dog"),) * 2, (("cat", "dog"), ()), ((), ())):
        assert join_classes(lists).numbers is None


def test_a_name_is_one_class_in_either_form_of_unicode(ensemble: Ensemble) -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    joint = join_classes(((composed, "dog"), ("ship", decomposed)))
    assert joint.names == (composed, "dog", "ship")
    assert joint.numbers is not None
    assert joint.numbers.tolist() == [[0, 1, -1], [1, -1, 0]]
    expert = _expert("cat", "dog")
    expert.classes = VelocityField(
        expert.network, expert.schedule, "sample", classes=("dog", decomposed)
    ).classes
    assert expert.classes == ("dog", composed)
    for name in (composed, decomposed):
        images = sample(expert, 1, steps=2, solver="euler", class_labels=[name])
        assert (images - MEANS["dog"]).abs().max() < 1e-6


@pytest.mark.parametrize("number", [2, 3, -1])
def test_a_label_of_no_class_is_refused_when_sampling(number: int) -> None:
    expert = _expert("cat", "dog")
    for model in (expert, Ensemble([expert, _expert("cat", "dog")], strategy="draw")):
        for labels in ([0, number], torch.tensor([0, number]), np.array([0, number])):
            with pytest.raises(
                HddmError, match=f"no class {number}; the model's classes are cat, dog"
            ):
                sample(model, 2, steps=2, class_labels=labels)
    x, t = torch.ones(1, *SHAPE, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    # The network's mean of no class is 0.
    assert torch.equal(expert.velocity(x, t, class_labels=torch.tensor([2])), x)


@pytest.mark.parametrize("strategy", ["draw", "full", "top-2"])
def test_each_expert_makes_the_class_of_that_name(ensemble: Ensemble, strategy: str) -> None:
    names = ["cat", "dog", "ship", "plane"] * 8
    images = sample(ensemble, 32, steps=4, strategy=strategy, solver="euler", class_labels=names)
    wanted = torch.tensor([MEANS[name] for name in names]).view(-1, 1, 1, 1)
    assert (images - wanted).abs().max() < 1e-6


def test_an_expert_has_no_share_of_a_class_that_it_does_not_know(ensemble: Ensemble) -> None:
    labels = torch.tensor([0, 1, 2, 3, 4])
    shares = [[1, 0, 0], [2 / 3, 1 / 3, 0], [0, 1, 0], [0, 0.5, 0.5], [0.5, 0.25, 0.25]]
    found = ensemble.prior_of(5, {"class_labels": labels})
    assert torch.allclose(found, torch.tensor(shares, dtype=torch.float64))
    ensemble.strategy = "full"
    x, t = torch.zeros(5, *SHAPE, dtype=torch.float64), torch.full((5,), 0.5, dtype=torch.float64)
    weights = ensemble.weights(x, t, conditions={"class_labels": labels})
    # The router knows nothing, so that its posterior is that of the classes: p(k | class) / p(k).
    for row, share in zip(weights, shares, strict=True):
        product = torch.tensor(share, dtype=torch.float64) / ensemble.prior
        assert torch.allclose(row, product / product.sum())


def test_what_an_expert_does_not_know_is_refused_by_name(ensemble: Ensemble) -> None:
    with pytest.raises(HddmError, match="expert 0 knows no class 'ship'"):
        sample(ensemble, 2, steps=2, expert=0, class_labels=["cat", "ship"])
    with pytest.raises(
        HddmError, match="no class 'bird'; the model's classes are cat, dog, ship, plane"
    ):
        sample(ensemble, 1, steps=2, class_labels=["bird"])
    alone = Ensemble([_expert("cat"), _expert("ship")], strategy="draw", prior=[1, 0])
    with pytest.raises(HddmError, match="no expert with a share of the data knows class ship"):
        sample(alone, 1, steps=2, class_labels=["ship"])


def test_away_from_a_class_that_an_expert_does_not_know_is_away_from_none(
    ensemble: Ensemble,
) -> None:
    negative = {"class_labels": torch.tensor([2])}
    images = sample(
        ensemble,
        1,
        steps=4,
        solver="euler",
        guidance_scale=2.0,
        negative=negative,
        class_labels=["cat"],
    )
    # 2 v(cat) - v(none) is the velocity of a picture of 2 × 1 - 0.
    assert (images - 2.0).abs().max() < 1e-6


class _Owner(nn.Module):
    """The optimal network of an owner's mixture of each class, and of all of them for no class."""

    def __init__(
        self, mixtures: list[GaussianMixture], shares: list[float], case: Case, kind: str
    ) -> None:
        super().__init__()
        everything = GaussianMixture.union(mixtures, shares)
        self.oracles = [
            OracleNetwork(one, case.alpha_sigma, kind) for one in (*mixtures, everything)
        ]

    def forward(self, y: Tensor, t: Tensor, class_labels: Tensor) -> Tensor:
        outputs = torch.stack([oracle(y, t) for oracle in self.oracles])
        return outputs[class_labels, torch.arange(len(y))]


def test_two_owners_are_the_union_of_their_mixtures() -> None:
    """Objectives, noise ranges and class lists are unlike; "dog" is known to both."""
    names = ("cat", "dog", "ship")
    mixture = {
        (k, name): GaussianMixture.random(seed=7 * k + row, modes=2, dim=4)
        for k in (0, 1)
        for row, name in enumerate(names)
    }
    prior = [0.3, 0.7]
    owners = [
        (("cat", "dog"), [0.8, 0.2], case_named("sd-scaled-linear"), "epsilon"),
        (("ship", "dog"), [0.6, 0.4], case_named("linear"), "sample"),
    ]
    fields, wholes = [], []
    for k, (classes, shares, case, kind) in enumerate(owners):
        own = [mixture[k, name] for name in classes]
        null = {"class_labels": torch.tensor(len(classes))}
        told = {"conditions": ("class_labels",), "null_conditions": null, "sample_shape": SHAPE}
        network = _Owner(own, shares, case, kind)
        fields.append(VelocityField(network, case.schedule, kind, 1.0, classes=classes, **told))
        wholes.append(GaussianMixture.union(own, shares))
    # p(k | class): dogs are 0.3 × 0.2 of ours and 0.7 × 0.4 of theirs.
    rows = [[1, 0], [0.06 / 0.34, 0.28 / 0.34], [0, 1]]
    ensemble = Ensemble(in_parts(fields, None, rows), exact_router(wholes, prior), "full", prior)
    low, high = max(one.range[0] for one in fields), min(one.range[1] for one in fields)
    t = torch.linspace(low, high, 60, dtype=torch.float64)
    union = GaussianMixture.union(wholes, prior)
    x = union.states(t, seed=1, shape=SHAPE)
    assert relative_error(ensemble.velocity(x, t), union.velocity(x, t)) < 1e-9
    # Of a class that one owner alone knows, routed or drawn, the velocity is that of the owner's mixture.
    for label, (k, name) in {0: (0, "cat"), 2: (1, "ship")}.items():
        labels = torch.full((len(t),), label)
        expected = mixture[k, name].velocity(x, t)
        assert relative_error(ensemble.velocity(x, t, class_labels=labels), expected) < 1e-9
        drawn = pick_experts(
            ensemble.prior_of(len(t), {"class_labels": labels}), torch.rand(len(t))
        )
        found = ensemble.velocity(x, t, expert=drawn, class_labels=labels)
        assert relative_error(found, expected) < 1e-9
    # Of one that both know, a share of the samples is each owner's, whose velocity is that of its own dogs.
    dogs = torch.ones(len(t), dtype=torch.long)
    drawn = pick_experts(
        ensemble.prior_of(len(t), {"class_labels": dogs}), torch.linspace(0, 0.999, len(t))
    )
    assert abs(drawn.double().mean() - 0.28 / 0.34) < 1 / len(t)
    found = ensemble.velocity(x, t, expert=drawn, class_labels=dogs)
    each = torch.stack([mixture[k, "dog"].velocity(x, t) for k in (0, 1)])[
        drawn, torch.arange(len(t))
    ]
    assert relative_error(found, each) < 1e-9
