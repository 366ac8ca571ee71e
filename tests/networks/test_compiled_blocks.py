"""Compiled blocks: one graph for all of a class, for batches of any size, with the same output."""

import pytest
import torch
from diffusers import DiTTransformer2DModel, UNet2DModel
from torch import Tensor, nn

from hddm.networks.transformers import ExpertTransformer
from hddm.networks.wrappers import NetworkWrapper, compile_blocks
from tests.artefacts import as_traced

pytestmark = pytest.mark.usefixtures("nothing_compiled_before")


def _own() -> nn.Module:
    network = ExpertTransformer(
        8, 1, 2, hidden_size=16, depth=4, num_heads=2, num_classes=3, rotary=True
    )
    for parameter in network.parameters():
        # Layers that begin at zero would make all outputs equal.
        nn.init.normal_(parameter, std=0.1)
    return network


def _dit() -> nn.Module:
    shape = {"in_channels": 1, "sample_size": 8, "num_embeds_ada_norm": 3, "norm_num_groups": 1}
    return DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=8, num_layers=4, **shape)


def _unet() -> nn.Module:
    kinds = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    return UNet2DModel(
        8, 1, 1, block_out_channels=(8, 8), norm_num_groups=2, num_class_embeds=3, **kinds
    )


@pytest.mark.slow
@pytest.mark.parametrize("build", [_own, _dit, _unet])
def test_all_blocks_share_a_graph_that_takes_batches_of_any_size(build: type[nn.Module]) -> None:
    torch.manual_seed(0)
    network, graphs = NetworkWrapper(build()).eval(), []

    def outputs(num: int) -> Tensor:
        noise = torch.Generator().manual_seed(num)
        x, times = torch.randn(num, 1, 8, 8, generator=noise), torch.rand(num, generator=noise)
        with torch.inference_mode():
            return network(x, 1000 * times, class_labels=torch.arange(num) % 3)

    sizes = (4, 2, 7)
    with as_traced():
        plain = [outputs(size) for size in sizes]
    backend = lambda graph, inputs: graphs.append(graph) or graph.forward  # noqa: E731
    compile_blocks(network, dynamic=True, backend=backend)
    assert torch.equal(outputs(sizes[0]), plain[0])
    compiled = len(graphs)
    assert (
        compiled <= 2
    )  # of diffusers' DiT, whose blocks embed the time themselves in a part of their own
    for size, expected in zip(sizes[1:], plain[1:], strict=True):
        assert torch.equal(outputs(size), expected)
    assert len(graphs) == compiled
