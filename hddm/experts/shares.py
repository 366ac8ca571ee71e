"""Shares p(k) of experts, by their records and what was decided on each, and the domains that they form."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence

from hddm.experts.expert import Expert
from hddm.fit import Findings
from hddm.utils.records import WHOLE


def domains_of(experts: Sequence[Expert]) -> tuple[int, ...]:
    """For each expert the index of the first expert of its domain.

    A domain was set by hand, or has the experts of one shard, each for a part of t.
    """
    keys: list[Hashable] = []
    for k, one in enumerate(experts):
        if one.member.domain:
            keys.append(("set", one.member.domain))
        elif one.record.noise_range != WHOLE and one.record.shard is not None:
            keys.append(one.record.shard.hash)
        else:
            keys.append(k)
    return tuple(map(keys.index, keys))


def weights_of(experts: Sequence[Expert], domains: Sequence[int], found: Findings) -> list[float]:
    """p(k), not normalised: shares that are set, and of the rest a part by shard size.

    The experts of a domain have equal parts of its p. Where a size is unknown, the rest is divided equally.
    """
    fixed, sizes = dict[int, float](), dict[int, float]()
    unknown = []
    for k, one in enumerate(experts):
        if one.member.share is not None:
            fixed[k] = one.member.share
        elif one.record.shard is not None:
            sizes[k] = float(one.record.shard.images)
        else:
            unknown.append(k)
    free = [k for k in range(len(experts)) if k not in fixed]
    if unknown:
        if len({domains[k] for k in free}) > 1:
            names = ", ".join(experts[k].name for k in unknown)
            others = " whose share is not given" if fixed else ""
            unused = ", not by the sizes of the other shards" if sizes else ""
            text = (
                f"so all experts{others} get equal shares{unused}; `share` EXPERT=0.3 changes them"
            )
            found.note(f"{names}: no shard is recorded, {text}")
        sizes = dict.fromkeys(free, 1.0)
    sharers = Counter(domains)
    sizes = {k: size / sharers[domains[k]] for k, size in sizes.items()}
    rest, total = 1 - math.fsum(fixed.values()), sum(sizes.values())
    weights = dict(fixed)
    for k, size in sizes.items():
        weights[k] = rest * size / total
    return [weights[k] for k in range(len(experts))]
