"""Text attention added to DiTs, and configs of DiTs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiTTransformer2DModel

from hddm.checkpoints.convert import write
from hddm.checkpoints.plan import add_text, plan
from hddm.networks.transformers import ExpertTransformer
from hddm.settings import Conversion
from hddm.utils.errors import HddmError
from tests.checkpoint_files import dit, pipeline
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
    x, labels, text = torch.randn(5, 4, 8, 8, generator=noise), torch.arange(5), torch.ones(5, 6, 12)
    with torch.no_grad():
        assert torch.equal(network(x, TIMES, labels, text), source(x, TIMES, labels))
    with pytest.raises(HddmError, match="already takes text"):
        add_text(weights, config, 12)
    first, second = (network.layers[i].cross_attn.in_proj_weight for i in range(2))
    assert first.std() > 0
    assert not torch.equal(first, second)


DEFAULTS = {"num_attention_heads": 16, "in_channels": 4, "patch_size": 2, "num_embeds_ada_norm": 1000}


def _pipeline(folder: Path, **changes: object) -> Path:
    """A pipeline whose blocks share their embedders, as in released DiTs."""
    network = dit(**{"attention_head_dim": 2, "sample_size": 32, **changes})
    assert isinstance(network, DiTTransformer2DModel)
    first = network.transformer_blocks[0].norm1.emb.state_dict()
    for block in network.transformer_blocks:
        block.norm1.emb.load_state_dict(first)
    return pipeline(folder, network)


def test_what_a_config_leaves_to_its_class_is_the_classs(tmp_path: Path) -> None:
    """Written networks are compared with their sources."""
    source = _pipeline(tmp_path / "source", **DEFAULTS)
    path = source / "transformer/config.json"
    stated = json.loads(path.read_text())
    left_out = [*DEFAULTS, "sample_size", "norm_eps", "attention_bias", "activation_fn", "norm_type"]
    path.write_text(json.dumps({key: value for key, value in stated.items() if key not in left_out}))
    write(plan(source, Conversion(text_dim=12)), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    names = ("num_heads", "in_channels", "patch_size", "num_classes", "sample_size", "depth")
    assert [config[name] for name in names] == [16, 4, 2, 1000, 32, 2]
