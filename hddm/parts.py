"""What an ensemble is made of on disk, opened and compared before any expert's weights are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hddm.ensemble_folders import (
    ENSEMBLE_FILE,
    EnsembleFacts,
    read_ensemble_facts,
    refuse_damaged_ensemble,
)
from hddm.errors import HddmError, UsageError
from hddm.experts import EXPERT_FILE, RouterFacts, UnreadExpert, open_expert, read_router
from hddm.model_folders import unread
from hddm.model_index import COMPONENTS, MODEL_INDEX, read_model_index
from hddm.models.router import RouterTransformer
from hddm.models.transformer import ExpertTransformer
from hddm.paris import is_paris, paris_experts, paris_router
from hddm.paths import inside
from hddm.router_matching import check_together
from hddm.routing import Strategy


@dataclass(frozen=True)
class Parts:
    """What an ensemble folder holds, the experts' weights still on disk."""

    experts: list[UnreadExpert]
    router: RouterTransformer | None
    router_facts: RouterFacts | None
    facts: EnsembleFacts
    components: Sequence[str] = ()
    """Those of `hddm.model_index.COMPONENTS` that are there."""


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
        facts = EnsembleFacts(experts=(".",), prior=(1.0,), strategy="draw", shift=expert.facts.shift)
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


def _only(facts: EnsembleFacts, chosen: Sequence[int]) -> EnsembleFacts:
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


def _check_outputs(facts: EnsembleFacts, router: RouterTransformer, folder: Path) -> None:
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
    facts = EnsembleFacts(
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
        RouterFacts(time_scale=time_scale, sample_shape=shape, shard_hashes=(), shard_images=()),
        facts,
        [name for name in COMPONENTS if inside(folder, name).is_dir()],
    )
