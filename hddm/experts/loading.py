"""What an ensemble is made of on disk, opened and compared before any expert's weights are read.

Any folder that hddm wrote, or the Paris release, to a velocity field.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hddm.ensemble import Ensemble, Router, Strategy
from hddm.experts.compatibility import check_together
from hddm.experts.ensembles import (
    COMPONENTS,
    ENSEMBLE_FILE,
    MODEL_INDEX,
    EnsembleRecord,
    read_ensemble_facts,
    read_model_index,
    refuse_damaged_ensemble,
)
from hddm.experts.expert_set import ExpertSet, as_field
from hddm.experts.lora import bases_in
from hddm.experts.paris import is_paris, paris_experts, paris_router
from hddm.experts.records import (
    EXPERT_FILE,
    Expert,
    RouterRecord,
    UnreadExpert,
    open_expert,
    read_router,
    refuse_base,
)
from hddm.networks.folders import unread
from hddm.networks.offload import Offload, Shelf
from hddm.networks.transformers import ExpertTransformer, RouterTransformer
from hddm.networks.wrappers import adapted
from hddm.utils.errors import HddmError, UsageError
from hddm.utils.files import inside
from hddm.velocity import VelocityField


@dataclass(frozen=True)
class Parts:
    """What an ensemble folder holds, the experts' weights still on disk."""

    experts: list[UnreadExpert]
    router: RouterTransformer | None
    router_facts: RouterRecord | None
    facts: EnsembleRecord
    components: Sequence[str] = ()
    """Those of `hddm.experts.ensembles.COMPONENTS` that are there."""


def open_parts(folder: Path, dtype: torch.dtype, experts: Sequence[int] | None = None) -> Parts:
    """What an ensemble folder, the Paris release or an expert folder holds, the latter as an ensemble of one.

    Args:
        folder: the folder.
        dtype: of the router.
        experts: indices of the experts to take, in this order; of the others nothing is opened.

    Raises:
        HddmError: as `hddm.load`; for indices that are not there, twice there, or none.
    """
    if (folder / EXPERT_FILE).exists():
        expert = open_expert(folder)
        facts = EnsembleRecord(experts=(".",), prior=(1.0,), strategy="draw", shift=expert.facts.shift)
        return Parts([expert], None, None, facts)
    if (folder / ENSEMBLE_FILE).exists():
        return _ensemble(folder, dtype, experts)
    if is_paris(folder):
        return _paris(folder, dtype, experts)
    raise UsageError(
        f"{folder}: neither an expert folder ({EXPERT_FILE}) nor an ensemble folder ({ENSEMBLE_FILE}); a "
        "pretrained checkpoint must become an expert first (hddm convert)"
    )


def _ensemble(folder: Path, dtype: torch.dtype, chosen: Sequence[int] | None) -> Parts:
    facts = read_ensemble_facts(folder)
    router, router_facts = read_router(folder / facts.router, dtype) if facts.router else (None, None)
    if router is not None:
        _check_outputs(facts, router, folder)
    all_facts, all_experts = facts, range(len(facts.experts))
    if chosen is not None:
        facts = _only(facts, chosen)
    has = read_model_index(folder) if (folder / MODEL_INDEX).exists() else {}
    bases = {sha256: folder / name for sha256, name in facts.bases.items()}
    experts = [open_expert(folder / name, bases) for name in facts.experts]
    shards = router_facts if router_facts is not None and router_facts.shard_hashes else None
    named = [(name, expert.facts) for name, expert in zip(facts.experts, experts, strict=True)]
    check_together(named, shards, facts.router_outputs)
    refuse_damaged_ensemble(folder, all_facts, all_experts if chosen is None else chosen)
    return Parts(experts, router, router_facts, facts, [name for name in COMPONENTS if has.get(name)])


def _only(facts: EnsembleRecord, chosen: Sequence[int]) -> EnsembleRecord:
    """The record of an ensemble of these experts alone; its router keeps their outputs."""
    total = len(facts.experts)
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(total)):
        raise HddmError(f"experts {list(chosen)}: choose some of 0 … {total - 1}, each once")
    outputs = facts.router_outputs or tuple(range(total))
    rows = [[row[k] for k in chosen] for row in facts.class_prior]
    prior = tuple(facts.prior[k] for k in chosen)
    strategy = Strategy.parse(facts.strategy)
    # All of fewer than k are the k most probable of them.
    too_many = strategy.kind == "top" and strategy.value > len(chosen)
    changes = {
        "experts": tuple(facts.experts[k] for k in chosen),
        "router_outputs": tuple(outputs[k] for k in chosen) if facts.router is not None else (),
        "prior": prior,
        "strategy": f"top-{len(chosen)}" if too_many else facts.strategy,
        # A class that none of them has seen is anybody's.
        "class_prior": tuple(tuple(row) if sum(row) else prior for row in rows),
    }
    return facts.model_copy(update=changes)


def _check_outputs(facts: EnsembleRecord, router: RouterTransformer, folder: Path) -> None:
    total, experts = router.config.num_experts, len(facts.experts)
    fits = max(facts.router_outputs) < total if facts.router_outputs else total == experts
    if not fits:
        raise HddmError(
            f"{folder / ENSEMBLE_FILE}: the router has {total} outputs, and the {experts} experts are given "
            f"{list(facts.router_outputs) or 'all in order'}; assemble it anew"
        )


def _paris(folder: Path, dtype: torch.dtype, chosen: Sequence[int] | None) -> Parts:
    experts = []
    for part, expert_facts in paris_experts(folder):
        found = unread(ExpertTransformer, part.arguments, part.weights, str(part.weights))
        experts.append(UnreadExpert(part.weights.parent, found, expert_facts))
    part, time_scale = paris_router(folder)
    found_router = unread(RouterTransformer, part.arguments, part.weights, str(part.weights))
    shape = experts[0].facts.sample_shape
    # Of its shards the release says nothing, so nothing can be drawn from their sizes; top-2 is what it is
    # published with.
    facts = EnsembleRecord(
        experts=tuple(expert.name for expert in experts),
        router="router",
        prior=(1 / len(experts),) * len(experts),
        strategy=f"top-{min(2, len(experts))}",
        shift=experts[0].facts.shift,
    )
    if chosen is not None:
        facts = _only(facts, chosen)
        experts = [experts[k] for k in chosen]
    return Parts(
        experts,
        found_router.load(dtype),
        RouterRecord(time_scale=time_scale, sample_shape=shape, shard_hashes=(), shard_images=()),
        facts,
        [name for name in COMPONENTS if inside(folder, name).is_dir()],
    )


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
    """An expert folder as a `VelocityField`, an ensemble folder or the Paris release as an `Ensemble`.

    An ensemble's experts are read when they are first needed; what their folders say is checked here.

    Args:
        path: the folder.
        dtype: that networks run in; weights stored in another one are cast.
        device: that networks run on.
        experts: indices of an ensemble's experts to take, in this order; by default all.
        offload: what experts that are not running do; see `hddm.networks.offload`.
        max_memory: bytes that the weights of an ensemble may take on the device, the router's included.
        base: the folder of the weights that an adapter changes; by default that is looked for where it was
            when the adapter was trained. An ensemble holds those of its adapters.

    Raises:
        HddmError: for anything else, a folder whose parts contradict each other, or a base for what is no
            adapter.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise HddmError(f"{folder}: no such folder")
    if (folder / EXPERT_FILE).exists():
        if experts is not None or offload != "none" or max_memory is not None:
            raise HddmError(f"{folder}: is one expert; choosing and offloading experts needs an ensemble")
        return _field(folder, dtype, device, [] if base is None else [Path(base)])
    if base is not None:
        raise HddmError(f"{folder}: is no expert folder; a base goes with one adapter")
    parts = open_parts(folder, dtype, experts)
    if parts.router is not None:
        parts.router.to(device)
    held = expert_set(parts, dtype, device, offload, max_memory)
    return ensemble_of(held, parts.router, parts.router_facts, parts.facts)


def expert_set(
    parts: Parts,
    dtype: torch.dtype,
    device: torch.device | str,
    offload: Offload = "none",
    max_memory: int | None = None,
    others: Sequence[nn.Module] = (),
) -> ExpertSet:
    """The experts of an ensemble, on a shelf of their own.

    ``others`` and the router take their part of ``max_memory`` first.

    Raises:
        HddmError: for a limit that leaves no room for an expert.
    """
    budget = None
    if max_memory is not None:
        beside = [part for part in (parts.router, *others) if part is not None]
        budget = room_beside(beside, max_memory)
    return ExpertSet(parts.experts, dtype, device, Shelf(offload, budget))


def bytes_of(parts: Sequence[nn.Module]) -> int:
    """Bytes of all weights of ``parts``."""
    return sum(p.numel() * p.element_size() for part in parts for p in part.parameters())


def room_beside(parts: Sequence[nn.Module], max_memory: int) -> int:
    """Bytes of ``max_memory`` that ``parts`` leave for experts.

    Raises:
        HddmError: where they leave none.
    """
    taken = bytes_of(parts)
    if taken >= max_memory:
        raise HddmError(
            f"--max-memory of {max_memory / 1e6:.1f} MB: router, VAE and text encoder alone take "
            f"{taken / 1e6:.1f} MB; allow more"
        )
    return max_memory - taken


def ensemble_of(
    experts: ExpertSet,
    router: RouterTransformer | None,
    router_facts: RouterRecord | None,
    facts: EnsembleRecord,
) -> Ensemble:
    """The velocity field of an ensemble's parts.

    Raises:
        HddmError: for parts that contradict each other.
    """
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


def field_of(expert: Expert, device: torch.device | str = "cpu") -> VelocityField:
    """An expert as a velocity field that shares its network.

    Raises:
        HddmError: for a schedule that is unknown or does not go with the prediction type.
    """
    return as_field(expert, adapted(expert.network, expert.facts.round_time).to(device))


def _field(
    folder: Path, dtype: torch.dtype, device: torch.device | str, bases: Sequence[Path]
) -> VelocityField:
    unread = open_expert(folder, bases_in(bases) if bases else None)
    refuse_base(folder, unread.facts.adapter, bases)
    expert = unread.read(dtype)
    try:
        return field_of(expert, device)
    except HddmError as error:
        raise HddmError(f"{folder / EXPERT_FILE}: {error}") from error
