"""Loading of folders that hddm wrote, and of the Paris release, as velocity fields (`load`).

All records are read and compared before any weights. `ExpertSet` holds an ensemble's experts as one module
and reads their weights on demand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hddm.ensemble import Ensemble, Router, Strategy
from hddm.experts.compatibility import Findings, compare_experts, match_router
from hddm.experts.ensemble_folders import (
    COMPONENTS,
    ENSEMBLE_FILE,
    ROUTER,
    ClassName,
    EnsembleRecord,
    bases_of,
    components_in,
    read_ensemble_facts,
    refuse_damaged_ensemble,
    write_ensemble_records,
)
from hddm.experts.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, bases_in, refuse_base
from hddm.experts.paris import is_paris, paris_experts, paris_router
from hddm.experts.records import (
    EXPERT_FILE,
    WEAK,
    ExpertRecord,
    RouterRecord,
    UnreadExpert,
    as_field,
    field_of,
    open_expert,
    read_router,
    save_router,
    save_weak,
    stored,
    without_adapter,
    write_records,
)
from hddm.networks.folders import WEIGHTS
from hddm.networks.offload import Offload, Shelf
from hddm.networks.transformers import RouterTransformer
from hddm.utils.errors import HddmError, UsageError
from hddm.utils.files import inside, link_or_copy, restore
from hddm.velocity import VelocityField


class ExpertSet(nn.Module):
    """Experts whose weights are read when first needed.

    Weights are read again after eviction or a cast: changes in memory last, and are saved, only while they
    stay. ``experts`` are in the router's order; wrap those in memory with
    `hddm.experts.records.Expert.unread`. ``shelf`` decides which stay on the device; by default all that have
    run. Raises `HddmError` for no experts, or one that does not fit on the shelf.
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
        self.stored = [
            stored(expert.unread, expert.facts, expert.name, dtype, device, self.shelf) for expert in experts
        ]
        self._weak = {
            index: stored(expert.weak, expert.facts, f"{expert.name}/{WEAK}", dtype, device, self.shelf)
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
        self.shelf = shelf

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


def load(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    experts: Sequence[int] | None = None,
    offload: Offload = "none",
    max_memory: int | None = None,
    base: str | Path | None = None,
) -> VelocityField | Ensemble:
    """Load an expert folder as a `VelocityField`, an ensemble folder or the Paris release as an `Ensemble`.

    An ensemble's experts are read when first needed; their records are checked here.

    Args:
        path: folder to load.
        dtype: that networks run in; other weights are cast.
        device: that networks run on.
        experts: indices of the ensemble's experts to take, in this order; by default all.
        offload: where idle experts wait; see `hddm.networks.offload`.
        max_memory: bytes on the device for an ensemble's weights, including the router's.
        base: folder of the weights that an adapter changes; by default that of its training. Ensembles hold
            their adapters' bases.

    Raises:
        HddmError: for anything else, contradictory parts, or a base for an expert that is no adapter.
    """
    folder = Path(path)
    restore(folder)
    if not folder.is_dir():
        raise HddmError(f"{folder}: no such folder")
    if not (folder / EXPERT_FILE).exists():
        if base is not None:
            raise HddmError(f"{folder}: is no expert folder; a base goes with one adapter")
        return open_ensemble(folder, dtype, experts).on(device, dtype, offload, max_memory)
    if experts is not None or offload != "none" or max_memory is not None:
        raise HddmError(f"{folder}: is one expert; choosing and offloading experts needs an ensemble")
    bases = [] if base is None else [Path(base)]
    expert = open_expert(folder, bases_in(bases) or None)
    refuse_base(folder, expert.facts.adapter, bases)
    read = expert.read(dtype)
    try:
        return field_of(read, device)
    except HddmError as error:
        raise HddmError(f"{folder / EXPERT_FILE}: {error}") from error


@dataclass(frozen=True)
class OpenedEnsemble:
    """Content of an ensemble folder, with the experts' weights still on disk."""

    experts: list[UnreadExpert]
    router: RouterTransformer | None
    router_facts: RouterRecord | None
    facts: EnsembleRecord
    components: Sequence[str] = ()
    """`hddm.experts.ensemble_folders.COMPONENTS` that are present."""

    def expert_set(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        offload: Offload = "none",
        max_memory: int | None = None,
        others: Sequence[nn.Module] = (),
    ) -> ExpertSet:
        """The experts on their own shelf; router and ``others`` take their part of ``max_memory`` first."""
        if max_memory is not None:
            beside = [part for part in (self.router, *others) if part is not None]
            max_memory = room_beside(beside, max_memory)
        return ExpertSet(self.experts, dtype, device, Shelf(offload, max_memory))

    def on(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        offload: Offload = "none",
        max_memory: int | None = None,
    ) -> Ensemble:
        """The velocity field, with the router itself moved to ``device``; raises as `expert_set`."""
        if self.router is not None:
            self.router.to(device)
        experts = self.expert_set(device, dtype, offload, max_memory)
        return ensemble_of(experts, self.router, self.router_facts, self.facts)


def open_ensemble(folder: Path, dtype: torch.dtype, experts: Sequence[int] | None = None) -> OpenedEnsemble:
    """Open an ensemble folder, the Paris release, or an expert folder as an ensemble of one.

    ``dtype`` is the router's; ``experts`` are the indices to take, in this order; nothing of the others is
    opened. Raises `HddmError` as `hddm.load`, and for unknown, repeated or no indices.
    """
    if (folder / EXPERT_FILE).exists():
        expert = open_expert(folder)
        facts = EnsembleRecord.equal(["."], has_router=False, shift=expert.facts.shift)
        return OpenedEnsemble([expert], None, None, facts)
    if (folder / ENSEMBLE_FILE).exists():
        return _ensemble(folder, dtype, experts)
    if is_paris(folder):
        return _paris(folder, dtype, experts)
    raise UsageError(
        f"{folder}: neither an expert folder ({EXPERT_FILE}) nor an ensemble folder ({ENSEMBLE_FILE}); a "
        "pretrained checkpoint must become an expert first (hddm convert)"
    )


def _ensemble(folder: Path, dtype: torch.dtype, chosen: Sequence[int] | None) -> OpenedEnsemble:
    written = read_ensemble_facts(folder)
    router, router_facts = read_router(folder / written.router, dtype) if written.router else (None, None)
    facts = written if chosen is None else _only(written, chosen)
    components = components_in(folder)
    bases = {sha256: folder / name for sha256, name in facts.bases.items()}
    experts = [open_expert(folder / name, bases) for name in facts.experts]
    named = [(name, expert.facts) for name, expert in zip(facts.experts, experts, strict=True)]
    found = Findings()
    compare_experts(named, found)
    if router is not None and router_facts is not None:
        total = router.config.num_experts
        if not written.router_outputs and total != len(written.experts):
            found.differ("router", f"has {total} outputs, not {len(written.experts)}")
        match_router(named, router_facts, total, found, settled=facts.outputs)
    found.refuse("the parts of this ensemble do not fit together; assemble it anew:")
    refuse_damaged_ensemble(folder, written, range(len(experts)) if chosen is None else chosen)
    return OpenedEnsemble(experts, router, router_facts, facts, components)


def _only(facts: EnsembleRecord, chosen: Sequence[int]) -> EnsembleRecord:
    """The record of an ensemble reduced to these experts; they keep their router outputs."""
    total = len(facts.experts)
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(total)):
        raise HddmError(f"experts {list(chosen)}: choose some of 0 … {total - 1}, each once")
    rows = [[row[k] for k in chosen] for row in facts.class_prior]
    prior = tuple(facts.prior[k] for k in chosen)
    strategy = Strategy.parse(facts.strategy)
    # All of fewer than k are the k most probable of them.
    too_many = strategy.kind == "top" and strategy.value > len(chosen)
    changes = {
        "experts": tuple(facts.experts[k] for k in chosen),
        "router_outputs": tuple(facts.outputs[k] for k in chosen) if facts.router is not None else (),
        "prior": prior,
        "strategy": f"top-{len(chosen)}" if too_many else facts.strategy,
        # A class that none of them has seen is anybody's.
        "class_prior": tuple(tuple(row) if sum(row) else prior for row in rows),
    }
    return facts.model_copy(update=changes)


def _paris(folder: Path, dtype: torch.dtype, chosen: Sequence[int] | None) -> OpenedEnsemble:
    experts = paris_experts(folder)
    router, router_facts = paris_router(folder, experts)
    # The release records no shards, so there are no sizes to draw from; it is published with top-2.
    names, strategy = [expert.name for expert in experts], f"top-{min(2, len(experts))}"
    facts = EnsembleRecord.equal(names, True, strategy, experts[0].facts.shift)
    if chosen is not None:
        facts = _only(facts, chosen)
        experts = [experts[k] for k in chosen]
    components = [name for name in COMPONENTS if inside(folder, name).is_dir()]
    return OpenedEnsemble(experts, router.load(dtype), router_facts, facts, components)


def room_beside(models: Sequence[nn.Module], max_memory: int) -> int:
    """Bytes of ``max_memory`` left for experts beside ``models``; `HddmError` where none are."""
    taken = sum(p.numel() * p.element_size() for model in models for p in model.parameters())
    if taken >= max_memory:
        alone = f"router, VAE and text encoder alone take {taken / 1e6:.1f} MB"
        raise HddmError(f"--max-memory of {max_memory / 1e6:.1f} MB: {alone}; allow more")
    return max_memory - taken


def ensemble_of(
    experts: ExpertSet,
    router: RouterTransformer | None,
    router_facts: RouterRecord | None,
    facts: EnsembleRecord,
) -> Ensemble:
    """The velocity field of an ensemble's parts; `HddmError` where they contradict each other."""
    route = None
    if router is not None:
        if router_facts is None:
            raise HddmError("a router needs its router_facts, which say how it counts time")
        outputs = facts.router_outputs or None
        route = Router(router, router_facts.time_scale, router_facts.temperatures, outputs)
    try:
        return Ensemble(
            experts.fields(), route, facts.strategy, facts.prior, facts.class_prior or None, facts.shift
        )
    except HddmError as error:
        raise HddmError(f"{ENSEMBLE_FILE}: {error}") from error


def save_ensemble(
    draft: Path,
    experts: ExpertSet,
    router: RouterTransformer | None,
    router_facts: RouterRecord | None,
    facts: EnsembleRecord,
    components: Mapping[str, ClassName],
) -> None:
    """Write an ensemble into ``draft``, which holds ``components``; the inverse of `open_ensemble`."""
    experts.save_pretrained(draft / "experts")
    if router is not None and router_facts is not None:
        (draft / ROUTER).mkdir()
        save_router(draft / ROUTER, router, router_facts)
    names = tuple(f"experts/{k}" for k in range(len(experts.experts)))
    update = {"experts": names, "router": None if router is None else ROUTER}
    known = {
        one.facts.adapter.base_sha256: one.base for one in experts.experts if one.facts.adapter and one.base
    }
    bases = bases_of([draft / name for name in names], known)
    write_ensemble_records(draft, facts.model_copy(update=update), components, bases)


def _differ(expert: UnreadExpert, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> bool:
    """True where the weights in memory differ from those on disk."""
    on_disk = expert.unread.read(dtype)
    return any(not torch.equal(tensors[name].cpu(), value) for name, value in on_disk.items())
