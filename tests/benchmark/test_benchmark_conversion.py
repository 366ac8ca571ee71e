"""The conversion benchmark's mixtures and conversions, by hand."""

import pytest
import torch
from torch import Tensor

from benchmarks.conversion.fidelity import EXACT, TIMES, conversions, errors_on_mixtures, schedules
from benchmarks.conversion.mixtures import DiagonalMixture
from tests.oracles import GaussianMixture


def test_the_mixture_is_that_of_the_oracle() -> None:
    mixture = DiagonalMixture.random(0, modes=3, dimension=5)
    oracle = GaussianMixture(mixture.weights, mixture.means, torch.diag_embed(mixture.variances))
    x, t = mixture.states(16, 0.3, seed=1)
    for found, expected in zip(
        mixture.x_0_and_eps(x, 1 - t, t), oracle.x_0_and_eps(x, 1 - t, t), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_only_the_exact_conversion_is_exact_inside_the_range() -> None:
    for row in errors_on_mixtures((8,), states=256, seeds=1):
        inside = [k for k, t in enumerate(TIMES) if t <= 0.99]
        assert max(row["errors"][EXACT][k] for k in inside) < 1e-9
        for way in set(row["errors"]) - {EXACT}:
            assert max(row["errors"][way][k] for k in inside) > 0.1


def test_the_inexact_conversions_are_the_formulas_that_they_claim_to_be() -> None:
    fed: list[tuple[Tensor, Tensor]] = []

    def network(y: Tensor, timestep: Tensor) -> Tensor:
        fed.append((y, timestep))
        return 0.5 * y

    x, t = torch.tensor([[2.0]], dtype=torch.float64), torch.tensor([0.3004], dtype=torch.float64)
    linear = schedules()["DDPM, linear betas"]
    ways = conversions(network, linear)
    a, s = (float(one) for one in linear.alpha_sigma(torch.tensor(300.0, dtype=torch.float64)))
    expected = {
        "same x, same t": ((1 - 2) / (1 - 0.3004), 999 * 0.3004),
        "round(999 t), own coefficients": (1 - (2 - s) / a, 300),
        "round(999 t), read as velocity": (1.0, 300),
    }
    for way, (velocity, timestep) in expected.items():
        assert ways[way](x, t).item() == pytest.approx(velocity)
        assert fed[-1][0].item() == 2
        assert fed[-1][1].item() == pytest.approx(timestep)
