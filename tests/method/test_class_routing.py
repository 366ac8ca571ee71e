"""Which experts a class is given to: held against posteriors in closed form."""

import pytest
import torch

import hddm
from hddm.ensemble import sparse_weights
from tests.cases import LINEAR
from tests.oracles import GaussianMixture, OracleNetwork, exact_router

PRIOR = [0.2, 0.5, 0.3]
# Images of four classes in three shards, with p(k) as their sums: 20, 50, 30 of 100.
COUNTS = torch.tensor([[20.0, 0, 0], [0, 30, 0], [0, 15, 15], [0, 5, 15]])
SHARDS = [GaussianMixture.random(seed=40 + k, modes=2, dim=4) for k in range(3)]
SHAPE = (1, 2, 2)


def _ensemble(strategy: str) -> hddm.Ensemble:
    fields = [
        hddm.VelocityField(
            OracleNetwork(shard, LINEAR.alpha_sigma, "flow_prediction"), LINEAR.schedule, "flow_prediction"
        )
        for shard in SHARDS
    ]
    for field in fields:
        network = field.network
        field.network = lambda y, timestep, class_labels, network=network: network(y, timestep)
    return hddm.Ensemble(fields, exact_router(SHARDS, PRIOR), strategy, PRIOR, COUNTS)


@pytest.mark.parametrize("label", range(4))
@pytest.mark.parametrize("strategy", ["full", "top-1", "nucleus-0.8"])
def test_a_class_is_routed_by_the_posterior_of_its_own_shares(label: int, strategy: str) -> None:
    # Given the shard, class and image are independent here, so the posterior is that of another prior.
    ensemble = _ensemble(strategy)
    shares = (COUNTS[label] / COUNTS[label].sum()).tolist()
    t = torch.linspace(0.05, 0.95, 21, dtype=torch.float64)
    x_t = SHARDS[1].states(t, seed=3, shape=SHAPE)
    exact = exact_router(SHARDS, shares)(x_t, t)
    found = ensemble.weights(x_t, t, conditions={"class_labels": torch.full((21,), label)})
    torch.testing.assert_close(found, sparse_weights(exact, ensemble._strategy), rtol=1e-9, atol=1e-12)
    v = ensemble.velocity(x_t, t, class_labels=torch.full((21,), label))
    expected = sum(
        found[:, k].view(-1, 1, 1, 1) * shard.velocity(x_t, t).view(x_t.shape)
        for k, shard in enumerate(SHARDS)
    )
    torch.testing.assert_close(v, expected, rtol=1e-9, atol=1e-9)


def test_the_null_class_is_routed_as_no_class() -> None:
    ensemble = _ensemble("full")
    t = torch.linspace(0.05, 0.95, 5, dtype=torch.float64)
    x_t = SHARDS[0].states(t, seed=4, shape=SHAPE)
    null = {"class_labels": torch.full((5,), 4)}
    assert torch.equal(ensemble.weights(x_t, t, conditions=null), ensemble.weights(x_t, t))


def test_a_class_whose_shards_the_router_excludes_is_still_made_by_them() -> None:
    ensemble = _ensemble("full")
    ensemble.router = lambda x, t: torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64).expand(len(x), -1)
    t = torch.full((2,), 0.5, dtype=torch.float64)
    found = ensemble.weights(torch.zeros(2, *SHAPE), t, conditions={"class_labels": torch.tensor([0, 3])})
    torch.testing.assert_close(found.double(), torch.tensor([[1.0, 0, 0], [0, 1, 0]]).double())


def test_sampling_gives_every_sample_its_class_s_experts() -> None:
    ensemble = _ensemble("full")
    use = hddm.sampling.ExpertUse(3)
    hddm.sample(ensemble, 6, steps=3, shape=SHAPE, use=use, class_labels=torch.tensor([0, 0, 1, 1, 0, 1]))
    torch.testing.assert_close(use.shares, torch.tensor([0.5, 0.5, 0.0]).double())
