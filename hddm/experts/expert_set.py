"""The experts of an ensemble as one module, as a diffusers pipeline holds them."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hddm.experts.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from hddm.experts.records import (
    Expert,
    ExpertRecord,
    UnreadExpert,
    null_conditions,
    without_adapter,
    write_records,
)
from hddm.networks.folders import WEIGHTS, Unread
from hddm.networks.offload import Offload, Shelf, StoredNetwork
from hddm.networks.wrappers import Adapter, adapted
from hddm.schedules import from_config
from hddm.utils.errors import HddmError
from hddm.utils.files import link_or_copy
from hddm.velocity import VelocityField


class ExpertSet(nn.Module):
    """Experts whose weights come when they are first needed.

    They are read again after they have left, or when they are cast: a change made to them in memory lasts
    while they stay, and is saved if they are there.

    Args:
        experts: in the router's order. Those in memory are wrapped by `hddm.experts.records.Expert.unread`.
        dtype: that they run in.
        device: where they run.
        shelf: which of them stay there; by default all that have run.

    Raises:
        HddmError: for no experts, or one that does not fit on the shelf.
    """

    def __init__(
        self,
        experts: Sequence[UnreadExpert],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        shelf: Shelf | None = None,
    ) -> None:
        super().__init__()
        if not experts:
            raise HddmError("an ensemble needs at least one expert")
        self.experts = tuple(experts)
        self.shelf = shelf or Shelf()
        self.stored = [_stored(expert, dtype, device, self.shelf) for expert in experts]
        self.networks = nn.ModuleList(self.stored)

    @property
    def facts(self) -> tuple[ExpertRecord, ...]:
        """What each expert is."""
        return tuple(expert.facts for expert in self.experts)

    @property
    def device(self) -> torch.device:
        """Where experts run."""
        return self.stored[0].placement.device

    @property
    def dtype(self) -> torch.dtype:
        """That experts run in."""
        return self.stored[0].placement.dtype

    def fields(self) -> list[VelocityField]:
        """The experts as velocity fields that share these networks."""
        fields = []
        for expert, network in zip(self.experts, self.stored, strict=True):
            try:
                fields.append(as_field(expert, network))
            except HddmError as error:
                raise HddmError(f"{expert.name}: {error}") from error
        return fields

    def offload(self, mode: Offload, budget: int | None = None) -> None:
        """Change how long weights stay; see `hddm.networks.offload`. Doing so twice does no harm.

        Raises:
            HddmError: for an unknown mode, a budget that an expert does not fit in, or ``disk`` for
                experts that lie on none.
        """
        if mode == "disk" and any(expert.folder is None for expert in self.experts):
            raise HddmError("offload disk: these experts are in memory only; save the ensemble and load it")
        shelf = Shelf(mode, budget)
        for network in self.stored:
            shelf.add(network)
        for network in self.stored:
            network.move_to(shelf)
        self.shelf = shelf

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Have ``torch.compile``, with these arguments, compile every network when it first runs."""
        for network in self.stored:
            network.network.compile(*args, **kwargs)

    def save_pretrained(self, folder: str | Path, **_: object) -> None:
        """Write an expert folder each, ``0``, ``1``, …, with weights in the dtype that they run in.

        An adapter whose weights are what they were when they were read stays one, in the dtype that it has
        on disk; its base is for the caller to save. One that was changed in memory is merged.
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
            write_records(target, facts, expert.nulls)


def as_field(expert: UnreadExpert | Expert, network: nn.Module) -> VelocityField:
    """An expert as a velocity field with ``network``, adapted, for its own.

    Raises:
        HddmError: for a schedule that is unknown or does not go with the prediction type.
    """
    facts = expert.facts
    return VelocityField(
        network,
        from_config(facts.schedule),
        facts.prediction_type,
        facts.time_scale,
        expert.calibration,
        conditions=facts.conditions,
        null_conditions=null_conditions(facts.null_class) | dict(expert.nulls),
        sample_shape=facts.sample_shape,
        classes=facts.classes,
        shift=facts.shift,
    )


def _differ(expert: UnreadExpert, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> bool:
    """Whether weights in memory are others than those on disk."""
    on_disk = expert.unread.read(dtype)
    return any(not torch.equal(tensors[name].cpu(), value) for name, value in on_disk.items())


def _stored(
    expert: UnreadExpert, dtype: torch.dtype, device: torch.device | str, shelf: Shelf
) -> StoredNetwork:
    common = adapted(expert.unread.network, expert.facts.round_time)
    prefix = "model." if isinstance(common, Adapter) else ""
    read = functools.partial(_read, expert.unread, prefix)
    return StoredNetwork(common, read, expert.name, dtype, device, shelf)


def _read(unread: Unread[Any], prefix: str, dtype: torch.dtype) -> Mapping[str, Tensor]:
    return {prefix + name: value for name, value in unread.read(dtype).items()}
