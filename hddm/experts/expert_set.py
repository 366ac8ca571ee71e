"""The experts of an ensemble as one module, a diffusers component whose weights are read on demand."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from hddm.experts.ensemble_folders import EnsembleRecord, Member
from hddm.experts.in_memory import in_memory, storable
from hddm.experts.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from hddm.experts.parts import Encoders, encoders_of
from hddm.experts.records import (
    WEAK,
    Expert,
    ExpertRecord,
    as_field,
    save_weak,
    stored,
    without_adapter,
    write_records,
)
from hddm.networks.folders import WEIGHTS
from hddm.networks.offload import Offload, Shelf, StoredNetwork
from hddm.utils.errors import HddmError
from hddm.utils.files import link_or_copy
from hddm.utils.tensors import device_of, parameter_dtype
from hddm.velocity import VelocityField


class ExpertSet(nn.Module):
    """Experts whose weights are read when first needed.

    Weights are read again after eviction or a cast: changes in memory last, and are saved, only while they
    stay. ``experts`` are in the router's order; of an expert in memory the network is copied, and velocity
    fields, of known sample shape, keep theirs. ``shelf`` decides which stay on the device; by default all
    that have run. ``record`` is their ensemble's, by default ``draw`` with nothing decided on them, and
    ``topics`` the number of the text encoder that prompts are routed by: diffusers' ``components`` have no
    other place for them. Raises `HddmError` for no experts, or one that does not fit on the shelf.
    """

    def __init__(
        self,
        experts: Sequence[Expert | VelocityField],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        shelf: Shelf | None = None,
        record: EnsembleRecord | None = None,
        topics: int | None = None,
    ) -> None:
        super().__init__()
        if not experts:
            raise HddmError("an ensemble needs at least one expert")
        members = tuple(Member(folder=f"experts/{k}") for k in range(len(experts)))
        self.record, self.topics = record or EnsembleRecord(experts=members), topics
        # Copies: what is changed on a field afterwards is no part of this.
        self._fields = {k: copy.copy(one) for k, one in enumerate(experts) if isinstance(one, VelocityField)}
        self.experts = tuple(
            in_memory(one) if isinstance(one, VelocityField) else one.apart() for one in experts
        )
        shelf = shelf or Shelf()
        self._running: list[Any] = []
        self._weak: dict[int, Any] = {}
        for k, expert in enumerate(self.experts):
            if field := self._fields.get(k):
                self._running.append(field.network)
                if field.weak is not None:
                    self._weak[k] = field.weak.network
                continue
            self._running.append(stored(expert.unread, expert.facts, expert.name, dtype, device, shelf))
            if expert.weak is not None:
                name = f"{expert.name}/{WEAK}"
                self._weak[k] = stored(expert.weak, expert.facts, name, dtype, device, shelf)
        self._all = [one for one in (*self._running, *self._weak.values()) if isinstance(one, nn.Module)]
        self.networks = nn.ModuleList(self._all)

    @property
    def stored(self) -> list[StoredNetwork]:
        """Networks of the experts whose weights come and go."""
        return [network for network in self._running if isinstance(network, StoredNetwork)]

    @property
    def facts(self) -> tuple[ExpertRecord, ...]:
        """Records of the experts."""
        return tuple(expert.facts for expert in self.experts)

    @property
    def encoders(self) -> Encoders:
        """Numbers of the experts' VAEs and text encoders."""
        return encoders_of(self.record.experts, [(one.name, one.facts) for one in self.experts])

    @property
    def shelf(self) -> Shelf:
        """The shelf that holds their weights."""
        return self.stored[0].shelf

    @property
    def device(self) -> torch.device:
        """The device that experts run on."""
        return device_of(self._running[0])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that experts run in."""
        return parameter_dtype(self._running[0]) or torch.float32

    def fields(self) -> list[VelocityField]:
        """Experts as velocity fields that share these networks."""
        fields = []
        for index, (expert, network) in enumerate(zip(self.experts, self._running, strict=True)):
            try:
                field = self._fields.get(index) or as_field(expert, network, self._weak.get(index))
            except HddmError as error:
                raise HddmError(f"{expert.name}: {error}") from error
            field = copy.copy(field)
            if names := self.record.experts[index].classes:
                field.classes = names
            fields.append(field)
        return fields

    def offload(self, mode: Offload, budget: int | None = None) -> None:
        """Change how long weights stay on the device; see `hddm.networks.offload`. Idempotent.

        Raises `HddmError` for an unknown mode, a budget below an expert's size, ``disk`` for experts in
        memory, and networks that are not hddm's to move.
        """
        own = [network for network in self._all if isinstance(network, StoredNetwork)]
        if len(own) < len(self._running) + len(self._weak):
            raise HddmError(
                f"offload {mode}: an expert was built in memory, and its weights stay where they are; save "
                "the pipeline and load it"
            )
        if mode == "disk" and any(expert.folder is None for expert in self.experts):
            raise HddmError("offload disk: these experts are in memory only; save the ensemble and load it")
        shelf = Shelf(mode, budget)
        for network in own:
            shelf.add(network)
        for network in own:
            network.move_to(shelf)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Let ``torch.compile``, with these arguments, compile each network at its first run."""
        for network in self._all:
            (network.network if isinstance(network, StoredNetwork) else network).compile(*args, **kwargs)

    def save_pretrained(self, folder: str | Path, **_: object) -> None:
        """Write an expert folder each, ``0``, ``1``, …, with weights in the dtype that they run in.

        An adapter with unchanged weights stays an adapter, in its dtype on disk; the caller saves its base.
        An adapter that was changed in memory is merged. Raises `HddmError` for experts built in memory that a
        folder cannot hold.
        """
        experts = self.storable()
        for index, (expert, network) in enumerate(zip(experts, self._running, strict=True)):
            target = Path(folder) / str(index)
            target.mkdir(parents=True)
            expert.network.save_config(target)
            dtype, facts = parameter_dtype(network) or torch.float32, expert.facts
            if facts.adapter and expert.folder and not _is_changed(expert, dtype):
                for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
                    link_or_copy(expert.folder / name, target / name)
            else:
                facts, tensors = without_adapter(facts), expert.network.state_dict()
                if any(value.is_meta for value in tensors.values()):
                    tensors = expert.unread.read(dtype)
                here = {name: value.cpu().contiguous() for name, value in tensors.items()}
                save_file(here, target / WEIGHTS, {"format": "pt"})
            if expert.calibration is not None:
                expert.calibration.save(target)
            if expert.topic is not None:
                expert.topic.save(target)
            # On disk they are in bfloat16, and in memory they may say more.
            on_disk = isinstance(self._weak.get(index), StoredNetwork)
            save_weak(target, expert, torch.bfloat16 if on_disk else dtype)
            write_records(target, facts, expert.nulls)

    def is_as_stored(self) -> bool:
        """True where all experts have folders, and weights that are in memory are those in them."""
        return not any(
            expert.folder is None or _is_changed(expert, parameter_dtype(network) or torch.float32)
            for expert, network in zip(self.experts, self._running, strict=True)
        )

    def storable(self) -> list[Expert]:
        """The experts as folders hold them; `HddmError` names the first that no folder could hold."""
        found = list(self.experts)
        for index, field in self._fields.items():
            try:
                found[index] = storable(found[index], field)
            except HddmError as error:
                raise HddmError(f"expert {index}: {error}") from error
        return found


def _is_changed(expert: Expert, dtype: torch.dtype) -> bool:
    """True where weights are in memory, and differ from those on disk."""
    tensors = expert.network.state_dict()
    if any(value.is_meta for value in tensors.values()):
        return False
    on_disk = expert.unread.read(dtype)
    return any(not torch.equal(tensors[name].cpu(), value) for name, value in on_disk.items())
