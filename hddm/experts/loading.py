"""Loading of folders that hddm wrote, and of the Paris release, as velocity fields (`load`).

All records are read and compared before any weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hddm.classes import join_classes
from hddm.ensemble import Ensemble, Strategy
from hddm.experts.compatibility import (
    Findings,
    Named,
    by_domain,
    class_lists_of,
    compare_domains,
    compare_experts,
    match_router,
)
from hddm.experts.ensemble_folders import (
    ENSEMBLE_FILE,
    KEPT,
    ROUTER,
    ClassName,
    EnsembleRecord,
    bases_of,
    components_in,
    name_of,
    read_ensemble_facts,
    refuse_damaged_ensemble,
    whole_components,
    write_ensemble_records,
)
from hddm.experts.expert_set import ExpertSet
from hddm.experts.lora import bases_in, refuse_base
from hddm.experts.paris import is_paris, paris_experts, paris_router
from hddm.experts.records import (
    EXPERT_FILE,
    Expert,
    RouterRecord,
    field_of,
    open_expert,
    read_router,
    save_router,
)
from hddm.networks.offload import Offload, Shelf
from hddm.networks.transformers import RouterTransformer
from hddm.networks.wrappers import described
from hddm.routers import MomentsRouter, Router
from hddm.utils.errors import HddmError, UsageError, choose
from hddm.utils.files import inside, restore
from hddm.utils.records import WHOLE, ensemble_around
from hddm.utils.tensors import available_device
from hddm.velocity import VelocityField

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = {str(one).removeprefix("torch."): one for one in _DTYPES}


def load(
    path: str | Path,
    dtype: torch.dtype | str = torch.float32,
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
        dtype: that networks run in, or its name; other weights are cast.
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
    device = available_device(device)
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise HddmError(f"--dtype {dtype}: {choose(dtype, list(DTYPES))}")
        dtype = DTYPES[dtype]
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

    experts: list[Expert]
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
        return ExpertSet(self.experts, dtype, device, Shelf(offload, max_memory), self.facts)

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
        if (part := expert.facts.noise_range) != WHOLE:
            raise HddmError(
                f"{folder}: is made for t in {part[0]:g}:{part[1]:g} alone; sample it in an ensemble, with "
                "an expert of the rest (hddm assemble)"
            )
        facts = EnsembleRecord.equal(["."], has_router=False, shift=expert.facts.shift)
        return OpenedEnsemble([expert], None, None, facts, tuple(whole_components(folder)))
    if (folder / ENSEMBLE_FILE).exists():
        return _ensemble(folder, dtype, experts)
    if is_paris(folder):
        return _paris(folder, dtype, experts)
    remedy = "hddm convert makes an expert of a checkpoint"
    if folder.suffix == ".run":
        remedy = f"it is the run of a training, and its expert is {folder.with_suffix('')}"
    raise UsageError(
        f"{folder}: neither an expert folder ({EXPERT_FILE}) nor an ensemble ({ENSEMBLE_FILE}); {remedy}"
    )


def _ensemble(folder: Path, dtype: torch.dtype, chosen: Sequence[int] | None) -> OpenedEnsemble:
    written = read_ensemble_facts(folder)
    router, router_facts = read_router(folder / written.router, dtype) if written.router else (None, None)
    facts = written if chosen is None else _only(written, chosen)
    components = components_in(folder)
    bases = {sha256: folder / name for sha256, name in facts.bases.items()}
    experts = [open_expert(folder / name, bases) for name in facts.experts]
    topics = [one.topic.record for one in experts if one.topic is not None and one.topic.record is not None]
    if facts.topics is not None and len({one.text_encoder.fingerprint for one in topics}) != 1:
        if topics:
            raise HddmError(
                f"{folder}: its experts' topics are of several text encoders; describe all by one"
            )
        facts = facts.model_copy(update={"topics": None})
    named = [(name, expert.facts) for name, expert in zip(facts.experts, experts, strict=True)]
    found = _compared(named, facts, router, router_facts)
    total = None if router is None else router.config.num_experts
    if total not in (None, len(written.experts)) and not written.router_outputs:
        found.differ("router", f"has {total} outputs, not {len(written.experts)}")
    found.refuse("the parts of this ensemble do not fit together; assemble it anew:")
    refuse_damaged_ensemble(folder, written, range(len(experts)) if chosen is None else chosen)
    return OpenedEnsemble(experts, router, router_facts, facts, components)


def _compared(
    experts: Sequence[Named],
    facts: EnsembleRecord,
    router: RouterTransformer | None,
    router_facts: RouterRecord | None,
) -> Findings:
    """Differences between the parts of an ensemble, by their records."""
    found, domains = Findings(), facts.domain_of
    compare_experts(experts, found, facts.shares, domains, is_drawn=not facts.is_routed)
    compare_domains(experts, domains, class_lists_of(experts, facts.class_lists), found)
    if router is not None and router_facts is not None:
        total, outputs = router.config.num_experts, by_domain(facts.outputs, domains)
        match_router(by_domain(experts, domains), router_facts, total, found, settled=outputs)
    return found


def _only(facts: EnsembleRecord, chosen: Sequence[int]) -> EnsembleRecord:
    """The record of an ensemble reduced to these experts; they keep their router outputs."""
    total = len(facts.experts)
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(total)):
        raise HddmError(f"experts {list(chosen)}: choose some of 0 … {total - 1}, each once")
    domains = tuple(facts.domain_of[k] for k in chosen)
    if parted := [k for k, one in enumerate(facts.domain_of) if one in domains and k not in chosen]:
        raise HddmError(f"experts {list(chosen)}: one of them is of a domain with {parted}; choose these too")
    rows = [[row[k] for k in chosen] for row in facts.class_prior]
    strategy = Strategy.parse(facts.strategy)
    # All of fewer than k are the k most probable of them.
    number = len(set(domains))
    too_many = strategy.kind == "top" and strategy.value > number
    by_expert = ("experts", "names", "prior", "shares", "class_lists", "texts", "vaes")
    changes: dict[str, Any] = {
        name: tuple(of[k] for k in chosen) for name in by_expert if (of := getattr(facts, name))
    }
    changes |= {
        "router_outputs": tuple(facts.outputs[k] for k in chosen) if facts.router is not None else (),
        "router_aside": None,
        "aside_outputs": (),
        "domains": domains if number < len(domains) else (),
        "strategy": f"top-{number}" if too_many else facts.strategy,
        # A class that none of them has seen is anybody's.
        "class_prior": tuple(tuple(row) if sum(row) else changes["prior"] for row in rows),
    }
    return facts.model_copy(update=changes)


def _paris(folder: Path, dtype: torch.dtype, chosen: Sequence[int] | None) -> OpenedEnsemble:
    experts = paris_experts(folder)
    unread, router_facts = paris_router(folder, experts)
    router = unread.load(dtype)
    router.record = router_facts
    # The release records no shards, so there are no sizes to draw from; it is published with top-2.
    names, strategy = [expert.name for expert in experts], f"top-{min(2, len(experts))}"
    facts = EnsembleRecord.equal(names, True, strategy, experts[0].facts.shift)
    if chosen is not None:
        facts = _only(facts, chosen)
        experts = [experts[k] for k in chosen]
    components = [name for name in KEPT if inside(folder, name).is_dir()]
    return OpenedEnsemble(experts, router, router_facts, facts, components)


def room_beside(models: Sequence[nn.Module], max_memory: int) -> int:
    """Bytes of ``max_memory`` left for experts beside ``models``; `HddmError` where none are."""
    taken = sum(p.numel() * p.element_size() for model in models for p in model.parameters())
    if taken >= max_memory:
        alone = f"router, VAE and text encoder alone take {taken / 1e6:.1f} MB"
        raise HddmError(f"--max-memory of {max_memory / 1e6:.1f} MB: {alone}; allow more")
    return max_memory - taken


def ensemble_of(
    experts: ExpertSet,
    router: Callable[..., Tensor] | None,
    router_facts: RouterRecord | None,
    facts: EnsembleRecord,
) -> Ensemble:
    """The velocity field of an ensemble's parts; `HddmError` where they contradict each other."""
    fields, route, class_prior = experts.fields(), router, facts.class_prior
    if isinstance(router, RouterTransformer):
        if router_facts is None:
            raise HddmError("a router needs its router_facts, which say how it counts time")
        outputs = facts.router_outputs or None
        route = Router(router, router_facts.time_scale, router_facts.temperatures, outputs, facts.prior)
    elif router is None and facts.moments_evidence is not None:
        route = _moments_router(fields, facts)
    if facts.classes and class_prior:
        rows = dict(zip(facts.classes, class_prior, strict=True))
        if len(rows) < len(facts.classes):
            raise HddmError(f"{ENSEMBLE_FILE}: has a class twice, in two Unicode forms; assemble it anew")
        names = join_classes(tuple(field.classes for field in fields)).names
        if unknown := [name for name in names if name not in rows]:
            raise HddmError(f"{ENSEMBLE_FILE}: has no p(k | class) of {', '.join(unknown)}; assemble it anew")
        class_prior = tuple(rows[name] for name in names)
    try:
        return Ensemble(
            fields,
            route,
            facts.strategy,
            facts.prior,
            class_prior or None,
            facts.shift,
            facts.texts,
            facts.vaes,
            facts.domain_of,
            facts.topics,
        )
    except HddmError as error:
        raise HddmError(f"{ENSEMBLE_FILE}: {error}") from error


def _moments_router(fields: Sequence[VelocityField], facts: EnsembleRecord) -> MomentsRouter:
    """The router by the moments that the experts' calibrations hold; `HddmError` for an expert without."""
    moments = []
    for name, field in zip(facts.experts, fields, strict=True):
        if field.calibration is None:
            raise HddmError(f"{name}: has no calibration, and a router by moments needs those of all experts")
        moments.append(field.calibration.moments)
    assert facts.moments_evidence is not None
    return MomentsRouter(moments, facts.prior, facts.moments_evidence)


def save_ensemble(
    draft: Path,
    experts: ExpertSet,
    router: Callable[..., Tensor] | None,
    router_facts: RouterRecord | None,
    facts: EnsembleRecord,
    components: Mapping[str, ClassName],
) -> None:
    """Write an ensemble into ``draft``, which holds ``components``; the inverse of `open_ensemble`.

    Raises `HddmError` for parts in memory that a folder cannot hold, or that do not fit together.
    """
    named = [(f"expert {k}", expert.facts) for k, expert in enumerate(experts.storable())]
    if router is not None and (not isinstance(router, RouterTransformer) or router_facts is None):
        raise HddmError(f"the router is {described(router)}, and a folder holds a RouterTransformer")
    found = _compared(named, facts, router, router_facts)
    found.refuse("these parts do not fit together in one folder, and nothing was written:")
    experts.save_pretrained(draft / "experts")
    if isinstance(router, RouterTransformer) and router_facts is not None:
        (draft / ROUTER).mkdir()
        save_router(draft / ROUTER, router, router_facts)
    names = tuple(f"experts/{k}" for k in range(len(experts.experts)))
    routed: dict[str, Any] = {"router": ROUTER, "router_aside": None, "aside_outputs": ()}
    if router is None:
        routed = {"router": None, "router_outputs": ()}
        first = experts.experts[0].folder
        if facts.router_aside is not None and first and (around := ensemble_around(first)):
            (draft / ROUTER).mkdir()
            save_router(draft / ROUTER, *read_router(around / facts.router_aside))
    known = {
        one.facts.adapter.base_sha256: one.base for one in experts.experts if one.facts.adapter and one.base
    }
    bases = bases_of([draft / name for name in names], known)
    folders = [one.folder for one in experts.experts if one.folder is not None]
    if not facts.names and len(folders) == len(names):
        routed["names"] = tuple(map(name_of, folders))
    write_ensemble_records(draft, facts.model_copy(update={"experts": names, **routed}), components, bases)
