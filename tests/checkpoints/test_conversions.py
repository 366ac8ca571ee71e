"""The naive conversion that an experiment compares with, and what an evaluation costs."""

from pathlib import Path

import torch
from torch import Tensor

import hddm
from benchmarks.conversion.conversions import SameTimeField
from hddm.benchmark.counting import evaluation_flop, forward_flop
from tests.cases import COSINE

SHAPE = (1, 2, 2)
X = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(0))
TIMES = torch.tensor([0.0, 0.2, 0.5, 0.9, 0.999])


def _wide(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)


def test_the_naive_conversion_is_the_same_x_at_the_same_t() -> None:
    seen: list[Tensor] = []

    def network(y: Tensor, time: Tensor) -> Tensor:
        seen.extend((y, time))
        return 0.3 * y + _wide(time) / 1000

    field = SameTimeField(network, COSINE.schedule, "epsilon", 1000.0)
    eps = 0.3 * X + _wide(TIMES)
    torch.testing.assert_close(
        field.velocity(X, TIMES), (eps - X) / _wide(1 - TIMES), rtol=1e-4, atol=1e-5
    )
    assert torch.equal(seen[0], X)
    torch.testing.assert_close(seen[1], 1000 * TIMES)
    assert torch.equal(field.velocity(X, torch.ones(5)), X)


def _block(tokens: int, width: int) -> int:
    """Operations of projections, attention over all pairs, and a perceptron four times as wide."""
    linear = 2 * tokens * width * (3 * width + width + 2 * 4 * width)
    return linear + 2 * 2 * tokens * tokens * width


def test_the_cost_is_the_count_of_every_multiplication_and_addition(ensemble: Path) -> None:
    width, depth, tokens, patch = 32, 2, 4, 4
    time = 2 * (256 * width + width * width)
    embed = 2 * tokens * patch * width
    expert = embed + time + 2 * width * 6 * width + depth * _block(tokens, width) + embed
    # The head reads one token, so the last block asks, mixes and makes that one alone.
    head, all_tokens = 2 * (width * width + width * 2), tokens + 1
    last = 2 * all_tokens * width * 2 * width + 2 * width * (width + width + 8 * width)
    last += 2 * 2 * all_tokens * width
    blocks = (depth - 1) * _block(all_tokens, width) + last + depth * 2 * width * 6 * width
    router = embed + time + blocks + head
    model = hddm.load(ensemble)
    state = torch.zeros(1, *model.sample_shape)
    for field in model.experts:
        field.calibration = None
    assert [evaluation_flop(field) for field in model.experts] == [expert] * len(model.experts)
    assert forward_flop(model.router, state, torch.ones(1)) == router
