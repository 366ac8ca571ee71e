"""Tiny experts, adapters of them, and LoRA files of other tools, with random weights."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from hddm.experts.adapter_records import adapter_of
from hddm.experts.expert import Expert
from hddm.experts.expert_folders import open_expert, save_expert
from hddm.experts.records import ExpertRecord
from hddm.training.adapters import add_adapter, save_adapted, targets_of
from tests.ensemble_files import flow_expert


def write_base(
    folder: Path, expert: Expert | None = None, dtype: torch.dtype = torch.float32
) -> Path:
    """An expert of its own."""
    folder.mkdir(parents=True)
    expert = expert or flow_expert(0)
    expert.network.to(dtype)
    save_expert(folder, expert)
    return folder


def write_adapter(
    base: Path,
    out: Path,
    rank: int = 2,
    alpha: float | None = None,
    seed: int = 1,
    size: float = 0.3,
    **changes: object,
) -> Path:
    """An adapter of the expert in ``base`` whose B is normal with deviation ``size``."""
    expert = open_expert(base).read()
    facts = adapter_of(base, out, rank, float(alpha or rank), targets_of(expert.network))
    add_adapter(expert.network, facts, seed)
    noise = torch.Generator().manual_seed(seed)
    for name, parameter in expert.network.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(std=size, generator=noise) if size else parameter.data.zero_()
    out.mkdir(parents=True)
    changed = ExpertRecord.model_validate(expert.record.model_dump() | changes)
    save_adapted(out, Expert(expert.network, changed, expert.calibration, expert.nulls), facts)
    return out


def kohya(
    network: nn.Module,
    ranks: Sequence[int] = (3,),
    alphas: Sequence[float] = (2.0,),
    named: Callable[[str], str] | None = None,
) -> dict[str, Tensor]:
    """A LoRA of every linear layer and convolution, in turn of these ranks and alphas, by kohya's names."""
    noise, content = torch.Generator().manual_seed(7), {}
    kinds = (nn.Linear, nn.Conv2d)
    layers = [(name, one.weight) for name, one in network.named_modules() if isinstance(one, kinds)]
    for index, (name, weight) in enumerate(layers):
        rank, (out, width, *window) = ranks[index % len(ranks)], weight.shape
        stem = f"lora_unet_{(named(name) if named else name).replace('.', '_')}"
        down, up = (rank, width, *window), (out, rank, *[1] * len(window))
        content[f"{stem}.lora_down.weight"] = 0.1 * torch.randn(down, generator=noise)
        content[f"{stem}.lora_up.weight"] = 0.1 * torch.randn(up, generator=noise)
        content[f"{stem}.alpha"] = torch.tensor(alphas[index % len(alphas)])
    return content


def states(shape: tuple[int, int, int] = (3, 4, 4), num: int = 3) -> tuple[Tensor, Tensor]:
    """States and times."""
    noise = torch.Generator().manual_seed(5)
    return torch.randn(num, *shape, generator=noise), torch.rand(num, generator=noise)
