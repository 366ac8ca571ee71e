"""Muon for matrices, AdamW for the rest: which parameter is whose, and a resume to the last bit."""

from pathlib import Path

import pytest
import torch
from diffusers import DiTTransformer2DModel
from safetensors.torch import load_file
from torch import nn

from hddm.experts.records import WEAK
from hddm.networks.folders import WEIGHTS
from hddm.networks.transformers import ExpertTransformer, RouterTransformer
from hddm.training.expert import train_expert
from hddm.training.optimizer import optimizer_of
from hddm.training.settings import ExpertRecipe, RunOptions, resolve, size_config
from tests.artefacts import Died, ending_at, expert_settings

MUON = expert_settings("flow", optimizer="muon", learning_rate=1e-3, muon_learning_rate=0.02)
TINY = {"sample_size": 8, "in_channels": 3, **size_config("tiny")}


def _of_muon(network: nn.Module) -> set[str]:
    names = {parameter: name for name, parameter in network.named_parameters()}
    groups = optimizer_of(network, resolve(ExpertRecipe, MUON)).param_groups
    return {names[p] for group in groups if group["initial_lr"] == 0.02 for p in group["params"]}


def test_muon_takes_the_matrices_between_features_and_no_others() -> None:
    expert = ExpertTransformer(**TINY, num_classes=3, text_dim=16)
    found = _of_muon(expert)
    block = {"attn.in_proj_weight", "attn.out_proj.weight", "mlp.0.weight", "mlp.2.weight"}
    block |= {f"cross_{name}" for name in block if name.startswith("attn")}
    others = {"t_block.1.weight", "time_embed.mlp.0.weight", "time_embed.mlp.2.weight", "text_proj.weight"}
    assert found == others | {f"layers.{k}.{name}" for k in range(2) for name in block}
    router = _of_muon(RouterTransformer(num_experts=3, **TINY))
    assert "layers.0.adaLN_modulation.1.weight" in router
    assert not {name for name in router if name.startswith(("head", "patch_embed", "pos_embed"))}
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "sample_size": 8}
    foreign = _of_muon(DiTTransformer2DModel(**sizes, num_embeds_ada_norm=5))
    assert "transformer_blocks.0.attn1.to_q.weight" in foreign
    assert not {
        name for name in foreign if "proj_out" in name or "pos_embed" in name or "embedding_table" in name
    }


def test_every_parameter_is_trained_by_one_optimiser() -> None:
    network = ExpertTransformer(**TINY)
    optimizer = optimizer_of(network, resolve(ExpertRecipe, MUON))
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, trained)) == sorted(map(id, network.parameters()))
    before = [p.detach().clone() for p in trained]
    for p in trained:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert not any(torch.equal(p, old) for p, old in zip(trained, before, strict=True))
    assert all(optimizer.state[p] for p in trained)


def test_muon_makes_the_step_of_a_matrix_orthogonal() -> None:
    """All singular values of its first step are near the rate, times √(rows/columns) where rows are more."""
    layer = nn.Linear(16, 64, bias=False)
    settings = MUON.model_copy(update={"weight_decay": 0.0})
    optimizer = optimizer_of(nn.ModuleDict({"layer": layer}), resolve(ExpertRecipe, settings))
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    values = torch.linalg.svdvals(layer.weight.detach() - before) / 0.02
    assert ((values > 0.5 * 2) & (values < 1.3 * 2)).all()


@pytest.mark.integration
def test_a_training_by_muon_resumes_to_the_last_bit(whole: Path, tmp_path: Path) -> None:
    losses = train_expert(whole, tmp_path / "one", MUON)
    run = RunOptions(checkpoint_every=3, resume=True)
    with pytest.raises(Died):
        train_expert(whole, tmp_path / "two", MUON, on_step=ending_at(7), run=run)
    assert train_expert(whole, tmp_path / "two", MUON, run=run) == losses
    for file in (WEIGHTS, WEAK):
        one, two = (load_file(tmp_path / name / file) for name in ("one", "two"))
        assert all(torch.equal(one[name], two[name]) for name in one)
