"""What experts of every family are held to: int8, LoRA files and shared graphs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from diffusers import ModelMixin
from safetensors.torch import save_file
from torch import Tensor

import hddm as library
from hddm.checkpoints.lora import convert_lora
from hddm.experts.expert import open_expert
from hddm.experts.expert_set import ExpertSet
from hddm.networks.wrappers import NetworkWrapper, compile_blocks
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.settings import Computing

_SHAPE = (2, 4, 8, 8)


def check_int8(expert: Path, prompts: Sequence[str], least: float = 1e-6) -> None:
    """Weights in int8 change the velocity of ``prompts`` by ``least`` to 0.05 of its norm."""
    pytest.importorskip("torchao")
    x, t = torch.randn(_SHAPE), torch.full((2,), 0.4)
    pipe = HDDMPipeline.from_pretrained(expert)
    given = pipe.encode(list(prompts)).given
    exact = library.load(expert).velocity(x, t, **given)
    pipe.experts.prepare(Computing(quantize="int8"))
    error = (pipe.ensemble.experts[0].velocity(x, t, **given) - exact).norm() / exact.norm()
    assert least < error < 0.05


def check_lora(
    content: Mapping[str, Tensor],
    changes: Mapping[str, Tensor],
    network: ModelMixin,
    expert: Path,
    prompts: Sequence[str],
    folder: Path,
    least: float = 1e-2,
) -> None:
    """A LoRA file of this ``content`` adds ``changes`` to weights of the ``network`` of ``expert``.

    Its velocity is that of the changed network to 1e-5, and ``least`` away from the expert's own.
    """
    save_file(dict(content), folder / "lora.safetensors")
    convert_lora(folder / "lora.safetensors", expert, folder / "style")
    held = ExpertSet([open_expert(folder / "style"), open_expert(expert)])
    given = HDDMPipeline.from_pretrained(expert).encode(list(prompts)).given
    x, t = torch.randn(_SHAPE), torch.full((2,), 0.4)
    found, base = (one.velocity(x, t, **given) for one in held.fields())
    # The base's weights are held once.
    assert len(set(held.stored)) == 1
    weights = network.state_dict()
    for name, change in changes.items():
        weights[name] = weights[name] + change
    network.load_state_dict(weights)
    own = library.load(expert)
    own.network = NetworkWrapper(network)
    expected = own.velocity(x, t, **given)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (base - expected).abs().max() > least * expected.abs().max()


def graphs_of(network: ModelMixin, t: Tensor, given: Mapping[str, Tensor]) -> int:
    """The number of graphs that a network's blocks are compiled to; its output stays bit for bit."""
    wrapper, graphs = NetworkWrapper(network).eval(), []
    x = torch.randn(_SHAPE)
    with torch.inference_mode():
        plain = wrapper(x, t, **given)
        backend = lambda graph, inputs: graphs.append(graph) or graph.forward  # noqa: E731
        compile_blocks(wrapper, dynamic=True, backend=backend)
        assert torch.equal(wrapper(x, t, **given), plain)
    return len(graphs)
