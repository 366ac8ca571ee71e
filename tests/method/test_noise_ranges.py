"""Experts for parts of t: together the whole field, and nothing stands in for one outside its part."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from hddm.ensemble import Ensemble
from hddm.expert_use import ExpertUse
from hddm.noise import Seeded
from hddm.running import pick_experts
from hddm.sampling import integrate, sample, time_grid
from hddm.utils.errors import HddmError
from hddm.velocity import VelocityField
from tests.artefacts import refusal
from tests.cases import LINEAR, Case, ConditionSum, case_named, in_parts, oracle_field
from tests.oracles import GaussianMixture, OracleNetwork, exact_router, relative_error

PRIOR = [0.3, 0.5, 0.2]
SHARDS = [GaussianMixture.random(seed=20 + k, modes=3, dim=8) for k in range(3)]
WHOLE = GaussianMixture.union(SHARDS, PRIOR)
SHAPE = (2, 2, 2)
FLOW = (LINEAR, "flow_prediction")
EPSILON = (case_named("ddpm-linear"), "epsilon")
COSINE = (case_named("cosine"), "epsilon")
Kind = tuple[Case, str]


class Exact(nn.Module):
    """An optimal network in float64, so that it is sampled in float64."""

    def __init__(self, shard: GaussianMixture, kind: Kind) -> None:
        super().__init__()
        self.best = OracleNetwork(shard, kind[0].alpha_sigma, kind[1])
        self.wide = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, y: Tensor, timestep: Tensor) -> Tensor:
        return self.best(y, timestep)


def _exact(
    shard: GaussianMixture, kind: Kind = FLOW, low: float = 0.0, high: float = 1.0
) -> VelocityField:
    network = Exact(shard, kind)
    return VelocityField(
        network, kind[0].schedule, kind[1], sample_shape=SHAPE, noise_range=(low, high)
    )


def _pair(
    shard: GaussianMixture, boundary: float, high: Kind = FLOW, low: Kind = FLOW
) -> list[VelocityField]:
    return [_exact(shard, high, low=boundary), _exact(shard, low, high=boundary)]


def _router(parts: Sequence[tuple[int, float]]) -> Callable[[Tensor, Tensor], Tensor]:
    """The exact posterior of the shards, in ``parts`` (shard, share of its probability), one an expert."""
    posterior = exact_router(SHARDS, PRIOR)
    shares = torch.tensor([share for _, share in parts], dtype=torch.float64)
    return lambda x, t: posterior(x, t)[:, [shard for shard, _ in parts]] * shares


def _one(strategy: str = "draw", **options: float) -> Ensemble:
    """A pair of numbers: 2 at high noise, 1 at low noise."""
    fields = [
        ConditionSum(2.0).field(noise_range=(0.5, 1), sample_shape=SHAPE),
        ConditionSum(1.0).field(noise_range=(0, 0.5), sample_shape=SHAPE),
    ]
    return Ensemble(in_parts(fields, [0, 0]), strategy=strategy, **options)


@pytest.mark.parametrize(
    ("high", "low"),
    [
        (FLOW, FLOW),
        (EPSILON, FLOW),
        (FLOW, COSINE),
        (COSINE, (case_named("squaredcos-cap-v2"), "sample")),
    ],
    ids=["flow", "ddpm at high noise", "ddpm at low noise", "two of ddpm"],
)
@pytest.mark.parametrize("boundary", [0.5, 0.875])
def test_a_pair_of_exact_fields_is_the_whole_field(high: Kind, low: Kind, boundary: float) -> None:
    pair = _pair(SHARDS[0], boundary, high, low)
    start, end = max(pair[1].range[0], 0), min(pair[0].range[1], 1)
    t = torch.cat(
        [torch.linspace(start, end, 97), torch.tensor([boundary, boundary - 1e-12])]
    ).double()
    x_t = SHARDS[0].states(t, seed=0, shape=SHAPE)
    truth = SHARDS[0].velocity(x_t, t)
    for strategy in ("full", "top-1", "nucleus-0.9"):
        assert (
            relative_error(Ensemble(in_parts(pair, [4, 4]), None, strategy).velocity(x_t, t), truth)
            < 1e-9
        )
    drawn = torch.arange(len(t)) % 2
    found = Ensemble(in_parts(pair, [0, 0]), strategy="draw").velocity(x_t, t, expert=drawn)
    assert relative_error(found, truth) < 1e-9


@pytest.mark.parametrize("strategy", ["full", "top-3", "nucleus-1"])
def test_pairs_of_several_shards_and_the_exact_posterior_are_one_model_of_the_whole(
    strategy: str,
) -> None:
    """Whatever part of the probability of their shard the router gives to each of a pair."""
    (first, second), (third, fourth) = (
        _pair(SHARDS[0], 0.5, FLOW, COSINE),
        _pair(SHARDS[2], 0.8, EPSILON),
    )
    experts = [first, _exact(SHARDS[1]), fourth, second, third]
    router = _router([(0, 0.3), (1, 1), (2, 0.9), (0, 0.7), (2, 0.1)])
    ensemble = Ensemble(in_parts(experts, [0, 1, 2, 0, 2]), router, strategy)
    assert ensemble.num_domains == 3
    t = torch.linspace(0, third.range[1], 97, dtype=torch.float64)
    x_t = WHOLE.states(t, seed=0, shape=SHAPE)
    assert relative_error(ensemble.velocity(x_t, t), WHOLE.velocity(x_t, t)) < 1e-9


@pytest.mark.parametrize("solver", ["euler", "heun", "adams-moulton"])
def test_a_sampled_pair_is_the_whole_expert(solver: str) -> None:
    alone = sample(_exact(SHARDS[0]), 5, steps=12, solver=solver)
    for strategy in ("draw", "full"):
        pair = Ensemble(in_parts(_pair(SHARDS[0], 0.6, FLOW, COSINE), [0, 0]), None, strategy)
        found = sample(pair, 5, steps=12, solver=solver)
        assert found.dtype == torch.float64
        assert relative_error(found, alone) < 1e-9


@pytest.mark.parametrize(
    ("strategy", "options"), [("draw", {}), ("full", {}), ("top-2", {"router_every": 5})]
)
def test_sampled_pairs_are_the_ensemble_of_whole_experts(
    strategy: str, options: dict[str, int]
) -> None:
    """A domain is drawn as often as the one expert of its shard, and mixed by the same probability."""
    whole = Ensemble(
        [_exact(shard) for shard in SHARDS], exact_router(SHARDS, PRIOR), strategy, PRIOR
    )
    experts = [*_pair(SHARDS[0], 0.5, FLOW, COSINE), _exact(SHARDS[1]), *_pair(SHARDS[2], 0.7)]
    router = _router([(0, 0.5), (0, 0.5), (1, 1), (2, 0.5), (2, 0.5)])
    prior = [PRIOR[0] / 2, PRIOR[0] / 2, PRIOR[1], PRIOR[2] / 2, PRIOR[2] / 2]
    pairs = Ensemble(in_parts(experts, [0, 0, 2, 3, 3]), router, strategy, prior)
    if strategy == "draw":
        assert set(pick_experts(whole.prior, Seeded(0).draws(range(12))).tolist()) == {0, 1, 2}
    expected = sample(whole, 12, steps=10, batch_size=4, **options)
    use = ExpertUse(5)
    found = sample(pairs, 12, steps=10, batch_size=4, use=use, **options)
    assert relative_error(found, expected) < 1e-9
    for row in use.report()["by_time"]:
        for runs, field in zip(row["runs"], experts, strict=True):
            assert runs == 0 or (
                field.noise_range[0] < row["t"][1] and field.noise_range[1] > row["t"][0]
            )


def test_where_ranges_meet_the_expert_of_higher_noise_runs() -> None:
    t = torch.tensor([0.0, 0.5 - 1e-12, 0.5, 0.7, 1.0], dtype=torch.float64)
    v = _one("full").velocity(torch.zeros(5, *SHAPE), t)
    assert v[:, 0, 0, 0].tolist() == [1, 1, 2, 2, 2]
    # In float32 a t of 0.7 lies below 0.7.
    fields = [
        ConditionSum(k).field(noise_range=part) for k, part in ((2.0, (0.7, 1)), (1.0, (0, 0.7)))
    ]
    ensemble = Ensemble(in_parts(fields, [0, 0]), strategy="full")
    for dtype, value in ((torch.float32, 1), (torch.float64, 2)):
        assert (
            ensemble.velocity(torch.zeros(1, *SHAPE), torch.tensor([0.7], dtype=dtype)).mean()
            == value
        )
    assert fields[0].velocity(torch.zeros(1, *SHAPE), torch.tensor([0.7])).mean() == 2


def test_an_expert_for_a_part_of_t_is_refused_outside_it() -> None:
    high = oracle_field(SHARDS[0], noise_range=(0.5, 1))
    assert high.velocity(torch.zeros(2, 8), torch.tensor([0.5, 1.0])).shape == (2, 8)
    message = refusal(high.velocity, torch.zeros(2, 8), torch.tensor([0.7, 0.45]))
    assert "t = 0.45 is outside the noise range 0.5:1 of this expert" in message
    for field in (high, oracle_field(SHARDS[0], noise_range=(0, 0.5))):
        assert "is outside the noise range" in refusal(sample, field, 2, shape=SHAPE)
    states = integrate(high, torch.zeros(2, 8), 0.5 + 0.5 * time_grid(4))
    assert states.isfinite().all()


@pytest.mark.parametrize("part", [(0.5, 0.5), (0.7, 0.2), (-0.1, 1), (0, 2), (0.996, 1)], ids=str)
def test_a_noise_range_is_a_part_of_t_that_the_schedule_reaches(part: tuple[float, float]) -> None:
    with pytest.raises(HddmError, match=r"^`noise_range` .*: must be LOW:HIGH"):
        oracle_field(SHARDS[0], *EPSILON, noise_range=part)


@pytest.mark.parametrize(
    ("ranges", "domains", "words"),
    [
        ([(0.5, 1), (0, 0.5)], None, "expert 0: for t in 0.5:1, so that t in 0:0.5 is missing"),
        ([(0, 1), (0, 0.5)], None, "expert 1: for t in 0:0.5, so that t in 0.5:1 is missing"),
        (
            [(0.5, 1), (0, 0.4)],
            [0, 0],
            "expert 0 and expert 1: for t in 0.5:1 and 0:0.4, so that t in 0.4:0.5 is missing",
        ),
        (
            [(0.5, 1), (0, 1), (0, 0.6)],
            [0, 1, 0],
            "so that t in 0.5:0.6 is double; experts of one domain cover [0, 1] once",
        ),
        (
            [(0, 1), (0, 1)],
            [0, 0],
            "expert 0 and expert 1: for t in 0:1 and 0:1, so that t in 0:1 is double",
        ),
    ],
    ids=str,
)
def test_a_domain_covers_t_once(
    ranges: list[tuple[float, float]], domains: list[int] | None, words: str
) -> None:
    experts = [ConditionSum().field(noise_range=part) for part in ranges]
    assert words in refusal(Ensemble, in_parts(experts, domains), strategy="draw")


def test_all_that_keeps_experts_apart_is_told_at_once() -> None:
    experts = [ConditionSum().field(noise_range=part) for part in [(0, 1), (0, 1), (0, 0.5)]]
    experts[1].sample_shape, experts[0].sample_shape = (3, 8, 8), (1, 8, 8)
    experts[2].sampling_steps = 2
    told = refusal(Ensemble, experts, strategy="full")
    assert "expert 1: sample_shape (3, 8, 8), not (1, 8, 8)" in told
    assert "expert 2: is a student of few steps" in told
    assert "for t in 0:0.5, so that t in 0.5:1 is missing" in told


def test_either_of_a_pair_stands_for_both() -> None:
    pair = _one()
    whole = sample(pair, 3, steps=8)
    for expert in (0, 1):
        assert torch.equal(sample(pair, 3, steps=8, expert=expert), whole)
    # Of Euler's 8 steps those from 1 to 0.5 begin with 2, that from 0.5 too.
    start = sample(
        Ensemble([ConditionSum().field(sample_shape=SHAPE)], strategy="draw"), 3, steps=8
    )
    torch.testing.assert_close(sample(pair, 3, steps=8, solver="euler"), start - (5 * 2 + 3) / 8)


def test_a_pair_counts_once_for_strategies_and_classes() -> None:
    fields = [ConditionSum(k).field("class_labels", classes=["a", "b"]) for k in range(2)]
    table = torch.tensor([[0.4, 0.6], [0.9, 0.1]], dtype=torch.float64)
    of_class = [[0.2, 0.8], [0.7, 0.3]]
    plain = Ensemble(in_parts(fields, None, of_class), lambda x, t: table, "full", PRIOR[:2])
    parts = [ConditionSum().field("class_labels", classes=["a", "b"], noise_range=(0, 0.5))]
    parts += [
        fields[1],
        ConditionSum().field("class_labels", classes=["a", "b"], noise_range=(0.5, 1)),
    ]
    split = torch.tensor([[0.5, 0, 0.5], [0, 1, 0]], dtype=torch.float64)
    prior, rows = torch.tensor(PRIOR[:2]).double() @ split, torch.tensor(of_class).double() @ split
    paired = Ensemble(in_parts(parts, [0, 1, 0], rows), lambda x, t: table @ split, "full", prior)
    x, t, labels = torch.zeros(2, *SHAPE).double(), torch.tensor([0.3, 0.8]), torch.tensor([0, 1])
    expected, found = (
        plain.weights(x, t, conditions={"class_labels": labels}),
        paired.weights(x, t, conditions={"class_labels": labels}),
    )
    torch.testing.assert_close(found[:, 1], expected[:, 1])
    torch.testing.assert_close(found[:, [0, 2]], expected[:, :1] * torch.eye(2).double())
    assert "top-3 needs 3 experts and there are 2" in refusal(
        Ensemble, in_parts(parts, [0, 1, 0]), None, "top-3"
    )
