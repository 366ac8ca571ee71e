"""The networks: sizes, shapes, initial values and what depends on what."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hddm.networks.layers import (
    PatchEmbedding,
    TanhGelu,
    TimeEmbedding,
    attend,
    rotate,
    sinusoid,
    square_positions,
    square_rotations,
)
from hddm.networks.sizes import size_config
from hddm.networks.transformers import ExpertTransformer, RouterTransformer
from hddm.utils.errors import HddmError

TINY = {"sample_size": 8, "in_channels": 3, **size_config("tiny")}
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
T = torch.tensor([3.0, 700.0])
DIT_XL: dict[str, Any] = {"modulation": "zero", "num_classes": 1000, "out_channels": 8}
TEXT = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))


def _awake(network: torch.nn.Module) -> torch.nn.Module:
    """``network`` with random numbers where initialisation puts zeros."""
    noise = torch.Generator().manual_seed(2)
    for parameter in network.parameters():
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=noise)
    return network


def _poked(row: int, column: int) -> Tensor:
    """``X`` with another pixel."""
    poked = X.clone()
    poked[:, 1, row, column] += 1
    return poked


@pytest.mark.parametrize(
    ("make", "millions", "error"),
    [
        (lambda: ExpertTransformer(text_dim=768, **size_config("XL/2")), 605.97, 0.01),
        (lambda: RouterTransformer(num_experts=8, **size_config("B/2")), 129.14, 0.01),
        # Peebles & Xie 2022, table 4; the positions, which are no parameters there, are counted here.
        (lambda: ExpertTransformer(**DIT_XL, **size_config("XL/2")), 675, 0.5),
    ],
    ids=["the paper's expert", "the paper's router", "DiT XL/2"],
)
def test_parameters_are_as_many_as_published(
    make: Callable[[], torch.nn.Module], millions: float, error: float
) -> None:
    with torch.device("meta"):
        network = make()
    numbers = sum(parameter.numel() for parameter in network.parameters())
    assert numbers / 1e6 == pytest.approx(millions, abs=error)


# Peebles & Xie 2022, table 1.
@pytest.mark.parametrize(
    ("letter", "numbers"),
    [("S", (12, 384, 6)), ("B", (12, 768, 12)), ("L", (24, 1024, 16)), ("XL", (28, 1152, 16))],
)
def test_named_sizes_are_dits(letter: str, numbers: tuple[int, ...]) -> None:
    names = ("depth", "hidden_size", "num_heads", "patch_size")
    for patch in (2, 4, 8):
        assert size_config(f"{letter}/{patch}") == dict(zip(names, (*numbers, patch), strict=True))
    shape = {"depth": 6, "hidden_size": 192, "num_heads": 3, "patch_size": 2}
    assert size_config("6x192/2") == shape
    assert size_config("2x24/1") == {"depth": 2, "hidden_size": 24, "num_heads": 1, "patch_size": 1}
    for wrong in ("huge", "6x100/2", "6x12/2", "0x64/2", "6x64", "6x64/0", "6x-64/2"):
        with pytest.raises(HddmError, match=r"unknown model size .* as 6x192/2"):
            size_config(wrong)


def test_text_is_taken_in_any_precision() -> None:
    network = ExpertTransformer(**TINY, text_dim=12).bfloat16()
    assert network(X.bfloat16(), T, encoder_hidden_states=TEXT).isfinite().all()


@torch.no_grad()
def test_a_patch_of_the_output_lies_where_its_input_does() -> None:
    """Without blocks nothing mixes patches: a changed pixel may change its own patch only."""
    network = _awake(ExpertTransformer(**{**TINY, "depth": 0}))
    for row, column in ((0, 0), (1, 6), (5, 2), (7, 7)):
        changed = (network(_poked(row, column), T) - network(X, T)).abs().amax((0, 1)) > 0
        patch = torch.zeros(8, 8, dtype=torch.bool)
        patch[row // 2 * 2 : row // 2 * 2 + 2, column // 2 * 2 : column // 2 * 2 + 2] = True
        assert torch.equal(changed, patch)


def test_a_patch_is_laid_out_by_row_then_column_then_channel() -> None:
    network = ExpertTransformer(**TINY)
    network.final_layer.linear.bias.data = torch.arange(12.0)
    output = network(X, T)
    for row in range(8):
        for column in range(8):
            first = 3 * (2 * (row % 2) + column % 2)
            assert output[0, :, row, column].tolist() == [first, first + 1, first + 2]


@torch.no_grad()
def test_every_patch_sees_every_other_knows_its_place_and_sees_no_other_sample() -> None:
    network = _awake(ExpertTransformer(**TINY))
    together = network(X, T)
    assert ((network(_poked(0, 0), T) - together).abs() > 0).all()
    alone = torch.cat([network(X[i : i + 1], T[i : i + 1]) for i in range(2)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    output = network(torch.zeros_like(X), T)
    patches = (
        output.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    )
    assert torch.pdist(patches[0]).min() > 1e-4


def test_rotary_scores_depend_on_the_distance_of_patches_alone() -> None:
    """Queries and keys that are the same everywhere, on a square of 3 × 3."""
    same = torch.randn(2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, k = (rotate(one.expand(1, 1, 9, 8), square_rotations(8, 3, same)) for one in same)
    torch.testing.assert_close(q.norm(dim=-1), same[0].norm().expand(1, 1, 9))
    scores = (q @ k.mT)[0, 0].reshape(3, 3, 3, 3)
    by_distance: dict[tuple[int, int], list[float]] = {}
    for row, column, other_row, other_column in itertools.product(range(3), repeat=4):
        score = float(scores[row, column, other_row, other_column])
        by_distance.setdefault((row - other_row, column - other_column), []).append(score)
    assert len(by_distance) == 5 * 5
    assert all(max(found) - min(found) < 1e-6 for found in by_distance.values())
    means = torch.tensor([found[0] for found in by_distance.values()])
    assert means.unique().numel() == len(means)
    # One patch is not turned, at row 0 and column 0.
    assert torch.equal(q[..., 0, :], same[:1].expand(1, 1, 8))


def test_time_embeds_as_cosines_then_sines() -> None:
    times = torch.tensor([0.0, 1.0, 987.17], dtype=torch.float64)
    angles = times.numpy()[:, None] * 10000.0 ** (-np.arange(4) / 4)
    expected = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    np.testing.assert_allclose(sinusoid(times, 8, torch.float64), expected, rtol=0, atol=1e-12)


def test_a_place_is_its_column_then_its_row() -> None:
    table = square_positions(16, 4)[0]
    of_place = sinusoid(torch.arange(4.0), 8, torch.float32)
    expected = [
        torch.cat([of_place[column], of_place[row]]) for row in range(4) for column in range(4)
    ]
    assert torch.equal(table, torch.stack(expected))


def test_near_times_stay_apart_in_a_bfloat16_network() -> None:
    times = torch.tensor([987.17, 988.49])
    angles = sinusoid(times, 256, torch.bfloat16)
    # Rounded once, at the end: by at most 1/256.
    error = angles.double() - sinusoid(times.double(), 256, torch.float64)
    assert error.abs().max() <= 1 / 256
    near = _awake(TimeEmbedding(32)).bfloat16()(times)
    assert near.dtype == torch.bfloat16
    assert not torch.equal(near[0], near[1])


@torch.no_grad()
def test_a_router_starts_even_and_reads_the_whole_image_and_the_time() -> None:
    network = RouterTransformer(num_experts=5, **TINY)
    torch.testing.assert_close(network(X, T).softmax(1), torch.full((2, 5), 0.2))
    logits = _awake(network)(X, T)
    assert logits.isfinite().all()
    assert not torch.equal(network(_poked(7, 0), T), logits)
    assert not torch.equal(network(X, T + 50), logits)


BOTH = {"num_classes": 4, "text_dim": 12}


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"num_classes": 4},
        {"text_dim": 12},
        BOTH,
        BOTH | {"modulation": "zero"},
        BOTH | {"modulation_rank": 3},
        BOTH | {"modulation_rank": 32},
        BOTH | {"final_modulation": "linear"},
        BOTH | {"out_channels": 6},
    ],
    ids=str,
)
@torch.no_grad()
def test_every_expert_starts_at_zero_and_reads_time_class_and_text(kind: dict[str, Any]) -> None:
    network = ExpertTransformer(**TINY, **kind)
    given = {"timestep": T}
    given |= {"class_labels": torch.tensor([0, 4])} if "num_classes" in kind else {}
    given |= {"encoder_hidden_states": TEXT} if "text_dim" in kind else {}
    output = network(X, **given)
    assert torch.equal(output, torch.zeros(2, kind.get("out_channels", 3), 8, 8))
    output = _awake(network)(X, **given)
    for name, value in given.items():
        changed = network(X, **given | {name: value.flip(0)})
        assert ((changed - output).abs().amax((1, 2, 3)) > 1e-4).all()


def _trained(
    network: torch.nn.Module, conditions: dict[str, Tensor]
) -> tuple[dict[str, Tensor], int]:
    """Gradients of all parameters, and how often the first block ran."""
    runs = 0

    def count(*_: object) -> None:
        nonlocal runs
        runs += 1

    handle = network.layers[0].attn.register_forward_hook(count)
    network.zero_grad()
    network(X, T, **conditions).square().mean().backward()
    handle.remove()
    return {
        name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None
    }, runs


@pytest.mark.parametrize(
    ("make", "conditions"),
    [
        (lambda: ExpertTransformer(**TINY, rotary=True), {}),
        (
            lambda: ExpertTransformer(**TINY, num_classes=4, text_dim=12, modulation="zero"),
            {"class_labels": torch.tensor([0, 4]), "encoder_hidden_states": TEXT},
        ),
        (lambda: RouterTransformer(num_experts=5, **TINY), {}),
    ],
    ids=["expert", "expert with text", "router"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpointed_blocks_run_twice_and_give_the_same_gradients(
    make: Callable[[], torch.nn.Module], conditions: dict[str, Tensor], dtype: torch.dtype
) -> None:
    network = _awake(make())
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        plain, once = _trained(network, conditions)
        network.enable_gradient_checkpointing()
        checkpointed, twice = _trained(network, conditions)
        network.disable_gradient_checkpointing()
        assert (once, twice, _trained(network, conditions)[1]) == (1, 2, 1)
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)


def test_patches_are_embedded_as_the_convolution_does_token_by_token_in_memory() -> None:
    embed = PatchEmbedding(3, 32, 2, 4)
    _awake(embed)
    tokens = embed(X)
    expected = F.conv2d(X, embed.weight, embed.bias, stride=2).flatten(2).transpose(1, 2)
    torch.testing.assert_close(tokens, expected)
    assert tokens.is_contiguous()
    with pytest.raises(RuntimeError, match="Shape mismatch"):
        embed(torch.zeros(1, 3, 4, 16))


@pytest.mark.parametrize(("queries", "keys"), [(16, 16), (7, 33)])
@pytest.mark.parametrize("scale", [1, 6], ids=["even", "sharp"])
def test_attention_in_bfloat16_has_the_gradient_of_its_definition(
    queries: int, keys: int, scale: float
) -> None:
    noise = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 3, n, 8, generator=noise) for n in (queries, keys, keys))
    inputs = [x.bfloat16() for x in (scale * q, k, v)]
    upstream = torch.randn(q.shape, generator=noise).bfloat16()

    def gradients(attention: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        return torch.autograd.grad(attention(*leaves), leaves, upstream.to(dtype))

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1) @ v

    exact = gradients(definition, torch.float64)
    for ours, theirs, truth in zip(
        gradients(attend, torch.bfloat16),
        gradients(F.scaled_dot_product_attention, torch.bfloat16),
        exact,
        strict=True,
    ):
        error, usual = ((x.double() - truth).norm() / truth.norm() for x in (ours, theirs))
        assert error < 0.01
        assert error < 2 * usual


@pytest.mark.usefixtures("nothing_compiled_before")
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
def test_a_compiled_gelu_is_the_same_function_with_the_same_gradient(
    dtype: torch.dtype, error: float
) -> None:
    points = torch.cat([torch.linspace(-6, 6, 97), torch.tensor([-300.0, 300.0])]).to(dtype)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph.code)
        return graph.forward

    def with_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.detach().requires_grad_()
        output = function(leaf)
        return output, torch.autograd.grad(output.sum(), leaf)[0]

    compiled = torch.compile(TanhGelu(), backend=backend)
    exact = with_gradient(lambda x: F.gelu(x, approximate="tanh"), points.double())
    for ours, truth in zip(with_gradient(compiled, points), exact, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), truth, atol=error, rtol=error)
    assert "sigmoid" in graphs[0]
    torch.testing.assert_close(
        TanhGelu()(points), F.gelu(points, approximate="tanh"), rtol=0, atol=0
    )
