"""Low-rank additions row by row, layer by layer, against merged weights."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hddm.networks.layers import Attention
from hddm.networks.offload import Shelf, StoredNetwork
from hddm.networks.shared import (
    AdaptedNetwork,
    Adapter,
    SharedNetwork,
    add_at_once,
    add_by_runs,
    unshareable,
)

Factors = dict[str, tuple[Tensor, Tensor]]


class Network(nn.Module):
    """Layers by name, one after the other."""

    config: Any = None

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, one in layers.items():
            setattr(self, name, one)
        self.names = tuple(layers)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = getattr(self, name)(x)
        return x


class Functional(Network):
    """Uses the weight of its layer without calling it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight)


class Flattened(Network):
    """Calls its layer with tokens in place of rows."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(0, 1)).view(x.shape)


def _weight_of(name: str, layer: nn.Module) -> str:
    return f"{name}.{'in_proj_weight' if isinstance(layer, Attention) else 'weight'}"


def _factors(network: Network, rank: int, seed: int) -> Factors:
    noise, found = torch.Generator().manual_seed(seed), {}
    for name in network.names:
        full = _weight_of(name, getattr(network, name))
        out, width, *window = network.get_parameter(full).shape
        down = torch.randn(rank, width, *window, generator=noise)
        up = torch.randn(out, rank, *[1] * len(window), generator=noise)
        found[full] = down, up
    return found


def _merged(network: Network, factors: Factors) -> Network:
    merged = copy.deepcopy(network)
    for name, (down, up) in factors.items():
        parameter = merged.get_parameter(name)
        parameter.data += (up.flatten(1) @ down.flatten(1)).view(parameter.shape)
    return merged


def _adapter(factors: Factors) -> Adapter:
    shapes = {name: (tuple(a.shape), tuple(b.shape)) for name, (a, b) in factors.items()}
    return Adapter(lambda dtype: factors, shapes)


def _shared(network: Network, *factors: Factors) -> SharedNetwork:
    weights = {name: value.detach() for name, value in network.state_dict().items()}
    return SharedNetwork(
        copy.deepcopy(network).to("meta"),
        [_adapter(one) for one in factors],
        lambda dtype: weights,
        "the test",
        torch.float32,
        "cpu",
        Shelf(),
    )


LAYERS = {
    "linear": (lambda: nn.Linear(6, 6), (5, 6)),
    "linear of vectors": (lambda: nn.Linear(6, 6, bias=False), (6,)),
    "linear of maps": (lambda: nn.Linear(6, 6), (2, 3, 6)),
    "1x1": (lambda: nn.Conv2d(6, 8, 1), (6, 4, 4)),
    "3x3": (lambda: nn.Conv2d(6, 8, 3, padding=1), (6, 4, 4)),
    "strided": (lambda: nn.Conv2d(6, 8, 3, stride=2, padding=1, dilation=2), (6, 9, 9)),
    "same": (lambda: nn.Conv2d(6, 8, 3, padding="same"), (6, 4, 5)),
    "attention": (lambda: Attention(6, 2), (5, 6)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_rows_in_every_order_have_the_output_of_their_own_merged_layer(kind: str) -> None:
    make, shape = LAYERS[kind]
    torch.manual_seed(0)
    network = Network(layer=make())  # type: ignore[no-untyped-call]
    # Two of one rank and one of another.
    factors = [_factors(network, rank, seed) for seed, rank in enumerate((2, 2, 3))]
    models: dict[int | None, Network] = {None: network}
    for k, one in enumerate(factors):
        models[k] = _merged(network, one)
    shared, x = _shared(network, *factors), torch.randn(4, *shape)
    with torch.no_grad():
        for rows in itertools.product((None, 0, 1, 2), repeat=4):
            found = shared.run_rows(rows, x)
            for row, adapter in enumerate(rows):
                expected = models[adapter](x[row : row + 1])[0]
                torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(5, 6), (6,), (2, 3, 6)])
def test_the_product_of_gpus_is_that_of_cpus(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, output = torch.randn(4, *shape), torch.randn(4, *shape[:-1], 7)
    downs, ups = list(torch.randn(3, 2, 6)), list(torch.randn(3, 7, 2))
    rows = [0, 0, 2, 1]
    once, by_runs = output.clone(), output.clone()
    own = [downs[k] for k in rows], [ups[k] for k in rows]
    add_at_once(once, x, *own)
    add_by_runs(by_runs, x, [(0, 2), (2, 3), (3, 4)], *own)
    expected = [output[i] + x[i] @ downs[k].mT @ ups[k].mT for i, k in enumerate(rows)]
    torch.testing.assert_close(once, torch.stack(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(by_runs, torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_memory_may_be_laid_out_in_channels_last() -> None:
    torch.manual_seed(0)
    network = Network(first=nn.Conv2d(4, 6, 3, padding=1), second=nn.Conv2d(6, 6, 1))
    factors = [_factors(network, 2, seed) for seed in range(2)]
    shared = _shared(network, *factors)
    x = torch.randn(4, 4, 5, 5).to(memory_format=torch.channels_last)
    with torch.no_grad():
        found = shared.run_rows([0, 1, 1, 0], x)
        for row, adapter in enumerate([0, 1, 1, 0]):
            expected = _merged(network, factors[adapter])(x[row : row + 1])[0]
            torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-4)


def test_under_autocast_the_addition_is_that_of_full_precision() -> None:
    torch.manual_seed(0)
    network = Network(layer=nn.Linear(6, 6))
    factors = [_factors(network, 2, seed) for seed in range(2)]
    shared, x = _shared(network, *factors), torch.randn(2, 3, 6)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = shared.run_rows([0, 1], x)
    assert found.dtype == torch.bfloat16
    with torch.no_grad():
        expected = shared.run_rows([0, 1], x)
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.05)


def test_cross_attention_adds_queries_and_the_contexts_keys_and_values() -> None:
    torch.manual_seed(0)
    layer = Attention(6, 2)
    network = Network(layer=layer)
    factors = [_factors(network, 2, seed) for seed in range(2)]
    shared = _shared(network, *factors)
    x, context = torch.randn(2, 3, 6), torch.randn(2, 5, 6)
    shared.network.forward = lambda x: shared.network.layer(x, context)  # type: ignore[method-assign]
    with torch.no_grad():
        found = shared.run_rows([1, 0], x)
        for row, adapter in enumerate([1, 0]):
            merged = _merged(network, factors[adapter]).layer
            expected = merged(x[row : row + 1], context[row : row + 1])[0]
            torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-5)


def test_gradients_with_respect_to_states_are_those_of_merged_weights() -> None:
    torch.manual_seed(0)
    network = Network(first=nn.Linear(6, 6), second=nn.Linear(6, 6))
    factors = [_factors(network, 2, seed) for seed in range(2)]
    shared, x = _shared(network, *factors), torch.randn(2, 3, 6, requires_grad=True)
    (found,) = torch.autograd.grad(shared.run_rows([0, 1], x).pow(2).sum(), x)
    for row in range(2):
        own = x[row].detach().requires_grad_()
        (expected,) = torch.autograd.grad(_merged(network, factors[row])(own).pow(2).sum(), own)
        torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-3)


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize(
    "layer",
    [
        OwnForward(4, 4),
        nn.Conv2d(4, 4, 1, groups=2),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv1d(4, 4, 1),
        nn.ConvTranspose2d(4, 4, 1),
        nn.Embedding(4, 4),
    ],
    ids=lambda one: type(one).__name__,
)
def test_layers_that_a_product_cannot_be_added_to_are_named(layer: nn.Module) -> None:
    network = Network(plain=nn.Linear(4, 4), layer=layer)
    assert unshareable(network, ["plain.weight", "layer.weight"]) == ["layer.weight"]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Functional, "was not called as a layer"), (Flattened, "one input for each row")],
)
def test_a_network_that_uses_its_layers_otherwise_runs_with_merged_weights_and_says_so(
    kind: type[Network], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    network = kind(layer=nn.Linear(6, 6, bias=False))
    factors = [_factors(network, 2, seed) for seed in range(2)]
    shared, users = _shared(network, *factors), []
    for k, one in enumerate(factors):
        merged = _merged(network, one)
        weights = {name: value.detach() for name, value in merged.state_dict().items()}

        def own(
            dtype: torch.dtype, device: torch.device, shelf: Shelf, weights: Any = weights
        ) -> StoredNetwork:
            empty = copy.deepcopy(network).to("meta")
            return StoredNetwork(empty, lambda _: weights, "own", dtype, device, shelf)

        users.append(AdaptedNetwork(shared, k, own))
    x = torch.randn(2, 3, 6)
    with torch.no_grad():
        for user, one in zip(users, factors, strict=True):
            assert torch.equal(user(x), _merged(network, one)(x))
    assert not any(user.is_sharing for user in users)
    assert len([one for one in caplog.records if reason in one.message]) == 1
    # Nothing of the base is left in memory.
    assert all(one.is_meta for one in shared.network.parameters())
