"""The expert network against DiT as diffusers computes it."""

import re

import pytest
import torch
from diffusers import DiTTransformer2DModel
from torch import Tensor

from hddm.networks.transformers import ExpertTransformer
from hddm.training.settings import size_config
from hddm.utils.errors import HddmError

DIT = {
    "sample_size": 16,
    "hidden_size": 64,
    "depth": 3,
    "num_heads": 4,
    "num_classes": 7,
    "modulation": "zero",
    "norm_eps": 1e-6,
    "out_channels": 8,
}
# The embedders of the other blocks are copies of the first block's.
DIFFUSERS_NAMES = {
    r"^pos_embed\.proj": "patch_embed",
    r"^transformer_blocks\.0\.norm1\.emb\.timestep_embedder\.linear_1": "time_embed.mlp.0",
    r"^transformer_blocks\.0\.norm1\.emb\.timestep_embedder\.linear_2": "time_embed.mlp.2",
    r"^transformer_blocks\.0\.norm1\.emb\.class_embedder\.embedding_table": "class_embed",
    r"^transformer_blocks": "layers",
    r"attn1\.to_out\.0": "attn.out_proj",
    r"ff\.net\.0\.proj": "mlp.0",
    r"ff\.net\.2": "mlp.2",
    r"norm1\.linear": "modulation",
    r"^proj_out_1": "final_layer.modulation",
    r"^proj_out_2": "final_layer.linear",
}


def _renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    for pattern, name in DIFFUSERS_NAMES.items():
        weights = {re.sub(pattern, name, key): value for key, value in weights.items()}
    return weights


@torch.no_grad()
def test_diffusers_dit_with_one_embedder_is_reproduced() -> None:
    noise = torch.Generator().manual_seed(0)
    theirs = DiTTransformer2DModel(
        sample_size=16,
        num_attention_heads=4,
        attention_head_dim=16,
        num_layers=3,
        out_channels=8,
        num_embeds_ada_norm=7,
    ).eval()
    for parameter in theirs.parameters():
        parameter.data = 0.15 * torch.randn(parameter.shape, generator=noise)
    first = theirs.transformer_blocks[0].norm1.emb
    for block in theirs.transformer_blocks:
        block.norm1.emb.load_state_dict(first.state_dict())
    weights = _renamed(theirs.state_dict())
    for layer in range(3):
        for part in ("weight", "bias"):
            maps = [weights.pop(f"layers.{layer}.attn1.to_{letter}.{part}") for letter in "qkv"]
            weights[f"layers.{layer}.attn.in_proj_{part}"] = torch.cat(maps)
    weights = {key: value for key, value in weights.items() if ".norm1." not in key}
    weights["pos_embed"] = theirs.pos_embed.pos_embed
    ours = ExpertTransformer(**DIT, mlp_norm_eps=1e-5, frequency_shift=1)
    ours.load_state_dict(weights)
    x = torch.randn(3, 4, 16, 16, generator=noise)
    times, labels = torch.tensor([5, 333, 999]), torch.tensor([0, 6, 7])
    expected = theirs(x, times, labels).sample
    torch.testing.assert_close(ours(x, times, labels), expected, rtol=0, atol=5e-6 * expected.std().item())


def test_text_is_asked_for_by_name_and_taken_in_any_precision() -> None:
    network = ExpertTransformer(sample_size=4, in_channels=1, text_dim=6, **size_config("tiny")).bfloat16()
    x, t = torch.zeros(1, 1, 4, 4, dtype=torch.bfloat16), torch.ones(1)
    with pytest.raises(HddmError, match="pass encoder_hidden_states"):
        network(x, t)
    assert network(x, t, encoder_hidden_states=torch.ones(1, 3, 6)).isfinite().all()
