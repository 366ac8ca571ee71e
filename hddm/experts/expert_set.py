"""The experts of an ensemble as one module, a diffusers component whose weights are read on demand."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hddm.experts.ensemble_folders import EnsembleRecord
from hddm.experts.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from hddm.experts.records import (
    WEAK,
    ExpertRecord,
    UnreadExpert,
    as_field,
    save_weak,
    stored,
    without_adapter,
    write_records,
)
from hddm.networks.folders import WEIGHTS
from hddm.networks.offload import Offload, Shelf
from hddm.networks.transformers import RouterTransformer
from hddm.utils.errors import HddmError
from hddm.utils.files import link_or_copy
from hddm.utils.records import Record
from hddm.velocity import VelocityField

Part = TypeVar("Part", "ExpertSet", RouterTransformer)


def carrying(part: Part, record: Record | None) -> Part:
    """``part`` if it carries this ``record``, else a copy that does and shares its weights."""
    if part.record != record:
        part = copy.copy(part)
        part.record = record  # type: ignore[assignment]
    return part


class ExpertSet(nn.Module):
    """Experts whose weights are read when first needed.

    Weights are read again after eviction or a cast: changes in memory last, and are saved, only while they
    stay. ``experts`` are in the router's order; wrap those in memory with
    `hddm.experts.records.Expert.unread`. ``shelf`` decides which stay on the device; by default all that have
    run. ``record`` is their ensemble's, by default ``draw`` with equal shares; diffusers' ``components``
    have no other place for it. Raises `HddmError` for no experts, or one that does not fit on the shelf.
    """

    def __init__(
        self,
        experts: Sequence[UnreadExpert],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        shelf: Shelf | None = None,
        record: EnsembleRecord | None = None,
    ) -> None:
        super().__init__()
        if not experts:
            raise HddmError("an ensemble needs at least one expert")
        self.experts = tuple(experts)
        names = [f"experts/{k}" for k in range(len(experts))]
        self.record = record or EnsembleRecord.equal(names, has_router=False)
        shelf = shelf or Shelf()
        self.stored = [
            stored(expert.unread, expert.facts, expert.name, dtype, device, shelf) for expert in experts
        ]
        self._weak = {
            index: stored(expert.weak, expert.facts, f"{expert.name}/{WEAK}", dtype, device, shelf)
            for index, expert in enumerate(experts)
            if expert.weak is not None
        }
        self._all = [*self.stored, *self._weak.values()]
        self.networks = nn.ModuleList(self._all)

    @property
    def facts(self) -> tuple[ExpertRecord, ...]:
        """Records of the experts."""
        return tuple(expert.facts for expert in self.experts)

    @property
    def shelf(self) -> Shelf:
        """The shelf that holds their weights."""
        return self.stored[0].shelf

    @property
    def device(self) -> torch.device:
        """The device that experts run on."""
        return self.stored[0].placement.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that experts run in."""
        return self.stored[0].placement.dtype

    def fields(self) -> list[VelocityField]:
        """Experts as velocity fields that share these networks."""
        fields = []
        for index, (expert, network) in enumerate(zip(self.experts, self.stored, strict=True)):
            try:
                fields.append(as_field(expert, network, self._weak.get(index)))
            except HddmError as error:
                raise HddmError(f"{expert.name}: {error}") from error
        return fields

    def offload(self, mode: Offload, budget: int | None = None) -> None:
        """Change how long weights stay on the device; see `hddm.networks.offload`. Idempotent.

        Raises `HddmError` for an unknown mode, a budget below an expert's size, or ``disk`` for experts in
        memory.
        """
        if mode == "disk" and any(expert.folder is None for expert in self.experts):
            raise HddmError("offload disk: these experts are in memory only; save the ensemble and load it")
        shelf = Shelf(mode, budget)
        for network in self._all:
            shelf.add(network)
        for network in self._all:
            network.move_to(shelf)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Let ``torch.compile``, with these arguments, compile each network at its first run."""
        for network in self._all:
            network.network.compile(*args, **kwargs)

    def save_pretrained(self, folder: str | Path, **_: object) -> None:
        """Write an expert folder each, ``0``, ``1``, …, with weights in the dtype that they run in.

        An adapter with unchanged weights stays an adapter, in its dtype on disk; the caller saves its base.
        An adapter that was changed in memory is merged.
        """
        for index, (expert, network) in enumerate(zip(self.experts, self.stored, strict=True)):
            target = Path(folder) / str(index)
            target.mkdir(parents=True)
            expert.unread.network.save_config(target)
            tensors = expert.unread.network.state_dict()
            facts = expert.facts
            is_here = not any(value.is_meta for value in tensors.values())
            if facts.adapter and expert.folder and not (is_here and _differ(expert, tensors, network.dtype)):
                for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
                    link_or_copy(expert.folder / name, target / name)
            else:
                facts = without_adapter(facts)
                if not is_here:
                    tensors = expert.unread.read(network.dtype)
                here = {name: value.cpu().contiguous() for name, value in tensors.items()}
                save_file(here, target / WEIGHTS, {"format": "pt"})
            if expert.calibration is not None:
                expert.calibration.save(target)
            save_weak(target, expert)
            write_records(target, facts, expert.nulls)


def _differ(expert: UnreadExpert, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> bool:
    """True where the weights in memory differ from those on disk."""
    on_disk = expert.unread.read(dtype)
    return any(not torch.equal(tensors[name].cpu(), value) for name, value in on_disk.items())
