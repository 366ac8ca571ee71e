"""Experts of different objectives, mixed: one velocity field of the whole data."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hddm.ensemble import Ensemble
from hddm.utils.errors import HddmError
from hddm.velocity import VelocityField
from tests.cases import LINEAR, Case, case_named
from tests.oracles import GaussianMixture, OracleNetwork, exact_router, relative_error

PRIOR = [0.1, 0.4, 0.3, 0.2]
SHARDS = [GaussianMixture.random(seed=10 + k, modes=3, dim=8) for k in range(4)]
WHOLE = GaussianMixture.union(SHARDS, PRIOR)
SHAPE = (2, 2, 2)
FOUR_KINDS = [
    (LINEAR, "flow_prediction"),
    (case_named("cosine"), "epsilon"),
    (case_named("ddpm-linear"), "epsilon"),
    (LINEAR, "flow_prediction"),
]
OTHER_KINDS = [
    (case_named("sd-scaled-linear-ztsnr"), "v_prediction"),
    (case_named("cosine"), "flow_prediction"),
    (case_named("squaredcos-cap-v2"), "sample"),
    (LINEAR, "epsilon"),
]


class Constant:
    """An expert's network of constant output, which counts the samples that it sees."""

    def __init__(self, value: float, conditions: tuple[str, ...] = ()) -> None:
        self.value, self.conditions = value, conditions
        self.seen: list[Tensor] = []

    def __call__(self, y: Tensor, timestep: Tensor, **conditions: Tensor) -> Tensor:
        assert set(conditions) <= set(self.conditions)
        assert all(len(value) == len(y) for value in conditions.values())
        self.seen.append(y)
        shift = sum(value.to(y).view(-1, 1, 1, 1) for value in conditions.values())
        return torch.full_like(y, self.value) + shift

    def field(self) -> VelocityField:
        return VelocityField(self, LINEAR.schedule, "flow_prediction", conditions=self.conditions)


def _table_router(rows: list[list[float]]) -> Callable[[Tensor, Tensor], Tensor]:
    table = torch.tensor(rows, dtype=torch.float64)
    return lambda x_t, t: table.to(x_t)


def _experts(kinds: list[tuple[Case, str]]) -> list[VelocityField]:
    return [
        VelocityField(OracleNetwork(shard, case.alpha_sigma, kind), case.schedule, kind)
        for shard, (case, kind) in zip(SHARDS, kinds, strict=True)
    ]


@pytest.mark.parametrize("kinds", [FOUR_KINDS, OTHER_KINDS], ids=["flow and ddpm", "all kinds"])
@pytest.mark.parametrize("strategy", ["full", "top-4", "nucleus-1"])
def test_heterogeneous_experts_with_the_exact_posterior_are_one_model_of_the_whole(
    kinds: list[tuple[Case, str]], strategy: str
) -> None:
    ensemble = Ensemble(_experts(kinds), exact_router(SHARDS, PRIOR), strategy)
    low = max(field.range[0] for field in ensemble.experts)
    high = min(field.range[1] for field in ensemble.experts)
    t = torch.linspace(low, high, 97, dtype=torch.float64)
    x_t = WHOLE.states(t, seed=0, shape=SHAPE)
    assert relative_error(ensemble.velocity(x_t, t), WHOLE.velocity(x_t, t)) < 1e-9


def test_one_expert_alone_is_not_the_whole() -> None:
    ensemble = Ensemble(_experts(FOUR_KINDS), exact_router(SHARDS, PRIOR), "top-1")
    t = torch.linspace(0.02, 0.98, 97, dtype=torch.float64)
    x_t = WHOLE.states(t, seed=0, shape=SHAPE)
    assert relative_error(ensemble.velocity(x_t, t), WHOLE.velocity(x_t, t)) > 1e-2


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
    networks = [Constant(value) for value in (1.0, 10.0, 100.0)]
    ensemble = Ensemble([n.field() for n in networks], _table_router(TABLE), strategy)
    x_t = torch.arange(4.0, dtype=torch.float64).view(4, 1, 1, 1).expand(4, *SHAPE)
    v = ensemble.velocity(x_t, torch.full((4,), 0.5))
    weights = torch.tensor(EXPECTED[strategy], dtype=torch.float64)
    expected = (weights @ torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)).view(4, 1, 1, 1)
    torch.testing.assert_close(v, expected.expand(4, *SHAPE))
    for network, column in zip(networks, weights.T, strict=True):
        rows = [y[:, 0, 0, 0].tolist() for y in network.seen]
        needed = column.nonzero()[:, 0].double().tolist()
        assert rows == ([needed] if needed else [])


def test_strategy_can_be_set_later_and_is_checked() -> None:
    ensemble = Ensemble([Constant(k).field() for k in range(3)], _table_router(TABLE))
    assert ensemble.strategy == "nucleus-0.9"
    ensemble.strategy = "top-1"
    v = ensemble.velocity(torch.zeros(4, *SHAPE), torch.full((4,), 0.5))
    assert v[:, 0, 0, 0].tolist() == [0, 2, 1, 1]
    for bad in ("top-4", "best"):
        with pytest.raises(HddmError):
            ensemble.strategy = bad
    assert ensemble.strategy == "top-1"


def test_draw_needs_the_experts_that_were_drawn() -> None:
    networks = [Constant(float(k)) for k in range(3)]
    ensemble = Ensemble([n.field() for n in networks], strategy="draw")
    x_t, t = torch.zeros(4, *SHAPE), torch.full((4,), 0.5)
    with pytest.raises(HddmError, match="expert="):
        ensemble.velocity(x_t, t)
    v = ensemble.velocity(x_t, t, expert=torch.tensor([2, 0, 2, 2]))
    assert v[:, 0, 0, 0].tolist() == [2, 0, 2, 2]
    assert [[len(y) for y in n.seen] for n in networks] == [[1], [], [3]]


@pytest.mark.parametrize("expert", [[0], [0, 1, 1], [0, 2], [-1, 0], [[0], [1]]], ids=str)
def test_other_indices_than_one_expert_a_sample_are_refused(expert: list[int]) -> None:
    ensemble = Ensemble([Constant(0.0).field(), Constant(1.0).field()], strategy="draw")
    with pytest.raises(HddmError, match="expert="):
        ensemble.velocity(torch.zeros(2, *SHAPE), torch.full((2,), 0.5), expert=torch.tensor(expert))


def test_conditions_go_to_the_experts_that_declare_them() -> None:
    networks = [Constant(0.0, ("class_labels",)), Constant(0.0), Constant(0.0, ("scale",))]
    ensemble = Ensemble([n.field() for n in networks], strategy="draw")
    v = ensemble.velocity(
        torch.zeros(3, *SHAPE),
        torch.full((3,), 0.5),
        expert=torch.tensor([2, 0, 1]),
        class_labels=torch.tensor([7, 8, 9]),
        scale=torch.tensor([4, 5, 6]),
    )
    assert v[:, 0, 0, 0].tolist() == [4, 8, 0]


@pytest.mark.parametrize(
    ("router", "t", "conditions", "problem"),
    [
        (None, [0.5, 0.5], {}, "needs a router"),
        (_table_router([[0.2, 0.3, 0.5]] * 2), [0.5, 0.5], {}, "2 experts"),
        (_table_router([[0.5, 0.5]] * 2), [0.5, 0.5], {"caption": torch.zeros(2)}, "'caption'"),
        (_table_router([[0.5, 0.5]] * 2), [0.5, 1.5], {}, "^t "),
        (_table_router([[0.5, 0.5]] * 2), [0.5], {}, "^t "),
    ],
    ids=["no router", "one for three experts", "an unknown condition", "above 1", "too few times"],
)
def test_calls_that_do_not_fit_are_refused(
    router: Callable[..., Tensor] | None, t: list[float], conditions: dict[str, Tensor], problem: str
) -> None:
    experts = [Constant(0.0, ("class_labels",)).field(), Constant(0.0).field()]
    with pytest.raises(HddmError, match=problem):
        Ensemble(experts, router, "full").velocity(torch.zeros(2, *SHAPE), torch.tensor(t), **conditions)
    with pytest.raises(HddmError, match="at least one expert"):
        Ensemble([])


def test_guidance_is_applied_by_each_expert_before_mixing() -> None:
    networks = [Constant(1.0, ("class_labels",)), Constant(2.0, ("class_labels",))]
    rows = [[0.25, 0.75], [1.0, 0.0]]
    ensemble = Ensemble([n.field() for n in networks], _table_router(rows), "full")
    v = ensemble.velocity(
        torch.zeros(2, *SHAPE),
        torch.tensor([0.2, 0.8]),
        3.0,
        {"class_labels": torch.tensor([1, 2])},
        class_labels=torch.tensor([5, 9]),
    )
    # v_negative + 3 (v_positive - v_negative), the labels adding to the constants
    assert v[:, 0, 0, 0].tolist() == [1.75 + 1 + 3 * 4, 1 + 2 + 3 * 7]
    assert [sum(map(len, n.seen)) for n in networks] == [4, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_velocity_has_the_dtype_and_shape_of_the_state(dtype: torch.dtype) -> None:
    experts = _experts(FOUR_KINDS)
    ensemble = Ensemble(experts, exact_router(SHARDS, PRIOR), "full")
    v = ensemble.velocity(torch.ones(5, *SHAPE, dtype=dtype), torch.linspace(0, 1, 5))
    assert v.dtype == dtype
    assert v.shape == (5, *SHAPE)
    assert v.isfinite().all()


def test_a_single_expert_needs_no_router() -> None:
    (expert,) = _experts(FOUR_KINDS)[:1]
    t = torch.linspace(0, 1, 5, dtype=torch.float64)
    x_t = SHARDS[0].states(t, seed=1, shape=SHAPE)
    v = Ensemble([expert]).velocity(x_t, t)
    torch.testing.assert_close(v, SHARDS[0].velocity(x_t, t))


@pytest.mark.parametrize(
    "prior", [[1.0], [1.0, -0.1], [0.0, 0.0], [1.0, float("nan")], [1.0, float("inf")]], ids=str
)
def test_a_prior_that_is_none_is_refused(prior: list[float]) -> None:
    with pytest.raises(HddmError, match="prior"):
        Ensemble([Constant(0.0).field(), Constant(1.0).field()], prior=prior)


def test_prior_is_normalised_shard_sizes_and_uniform_by_default() -> None:
    experts = [Constant(float(k)).field() for k in range(2)]
    assert Ensemble(experts, prior=[300, 100]).prior.tolist() == [0.75, 0.25]
    assert Ensemble(experts).prior.tolist() == [0.5, 0.5]


def test_an_expert_without_conditions_takes_part_unguided() -> None:
    guided = VelocityField(Labelled(), LINEAR.schedule, "flow_prediction", conditions=("class_labels",))
    plain = VelocityField(Constant(1.0), LINEAR.schedule, "flow_prediction", conditions=())
    x_t, t = torch.zeros(4, *SHAPE), torch.full((4,), 0.5)
    labels, none = torch.full((4,), 3), torch.zeros(4, dtype=torch.long)
    mixed = Ensemble([guided, plain], lambda x, t: torch.full((len(x), 2), 0.5), "full")
    v = mixed.velocity(x_t, t, 2.0, {"class_labels": none}, class_labels=labels)
    torch.testing.assert_close(v, torch.full_like(v, (0 + 2.0 * 3 + 1) / 2))
    with pytest.raises(HddmError, match="guidance needs a condition"):
        mixed.velocity(x_t, t, 2.0)


def test_a_condition_of_another_length_is_refused() -> None:
    field = VelocityField(Labelled(), LINEAR.schedule, "flow_prediction", conditions=("class_labels",))
    mixed = Ensemble([field], strategy="top-1")
    for model in (field, mixed):
        with pytest.raises(HddmError, match=r"class_labels.*4 states"):
            model.velocity(torch.zeros(4, *SHAPE), torch.full((4,), 0.5), class_labels=torch.zeros(3))


class Labelled:
    """A network whose output is its class label."""

    def __call__(self, y: Tensor, timestep: Tensor, class_labels: Tensor) -> Tensor:
        return class_labels.to(y).view(-1, 1, 1, 1).expand_as(y)
