"""Any folder that hddm wrote, or the Paris release, to a velocity field."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from hddm.ensemble import Ensemble
from hddm.ensemble_folders import ENSEMBLE_FILE, EnsembleFacts, read_ensemble_facts
from hddm.errors import HddmError
from hddm.expert_set import ExpertSet, as_field
from hddm.experts import EXPERT_FILE, Expert, RouterFacts, UnreadExpert, open_expert, read_expert, read_router
from hddm.model_folders import unread
from hddm.model_index import MODEL_INDEX, read_model_index
from hddm.models.router import RouterTransformer
from hddm.models.transformer import ExpertTransformer
from hddm.networks import adapted
from hddm.offload import Offload, Shelf
from hddm.paris import is_paris, paris_experts, paris_router
from hddm.router_matching import check_together
from hddm.routing import Router, Strategy
from hddm.velocity import VelocityField

COMPONENTS = ("vae", "text_encoder", "tokenizer")
"""What an ensemble of latents may have besides, a folder each."""


@dataclass(frozen=True)
class Parts:
    """What an ensemble folder holds, the experts' weights still on disk."""

    experts: list[UnreadExpert]
    router: RouterTransformer | None
    router_facts: RouterFacts | None
    facts: EnsembleFacts
    components: Sequence[str] = ()
    """Those of `COMPONENTS` that are there."""

    def only(self, experts: Sequence[int]) -> "Parts":
        """The same with these experts alone; the router keeps their outputs.

        Raises:
            HddmError: for indices that are not there, twice there, or none.
        """
        total = len(self.experts)
        if not experts or len(set(experts)) < len(experts) or not set(experts) <= set(range(total)):
            raise HddmError(f"experts {list(experts)}: choose some of 0 … {total - 1}, each once")
        facts = self.facts
        outputs = facts.router_outputs or tuple(range(total))
        rows = [[row[k] for k in experts] for row in facts.class_prior]
        prior = tuple(facts.prior[k] for k in experts)
        strategy = Strategy.parse(facts.strategy)
        # All of fewer than k are the k most probable of them.
        too_many = strategy.kind == "top" and strategy.value > len(experts)
        return replace(
            self,
            experts=[self.experts[k] for k in experts],
            facts=facts.model_copy(
                update={
                    "experts": tuple(facts.experts[k] for k in experts),
                    "router_outputs": tuple(outputs[k] for k in experts),
                    "prior": prior,
                    "strategy": f"top-{len(experts)}" if too_many else facts.strategy,
                    # A class that none of them has seen is anybody's.
                    "class_prior": tuple(tuple(row) if sum(row) else prior for row in rows),
                }
            ),
        )


def load(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    experts: Sequence[int] | None = None,
    offload: Offload = "none",
    max_memory: int | None = None,
) -> VelocityField | Ensemble:
    """An expert folder as a `VelocityField`, an ensemble folder or the Paris release as an `Ensemble`.

    An ensemble's experts are read when they are first needed; what their folders say is checked here.

    Args:
        path: the folder.
        dtype: that networks run in; weights stored in another one are cast.
        device: that networks run on.
        experts: indices of an ensemble's experts to take, in this order; by default all.
        offload: what experts that are not running do; see `hddm.offload`.
        max_memory: bytes that the weights of an ensemble may take on the device, the router's included.

    Raises:
        HddmError: for anything else, or a folder whose parts contradict each other.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise HddmError(f"{folder}: no such folder")
    if (folder / EXPERT_FILE).exists():
        if experts is not None or offload != "none" or max_memory is not None:
            raise HddmError(f"{folder}: is one expert; choosing and offloading experts needs an ensemble")
        return _field(folder, dtype, device)
    parts = open_parts(folder, dtype)
    if experts is not None:
        parts = parts.only(experts)
    if parts.router is not None:
        parts.router.to(device)
    held = expert_set(parts, dtype, device, offload, max_memory)
    return ensemble_of(held, parts.router, parts.router_facts, parts.facts)


def open_parts(folder: Path, dtype: torch.dtype) -> Parts:
    """What an ensemble folder, the Paris release or an expert folder holds, the latter as an ensemble of one.

    Raises:
        HddmError: as `load`.
    """
    if (folder / EXPERT_FILE).exists():
        expert = open_expert(folder)
        facts = EnsembleFacts(experts=(".",), prior=(1.0,), strategy="draw", shift=expert.facts.shift)
        return Parts([expert], None, None, facts)
    if (folder / ENSEMBLE_FILE).exists():
        facts = read_ensemble_facts(folder)
        router, router_facts = read_router(folder / facts.router, dtype) if facts.router else (None, None)
        has = read_model_index(folder) if (folder / MODEL_INDEX).exists() else {}
        components = [name for name in COMPONENTS if has.get(name)]
        experts = [open_expert(folder / name) for name in facts.experts]
        if router is not None:
            _check_outputs(facts, router, folder)
        shards = router_facts if router_facts is not None and router_facts.shard_hashes else None
        named = [(name, expert.facts) for name, expert in zip(facts.experts, experts, strict=True)]
        check_together(named, shards, facts.router_outputs)
        return Parts(experts, router, router_facts, facts, components)
    if is_paris(folder):
        return _paris(folder, dtype)
    raise HddmError(
        f"{folder}: neither an expert folder ({EXPERT_FILE}) nor an ensemble folder ({ENSEMBLE_FILE}); a "
        "pretrained checkpoint must become an expert first (hddm convert)"
    )


def _check_outputs(facts: EnsembleFacts, router: RouterTransformer, folder: Path) -> None:
    total, experts = router.config.num_experts, len(facts.experts)
    fits = max(facts.router_outputs) < total if facts.router_outputs else total == experts
    if not fits:
        raise HddmError(
            f"{folder / ENSEMBLE_FILE}: the router has {total} outputs, and the {experts} experts are given "
            f"{list(facts.router_outputs) or 'all in order'}; assemble it anew"
        )


def _paris(folder: Path, dtype: torch.dtype) -> Parts:
    experts = []
    for part, expert_facts in paris_experts(folder):
        found = unread(ExpertTransformer, part.arguments, part.weights, str(part.weights))
        experts.append(UnreadExpert(part.weights.parent, found, expert_facts))
    part, time_scale = paris_router(folder)
    found_router = unread(RouterTransformer, part.arguments, part.weights, str(part.weights))
    found_router.network.load_state_dict(found_router.read(dtype), assign=True)
    shape = experts[0].facts.sample_shape
    # Of its shards the release says nothing, so nothing can be drawn from their sizes; top-2 is what it is
    # published with.
    facts = EnsembleFacts(
        experts=tuple(expert.name for expert in experts),
        router="router",
        prior=(1 / len(experts),) * len(experts),
        strategy=f"top-{min(2, len(experts))}",
        shift=experts[0].facts.shift,
    )
    return Parts(
        experts,
        found_router.network.requires_grad_(False),
        RouterFacts(time_scale=time_scale, sample_shape=shape, shard_hashes=(), shard_images=()),
        facts,
        [name for name in COMPONENTS if (folder / name).is_dir()],
    )


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
        budget = max_memory - sum(p.numel() * p.element_size() for part in beside for p in part.parameters())
    return ExpertSet(parts.experts, dtype, device, Shelf(offload, budget))


def ensemble_of(
    experts: ExpertSet,
    router: RouterTransformer | None,
    router_facts: RouterFacts | None,
    facts: EnsembleFacts,
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


def _field(folder: Path, dtype: torch.dtype, device: torch.device | str) -> VelocityField:
    expert = read_expert(folder, dtype)
    try:
        return field_of(expert, device)
    except HddmError as error:
        raise HddmError(f"{folder / EXPERT_FILE}: {error}") from error
