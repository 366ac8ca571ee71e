"""Tiny experts and adapters of them, with random weights."""

from pathlib import Path

import torch
from torch import Tensor

from hddm.experts.records import Expert, ExpertRecord, read_expert, save_expert
from hddm.training.lora import add_adapter, new_adapter, save_adapted
from tests.ensemble_files import flow_expert


def write_base(folder: Path, expert: Expert | None = None, dtype: torch.dtype = torch.float32) -> Path:
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
    expert = read_expert(base)
    facts = new_adapter(expert.network, rank, alpha, base, out)
    add_adapter(expert.network, facts, seed)
    noise = torch.Generator().manual_seed(seed)
    for name, parameter in expert.network.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(std=size, generator=noise) if size else parameter.data.zero_()
    out.mkdir(parents=True)
    changed = ExpertRecord.model_validate(expert.facts.model_dump() | changes)
    save_adapted(out, Expert(expert.network, changed, expert.calibration, expert.nulls), facts)
    return out


def states(shape: tuple[int, int, int] = (3, 4, 4), num: int = 3) -> tuple[Tensor, Tensor]:
    """States and times."""
    noise = torch.Generator().manual_seed(5)
    return torch.randn(num, *shape, generator=noise), torch.rand(num, generator=noise)
