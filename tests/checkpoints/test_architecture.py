"""AdaLN-Zero folded into AdaLN-Single, against least squares and singular values, and configs of DiTs."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiTTransformer2DModel
from torch import Tensor

from hddm.checkpoints.architecture import Folded, add_text, fold
from hddm.checkpoints.convert import write
from hddm.checkpoints.plan import Conversion, plan
from hddm.networks.transformers import ExpertTransformer
from hddm.utils.errors import HddmError
from tests.artefacts import Command
from tests.checkpoint_files import dit, pipeline, refused

SOURCE: dict[str, Any] = {
    "sample_size": 8,
    "hidden_size": 32,
    "depth": 3,
    "num_heads": 2,
    "modulation": "zero",
    "out_channels": 8,
    "frequency_shift": 1,
}
TIMES = torch.arange(0.5, 1000, 40)


def _source(seed: int = 0, **arguments: Any) -> tuple[ExpertTransformer, dict[str, Any]]:
    """An adaLN-Zero network with random numbers everywhere, and its config."""
    noise = torch.Generator().manual_seed(seed)
    config = {"num_classes": 4, **SOURCE, **arguments}
    network = ExpertTransformer(**config)
    for parameter in network.parameters():
        parameter.data = 0.15 * torch.randn(parameter.shape, generator=noise)
    return network, config


def _built(folded: Folded) -> ExpertTransformer:
    network = ExpertTransformer(**folded.config)
    network.load_state_dict(folded.weights)
    return network


@torch.no_grad()
def _output(network: ExpertTransformer, times: Tensor = TIMES) -> Tensor:
    """Outputs of the same images, each with its time and classes in turn."""
    dtype = network.pos_embed.dtype
    x = torch.randn(len(times), 4, 8, 8, generator=torch.Generator().manual_seed(9)).to(dtype)
    classes = network.config.num_classes
    labels = torch.arange(len(times)) % (classes + 1) if classes else None
    return network(x, times, labels)


@torch.no_grad()
def _pairs(network: ExpertTransformer, times: Tensor) -> tuple[Tensor, Tensor]:
    """h of all times and classes (n, d), and their shares (n,): one in ten is the null class."""
    network = copy.deepcopy(network).double()
    embedded = network.time_embed(times.double())
    shares = torch.ones(len(times), dtype=torch.float64)
    if network.class_embed is not None:
        classes = network.class_embed.weight
        embedded = (embedded[:, None] + classes).flatten(0, 1)
        shares = torch.cat([torch.full((len(classes) - 1,), 0.9 / (len(classes) - 1)), torch.tensor([0.1])])
        shares = shares.double().repeat(len(times))
    return torch.nn.functional.silu(embedded), shares / shares.sum()


def _targets(network: ExpertTransformer, h: Tensor) -> Tensor:
    """The blocks' modulations (depth, n, 6 d)."""
    weights = {key: value.double() for key, value in network.state_dict().items()}
    return torch.stack(
        [
            h @ weights[f"layers.{i}.modulation.weight"].T + weights[f"layers.{i}.modulation.bias"]
            for i in range(network.config.depth)
        ]
    )


def _measured(network: ExpertTransformer, folded: Folded, times: Tensor) -> float:
    """Relative error of the modulations that the folded weights give."""
    h, shares = _pairs(network, times)
    weights = {key: value.double() for key, value in folded.weights.items()}
    given = []
    for i in range(network.config.depth):
        matrix = weights["t_block.1.weight"]
        if folded.config["modulation_rank"]:
            factors = (weights[f"layers.{i}.residual.{k}.weight"] for k in (1, 0))
            matrix = matrix + torch.linalg.multi_dot(list(factors))
        table = weights[f"layers.{i}.scale_shift_table"].flatten()
        given.append(h @ matrix.T + weights["t_block.1.bias"] + table)
    truth = _targets(network, h)
    squares = [(part.square().sum((0, 2)) @ shares).item() for part in (torch.stack(given) - truth, truth)]
    return math.sqrt(squares[0] / squares[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_classes", [None, 4])
def test_at_full_rank_outputs_are_the_same_bits(num_classes: int | None, dtype: torch.dtype) -> None:
    source, config = _source(num_classes=num_classes)
    source.to(dtype)
    folded = fold(source.state_dict(), config, TIMES, rank=32)
    assert folded.modulation_error == 0
    output = _output(source)
    assert output.std() > 0.1
    assert torch.equal(_output(_built(folded).to(dtype)), output)


@pytest.mark.parametrize("num_classes", [None, 4])
def test_rank_0_is_the_least_squares_solution(num_classes: int | None) -> None:
    source, config = _source(num_classes=num_classes)
    folded = fold(source.state_dict(), config, TIMES, rank=0)
    h, shares = _pairs(source, TIMES)
    truth = _targets(source, h)
    # One matrix for all blocks, one constant a block.
    rows = torch.cat([h.repeat(3, 1), torch.eye(3).double().repeat_interleave(len(h), 0)], dim=1)
    roots = shares.sqrt().repeat(3)[:, None]
    solution = torch.linalg.lstsq(roots * rows, roots * truth.flatten(0, 1), driver="gelsd").solution
    error = (roots * (rows @ solution - truth.flatten(0, 1))).norm() / (roots * truth.flatten(0, 1)).norm()
    assert folded.modulation_error == pytest.approx(error.item(), rel=1e-6)
    assert _measured(source, folded, TIMES) == pytest.approx(error.item(), rel=1e-5)


def test_the_error_falls_with_the_rank_and_is_what_the_weights_give() -> None:
    source, config = _source()
    errors = []
    for rank in (0, 1, 4, 12, 31):
        folded = fold(source.state_dict(), config, TIMES, rank)
        assert _measured(source, folded, TIMES) == pytest.approx(folded.modulation_error, rel=1e-4)
        errors.append(folded.modulation_error)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.1 * errors[0]


def test_residuals_are_the_best_of_their_rank() -> None:
    """Eckart and Young: the singular values left over, of the blocks' distance to what they share."""
    source, config = _source()
    weights = source.state_dict()
    h, shares = _pairs(source, TIMES)
    centred = (h - shares @ h) * shares.sqrt()[:, None]
    power = sum((target.square().sum(1) @ shares).item() for target in _targets(source, h))

    def left_over(shared: Tensor) -> float:
        own = [weights[f"layers.{i}.modulation.weight"].double() for i in range(3)]
        values = [torch.linalg.svdvals((matrix - shared) @ centred.T) for matrix in own]
        return math.sqrt(sum(value[4:].square().sum().item() for value in values) / power)

    folded = fold(weights, config, TIMES, rank=4)
    assert folded.modulation_error == pytest.approx(
        left_over(folded.weights["t_block.1.weight"].double()), 1e-5
    )
    mean = sum(weights[f"layers.{i}.modulation.weight"].double() for i in range(3)) / 3
    assert folded.modulation_error < left_over(mean)


def test_blocks_that_differ_in_bias_only_fold_exactly() -> None:
    source, config = _source()
    for layer in source.layers:
        layer.modulation.weight.data = source.layers[0].modulation.weight.data.clone()
    folded = fold(source.state_dict(), config, TIMES, rank=0)
    assert folded.modulation_error < 1e-6
    output = _output(source)
    torch.testing.assert_close(_output(_built(folded)), output, rtol=0, atol=1e-6 * output.abs().max().item())


@pytest.mark.parametrize(("rank", "residual"), [(0, 0), (5, 7 * 32 * 5), (32, 6 * 32 * 32)])
def test_a_folded_network_has_the_parameters_that_are_said(rank: int, residual: int) -> None:
    source, config = _source()
    folded = fold(source.state_dict(), config, TIMES, rank)
    count = sum(value.numel() for value in _built(folded).state_dict().values())
    before = sum(value.numel() for value in source.state_dict().values())
    own = 6 * 32 * 32 + 6 * 32
    assert count == before - 3 * own + own + 3 * (6 * 32 + residual)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_all_times_fold_better_than_t_500_alone(rank: int, seed: int) -> None:
    source, config = _source(seed)
    output = _output(source)
    errors = [
        (_output(_built(fold(source.state_dict(), config, times, rank))) - output).square().mean()
        for times in (torch.arange(1000.0), torch.tensor([500.0]))
    ]
    assert errors[0] < errors[1]


def test_a_sample_of_many_pairs_stands_for_all_of_them() -> None:
    source, config = _source(num_classes=40)
    # So that the null class's share shows.
    source.class_embed.weight.data[-1] *= 5
    folded = fold(source.state_dict(), config, torch.arange(1000.0), rank=4)
    everywhere = _measured(source, folded, torch.arange(1000.0)[::8])
    assert folded.modulation_error == pytest.approx(everywhere, rel=0.02)
    again = fold(source.state_dict(), config, torch.arange(1000.0), rank=4)
    assert all(torch.equal(value, again.weights[key]) for key, value in folded.weights.items())


@pytest.mark.parametrize("modulation", ["zero", "single"])
def test_added_text_leaves_outputs_the_same_bits(modulation: str) -> None:
    source, config = _source(modulation=modulation)
    state = torch.get_rng_state()
    weights, config = add_text(source.state_dict(), config, text_dim=12)
    assert torch.equal(torch.get_rng_state(), state)
    network = ExpertTransformer(**config)
    network.load_state_dict(weights)
    x = torch.randn(5, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    labels, text = torch.arange(5), torch.randn(5, 6, 12, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.equal(network(x, TIMES[:5], labels, text), source(x, TIMES[:5], labels))
    assert network.layers[0].cross_attn.in_proj_weight.std() > 0
    assert not torch.equal(
        weights["layers.0.cross_attn.in_proj_weight"], weights["layers.1.cross_attn.in_proj_weight"]
    )


def test_what_cannot_be_folded_or_widened_is_refused() -> None:
    source, config = _source()
    weights = source.state_dict()
    with pytest.raises(HddmError, match=r"'single'; only 'zero'"):
        fold(weights, {**config, "modulation": "single"}, TIMES, 0)
    with pytest.raises(HddmError, match=r"modulation_rank is 33"):
        fold(weights, config, TIMES, 33)
    with pytest.raises(HddmError, match=r"give one or more finite"):
        fold(weights, config, torch.tensor([]), 0)
    with pytest.raises(HddmError, match=r"already takes text"):
        add_text(weights, {**config, "text_dim": 8}, 12)
    with pytest.raises(HddmError, match=r"text_dim is 0"):
        add_text(weights, config, 0)


DEFAULTS = {"num_attention_heads": 16, "in_channels": 4, "patch_size": 2, "num_embeds_ada_norm": 1000}


def _pipeline(folder: Path, **changes: object) -> Path:
    """A pipeline whose blocks share their embedders, as in released DiTs."""
    network = dit(**{"attention_head_dim": 2, "sample_size": 32, **changes})
    assert isinstance(network, DiTTransformer2DModel)
    first = network.transformer_blocks[0].norm1.emb.state_dict()
    for block in network.transformer_blocks:
        block.norm1.emb.load_state_dict(first)
    return pipeline(folder, network)


@pytest.mark.parametrize("conversion", [Conversion(text_dim=12), Conversion(architecture="adaln-single")])
def test_what_a_config_leaves_to_its_class_is_the_classs(conversion: Conversion, tmp_path: Path) -> None:
    """Written networks are compared with their sources."""
    source = _pipeline(tmp_path / "source", **DEFAULTS)
    path = source / "transformer/config.json"
    stated = json.loads(path.read_text())
    left_out = [*DEFAULTS, "sample_size", "norm_eps", "attention_bias", "activation_fn", "norm_type"]
    path.write_text(json.dumps({key: value for key, value in stated.items() if key not in left_out}))
    write(plan(source, conversion), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    names = ("num_heads", "in_channels", "patch_size", "num_classes", "sample_size", "depth")
    assert [config[name] for name in names] == [16, 4, 2, 1000, 32, 2]


@pytest.mark.parametrize("option", [("--architecture", "adaln-single"), ("--text-dim", 12)])
@pytest.mark.parametrize("activation", ["gelu", "geglu"])
def test_another_activation_is_not_read_as_dits(
    activation: str, option: tuple[object, ...], hddm: Command, tmp_path: Path
) -> None:
    source = _pipeline(tmp_path / "source", activation_fn=activation)
    said = refused(hddm, source, *option)
    assert f"activation_fn is '{activation}'" in said
    assert "'gelu-approximate' only" in said


def test_embedders_that_differ_by_block_are_named_as_the_limit(hddm: Command, tmp_path: Path) -> None:
    source = pipeline(tmp_path / "source", dit())
    said = refused(hddm, source, "--architecture", "adaln-single")
    assert "embedders that differ by block" in said
    assert "transformer_blocks.1.norm1.emb" in said
