"""Experts of different objectives, mixed: one velocity field of the whole data."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hddm.ensemble import Ensemble, Part
from hddm.parts import Numbers
from hddm.sampling import sample
from hddm.strategies import Strategy
from hddm.utils.errors import HddmError
from hddm.velocity import VelocityField
from tests.artefacts import refusal
from tests.cases import LINEAR, Case, ConditionSum, case_named, in_parts, oracle_field
from tests.oracles import GaussianMixture, exact_router, relative_error

PRIOR = [0.1, 0.4, 0.3, 0.2]
SHARDS = [GaussianMixture.random(seed=10 + k, modes=3, dim=8) for k in range(4)]
WHOLE = GaussianMixture.union(SHARDS, PRIOR)
SHAPE = (2, 2, 2)
FLOW = (LINEAR, "flow_prediction")
FOUR_KINDS = [FLOW, (case_named("cosine"), "epsilon"), (case_named("ddpm-linear"), "epsilon"), FLOW]
OTHER_KINDS = [
    (case_named("sd-scaled-linear-ztsnr"), "v_prediction"),
    (case_named("cosine"), "flow_prediction"),
    (case_named("squaredcos-cap-v2"), "sample"),
    (LINEAR, "epsilon"),
]


def _table_router(rows: list[list[float]]) -> Callable[[Tensor, Tensor], Tensor]:
    table = torch.tensor(rows, dtype=torch.float64)
    return lambda x_t, t: table.to(x_t)


def _experts(kinds: list[tuple[Case, str]]) -> list[VelocityField]:
    return [oracle_field(shard, *kind) for shard, kind in zip(SHARDS, kinds, strict=True)]


def _of(
    networks: list[ConditionSum], *router: Callable[[Tensor, Tensor], Tensor], **options: Any
) -> Ensemble:
    return Ensemble([network.field() for network in networks], *router, **options)


@pytest.mark.parametrize("kinds", [FOUR_KINDS, OTHER_KINDS], ids=["flow and ddpm", "all kinds"])
@pytest.mark.parametrize("strategy", ["full", "top-4", "nucleus-1"])
def test_unlike_experts_and_the_exact_posterior_are_one_model(
    kinds: list[tuple[Case, str]], strategy: str
) -> None:
    ensemble = Ensemble(_experts(kinds), exact_router(SHARDS, PRIOR), strategy)
    low = max(field.range[0] for field in ensemble.experts)
    high = min(field.range[1] for field in ensemble.experts)
    t = torch.linspace(low, high, 97, dtype=torch.float64)
    x_t = WHOLE.states(t, seed=0, shape=SHAPE)
    assert relative_error(ensemble.velocity(x_t, t), WHOLE.velocity(x_t, t)) < 1e-9


TABLE = [[0.5, 0.3, 0.2], [0.25, 0.25, 0.5], [0.05, 0.9, 0.05], [0.25, 0.5, 0.25]]
EXPECTED = {
    "full": [[0.5, 0.3, 0.2], [0.25, 0.25, 0.5], [0.05, 0.9, 0.05], [0.25, 0.5, 0.25]],
    "top-1": [[1, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 0]],
    "top-2": [[0.625, 0.375, 0], [1 / 3, 0, 2 / 3], [1 / 19, 18 / 19, 0], [1 / 3, 2 / 3, 0]],
    "threshold-0.25": [[0.625, 0.375, 0], [0.25, 0.25, 0.5], [0, 1, 0], [0.25, 0.5, 0.25]],
    "nucleus-0.75": [[0.625, 0.375, 0], [1 / 3, 0, 2 / 3], [0, 1, 0], [1 / 3, 2 / 3, 0]],
}


@pytest.mark.parametrize("strategy", list(EXPECTED))
def test_each_expert_runs_for_the_samples_that_need_it_and_no_others(strategy: str) -> None:
    networks = [ConditionSum(value) for value in (1.0, 10.0, 100.0)]
    ensemble = _of(networks, _table_router(TABLE), strategy=strategy)
    x_t = torch.arange(4.0, dtype=torch.float64).view(4, 1, 1, 1).expand(4, *SHAPE)
    v = ensemble.velocity(x_t, torch.full((4,), 0.5))
    weights = torch.tensor(EXPECTED[strategy], dtype=torch.float64)
    expected = (weights @ torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)).view(4, 1, 1, 1)
    torch.testing.assert_close(v, expected.expand(4, *SHAPE))
    for network, column in zip(networks, weights.T, strict=True):
        rows = [y[:, 0, 0, 0].tolist() for y in network.states]
        needed = column.nonzero()[:, 0].double().tolist()
        assert rows == ([needed] if needed else [])


def test_strategy_can_be_set_later_and_is_checked() -> None:
    ensemble = _of([ConditionSum(k) for k in range(3)], _table_router(TABLE))
    assert ensemble.strategy == "nucleus-0.9"
    ensemble.strategy = "top-1"
    v = ensemble.velocity(torch.zeros(4, *SHAPE), torch.full((4,), 0.5))
    assert v[:, 0, 0, 0].tolist() == [0, 2, 1, 1]
    for bad in ("top-4", "best"):
        with pytest.raises(HddmError):
            ensemble.strategy = bad
    assert ensemble.strategy == "top-1"


def test_draw_needs_the_experts_that_were_drawn() -> None:
    networks = [ConditionSum(k) for k in range(3)]
    ensemble = _of(networks, strategy="draw")
    x_t, t = torch.zeros(4, *SHAPE), torch.full((4,), 0.5)
    assert "expert=" in refusal(ensemble.velocity, x_t, t)
    v = ensemble.velocity(x_t, t, expert=torch.tensor([2, 0, 2, 2]))
    assert v[:, 0, 0, 0].tolist() == [2, 0, 2, 2]
    assert [[len(y) for y in network.states] for network in networks] == [[1], [], [3]]


@pytest.mark.parametrize(
    ("router", "t", "conditions", "problem"),
    [
        (None, [0.5, 0.5], {}, "needs a router"),
        (
            _table_router([[0.2, 0.3, 0.5]] * 2),
            [0.5, 0.5],
            {},
            r"gave \(2, 3\), which are not \(2, 2\)",
        ),
        (_table_router([[0.5, 0.5]] * 2), [0.5, 0.5], {"caption": torch.zeros(2)}, "'caption'"),
        (_table_router([[0.5, 0.5]] * 2), [0.5, 1.5], {}, "^t "),
        (
            *(_table_router([[0.5, 0.5]] * 2), [0.5, 0.5]),
            *({"class_labels": torch.zeros(3)}, r"'class_labels' has 3 rows for 2 samples"),
        ),
    ],
    ids=["no router", "for three experts", "unknown condition", "above 1", "too many labels"],
)
def test_calls_that_do_not_fit_are_refused(
    router: Callable[..., Tensor] | None,
    t: list[float],
    conditions: dict[str, Tensor],
    problem: str,
) -> None:
    experts = [ConditionSum().field("class_labels"), ConditionSum().field()]
    with pytest.raises(HddmError, match=problem):
        Ensemble(experts, router, "full").velocity(
            torch.zeros(2, *SHAPE), torch.tensor(t), **conditions
        )


def test_guidance_is_applied_by_each_expert_before_mixing() -> None:
    networks = [ConditionSum(1.0), ConditionSum(2.0)]
    experts = [network.field("class_labels") for network in networks]
    ensemble = Ensemble(experts, _table_router([[0.25, 0.75], [1.0, 0.0]]), "full")
    x_t, t, against = (
        torch.zeros(2, *SHAPE),
        torch.tensor([0.2, 0.8]),
        {"class_labels": torch.tensor([1, 2])},
    )
    v = ensemble.velocity(x_t, t, 3.0, against, class_labels=torch.tensor([5, 9]))
    # v_negative + 3 (v_positive - v_negative), the labels adding to the constants
    assert v[:, 0, 0, 0].tolist() == [1.75 + 1 + 3 * 4, 1 + 2 + 3 * 7]
    assert [sum(map(len, network.states)) for network in networks] == [4, 2]


LABELLED = {"classes": ("a", "b"), "null_conditions": {"class_labels": torch.tensor(2)}}


def test_an_expert_that_cannot_take_what_is_asked_for_has_no_weight() -> None:
    names: list[tuple[str, ...]] = [
        ("class_labels", "time_ids"),
        (),
        ("time_ids",),
        ("encoder_hidden_states",),
    ]
    fields = [
        ConditionSum(10.0**k).field(*one, **LABELLED if not k else {})
        for k, one in enumerate(names)
    ]
    table = _table_router(
        [[0.0, 0.5, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25], [0.5, 0.25, 0.25, 0.0]]
    )
    x_t, t, sizes = torch.zeros(3, *SHAPE), torch.full((3,), 0.5), torch.zeros(3)
    labels, text = torch.tensor([0, 1, 2]), torch.zeros(3)
    for strategy in ("full", "top-1", "nucleus-0.9"):
        ensemble = Ensemble(fields, table, strategy)
        # The router is sure that the first is another expert's; the class decides. Label 2 is no class.
        weights = ensemble.weights(x_t, t, conditions={"class_labels": labels, "time_ids": sizes})
        assert weights[:2].tolist() == [[1, 0, 0, 0]] * 2
        assert torch.equal(weights[2], ensemble.weights(x_t, t)[2])
        weights = ensemble.weights(x_t, t, conditions={"encoder_hidden_states": text})
        assert weights.tolist() == [[0, 0, 0, 1]] * 3
        # Of two conditions, an expert may take either one.
        both = {"class_labels": labels, "encoder_hidden_states": text}
        assert (ensemble.weights(x_t, t, conditions=both)[:, 1:3] == 0).all()
        assert (ensemble.weights(x_t, t, conditions=both)[:2, [0, 3]].sum(1) == 1).all()
        # Settings say how an image is made, and not what it shows.
        assert torch.equal(
            ensemble.weights(x_t, t, conditions={"time_ids": sizes}), ensemble.weights(x_t, t)
        )


def test_an_expert_that_was_chosen_and_cannot_take_what_is_asked_for_is_refused() -> None:
    fields = [
        ConditionSum().field(),
        ConditionSum().field("encoder_hidden_states"),
        ConditionSum().field("hue"),
    ]
    ensemble, x_t, t = (
        Ensemble(fields, strategy="draw"),
        torch.zeros(2, *SHAPE),
        torch.full((2,), 0.5),
    )
    for name, k, words in (("encoder_hidden_states", 0, "the prompt"), ("hue", 1, "hue")):
        chosen = torch.tensor([{"hue": 2}.get(name, 1), k])
        told = refusal(ensemble.velocity, x_t, t, expert=chosen, **{name: torch.zeros(2)})
        assert told == f"expert {k} cannot take {words}; use another expert, or leave it out"
    no_share = Ensemble(fields, strategy="draw", prior=[1, 0, 0])
    told = refusal(no_share.prior_of, 2, {"encoder_hidden_states": torch.zeros(2)})
    assert told == "no expert with a share of the data takes the prompt; give one that does a share"


def test_a_pair_takes_what_one_of_its_experts_takes() -> None:
    high, low, other = ConditionSum().field("hue"), ConditionSum().field(), ConditionSum().field()
    high.noise_range, low.noise_range = (0.5, 1.0), (0.0, 0.5)
    ensemble = Ensemble(in_parts([high, low, other], [0, 0, 1]), strategy="draw")
    assert ensemble.prior_of(1, {"hue": torch.zeros(1)}).tolist() == [[0.5, 0.5, 0]]


def test_an_expert_without_a_class_of_the_others_takes_part_unguided() -> None:
    fields = [
        ConditionSum(1.0).field("class_labels", "time_ids", **LABELLED),
        ConditionSum(1.0).field("time_ids"),
    ]
    ensemble = Ensemble(fields, _table_router([[0.5, 0.5]] * 4), "full")
    x_t, t, sizes = torch.zeros(4, *SHAPE), torch.full((4,), 0.5), torch.arange(4.0)
    no_class, against = (
        {"class_labels": torch.full((4,), 2)},
        {"class_labels": torch.zeros(4).long()},
    )
    v = ensemble.velocity(x_t, t, 2.0, against, time_ids=sizes, **no_class)
    expected = 0.5 * (1 + sizes + 2 * 2) + 0.5 * (1 + sizes)
    torch.testing.assert_close(v[:, 0, 0, 0], expected)
    assert "guidance needs a condition" in refusal(ensemble.velocity, x_t, t, 2.0)


@pytest.mark.parametrize(
    "prior", [[1.0], [1.0, -0.1], [0.0, 0.0], [1.0, float("nan")], [1.0, float("inf")]], ids=str
)
def test_a_prior_that_is_none_is_refused(prior: list[float]) -> None:
    assert "prior" in refusal(_of, [ConditionSum()] * 2, prior=prior)


ROWS = {
    "zeros": [[1.0, 1.0], [0.0, 0.0]],
    "negative": [[1.0, 1.0], [2.0, -1.0]],
    "not a number": [[1.0, 1.0], [1.0, float("nan")]],
    "infinite": [[1.0, 1.0], [1.0, float("inf")]],
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("strategy", ["draw", "full"])
def test_a_row_of_shares_that_is_no_distribution_is_refused(name: str, strategy: str) -> None:
    fields = [ConditionSum().field(sample_shape=SHAPE) for _ in range(2)]
    ensemble = Ensemble(fields, _table_router([[0.5, 0.5]] * 2), strategy)
    told = refusal(sample, ensemble, 2, steps=1, prior=torch.tensor(ROWS[name]))
    assert told.startswith(
        f"`prior` of sample 1 is {ROWS[name][1]}: must be numbers of 0 or more, one of"
    )
    told = refusal(sample, ensemble, 2, steps=1, prior=torch.ones(2, 3))
    assert told == "`prior` has shape (2, 3), and must have (2, 2)"


def test_prior_is_normalised_shard_sizes_and_uniform_by_default() -> None:
    assert _of([ConditionSum()] * 2, prior=[300, 100]).prior.tolist() == [0.75, 0.25]
    assert _of([ConditionSum()] * 2).prior.tolist() == [0.5, 0.5]
    parts = [Part(ConditionSum().field(), weight=0.0) for _ in range(2)]
    assert Ensemble(parts, strategy="draw", prior=[1, 3]).prior.tolist() == [0.25, 0.75]
    assert "prior" in refusal(Ensemble, parts, strategy="draw")


def test_experts_of_unlike_samples_are_for_draw_only() -> None:
    fields = [ConditionSum().field() for _ in range(2)]
    fields[0].sample_shape, fields[1].sample_shape = (1, 8, 8), (3, 8, 8)
    different = r"expert 1: sample_shape \(3, 8, 8\), not \(1, 8, 8\); so it can be drawn"
    with pytest.raises(HddmError, match=different):
        Ensemble(fields, strategy="top-1")
    made_for_draw = Ensemble(fields, strategy="draw")
    with pytest.raises(HddmError, match="strategy 'full': these experts do not fit together:"):
        made_for_draw.strategy = "full"
    fields[0].sample_shape = None
    Ensemble(fields, strategy="top-1")


def test_vaes_and_text_encoders_are_numbered_as_they_first_appear() -> None:
    assert Numbers.of_vaes([None, "a", "b", "a"]) == Numbers(("a", "b"), (-1, 0, 1, 0))
    assert Numbers.of_vaes([None, None]) == Numbers((), (0, 0))
    assert Numbers.of_text_encoders([None, "a", "b", "a"]) == Numbers(("a", "b"), (0, 0, 1, 0))


# Images of four classes in four shards; their sums are in the proportions of PRIOR.
COUNTS = torch.tensor([[10.0, 0, 0, 0], [0, 30, 0, 0], [0, 10, 30, 0], [0, 0, 0, 20]])


def _of_classes(strategy: str) -> Ensemble:
    experts = in_parts(_experts([FLOW] * 4), None, COUNTS)
    return Ensemble(experts, exact_router(SHARDS, PRIOR), strategy, PRIOR)


@pytest.mark.parametrize("label", range(4))
@pytest.mark.parametrize("strategy", ["full", "top-1", "nucleus-0.8"])
def test_a_class_is_routed_by_the_posterior_of_its_own_shares(label: int, strategy: str) -> None:
    # Given the shard, class and image are independent here, so the posterior is that of another prior.
    shares = (COUNTS[label] / COUNTS[label].sum()).tolist()
    t = torch.linspace(0.05, 0.95, 21, dtype=torch.float64)
    x_t = SHARDS[1].states(t, seed=3, shape=SHAPE)
    exact = exact_router(SHARDS, shares)(x_t, t)
    given = {"class_labels": torch.full((21,), label)}
    found = _of_classes(strategy).weights(x_t, t, conditions=given)
    torch.testing.assert_close(
        found, Strategy.parse(strategy).weights(exact), rtol=1e-9, atol=1e-12
    )


def test_a_class_whose_shards_the_router_excludes_is_still_made_by_them() -> None:
    experts = [ConditionSum(k).field("class_labels") for k in range(4)]
    ensemble = Ensemble(
        in_parts(experts, None, COUNTS), _table_router([[0.0, 1.0, 0.0, 0.0]] * 2), "full", PRIOR
    )
    v = ensemble.velocity(
        torch.zeros(2, *SHAPE), torch.full((2,), 0.5), class_labels=torch.tensor([0, 2])
    )
    assert v[:, 0, 0, 0].tolist() == [0 + 0, 1 + 2]
