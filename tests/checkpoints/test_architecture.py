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
from hddm.checkpoints.plan import plan
from hddm.networks.transformers import ExpertTransformer
from hddm.utils.errors import HddmError
from hddm.utils.settings import Conversion
from tests.artefacts import Command
from tests.checkpoint_files import dit, pipeline, refused
from tests.transformer_files import DIT, dit_network

TIMES = torch.arange(0.5, 1000, 40)


def _source(seed: int = 0, **changes: Any) -> tuple[ExpertTransformer, dict[str, Any]]:
    """An adaLN-Zero network with random numbers everywhere, and its config."""
    config = {**DIT, "depth": 3, "frequency_shift": 1, **changes}
    return dit_network(seed, **config), config


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
    embedded, shares = network.time_embed(times.double()), torch.ones(1).double()
    if network.class_embed is not None:
        classes = network.class_embed.weight
        embedded = (embedded[:, None] + classes).flatten(0, 1)
        shares = torch.tensor([0.9 / (len(classes) - 1)] * (len(classes) - 1) + [0.1]).double()
    return torch.nn.functional.silu(embedded), shares.repeat(len(times)) / len(times) / shares.sum()


@torch.no_grad()
def _targets(network: ExpertTransformer, h: Tensor) -> Tensor:
    """The blocks' modulations (depth, n, 6 d)."""
    return torch.stack([layer.modulation.double()(h) for layer in copy.deepcopy(network).layers])


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


@pytest.mark.parametrize(("dtype", "num_classes"), [(torch.float32, None), (torch.bfloat16, 4)], ids=str)
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
    assert (_output(_built(folded)) - output).abs().max() < 1e-6 * output.abs().max()


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
    noise = torch.Generator().manual_seed(1)
    x, labels, text = torch.randn(5, 4, 8, 8, generator=noise), torch.arange(5), torch.ones(5, 6, 12)
    with torch.no_grad():
        assert torch.equal(network(x, TIMES[:5], labels, text), source(x, TIMES[:5], labels))
    first, second = (network.layers[i].cross_attn.in_proj_weight for i in range(2))
    assert first.std() > 0
    assert not torch.equal(first, second)


def test_what_cannot_be_folded_or_widened_is_refused() -> None:
    source, config = _source()
    weights = source.state_dict()
    for call, said in (
        (lambda: fold(weights, config, TIMES, 33), "modulation_rank is 33"),
        (lambda: add_text(weights, {**config, "text_dim": 8}, 12), "already takes text"),
    ):
        with pytest.raises(HddmError, match=said):
            call()


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
def test_another_activation_is_not_read_as_dits(
    option: tuple[object, ...], hddm: Command, tmp_path: Path
) -> None:
    said = refused(hddm, _pipeline(tmp_path / "source", activation_fn="gelu"), *option)
    assert "activation_fn is 'gelu', and" in said
    assert "'gelu-approximate' only" in said


def test_embedders_that_differ_by_block_are_named_as_the_limit(hddm: Command, tmp_path: Path) -> None:
    said = refused(hddm, pipeline(tmp_path / "source", dit()), "--architecture", "adaln-single")
    assert "transformer_blocks.1.norm1.emb" in said
    assert "embedders that differ by block" in said
