"""Loading of folders that hddm wrote, and of the Paris release, as velocity fields (`load`).

All records are read and compared before any weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from hddm.ensemble import Ensemble
from hddm.experts.adapter_records import bases_in
from hddm.experts.compatibility import router_condition, router_outputs
from hddm.experts.ensemble_folders import (
    ENSEMBLE_FILE,
    bases_of,
    refuse_damaged_ensemble,
    write_ensemble_records,
)
from hddm.experts.ensemble_records import (
    KEPT,
    MOMENTS,
    RELIABILITY,
    ROUTER,
    ClassName,
    EnsembleRecord,
    Member,
    components_in,
    name_of,
    numbered,
    read_ensemble_record,
)
from hddm.experts.expert import Expert, decided, experts_in
from hddm.experts.expert_folders import field_of, open_expert
from hddm.experts.expert_set import ExpertSet
from hddm.experts.kept import whole_components
from hddm.experts.paris import is_paris, paris_experts, paris_router
from hddm.experts.parts import numbers_of, parts_of, topics_number, with_parts
from hddm.experts.record_folders import read_router, save_router
from hddm.experts.records import EXPERT_FILE, RouterRecord, no_model
from hddm.fit import Findings
from hddm.networks.offload import Offload, Shelf
from hddm.networks.programs.permission import programs_allowed
from hddm.networks.transformers import RouterTransformer
from hddm.reliability import ReliabilityRouter
from hddm.routers import MomentsRouter, Router
from hddm.settings import DtypeName
from hddm.strategies import Strategy
from hddm.utils.errors import HddmError, UsageError, choose
from hddm.utils.files import inside, restore
from hddm.utils.hub import local
from hddm.utils.records import WHOLE
from hddm.utils.tensors import available_device, dtype_on
from hddm.velocity import VelocityField

_MISFIT = "the parts of this ensemble do not fit together; assemble it anew:"


def load(
    path: str | Path,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str = "cpu",
    *,
    experts: Sequence[int] | None = None,
    offload: Offload = "none",
    max_memory: int | None = None,
    base: str | Path | None = None,
    allow_program: bool = False,
) -> VelocityField | Ensemble:
    """Load an expert folder as a `VelocityField`, an ensemble folder or the Paris release as an `Ensemble`.

    An ensemble's experts are read when first needed; their records are checked here.

    Args:
        path: folder to load, or its name on a hub (`hddm.utils.hub`).
        dtype: that networks run in, or its name; other weights are cast.
        device: that networks run on.
        experts: indices of the ensemble's experts to take, in this order; by default all.
        offload: where idle experts wait; see `hddm.networks.offload`.
        max_memory: bytes on the device for an ensemble's weights, including the router's.
        base: folder of the weights that an adapter changes; by default that of its training. Ensembles hold
            their adapters' bases.
        allow_program: open networks that are programs (`hddm.export`), as you would run their authors' code.

    Raises:
        HddmError: for anything else, or contradictory parts.
    """
    folder = local(path)
    restore(folder)
    device = available_device(device)
    if isinstance(dtype, str) and dtype not in get_args(DtypeName):
        raise UsageError(f"`dtype={dtype!r}`: {choose(dtype, get_args(DtypeName))}")
    number_type = dtype_on(device, dtype) if isinstance(dtype, str) else dtype
    with programs_allowed(allow_program):
        if not (folder / EXPERT_FILE).exists():
            opened = open_ensemble(folder, number_type, experts)
            return opened.on(device, number_type, offload, max_memory)
        bases = None if base is None else bases_in([Path(base)])
        return field_of(open_expert(folder, bases).read(number_type), device)


@dataclass(frozen=True)
class OpenedEnsemble:
    """Content of an ensemble folder, with the experts' weights still on disk."""

    experts: list[Expert]
    router: RouterTransformer | None
    record: EnsembleRecord
    components: Mapping[str, str] = field(default_factory=dict)
    """Folders of the components that these experts have, by their names for these experts."""
    topics: int | None = None
    """Number of the text encoder that prompts are routed by."""

    def expert_set(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        offload: Offload = "none",
        max_memory: int | None = None,
        shares: bool = True,
    ) -> ExpertSet:
        """The experts on their own shelf; the router takes its part of ``max_memory`` first.

        With ``shares``, adapters of one base keep it once in memory, as in `ExpertSet`.
        """
        shelf = Shelf(offload, max_memory, [] if self.router is None else [self.router])
        return ExpertSet(self.experts, dtype, device, shelf, self.record, self.topics, shares)

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
        return ensemble_of(self.expert_set(device, dtype, offload, max_memory), self.router)


def open_ensemble(
    folder: Path, dtype: torch.dtype, experts: Sequence[int] | None = None
) -> OpenedEnsemble:
    """Open an ensemble folder, the Paris release, or an expert folder as an ensemble of one.

    ``dtype`` is the router's; ``experts`` are the indices to take, in this order; of the others only the
    records are read. Raises `HddmError` as `hddm.load`, and for a part of a domain.
    """
    if (folder / EXPERT_FILE).exists():
        expert = open_expert(folder)
        low, high = expert.record.noise_range
        if (low, high) != WHOLE:
            raise HddmError(
                f"{folder}: is made for t in {low:g}:{high:g} alone; sample it in an ensemble"
            )
        record = EnsembleRecord(experts=(Member(folder="."),), shift=expert.record.shift)
        names = {name: name for name in whole_components(folder)}
        return OpenedEnsemble([expert], None, record, names)
    if (folder / ENSEMBLE_FILE).exists():
        return _ensemble(folder, dtype, experts)
    if is_paris(folder):
        return _paris(folder, dtype, experts)
    raise no_model(folder)


def _ensemble(folder: Path, dtype: torch.dtype, chosen: Sequence[int] | None) -> OpenedEnsemble:
    written = read_ensemble_record(folder)
    router = read_router(folder / written.learned, dtype)[0] if written.learned else None
    record, components = written, {name: name for name in components_in(folder)}
    if chosen is not None:
        whole = experts_in(folder, written)
        record, renamed = _subset(written, whole, chosen)
        components = {new: old for new, old in renamed.items() if old in components}
    experts = decided([open_expert(folder / one.folder) for one in record.experts], record.experts)
    opened = OpenedEnsemble(experts, router, record, components)
    found = Findings()
    number = topics_number(experts, found)
    found.refuse(_MISFIT)
    refuse_damaged_ensemble(
        folder, written, range(len(record.experts)) if chosen is None else chosen
    )
    can_read = number is not None and numbered("text_encoder", number) in components
    return replace(opened, topics=number if can_read else None)


def _subset(
    record: EnsembleRecord, whole: Sequence[Expert], chosen: Sequence[int]
) -> tuple[EnsembleRecord, dict[str, str]]:
    """The ensemble's record for these experts only, and the old name of each component by its new name."""
    unknown = [k for k in chosen if not 0 <= k < len(whole)]
    if unknown:
        raise HddmError(f"`experts` {unknown}: choose from 0 to {len(whole) - 1}")
    parts = parts_of(whole)
    domains = {parts[k].domain for k in chosen}
    parted = [k for k, part in enumerate(parts) if part.domain in domains and k not in chosen]
    if parted:
        raise HddmError(
            f"experts {list(chosen)}: one of them is of a domain with {parted}; choose these too"
        )
    experts = with_parts([whole[k] for k in chosen], [parts[k] for k in chosen])
    renamed = dict[str, str]()
    for name in KEPT:
        before, after = numbers_of(whole, name).of, numbers_of(experts, name).of
        for new, old in enumerate(chosen):
            if before[old] >= 0:
                renamed[numbered(name, after[new])] = numbered(name, before[old])
    # All of fewer than k are the k most probable of them.
    strategy, number = Strategy.parse(record.strategy), len(domains)
    changes: dict[str, Any] = {"experts": tuple(one.member for one in experts)}
    if strategy.kind == "top" and strategy.value > number:
        changes["strategy"] = f"top-{number}"
    if record.reliability is not None:
        rows = [tuple(row[k] for k in chosen) for row in record.reliability.weights]
        changes["reliability"] = record.reliability.model_copy(update={"weights": tuple(rows)})
    return record.model_copy(update=changes), renamed


def _paris(folder: Path, dtype: torch.dtype, chosen: Sequence[int] | None) -> OpenedEnsemble:
    experts = paris_experts(folder)
    unread, router_record = paris_router(folder, experts)
    router = unread.load(dtype)
    router.record = router_record
    # The release records no shards, so there are no sizes to draw from; it is published with top-2.
    members = []
    for k, one in enumerate(experts):
        members.append(Member(folder=Path(one.name).name, output=k))
    record = EnsembleRecord(
        experts=tuple(members),
        router=ROUTER,
        strategy=f"top-{min(2, len(experts))}",
        shift=experts[0].record.shift,
    )
    if chosen is not None:
        record, _ = _subset(record, decided(experts, record.experts), chosen)
        experts = [experts[k] for k in chosen]
    components = {name: name for name in KEPT if inside(folder, name).is_dir()}
    return OpenedEnsemble(decided(experts, record.experts), router, record, components)


def ensemble_of(experts: ExpertSet, router: Callable[..., Tensor] | None) -> Ensemble:
    """The velocity field of an ensemble's parts; `HddmError` where they contradict each other."""
    record = experts.record
    parts, route = parts_of(experts.experts, experts.fields()), router
    weights = [part.weight for part in parts]
    if isinstance(router, RouterTransformer):
        known, total, found = router.record, router.config.num_experts, Findings()
        assert isinstance(known, RouterRecord)
        outputs = router_outputs(experts.experts, known, total, found)
        condition = router_condition(experts.experts, known, router.null_text, found)
        found.refuse(_MISFIT)
        in_order = outputs == list(range(total))
        is_by_hand = any(one.member.share is not None for one in experts.experts)
        route = Router(
            router,
            known.time_scale,
            known.temperatures,
            None if in_order else outputs,
            weights,
            condition,
            known.shard_images if is_by_hand and condition and known.shard_images else None,
        )
    elif router is None and record.router == MOMENTS:
        moments = []
        for part in parts:
            if part.field.calibration is not None:
                moments.append(part.field.calibration.moments)
        route = MomentsRouter(moments, weights, record.evidence)
    if record.reliability is not None:
        known_weights = record.reliability
        route = ReliabilityRouter(known_weights.times, known_weights.weights, route)
    elif record.router == RELIABILITY:
        route = ReliabilityRouter([0.0], [[1.0] * len(parts)])
    return Ensemble(parts, route, record.strategy, shift=record.shift)


def save_ensemble(
    draft: Path,
    experts: ExpertSet,
    router: Callable[..., Tensor] | None,
    record: EnsembleRecord,
    components: Mapping[str, ClassName],
) -> None:
    """Write an ensemble into ``draft``, which holds ``components``; the inverse of `open_ensemble`.

    Raises `HddmError` for a router that is not hddm's.
    """
    if not isinstance(router, RouterTransformer | None):
        raise HddmError(
            "a router that was made in Python cannot be saved; put one of hddm train router in its place"
        )
    experts.save_pretrained(draft / "experts")
    members = []
    for k, (expert, member) in enumerate(zip(experts.experts, record.experts, strict=True)):
        name = member.name or (expert.folder and name_of(expert.folder))
        members.append(member.model_copy(update={"folder": f"experts/{k}", "name": name}))
    changes: dict[str, Any] = {"experts": tuple(members)}
    if router is not None and isinstance(router.record, RouterRecord):
        (draft / ROUTER).mkdir()
        save_router(draft / ROUTER, router, router.record)
        changes["router"] = ROUTER
    else:
        changes["router"] = record.router if record.router in (MOMENTS, RELIABILITY) else None
    known = {}
    for one in experts.experts:
        if one.record.adapter is not None and one.base is not None:
            known[one.record.adapter.base_sha256] = one.base
    bases = bases_of([draft / member.folder for member in members], known)
    write_ensemble_records(draft, record.model_copy(update=changes), components, bases)
