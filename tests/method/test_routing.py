"""Strategies against their definitions, row by row; routers by moments against exact posteriors."""

import pytest
import torch
from torch import Tensor

from hddm.calibration import Moments
from hddm.ensemble import Ensemble
from hddm.routers import MomentsRouter, Router
from hddm.schedules import CosineSchedule, LinearSchedule
from hddm.strategies import Strategy
from hddm.utils.errors import HddmError
from hddm.velocity import VelocityField
from tests.cases import ConditionSum
from tests.oracles import GaussianMixture, OracleNetwork, Recorder, exact_router

NAMES = ["top-1", "top-2", "top-5", "full", "threshold-0.05", "threshold-0.3", "threshold-1"]
NAMES += ["nucleus-0.1", "nucleus-0.5", "nucleus-0.9", "nucleus-1"]


def _chosen(row: list[float], name: str) -> list[int]:
    """The experts that the strategy keeps, by its definition."""
    kind, _, value = name.partition("-")
    ranked = sorted(range(len(row)), key=lambda k: (-row[k], k))
    if kind == "top":
        return ranked[: int(value)]
    if kind == "threshold":
        return [k for k in ranked if row[k] >= float(value)] or ranked[:1]
    if kind == "nucleus":
        sizes = range(1, len(row) + 1)
        enough = (n for n in sizes if sum(row[k] for k in ranked[:n]) >= float(value))
        return ranked[: next(enough, len(row))]
    return ranked


def _definition(probabilities: Tensor, name: str) -> Tensor:
    rows = []
    for row in probabilities.tolist():
        chosen = _chosen(row, name)
        total = sum(row[k] for k in chosen)
        rows.append([row[k] / total if k in chosen else 0.0 for k in range(len(row))])
    return torch.tensor(rows, dtype=torch.float64)


def _random_rows(sharpness: float) -> Tensor:
    noise = torch.Generator().manual_seed(0)
    logits = sharpness * torch.randn(200, 5, generator=noise, dtype=torch.float64)
    return logits.softmax(1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sharpness", [0.1, 5.0])
def test_weights_equal_the_definition(name: str, sharpness: float) -> None:
    p = _random_rows(sharpness)
    weights = Strategy.parse(name).weights(p)
    torch.testing.assert_close(weights, _definition(p, name), rtol=1e-12, atol=1e-15)
    narrow = Strategy.parse(name).weights(p.float())
    torch.testing.assert_close(narrow, _definition(p.float(), name).float())


@pytest.mark.parametrize("name", NAMES)
def test_ties_go_to_the_lower_index(name: str) -> None:
    # Eighths are exact in binary: every sum is exactly what it reads.
    rows = [[1, 1, 2, 2, 2], [2, 2, 2, 1, 1], [4, 1, 1, 1, 1], [1, 4, 1, 1, 1], [0, 4, 0, 4, 0]]
    p = torch.tensor(rows, dtype=torch.float64) / 8
    weights = Strategy.parse(name).weights(p)
    torch.testing.assert_close(weights, _definition(p, name))


def test_a_nucleus_that_reaches_its_share_exactly_takes_no_more() -> None:
    p = torch.tensor([[0.5, 0.4, 0.1], [0.1, 0.4, 0.5], [0.25, 0.5, 0.25]])
    weights = Strategy.parse("nucleus-0.5").weights(p)
    assert weights.tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]


def test_a_threshold_includes_its_own_value_in_single_precision() -> None:
    p = torch.tensor([[0.1, 0.2, 0.7]])
    assert (Strategy.parse("threshold-0.1").weights(p) > 0).all()
    assert (Strategy.parse("threshold-0.2").weights(p) > 0).tolist() == [[False, True, True]]


@pytest.mark.parametrize(
    "name",
    [
        *(
            "top-0",
            "top--1",
            "top-1.5",
            "top",
            "top-",
            "nucleus",
            "nucleus-0",
            "nucleus-1.1",
            "nucleus-nan",
        ),
        *("threshold-x", "threshold--0.1", "draw-2", "full-2", "best", "", "Top-1"),
    ],
)
def test_an_unknown_strategy_is_refused(name: str) -> None:
    with pytest.raises(HddmError, match="unknown strategy"):
        Strategy.parse(name)


def test_more_experts_than_there_are_and_strategies_without_weights_are_refused() -> None:
    p = torch.full((2, 3), 1 / 3)
    with pytest.raises(HddmError, match="top-4 needs 4 experts and there are 3"):
        Strategy.parse("top-4").weights(p)
    with pytest.raises(HddmError, match="and has no weights"):
        Strategy.parse("draw").weights(p)
    Strategy.parse("top-3").weights(p)
    assert Strategy.parse("full").weights(torch.tensor([[2.0, 6.0]])).tolist() == [[0.25, 0.75]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_router_is_the_softmax_of_its_network_on_scaled_times(dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    network, x_t = Recorder(dtype), torch.tensor([[0.0, 1.0], [2.0, -1.0]], dtype=wide)
    t = torch.tensor([0.1234567, 1.0], dtype=torch.float64)
    p = Router(network)(x_t, t)
    torch.testing.assert_close(p[:, 0] / p[:, 1], torch.tensor([-1.0, 3.0], dtype=wide).exp())
    torch.testing.assert_close(p.sum(1), torch.ones(2, dtype=wide))
    ((x, timestep),) = network.fed
    assert x.dtype == dtype
    assert timestep.dtype == wide
    torch.testing.assert_close(timestep.double(), 1000 * t, rtol=2.0**-24, atol=0)


def _mixed(router: object) -> Ensemble:
    return Ensemble([ConditionSum().field() for _ in range(2)], router, "full")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_times_reach_any_router_in_the_states_dtype_float32_at_least(dtype: torch.dtype) -> None:
    seen: list[torch.dtype] = []

    def router(x_t: Tensor, t: Tensor) -> Tensor:
        seen.append(t.dtype)
        return torch.full((len(x_t), 2), 0.5)

    _mixed(router).velocity(torch.zeros(3, 1, 2, 2, dtype=dtype), torch.full((3,), 0.3))
    assert seen == [torch.float64 if dtype == torch.float64 else torch.float32]


@pytest.mark.parametrize("row", [[3.0, -2.0], [0.0, 0.0], [float("nan"), 1.0], [0.7, 0.7]], ids=str)
def test_what_is_no_probability_is_refused(row: list[float]) -> None:
    mixed = _mixed(lambda x, t: torch.tensor(row).expand(len(x), 2))
    with pytest.raises(HddmError, match="which are not"):
        mixed.velocity(torch.zeros(3, 1, 2, 2), torch.full((3,), 0.3))


DIM, SHAPE = 12, (3, 2, 2)
PRIOR = (0.5, 0.2, 0.3)
TIMES = torch.tensor([0.0, 0.02, 0.3, 0.7, 0.98, 1.0], dtype=torch.float64)


def _gaussian(seed: int, rank: int) -> tuple[GaussianMixture, Moments]:
    """A Gaussian of the form that `Moments` holds: ``rank`` variances, one for all other directions."""
    noise = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(DIM, DIM, generator=noise, dtype=torch.float64)).Q
    variances = 0.1 + torch.rand(rank + 1, generator=noise, dtype=torch.float64)
    mean = torch.randn(DIM, generator=noise, dtype=torch.float64)
    every = torch.cat([variances[:-1], variances[-1:].expand(DIM - rank)])
    data = GaussianMixture(
        torch.ones(1, dtype=torch.float64), mean[None], (basis * every @ basis.T)[None]
    )
    return data, Moments(mean, basis[:, :rank].contiguous(), variances)


def _states(shards: list[GaussianMixture]) -> tuple[Tensor, Tensor]:
    t = TIMES.repeat_interleave(40)
    return GaussianMixture.union(shards, PRIOR).states(t, seed=3, shape=SHAPE), t


@pytest.mark.parametrize("ranks", [(4, 4, 4), (0, 5, 12)], ids=str)
def test_the_posterior_of_gaussian_shards_is_exact(ranks: tuple[int, ...]) -> None:
    shards, moments = zip(*(_gaussian(seed, rank) for seed, rank in enumerate(ranks)), strict=True)
    x_t, t = _states(list(shards))
    found, exact = MomentsRouter(moments, PRIOR)(x_t, t), exact_router(shards, PRIOR)(x_t, t)
    assert (found - exact).abs().max() < 1e-9
    # At t = 1 nothing is known but the prior, at t = 0 nearly everything.
    assert (found[t == 1] - torch.tensor(PRIOR, dtype=torch.float64)).abs().max() < 1e-9
    assert found[t == 0].max(1).values.mean() > 0.9


def test_mixed_experts_that_it_routes_have_the_velocity_of_all_the_data() -> None:
    shards, moments = zip(*(_gaussian(seed, 5) for seed in range(3)), strict=True)
    kinds = [
        (CosineSchedule(), "epsilon"),
        (LinearSchedule(), "flow_prediction"),
        (CosineSchedule(), "sample"),
    ]
    experts = [
        VelocityField(
            OracleNetwork(shard, schedule.alpha_sigma, kind), schedule, kind, sample_shape=SHAPE
        )
        for shard, (schedule, kind) in zip(shards, kinds, strict=True)
    ]
    ensemble = Ensemble(experts, MomentsRouter(moments, PRIOR), "full", PRIOR)
    x_t, t = _states(list(shards))
    inner = (t > 0) & (t < 1)
    exact = GaussianMixture.union(shards, PRIOR).velocity(x_t[inner], t[inner])
    assert (ensemble.velocity(x_t[inner], t[inner]) - exact.view_as(x_t[inner])).abs().max() < 1e-9


def test_limited_evidence_makes_it_less_sure_and_keeps_the_order() -> None:
    """Against the trace of the whole matrices."""
    shards, moments = zip(*(_gaussian(seed, 5) for seed in range(3)), strict=True)
    x_t, t = (one[TIMES.repeat_interleave(40) < 1] for one in _states(list(shards)))
    sure, unsure = MomentsRouter(moments)(x_t, t), MomentsRouter(moments, evidence=2.0)(x_t, t)
    assert unsure.argmax(1).equal(sure.argmax(1))
    assert (unsure.max(1).values <= sure.max(1).values + 1e-12).all()
    directions = torch.zeros(len(t), dtype=torch.float64)
    for one in moments:
        rest = torch.eye(len(one.mean)) - one.basis @ one.basis.T
        covariance = one.basis @ one.variances[:-1].diag() @ one.basis.T + one.variances[-1] * rest
        for row, time in enumerate(t.tolist()):
            data = (1 - time) ** 2 * covariance.double()
            directions[row] += (
                torch.linalg.solve(data + time**2 * torch.eye(len(data)).double(), data).trace() / 3
            )
    temperature = (directions / 2).clamp_min(1)[:, None]
    log = sure.log() - sure.log().mean(1, keepdim=True)
    torch.testing.assert_close(unsure, (log / temperature).softmax(1), rtol=1e-5, atol=1e-7)
