"""Adapters (LoRA, arXiv:2106.09685): which weights of an expert they change, how they are added and written.

peft adds, trains and writes them. Adapted are the linear layers of attention and MLPs, as in the training
scripts of diffusers and peft. The packed query, key and value matrix of our own attention is a parameter and
no layer; peft's ``target_parameters`` adapts it as one matrix (3 width, width) with one A and one B.
`hddm.experts.lora` reads adapters and adds them to their base.
"""

import re
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from torch import Tensor, nn

from hddm.experts.adapter_records import AdapterRecord
from hddm.experts.expert import Expert
from hddm.experts.lora import PREFIX, peft_config, tensor_names, write_adapter
from hddm.experts.record_folders import write_records
from hddm.networks.families import known_family
from hddm.utils.errors import HddmError, optional
from hddm.utils.streams import Use, seed_of


def targets_of(network: nn.Module) -> tuple[str, ...]:
    """Return the names of the weights that an adapter changes, of attention and MLPs.

    Raises `HddmError` where the network's family names none.
    """
    family = known_family(network)
    adapted = set()
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear) and re.fullmatch(family.lora_layers, name):
            adapted.add(f"{name}.weight")
    targets = []
    for name, _ in network.named_parameters():
        if name in adapted or re.fullmatch(family.lora_parameters, name):
            targets.append(name)
    if not targets:
        raise HddmError(
            f"`lora_rank`: {family.name} has no layers to adapt; its family names them in lora_layers, "
            f"and {family.lora_layers!r} matches no linear layer of this network"
        )
    return tuple(targets)


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
    tensors: dict[str, Tensor] = {}
    for pair in tensor_names(adapter.targets).values():
        for name in pair:
            tensors[name] = state[name.removeprefix(PREFIX)].detach().cpu().contiguous()
    write_adapter(folder, adapter, tensors)
    if expert.calibration is not None:
        expert.calibration.save(folder)
    write_records(folder, expert.record.model_copy(update={"adapter": adapter}), expert.nulls)


def _peft() -> Any:
    return optional("peft", "`lora_rank`", "lora")
