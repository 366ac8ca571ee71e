"""Routers by moments against exact posteriors."""

import pytest
import torch
from torch import Tensor

from hddm.calibration import Moments
from hddm.ensemble import Ensemble
from hddm.routers import MomentsRouter
from hddm.schedules import CosineSchedule, LinearSchedule
from hddm.utils.errors import HddmError
from hddm.velocity import VelocityField
from tests.oracles import GaussianMixture, OracleNetwork, exact_router

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
    data = GaussianMixture(torch.ones(1, dtype=torch.float64), mean[None], (basis * every @ basis.T)[None])
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
        VelocityField(OracleNetwork(shard, schedule.alpha_sigma, kind), schedule, kind, sample_shape=SHAPE)
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


def test_what_makes_no_router_is_refused() -> None:
    (_, one), (_, other) = _gaussian(0, 3), _gaussian(1, 3)
    small = Moments(one.mean[:4], one.basis[:4], one.variances)
    for moments, options, said in (
        ([], {}, "images of one shape"),
        ([one, small], {}, r"not of \[12, 4\] numbers"),
        ([one, other], {"prior": [0.0, 0.0]}, "not all 0"),
        ([one, other], {"prior": [1.0]}, "prior must be 2 numbers"),
        ([one, other], {"evidence": 0.0}, "evidence must be a number above 0, not 0"),
    ):
        with pytest.raises(HddmError, match=said):
            MomentsRouter(moments, **options)
