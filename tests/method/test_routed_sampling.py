"""Sampling through a router or a draw: when the router is asked, who is drawn, and pieces of a run."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hddm.ensemble import Ensemble
from hddm.noise import Seeded
from hddm.sampling import sample
from hddm.schedules import LinearSchedule
from hddm.utils.errors import HddmError
from hddm.velocity import VelocityField
from tests.cases import in_parts

SHAPE = (1, 2, 2)
CALLS = {"euler": 1, "heun": 2, "adams-bashforth": 1, "adams-moulton": 1}


class Expert:
    """Data at one place, plus what the label adds: Euler's steps end exactly there. Counts its calls."""

    def __init__(self, place: float, conditions: tuple[str, ...] = ()) -> None:
        self.place, self.conditions = place, conditions
        self.rows: list[int] = []

    def __call__(self, x: Tensor, t: Tensor, class_labels: Tensor | None = None, **_: Tensor) -> Tensor:
        self.rows.append(len(x))
        labels = torch.zeros(len(x)) if class_labels is None else class_labels
        places = self.place + labels.to(x).view(-1, 1, 1, 1) / 16
        return (x - places) / t.clamp_min(1e-9).view(-1, 1, 1, 1)

    def field(self) -> VelocityField:
        given = {"conditions": self.conditions, "sample_shape": SHAPE}
        nulls = {name: torch.tensor(0) for name in self.conditions}
        return VelocityField(self, LinearSchedule(), "flow_prediction", null_conditions=nulls, **given)


class CountingRouter:
    """Prefers another expert for every sample and time, by the mean of the state."""

    def __init__(self, num: int) -> None:
        self.places = torch.linspace(-1, 1, num)
        self.times: list[float] = []

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        self.times.append(float(t[0]))
        distance = x.flatten(1).mean(1)[:, None] - (self.places + t[0].sin()).to(x)
        return (-4 * distance**2).softmax(1)


def _ensemble(
    strategy: str, conditions: tuple[str, ...] = (), prior: Any = None, class_prior: Any = ()
) -> Ensemble:
    fields = [Expert(place, conditions).field() for place in (-8.0, 0.0, 8.0)]
    return Ensemble(in_parts(fields, None, class_prior), CountingRouter(3), strategy, prior)


def _arrived(samples: Tensor) -> Tensor:
    """Index of the expert that each sample ended at."""
    return (samples[:, 0, 0, 0] / 8).round().long() + 1


@pytest.mark.parametrize("solver", list(CALLS))
@pytest.mark.parametrize("every", [1, 2, 100])
def test_the_router_is_asked_at_every_nth_call_of_a_batch(every: int, solver: str) -> None:
    ensemble = _ensemble("top-2")
    sample(ensemble, 10, steps=7, solver=solver, batch_size=4, router_every=every)
    assert len(ensemble.router.times) == 3 * math.ceil(7 * CALLS[solver] / every)
    assert ensemble.router.times[0] == 1


def test_between_its_answers_the_routers_choice_stays() -> None:
    ensemble = _ensemble("top-1")
    samples = sample(ensemble, 10, steps=5, router_every=5)
    first = CountingRouter(3)(Seeded(0).initial(range(10), SHAPE), torch.ones(10)).argmax(1)
    assert len(set(first.tolist())) > 1
    assert torch.equal(_arrived(samples), first)


@pytest.mark.parametrize("options", [{"strategy": "draw"}, {"expert": 1}], ids=str)
def test_who_was_drawn_or_named_stays_and_the_router_is_not_asked(options: dict[str, Any]) -> None:
    ensemble = _ensemble("top-2")
    samples = sample(ensemble, 40, steps=3, router_every=2, **options)
    assert ensemble.router.times == []
    assert set(_arrived(samples).tolist()) == ({1} if "expert" in options else {0, 1, 2})


CLASS_PRIOR = [[0.7, 0.2, 0.1], [0.0, 0.5, 0.5], [30, 10, 0]]
SHARES = [*CLASS_PRIOR[:2], [0.75, 0.25, 0.0]]
PRIOR = [0.2, 0.2, 0.6]


@pytest.mark.parametrize("label", [0, 1, 2, 3])
def test_draw_follows_the_class_and_without_one_the_prior(label: int) -> None:
    ensemble = _ensemble("draw", ("class_labels",), prior=PRIOR, class_prior=CLASS_PRIOR)
    num = 1500
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        samples = sample(ensemble, num, steps=1, batch_size=num, class_labels=torch.full((num,), label))
    shares = SHARES[label] if label < 3 else PRIOR
    found = _arrived(samples - label / 16).bincount(minlength=3) / num
    for share, one in zip(shares, found.tolist(), strict=True):
        assert abs(one - share) <= 4 * (share * (1 - share) / num) ** 0.5


def _warned(ensemble: Ensemble, **conditions: Tensor) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sample(ensemble, 2, steps=1, **conditions)
    # A warning points at who called.
    assert all(one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


def test_a_warning_comes_where_what_to_draw_from_is_not_known_and_only_there() -> None:
    labels, text = {"class_labels": torch.zeros(2)}, {"encoder_hidden_states": torch.zeros(2, 1)}
    both = ("class_labels", "encoder_hidden_states")
    known = {"class_prior": [[1, 1, 1]]}
    unknown = "draw picks experts by the prior alone: p(k | condition) is not known for "
    assert _warned(_ensemble("draw", both), **labels) == [unknown + "class_labels"]
    assert _warned(_ensemble("draw", both, **known), **text) == [unknown + "encoder_hidden_states"]
    assert _warned(_ensemble("draw", both, **known), **labels) == []
    assert _warned(_ensemble("draw", both)) == []
    assert _warned(_ensemble("top-1", both), **labels) == []
    assert _warned(Ensemble([Expert(0.0, both).field()], strategy="draw"), **labels) == []


def test_samples_run_expert_by_expert_and_come_back_in_order() -> None:
    experts = [Expert(place) for place in (-8.0, 0.0, 8.0)]
    ensemble = Ensemble([expert.field() for expert in experts], strategy="draw")
    samples = sample(ensemble, 24, seed=5, steps=2, batch_size=6)
    # Four batches in the order of experts: only one that ends inside a batch shares it.
    assert sum(len(expert.rows) for expert in experts) <= 2 * (4 + 2)
    assert all(max(expert.rows) == 6 for expert in experts)
    assert (_arrived(samples).diff() < 0).any()
    for index, one in enumerate(samples):
        alone = sample(ensemble, 1, seed=5, steps=2, start=index)[0]
        torch.testing.assert_close(one, alone)


@pytest.mark.parametrize("k", [0, 1, 2])
def test_an_expert_that_is_named_is_the_one_always_picked(k: int) -> None:
    named = sample(_ensemble("full"), 7, steps=4, expert=k)
    always = _ensemble("top-1")
    always.router = lambda x, t: torch.eye(3)[k].expand(len(x), -1)
    assert torch.equal(named, sample(always, 7, steps=4))
    assert torch.equal(named, sample(always.experts[k], 7, steps=4))


@pytest.mark.parametrize("solver", list(CALLS))
def test_committing_asks_the_router_above_its_time_and_once_there(solver: str) -> None:
    ensemble = _ensemble("commit-0.5")
    sample(ensemble, 10, steps=8, solver=solver)
    asked = ensemble.router.times
    assert len(asked) == 4 * CALLS[solver] + 1
    assert asked[-1] == 0.5
    # Above, all three experts run for each of 10 samples; below, one does.
    assert sum(sum(one.network.rows) for one in ensemble.experts) == 4 * CALLS[solver] * 10 * (3 + 1)


def test_committing_before_the_first_step_is_drawing_and_after_the_last_is_mixing() -> None:
    ensemble = _ensemble("commit-1", prior=[1, 2, 3])
    assert torch.equal(sample(ensemble, 8, steps=5), sample(ensemble, 8, steps=5, strategy="draw"))
    late = sample(ensemble, 8, steps=5, strategy="commit-0.01")
    assert torch.equal(late, sample(ensemble, 8, steps=5, strategy="full"))


@pytest.mark.parametrize("strategy", ["full", "top-1", "draw", "commit-0.6"])
def test_a_run_in_pieces_is_the_run_in_one(strategy: str) -> None:
    ensemble = _ensemble(strategy, ("class_labels",), class_prior=[[1, 2, 3], [3, 2, 1]])
    labels = torch.arange(10) % 2
    whole = sample(ensemble, 10, seed=3, steps=6, batch_size=2, class_labels=labels)
    pieces = [
        sample(ensemble, stop - start, 3, 6, batch_size=2, start=start, class_labels=labels[start:stop])
        for start, stop in ((0, 4), (4, 6), (6, 10))
    ]
    assert torch.equal(torch.cat(pieces), whole)


def test_conditions_are_rows_of_any_kind() -> None:
    ensemble = _ensemble("top-1", ("class_labels",))
    given = {"steps": 2, "guidance_scale": 2.0}
    negative, labels = {"class_labels": torch.tensor([1, 0])}, torch.tensor([2, 3])
    tensors = sample(ensemble, 2, **given, negative=negative, class_labels=labels)
    for rows in ([2, 3], np.array([2, 3])):
        found = sample(ensemble, 2, **given, negative={"class_labels": [1, 0]}, class_labels=rows)
        assert torch.equal(found, tensors)
    for wrong in ({"class_labels": torch.tensor(2)}, {"negative": {"class_labels": torch.tensor(2)}}):
        with pytest.raises(HddmError, match="'class_labels' has no rows for 2 samples"):
            sample(ensemble, 2, **given, **wrong)
    for wrong in ({"clas_labels": 4}, {"negative": {"clas_labels": [1, 0]}}):
        with pytest.raises(HddmError, match=r"no condition 'clas_labels'.*did you mean 'class_labels'"):
            sample(ensemble, 2, **wrong)
