"""The helpers of the conversion benchmark by hand, and its fidelity question in small."""

import pytest
import torch
from torch import Tensor

from benchmarks.conversion.checkpoint import XL, shapes
from benchmarks.conversion.curves import loss_at, reached, steps_to_reach
from benchmarks.conversion.fidelity import EXACT, QUICK, TIMES, conversions, errors_on_mixtures, schedules
from benchmarks.conversion.mixtures import DiagonalMixture
from benchmarks.conversion.starts import SCRATCH
from tests.oracles import GaussianMixture

STEPS, LOSSES = [0, 10, 20, 40], [1.0, 0.6, 0.5, 0.55]


def test_steps_and_losses_between_marks_are_those_of_the_straight_lines() -> None:
    steps = {1.0: 0.0, 2.0: 0.0, 0.8: 5.0, 0.6: 10.0, 0.55: 15.0, 0.5: 20.0}
    assert {loss: steps_to_reach(STEPS, LOSSES, loss) for loss in steps} == pytest.approx(steps)
    assert steps_to_reach(STEPS, LOSSES, 0.4) is None
    losses = {0: 1, 5: 0.8, 20: 0.5, 30: 0.525, 40: 0.55}
    assert {step: loss_at(STEPS, LOSSES, step) for step in losses} == pytest.approx(losses)


def test_a_speedup_is_paired_by_seed_and_missing_where_a_seed_did_not_arrive() -> None:
    runs = {
        SCRATCH: [{"steps": [0, 10], "losses": [1.0, 0.5]}, {"steps": [0, 10], "losses": [1.0, 0.6]}],
        "fast": [{"steps": [0, 10], "losses": [1.0, 0.0]}, {"steps": [0, 10], "losses": [0.5, 0.4]}],
        "slow": [{"steps": [0, 10], "losses": [1.0, 0.5]}, {"steps": [0, 10], "losses": [1.0, 0.7]}],
    }
    found = reached(runs, SCRATCH, 1.0)
    assert found["fast"].steps == (pytest.approx(5.0), 0.0)
    assert found["fast"].ratios == pytest.approx([2.0, 10.0])
    assert found["fast"].speedup.startswith("6.00×")
    assert str(found["slow"]) == "10, 1 of 2"
    assert found["slow"].speedup == "–"
    assert str(reached({**runs, "not": [runs["slow"][1]] * 2}, SCRATCH, None)["not"]) == "not in 10"


def test_the_mixture_is_that_of_the_oracle() -> None:
    mixture = DiagonalMixture.random(0, modes=3, dimension=5)
    oracle = GaussianMixture(mixture.weights, mixture.means, torch.diag_embed(mixture.variances))
    x, t = mixture.states(16, 0.3, seed=1)
    for found, expected in zip(
        mixture.x_0_and_eps(x, 1 - t, t), oracle.x_0_and_eps(x, 1 - t, t), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_only_the_exact_conversion_is_exact_inside_the_range() -> None:
    for row in errors_on_mixtures(QUICK, seeds=1):
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


def test_the_checkpoint_has_the_weights_of_the_published_one() -> None:
    # DiT-XL/2 with a learned variance, its fixed positions included.
    assert sum(torch.Size(shape).numel() for _, shape in shapes(XL)) == 675_129_632
