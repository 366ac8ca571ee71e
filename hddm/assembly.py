"""Assembly: experts and a router put side by side into one folder, checked to fit together."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from hddm.ensemble_folders import ENSEMBLE_FILE, EnsembleFacts, write_ensemble_records
from hddm.errors import HddmError
from hddm.experts import (
    EXPERT_FILE,
    FORMAT,
    ROUTER_FILE,
    ExpertFacts,
    RouterFacts,
)
from hddm.facts import read_facts
from hddm.files import link_or_copy, new_folder
from hddm.routing import Strategy

DEFAULT_STRATEGY = "draw"


def assemble(
    experts: Sequence[Path],
    out: Path,
    router: Path | None = None,
    strategy: str = DEFAULT_STRATEGY,
    overwrite: bool = False,
) -> None:
    """Put experts and a router into one folder, after checking that they fit.

    The prior is the shard sizes, or equal where an expert's is unknown. With a router, expert k must come
    from the shard that the router's output k stands for.

    Raises:
        HddmError: before anything is written, with every difference between the parts.
    """
    if not experts:
        raise HddmError("an ensemble needs at least one expert")
    Strategy.parse(strategy).check(len(experts))
    if router is None and strategy != "draw":
        raise HddmError(f"strategy {strategy!r} needs --router; only 'draw' does without")
    facts = [read_facts(folder / EXPERT_FILE, ExpertFacts, FORMAT) for folder in experts]
    router_facts = read_facts(router / ROUTER_FILE, RouterFacts, FORMAT) if router else None
    problems = _misfits(experts, facts, router_facts)
    if problems:
        raise HddmError(f"these parts do not fit together: {'; '.join(problems)}")
    sizes = [f.shard.images for f in facts if f.shard]
    images = sizes if len(sizes) == len(facts) else [1] * len(facts)
    with new_folder(out, ENSEMBLE_FILE, overwrite) as draft:
        names = [f"experts/{k}" for k in range(len(experts))]
        for folder, name in zip(experts, names, strict=True):
            _copy_folder(folder, draft / name)
        if router is not None:
            _copy_folder(router, draft / "router")
        content = EnsembleFacts(
            experts=tuple(names),
            router="router" if router else None,
            prior=tuple(n / sum(images) for n in images),
            strategy=strategy,
        )
        write_ensemble_records(draft, content, {})


def _misfits(folders: Sequence[Path], facts: Sequence[ExpertFacts], router: RouterFacts | None) -> list[str]:
    problems = []
    first = facts[0]
    for folder, one in zip(folders, facts, strict=True):
        for key in ("sample_shape", "space", "latent_scale"):
            mine, theirs = getattr(one, key), getattr(first, key)
            if mine != theirs:
                problems.append(f"{folder}: {key} is {mine}, {folders[0]} has {theirs}")
        if one.classes and first.classes and one.classes != first.classes:
            problems.append(f"{folder}: its class map differs from that of {folders[0]}")
    hashes = [one.shard.hash for one in facts if one.shard]
    for folder, one in zip(folders, facts, strict=True):
        if one.shard and hashes.count(one.shard.hash) > 1:
            problems.append(f"{folder}: its shard is there {hashes.count(one.shard.hash)} times")
    if router is None:
        return problems
    if router.sample_shape != first.sample_shape:
        problems.append(f"router: sample_shape is {router.sample_shape}, not {first.sample_shape}")
    if len(router.shard_hashes) != len(facts):
        problems.append(f"router: tells {len(router.shard_hashes)} shards apart, not {len(facts)}")
        return problems
    for k, (folder, one) in enumerate(zip(folders, facts, strict=True)):
        if one.shard is not None and one.shard.hash != router.shard_hashes[k]:
            problems.append(f"{folder}: was trained on another shard than output {k} of the router")
    return problems


def _copy_folder(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=lambda a, b: link_or_copy(Path(a), Path(b)))
