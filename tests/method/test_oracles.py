"""The oracles themselves, against numerical integration and differentiation."""

import torch

from tests.oracles import GaussianMixture

SHARD = GaussianMixture.random(seed=3, modes=3, dim=4)


def test_moments_are_those_of_the_samples() -> None:
    data = SHARD.sample(200_000, seed=0)
    torch.testing.assert_close(data.mean(0), SHARD.mean, atol=0.02, rtol=0)
    torch.testing.assert_close(data.T.cov(), SHARD.covariance, atol=0.04, rtol=0)


def test_noise_estimate_is_the_score_by_tweedies_formula() -> None:
    y = SHARD.sample(16, seed=1).requires_grad_()
    a, s = torch.linspace(0.1, 1, 16, dtype=torch.float64), torch.linspace(2, 0.05, 16).double()
    (score,) = torch.autograd.grad(SHARD.log_density(y, a, s).sum(), y)
    x_0, eps = SHARD.x_0_and_eps(y.detach(), a, s)
    torch.testing.assert_close(eps, -s[:, None] * score, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(a[:, None] * x_0 + s[:, None] * eps, y.detach())


def test_data_estimate_is_the_posterior_mean_of_importance_sampling() -> None:
    data = SHARD.sample(400_000, seed=2)
    y, a, s = data[:1] + 0.3, 0.6, 0.9
    weights = (-((y - a * data) ** 2).sum(1) / (2 * s**2)).softmax(0)
    x_0, _ = SHARD.x_0_and_eps(y, torch.tensor([a]), torch.tensor([s]))
    torch.testing.assert_close(x_0[0], weights @ data, atol=0.01, rtol=0)
