"""Which output of a router belongs to which expert: told by the shard, not by the order."""

from collections import Counter
from collections.abc import Mapping, Sequence

from hddm.compatibility import Findings, Named, compare_experts
from hddm.experts import ExpertFacts, RouterFacts


def match_router(
    experts: Sequence[Named],
    router: RouterFacts,
    found: Findings,
    name: str = "router",
    before: Sequence[int | None] = (),
    total: int | None = None,
) -> tuple[int, ...]:
    """The router's output for each expert: that of the expert's shard.

    Experts may come in any order, and some outputs may be left out. Where an expert records no shard, all
    are taken to be in the router's order, and there must be as many; so too where the router records none.

    Args:
        experts: in the order of the ensemble.
        router: what it tells apart.
        found: takes differences and notes.
        name: of the router, for messages.
        before: outputs that are settled, None for an expert without; empty for none.
        total: number of its outputs; by default that of the shards in its record.
    """
    shape = Counter(facts.sample_shape for _, facts in experts).most_common(1)[0][0]
    if router.sample_shape != shape:
        found.differ(name, f"sample_shape {router.sample_shape}, not {shape}")
    settled = before or [None] * len(experts)
    total = len(router.shard_hashes) if total is None else total
    if len(router.shard_hashes) not in (0, total):
        found.differ(name, f"names {len(router.shard_hashes)} shards, and has {total} outputs")
        return ()
    if beyond := sorted(output for output in settled if output is not None and output >= total):
        found.differ(name, f"has outputs 0 to {total - 1}, and the ensemble takes {beyond}")
        return ()
    loose = [
        expert
        for (expert, facts), output in zip(experts, settled, strict=True)
        if output is None and not (facts.shard and router.shard_hashes)
    ]
    if loose and (len(experts) != total or any(output is not None for output in settled)):
        told = "without a shard record" if router.shard_hashes else "of a router that records no shards"
        found.differ(
            name,
            f"tells {total} shards apart, and there are {len(experts)} experts, of which {', '.join(loose)} "
            f"{told} can only be matched by order",
        )
        return ()
    if loose and not router.shard_hashes:
        found.note(f"{name} records no shards; experts are taken to be in the order of its outputs")
    outputs = []
    takers: dict[int, list[str]] = {}
    for k, ((expert, facts), output) in enumerate(zip(experts, settled, strict=True)):
        if output is None and (facts.shard is None or not router.shard_hashes):
            if router.shard_hashes:
                found.note(
                    f"{expert} records no shard; by its place it is taken for output {k} of the router"
                )
            outputs.append(k)
            takers.setdefault(k, []).append(expert)
            continue
        by_shard = _output_of(facts, router)
        if facts.shard is not None and by_shard is None and router.shard_hashes:
            found.differ(
                expert,
                f"was trained on a shard that {name} does not know ({facts.shard.hash[:12]}); train a router "
                "on all shards and pass it with --router",
            )
        expected = k if loose else output
        if by_shard is not None and expected is not None and by_shard != expected:
            found.differ(expert, f"was trained on the shard of output {by_shard} of {name}, not {expected}")
        outputs.append(next(o for o in (by_shard, expected, k) if o is not None))
        if by_shard is not None or expected is not None:
            takers.setdefault(outputs[-1], []).append(expert)
    _refuse_shared(experts, takers, found)
    left = sorted(set(range(total)) - set(outputs))
    if left and not found.differences:
        found.note(f"{name}: of its {total} outputs, these are left out: {', '.join(map(str, left))}")
    return tuple(outputs)


def check_together(
    experts: Sequence[Named], router: RouterFacts | None = None, outputs: Sequence[int] = ()
) -> None:
    """Refuse the parts of an ensemble folder that do not fit together, as after a hand has changed it.

    Args:
        experts: in the order of the ensemble.
        router: what its router tells apart.
        outputs: of the router for each expert, as in ``ensemble.json``; empty where they are in order.

    Raises:
        HddmError: with every difference, a line a part.
    """
    found = Findings()
    compare_experts(experts, found)
    if router is not None:
        settled = list(outputs or range(len(experts)))
        if not outputs and len(router.shard_hashes) != len(experts):
            found.differ("router", f"tells {len(router.shard_hashes)} shards apart, not {len(experts)}")
        else:
            match_router(experts, router, found, before=settled)
    found.refuse("the parts of this ensemble do not fit together; assemble it anew:")


def _refuse_shared(experts: Sequence[Named], takers: Mapping[int, list[str]], found: Findings) -> None:
    """An output is one expert's; that two record one shard is told where experts are compared."""
    hashes = {name: facts.shard.hash if facts.shard else name for name, facts in experts}
    for output, names in takers.items():
        if len({hashes[name] for name in names}) > 1:
            for name in names:
                others = ", ".join(other for other in names if other != name)
                found.differ(name, f"takes output {output} of the router, and so does {others}")


def _output_of(facts: ExpertFacts, router: RouterFacts) -> int | None:
    if facts.shard is None or facts.shard.hash not in router.shard_hashes:
        return None
    return router.shard_hashes.index(facts.shard.hash)
