"""What experts of every family are held to: int8, LoRA files, shared graphs and mixtures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, ModelMixin
from safetensors.torch import load_file, save_file
from torch import Tensor

import hddm as library
from hddm.checkpoints.lora import convert_lora
from hddm.experts.assembly import assemble
from hddm.experts.expert_folders import open_expert
from hddm.experts.expert_set import ExpertSet
from hddm.networks.wrappers import NetworkWrapper, compile_blocks
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.settings import Computing
from hddm.utils.records import WEIGHTS
from tests.artefacts import Command, copied, printed
from tests.checkpoint_files import record_of

HALF_TYPES = [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
"""Types to run a pipeline in; what holds in the coarser one holds in float16 by the same code."""


def quick_first(names: Sequence[str]) -> list[Any]:
    """The first of the names of LoRA files, and the others as slow: test_lora_forms.py reads all of them."""
    first, *others = names
    return [first, *(pytest.param(one, marks=pytest.mark.slow) for one in others)]


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


def check_half_type(
    network: ModelMixin,
    dtype: torch.dtype,
    source: Path,
    expert: Path,
    prompts: Sequence[str],
    folder: Path,
    **converting: Any,
) -> None:
    """A variant of ``source`` in a half type keeps it, and has the velocity of ``expert`` to its rounding."""
    variant = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    other = copied(source, folder)
    network.to(dtype).save_pretrained(other / "transformer", variant=variant)
    library.convert(other, folder / "expert", variant=variant, **converting)
    weights = load_file(folder / "expert" / WEIGHTS)
    assert {one.dtype for one in weights.values()} == {dtype}
    x, t = torch.randn(_SHAPE), torch.full((2,), 0.4)
    given = HDDMPipeline.from_pretrained(expert).encode(list(prompts)).given
    exact = library.load(expert).velocity(x, t, **given)
    for one in (expert, folder / "expert"):
        found = library.load(one, dtype=dtype).velocity(x, t, **given)
        assert (found - exact).norm() < 0.1 * exact.norm()


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


def check_mixture(
    peer: DiffusionPipeline,
    vae: Any,
    expert: Path,
    prompts: Sequence[str],
    folder: Path,
    hddm: Command,
) -> HDDMPipeline:
    """An ``expert`` and a ``peer`` with its ``vae`` are drawn and mixed, each with the prompt as it reads it.

    Returned is the pipeline of both. With its own VAE the peer has other latents: that is found out, and not
    taken from the names of the models.
    """
    peer.save_pretrained(folder / "of-another-vae")
    peer.register_modules(vae=vae)
    peer.save_pretrained(folder / "of-this-vae")
    size = {"sample_size": _SHAPE[-1]} if hasattr(peer, "transformer") else {}
    for name in ("of-this-vae", "of-another-vae"):
        library.convert(folder / name, folder / "experts" / name, **size)
    folders = (folder / "experts" / "of-this-vae", expert)
    assert record_of(folders[0])["vae"] == record_of(expert)["vae"]
    assemble(folders, folder / "both")
    x = torch.randn(_SHAPE, generator=torch.Generator().manual_seed(3))
    t = torch.full((2,), 0.4)
    alone = []
    for one in folders:
        given = HDDMPipeline.from_pretrained(one).encode(list(prompts)).given
        alone.append(library.load(one).velocity(x, t, **given))
    even = HDDMPipeline.from_pretrained(
        folder / "both", router=lambda x, t: torch.full((len(x), 2), 0.5)
    )
    given = even.encode(list(prompts)).given
    drawn = even.ensemble.under("draw").velocity(x, t, expert=torch.tensor([0, 1]), **given)
    torch.testing.assert_close(drawn, torch.stack([alone[0][0], alone[1][1]]), rtol=1e-5, atol=1e-5)
    mixed = even.ensemble.under("full").velocity(x, t, **given)
    torch.testing.assert_close(mixed, (alone[0] + alone[1]) / 2, rtol=1e-5, atol=1e-5)
    assert (alone[0] - alone[1]).abs().max() > 1e-2
    printed(hddm, "sample", folder / "both", "--out", folder / "out", "--num-images", 4,
            "--steps", 2, "--prompt", "a cat", "--guidance-scale", 2)  # fmt: skip
    assert len(list((folder / "out").glob("0*.png"))) == 4
    assemble((folder / "experts" / "of-another-vae", expert), folder / "apart")
    assert not HDDMPipeline.from_pretrained(folder / "apart").ensemble.are_alike()
    return even
