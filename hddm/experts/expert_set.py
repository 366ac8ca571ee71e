"""The experts of an ensemble as one module, a diffusers component whose weights are read on demand."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from hddm.ensemble import Ensemble
from hddm.experts.compatibility import Entry, entries_of
from hddm.experts.ensemble_folders import EnsembleRecord, Member
from hddm.experts.records import (
    WEAK,
    Expert,
    ExpertRecord,
    as_field,
    save_expert,
    stored,
)
from hddm.networks.offload import Offload, Shelf, StoredNetwork
from hddm.networks.wrappers import NetworkWrapper, compile_blocks
from hddm.schedules import LinearSchedule
from hddm.settings import Computing
from hddm.utils.errors import HddmError
from hddm.utils.records import Record
from hddm.utils.tensors import device_of
from hddm.velocity import VelocityField

_IMAGES = (1, 3)
"""Channels of pixels; samples of any others are taken for latents."""
Module = TypeVar("Module", bound=nn.Module)


class ExpertSet(nn.Module):
    """Experts whose weights are read when first needed.

    Weights are read again after eviction or a cast: changes in memory last, and are saved, only while they
    stay. ``experts`` are in the router's order; of an expert in memory the network is copied, and velocity
    fields, of known sample shape, keep theirs. ``shelf`` decides which stay on the device; by default all
    that have run. ``record`` is their ensemble's, by default ``draw`` with nothing decided on them, and
    ``topics`` the number of the text encoder that prompts are routed by: diffusers' ``components`` have no
    other place for them. Raises `HddmError` for one that does not fit on the shelf.
    """

    def __init__(
        self,
        experts: Sequence[Expert | VelocityField],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        shelf: Shelf | None = None,
        record: EnsembleRecord | None = None,
        topics: int | None = None,
        ensemble: Ensemble | None = None,
    ) -> None:
        super().__init__()
        members = tuple(Member(folder=f"experts/{k}") for k in range(len(experts)))
        self.record, self.topics, self.ensemble = record or EnsembleRecord(experts=members), topics, ensemble
        shelf = shelf or Shelf()
        self.experts = tuple(
            in_memory(one) if isinstance(one, VelocityField) else one.apart() for one in experts
        )
        """The experts, with their records."""
        # Copies: what is changed on a field afterwards is no part of this.
        self._fields = tuple(
            copy.copy(one) if isinstance(one, VelocityField) else _on_demand(own, dtype, device, shelf)
            for one, own in zip(experts, self.experts, strict=True)
        )
        shelf.together = self._together
        self.networks = nn.ModuleList([one for one in self._networks if isinstance(one, nn.Module)])

    @property
    def _networks(self) -> list[Any]:
        """Networks of the experts and of their weak models."""
        return [one.network for field in self._fields for one in (field, field.weak) if one is not None]

    @property
    def _together(self) -> int:
        """Networks that one call of an expert runs."""
        return 1 + any(field.weak is not None for field in self._fields)

    @property
    def stored(self) -> list[StoredNetwork]:
        """Networks of the experts whose weights come and go."""
        return [field.network for field in self._fields if isinstance(field.network, StoredNetwork)]

    @property
    def facts(self) -> tuple[ExpertRecord, ...]:
        """Records of the experts."""
        return tuple(expert.facts for expert in self.experts)

    @property
    def entries(self) -> list[Entry]:
        """Records of the experts, with what was decided on each."""
        return entries_of(self.experts, self.record.experts)

    @property
    def shelf(self) -> Shelf:
        """The shelf that holds their weights."""
        return self.stored[0].shelf

    @property
    def device(self) -> torch.device:
        """The device that experts run on."""
        return device_of(self._fields[0].network)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that experts run in."""
        return self._fields[0].dtype

    def fields(self) -> list[VelocityField]:
        """Experts as velocity fields that share these networks."""
        fields = [copy.copy(field) for field in self._fields]
        for field, member in zip(fields, self.record.experts, strict=True):
            field.classes = member.classes or field.classes
        return fields

    def offload(self, mode: Offload, budget: int | None = None) -> None:
        """Change how long weights stay on the device; see `hddm.networks.offload`. Idempotent.

        Raises `HddmError` for an unknown mode, a budget below an expert's size, ``disk`` for experts in
        memory, and networks that are not hddm's to move.
        """
        own = self._from_folders(f"offload {mode}")
        if mode == "disk" and any(expert.folder is None for expert in self.experts):
            raise HddmError("offload disk: these experts are in memory only; load them from folders")
        shelf = Shelf(mode, budget)
        shelf.together = self._together
        for network in own:
            shelf.add(network)
        for network in own:
            network.move_to(shelf)

    def prepare(self, computing: Computing) -> None:
        """Quantize and compile the experts' networks, where the settings say so."""
        if computing.quantize:
            self.quantize()
        if computing.compile:
            self.compile(dynamic=True)

    def compile(self, **options: Any) -> None:
        """Compile the blocks of every network at its first run; see `compile_blocks`."""
        for network in self.networks:
            compile_blocks(network.network if isinstance(network, StoredNetwork) else network, **options)

    def quantize(self) -> None:
        """Hold linear layers in int8; see `StoredNetwork.quantize`. These experts can then not be saved."""
        for network in self._from_folders("quantize"):
            network.quantize()

    def _from_folders(self, change: str) -> list[StoredNetwork]:
        """All networks; `HddmError` names the ``change`` where one of them is not hddm's to read again."""
        own = [network for network in self._networks if isinstance(network, StoredNetwork)]
        if len(own) < len(self._networks):
            raise HddmError(f"{change}: an expert was built in memory; load it from a folder")
        return own

    def save_pretrained(self, folder: str | Path, **_: object) -> None:
        """Write one expert folder per expert, ``0``, ``1``, …, with weights in the dtype that they run in.

        An adapter with unchanged weights stays an adapter, in its dtype on disk; the caller saves its base.
        An adapter that was changed in memory is merged.
        """
        if any(network.is_quantized for network in self.stored):
            raise HddmError("quantized experts cannot be saved; load them again")
        for index, (expert, field) in enumerate(zip(self.experts, self._fields, strict=True)):
            target = Path(folder) / str(index)
            target.mkdir(parents=True)
            # Only an adapter is compared: the folder of another expert may be gone once its weights are read.
            keeps_adapter = expert.facts.adapter is not None and not _is_changed(expert, field.dtype)
            save_expert(target, expert, field.dtype, keeps_adapter)


def _on_demand(expert: Expert, dtype: torch.dtype, device: torch.device | str, shelf: Shelf) -> VelocityField:
    """An expert as a velocity field whose weights are read when first needed."""
    weak = None
    network = stored(expert.unread, expert.facts, expert.name, dtype, device, shelf)
    if expert.weak is not None:
        weak = stored(expert.weak, expert.facts, f"{expert.name}/{WEAK}", dtype, device, shelf)
    return as_field(expert, network, weak)


def _is_changed(expert: Expert, dtype: torch.dtype) -> bool:
    """True where weights are in memory, and differ from those on disk."""
    tensors = expert.network.state_dict()
    if any(value.is_meta for value in tensors.values()):
        return False
    on_disk = expert.unread.read(dtype)
    return any(not torch.equal(tensors[name].cpu(), value) for name, value in on_disk.items())


def carrying(part: Module, record: Record | None) -> Module:
    """``part`` if it carries this ``record``, else a copy that does and shares its weights."""
    if part.record != record:
        part = copy.copy(part)
        part.record = record  # type: ignore[assignment]
    return part


def _bare(network: Any) -> Any:
    """A network without what hddm wraps it in."""
    inner = network.network if isinstance(network, StoredNetwork) else network
    return inner.model if isinstance(inner, NetworkWrapper) else inner


def in_memory(field: VelocityField) -> Expert:
    """The expert that a field, whose samples have a shape, is in a pipeline.

    It is the one that the field was read from, unless the network was replaced after that.
    """
    shape, source, network = tuple(field.sample_shape or ()), field.source, _bare(field.network)
    stated = {"sample_shape": shape, "conditions": field.conditions or ()}
    if isinstance(field.network, StoredNetwork) and isinstance(source, Expert) and network is source.network:
        return replace(source, facts=source.facts.model_copy(update=stated))
    unstated = {
        "objective": "flow" if isinstance(field.schedule, LinearSchedule) else "ddpm",
        "prediction_type": field.prediction_type,
        "schedule": field.schedule.config,
        "schedule_source": "set in Python",
        "time_scale": float(field.time_scale),
        "space": "pixels" if shape[0] in _IMAGES else "latents",
    }
    return Expert(network, ExpertRecord.model_validate(unstated | stated))
