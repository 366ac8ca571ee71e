"""Text attention added to DiTs."""

from typing import Any

import pytest
import torch

from hddm.checkpoints.plan import add_text
from hddm.networks.transformers import ExpertTransformer
from tests.transformer_files import DIT, dit_network

TIMES = torch.arange(0.5, 1000, 200)


def _source(seed: int = 0, **changes: Any) -> tuple[ExpertTransformer, dict[str, Any]]:
    """An adaLN-Zero network with random numbers everywhere, and its config."""
    config = {**DIT, "depth": 3, "frequency_shift": 1, **changes}
    return dit_network(seed, **config), config


@pytest.mark.parametrize("modulation", ["zero", "single"])
def test_added_text_leaves_outputs_the_same_bits(modulation: str) -> None:
    source, config = _source(modulation=modulation)
    state = torch.get_rng_state()
    weights, config = add_text(source.state_dict(), config, text_dim=12)
    assert torch.equal(torch.get_rng_state(), state)
    network = ExpertTransformer(**config)
    network.load_state_dict(weights)
    noise = torch.Generator().manual_seed(1)
    x, labels, text = (
        torch.randn(5, 4, 8, 8, generator=noise),
        torch.arange(5),
        torch.ones(5, 6, 12),
    )
    with torch.no_grad():
        assert torch.equal(network(x, TIMES, labels, text), source(x, TIMES, labels))
    first, second = (network.layers[i].cross_attn.in_proj_weight for i in range(2))
    assert first.std() > 0
    assert not torch.equal(first, second)
