"""Low-rank adapters (LoRA, arXiv:2106.09685) through peft: adding, training and writing them.

Adapted are the linear layers of attention and MLPs, as in the training scripts of diffusers and peft. The
packed query, key and value matrix of our own attention is a parameter and no layer; peft's
``target_parameters`` adapts it as one matrix (3 width, width) with one A and one B.
"""

import re
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from torch import nn

from hddm.experts.lora import PREFIX, AdapterRecord, peft_config, tensor_names, write_adapter
from hddm.experts.records import Expert, write_records
from hddm.utils.errors import HddmError, optional
from hddm.utils.streams import Use, seed_of

_LAYERS = re.compile(
    r"layers\.\d+\.((cross_)?attn\.out_proj|mlp\.[02])"
    r"|(.+\.)?(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out|ff(_context)?\.net\.(0\.proj|2))"
    r"|single_transformer_blocks\.\d+\.proj_(mlp|out)"
)
"""Linear layers of attention and MLPs, in our networks and in diffusers' ones."""
_PARAMETERS = re.compile(r"layers\.\d+\.(cross_)?attn\.in_proj_weight")


def targets_of(network: nn.Module) -> tuple[str, ...]:
    """Return the names of the weights that an adapter changes, of attention and MLPs: at least one."""
    layers = {
        f"{name}.weight"
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and _LAYERS.fullmatch(name)
    }
    names = [name for name, _ in network.named_parameters()]
    found = tuple(name for name in names if name in layers or _PARAMETERS.fullmatch(name))
    if not found:
        text = f"a {type(network).__name__} without attention has no layers to adapt; leave it out"
        raise HddmError(f"--lora-rank: {text}")
    return found


def add_adapter(network: ModelMixin, adapter: AdapterRecord, seed: int) -> None:
    """Put an adapter on ``network``: freeze its own parameters, and train the adapter's.

    B is zero, so nothing changes at first; A is uniform, as peft draws it, from ``seed`` alone.
    """
    peft = _peft()
    network.requires_grad_(False)
    config = peft.LoraConfig(**peft_config(adapter))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, Use.ADAPTER_WEIGHTS))
        peft.inject_adapter_in_model(config, network)


def save_adapted(folder: Path, expert: Expert, adapter: AdapterRecord) -> None:
    """Write an adapted expert, without its base's weights, into an empty folder, in peft's format."""
    network: Any = expert.network
    network.save_config(folder)
    # By default peft looks the base up on the hub, to see whether an embedding has changed.
    state = _peft().get_peft_model_state_dict(network, save_embedding_layers=False)
    names = [name for pair in tensor_names(adapter.targets).values() for name in pair]
    tensors = {name: state[name.removeprefix(PREFIX)].detach().cpu().contiguous() for name in names}
    write_adapter(folder, adapter, tensors)
    if expert.calibration is not None:
        expert.calibration.save(folder)
    write_records(folder, expert.facts.model_copy(update={"adapter": adapter}), expert.nulls)


def _peft() -> Any:
    return optional("peft", "--lora-rank", "lora")
