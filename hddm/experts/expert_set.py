"""The experts of an ensemble as one module, a diffusers component whose weights are read on demand."""

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from hddm.experts.ensemble_records import EnsembleRecord, Member
from hddm.experts.expert import Expert, decided
from hddm.experts.expert_folders import apart, as_field, own_network, save_expert, stored
from hddm.experts.records import WEAK_FILE, ExpertRecord
from hddm.experts.sharing import shared_networks
from hddm.networks.offload import Offload, Shelf, StoredNetwork, holder_of
from hddm.networks.shared import AdaptedNetwork, SharedNetwork
from hddm.networks.wrappers import compile_blocks
from hddm.settings import Computing
from hddm.utils.errors import HddmError
from hddm.utils.tensors import device_of
from hddm.velocity import VelocityField


class ExpertSet(nn.Module):
    """Experts whose weights are read when first needed.

    Weights are read again after eviction or a cast: changes in memory last, and are saved, only while they
    stay. ``experts`` are in the router's order; of an expert in memory the network is copied. ``shelf``
    decides which stay on the device; by default all that have run. ``record`` is their ensemble's, by default
    ``draw`` with nothing decided on them, and ``topics`` the number of the text encoder that prompts are
    routed by: diffusers' ``components`` have no other place for them. With ``shares``, adapters of one base,
    and the base itself, hold its weights once (`hddm.experts.sharing`). Raises `HddmError` for an expert that
    does not fit on the shelf.
    """

    def __init__(
        self,
        experts: Sequence[Expert],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        shelf: Shelf | None = None,
        record: EnsembleRecord | None = None,
        topics: int | None = None,
        shares: bool = True,
    ) -> None:
        super().__init__()
        members = tuple(Member(folder=f"experts/{k}") for k in range(len(experts)))
        self.record, self.topics = record or EnsembleRecord(experts=members), topics
        shelf = shelf or Shelf()
        self._experts = tuple(map(apart, experts))
        shared = shared_networks(self._experts, dtype, device, shelf) if shares else {}
        fields, networks = [], []
        for k, one in enumerate(self._experts):
            fields.append(_on_demand(one, dtype, device, shelf, shared.get(k)))
            networks.append(fields[-1].network)
            if fields[-1].weak is not None:
                networks.append(fields[-1].weak.network)
        self._fields = tuple(fields)
        shelf.together = self._together
        self.networks = nn.ModuleList(cast(list[nn.Module], networks))

    @property
    def _networks(self) -> list[StoredNetwork]:
        """Those that hold the weights of the experts and of their weak models, each once."""
        holders = [cast(StoredNetwork, holder_of(one)) for one in self.networks]
        return list(dict.fromkeys(holders))

    @property
    def _together(self) -> int:
        """Networks that one call of an expert runs."""
        return 1 + any(field.weak is not None for field in self._fields)

    @property
    def stored(self) -> list[StoredNetwork]:
        """What holds the weights of each expert, which come and go; one for experts that share a base."""
        return [cast(StoredNetwork, holder_of(field.network)) for field in self._fields]

    @property
    def records(self) -> tuple[ExpertRecord, ...]:
        """Records of the experts."""
        return tuple(expert.record for expert in self._experts)

    @property
    def experts(self) -> list[Expert]:
        """The experts, with what their ensemble's record says on each."""
        return decided(self._experts, self.record.experts)

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
        for field, expert in zip(fields, self.experts, strict=True):
            field.classes = expert.classes
        return fields

    def offload(
        self, mode: Offload, max_memory: int | None = None, beside: Iterable[nn.Module] = ()
    ) -> None:
        """Change how long weights stay on the device, as `hddm.networks.offload.Shelf` has it. Idempotent.

        Raises `HddmError` for an unknown mode, a limit that an expert does not fit into, and ``disk`` for
        experts in memory.
        """
        if mode == "disk" and any(expert.folder is None for expert in self._experts):
            raise HddmError(
                "offload disk: these experts are in memory only; load them from folders"
            )
        shelf = Shelf(mode, max_memory, beside)
        shelf.together = self._together
        for network in self._networks:
            if isinstance(network, SharedNetwork) and not shelf.has_room_for(network):
                network.separate("`max_memory` has no room for the base with all adapters")
        for network in self._networks:
            shelf.add(network)
        for network in self._networks:
            network.move_to(shelf)

    def prepare(self, computing: Computing) -> None:
        """Quantize and compile the networks, where the settings say so; quantized ones cannot be saved."""
        if computing.quantize:
            for network in self._networks:
                network.quantize()
        if computing.compile:
            self.compile(dynamic=True)

    def compile(self, **options: Any) -> None:
        """Compile the blocks of every network at its first run; see `compile_blocks`.

        Experts that share a base get merged weights of their own.
        """
        for network in self._networks:
            if isinstance(network, SharedNetwork):
                network.separate("a compiled network has one set of weights")
        for network in self._networks:
            compile_blocks(network.network, **options)

    def save_pretrained(self, folder: str | Path, **_: object) -> None:
        """Write one expert folder per expert, ``0``, ``1``, …, with weights in the dtype that they run in.

        An adapter with unchanged weights stays an adapter, in its dtype on disk; the caller saves its base.
        An adapter that was changed in memory is merged.
        """
        if any(network.is_quantized for network in self.stored):
            raise HddmError("quantized experts cannot be saved; load them again")
        for index, (expert, field) in enumerate(zip(self._experts, self._fields, strict=True)):
            target = Path(folder) / str(index)
            target.mkdir(parents=True)
            # Only an adapter is compared: the folder of another expert may be gone once its weights are read.
            keeps_adapter = expert.record.adapter is not None and not _is_changed(
                expert, field.dtype
            )
            save_expert(target, expert, field.dtype, keeps_adapter)


def _on_demand(
    expert: Expert,
    dtype: torch.dtype,
    device: torch.device | str,
    shelf: Shelf,
    shared: AdaptedNetwork | None,
) -> VelocityField:
    """An expert as a velocity field whose weights are read when first needed, or are ``shared``."""
    weak, network = None, shared or own_network(expert, dtype, device, shelf)
    if expert.weak is not None:
        weak = stored(
            expert.weak, expert.record, f"{expert.name}/{WEAK_FILE}", dtype, device, shelf
        )
    return as_field(expert, network, weak)


def _is_changed(expert: Expert, dtype: torch.dtype) -> bool:
    """True where weights are in memory, and differ from those on disk."""
    tensors = expert.network.state_dict()
    if any(value.is_meta for value in tensors.values()):
        return False
    on_disk = expert.unread.read(dtype)
    return any(not torch.equal(tensors[name].cpu(), value) for name, value in on_disk.items())


def carrying(experts: ExpertSet, record: EnsembleRecord) -> ExpertSet:
    """``experts`` if they carry this ``record``, else a copy that does and shares their weights."""
    if experts.record != record:
        experts = copy.copy(experts)
        experts.record = record
    return experts
