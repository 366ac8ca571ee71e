"""Checks that experts, router and components fit together, by their records, before weights are read.

All differences are collected and reported together, one line per part. A value that one part records and
another does not gives a note, not a difference.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hddm.classes import join_classes
from hddm.data.shard_records import overlap
from hddm.ensemble import misfit_of
from hddm.experts.records import ExpertRecord, RouterRecord, ShardRecord
from hddm.utils.errors import HddmError, UsageError
from hddm.utils.records import WHOLE

ClassLists = Sequence[Sequence[str]]
"""Names of each expert's classes, in its own numbering."""
Shares = Sequence[float | None]
"""The part of all data that each expert stands for, None where the size of its shard decides."""
SHARE_TOLERANCE = 1e-6
Domains = Sequence[int]
"""For each expert the index of the first one of its domain (`hddm.ensemble`)."""
Named = tuple[str, ExpertRecord]
"""An expert's name for messages, mostly a folder, and its record."""
Value = TypeVar("Value")


@dataclass
class Findings:
    """Differences by part, and notes."""

    differences: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def differ(self, name: str, text: str) -> None:
        """Add a difference of a part, once."""
        texts = self.differences.setdefault(name, [])
        if text not in texts:
            texts.append(text)

    def note(self, text: str) -> None:
        """Add a note for the user."""
        if text not in self.notes:
            self.notes.append(text)

    @contextmanager
    def errors_of(self, name: str) -> Iterator[None]:
        """Record an `HddmError` raised in this block as a difference of a part."""
        try:
            yield
        except HddmError as error:
            self.differ(name, "; ".join([error.message, *error.details]))

    def refuse(self, message: str = "these parts do not fit together, and nothing was written:") -> None:
        """Raise an `HddmError` with all differences, one line per part."""
        if self.differences:
            lines = [f"{name}: {'; '.join(texts)}" for name, texts in self.differences.items()]
            raise HddmError(message, lines)


def takes_text(record: ExpertRecord) -> bool:
    """True for an expert of prompts."""
    return "encoder_hidden_states" in record.conditions


def takes_classes(record: ExpertRecord) -> bool:
    """True for an expert of classes."""
    return "class_labels" in record.conditions


_QUALITIES: Mapping[str, Callable[[ExpertRecord], Any]] = {
    "sample_shape": lambda one: one.sample_shape,
    "space": lambda one: one.space,
    "latent_scale": lambda one: one.latent_scale,
    "VAE": lambda one: one.vae and one.vae.fingerprint,
    "VAE's scale": lambda one: one.vae and one.vae.scale,
    "VAE's shift": lambda one: one.vae and one.vae.shift,
}
"""Properties that experts must share; None where one does not record it, or it does not apply."""


def _lacks(record: ExpertRecord, quality: str) -> bool:
    """True where an expert should record a property, which shapes do not show, and does not."""
    should = quality == "latent_scale" or (quality == "VAE" and record.space == "latents")
    return should and _QUALITIES[quality](record) is None


def class_lists_of(experts: Sequence[Named], given: ClassLists = ()) -> list[tuple[str, ...]]:
    """Names of each expert's classes in its numbering: those ``given``, else those of its record."""
    lists = given or [()] * len(experts)
    return [tuple(own) or record.classes for (_, record), own in zip(experts, lists, strict=True)]


def domains_of(experts: Sequence[Named], given: Sequence[Sequence[int]] = ()) -> tuple[int, ...]:
    """The domain of each expert: one of those ``given``, by index, or that of its shard, if for a part of t.

    Raises `HddmError` for an expert in two of those given.
    """
    domains, named = list(range(len(experts))), list(itertools.chain.from_iterable(given))
    if twice := [experts[k][0] for k in named if named.count(k) > 1]:
        raise UsageError(f"--domain {twice[0]}: is named twice; an expert is of one domain")
    for group in given:
        for k in group:
            domains[k] = min(group)
    first: dict[str, int] = {}
    for k, (name, record) in enumerate(experts):
        if record.shard is not None and record.noise_range != WHOLE and k not in named:
            other = first.setdefault(record.shard.hash, k)
            # One that is named twice is told so.
            domains[k] = k if experts[other][0] == name else other
    return tuple(domains)


def by_domain(values: Sequence[Value], domains: Domains) -> list[Value]:
    """Of ``values``, one an expert, that of the first expert of each domain; none where there are none."""
    return [values[k] for k in dict.fromkeys(domains) if values]


def sample_kind(record: ExpertRecord) -> tuple[Any, ...]:
    """Tell the kind of an expert's samples: those of one kind can be mixed."""
    return record.sample_shape, record.space, record.vae


def compare_domains(experts: Sequence[Named], domains: Domains, lists: ClassLists, found: Findings) -> None:
    """Refuse domains whose noise ranges do not cover [0, 1] once, or whose experts are of unlike data."""
    for domain in dict.fromkeys(domains):
        of = [k for k, one in enumerate(domains) if one == domain]
        name, ranges = " and ".join(experts[k][0] for k in of), [experts[k][1].noise_range for k in of]
        if misfit := misfit_of(ranges):
            parts = " and ".join(f"{low:g}:{high:g}" for low, high in ranges)
            remedy = "experts of one domain cover [0, 1] once, and --domain says which are one"
            found.differ(name, f"for t in {parts}, so that {misfit}; {remedy}")
        if len({shard.hash for k in of if (shard := experts[k][1].shard)}) > 1:
            found.differ(name, "are of one domain, and of different shards")
        if len({tuple(lists[k]) for k in of}) > 1:
            found.differ(name, "are of one domain, and of different classes")
        if len({sample_kind(experts[k][1]) for k in of}) > 1:
            found.differ(name, "are of one domain, and of different samples or latents")


def spread(shares: Shares, domains: Domains) -> list[float | None]:
    """Shares of domains, each the sum of those given for its experts, divided equally among these."""
    given = {one: [s for s, d in zip(shares, domains, strict=True) if d == one] for one in domains}
    sums = {one: None if set(of) == {None} else math.fsum(filter(None, of)) for one, of in given.items()}
    return [None if (total := sums[one]) is None else total / len(given[one]) for one in domains]


def compare_experts(
    experts: Sequence[Named],
    found: Findings,
    shares: Shares = (),
    domains: Domains = (),
    is_drawn: bool = False,
) -> list[str]:
    """Record each expert's differences from the most common values, of equally common ones the first.

    Two domains of one shard are no difference where both have a share, which says how they divide its part.
    Experts that are drawn alone, one a sample, may make samples of several kinds. Returns the names of those
    of another kind.
    """
    for quality, of in _QUALITIES.items():
        values = [of(record) for _, record in experts]
        known = Counter(value for value in values if value is not None)
        without = [name for name, record in experts if _lacks(record, quality)]
        if known:
            usual = known.most_common(1)[0][0]
            for (name, _), value in zip(experts, values, strict=True):
                if value is not None and value != usual and not is_drawn:
                    found.differ(name, f"{quality} {_difference(value, usual)}")
            for name in without:
                found.note(f"{name} does not record its {quality}; taken on trust")
        elif len(without) > 1 and quality == "VAE":
            found.note(f"no expert records its {quality}; that all share one is taken on trust")
    students = [name for name, record in experts if record.sampling_steps is not None]
    if 0 < len(students) < len(experts) or (students and not is_drawn):
        for name in students:
            found.differ(name, "is a student of few steps; it goes with such alone, and under draw")
    others, first = list(found.differences), domains or range(len(experts))
    _compare_shards(by_domain(experts, first), found, by_domain(shares or [None] * len(experts), first))
    return others


def _difference(mine: Any, usual: Any) -> str:
    if isinstance(mine, str):
        return f"{mine[:16]}, not {usual[:16]}"
    return f"{mine}, not {usual}"


def _compare_shards(experts: Sequence[Named], found: Findings, shares: Shares) -> None:
    first: dict[str, int] = {}
    for k, (name, record) in enumerate(experts):
        if record.shard is None or (before := first.setdefault(record.shard.hash, k)) == k:
            continue
        other = experts[before][0]
        if other == name:
            found.differ(name, "is named twice; name it once")
        elif None in (shares[k], shares[before]):
            given = shares[k] is not None or shares[before] is not None
            missing = f"; none is given for {name if shares[k] is None else other}" if given else ""
            found.differ(
                name,
                f"was trained on the same shard ({record.shard.hash[:12]}) as {other}; leave one of the two "
                f"out, or say by --share how much of the data each stands for{missing}",
            )


def compare_classes(experts: Sequence[Named], lists: ClassLists, found: Findings) -> None:
    """Refuse experts that number their classes without names beside others that name theirs."""
    named = next((name for (name, _), own in zip(experts, lists, strict=True) if own), None)
    for (name, record), own in zip(experts, lists, strict=True):
        if named is not None and takes_classes(record) and not own:
            found.differ(name, f"numbers its classes, and {named} names them; name its classes by --classes")


def match_router(
    experts: Sequence[Named],
    router: RouterRecord,
    total: int,
    found: Findings,
    name: str = "router",
    settled: Sequence[int | None] = (),
) -> tuple[int, ...]:
    """The router's output for each expert, one a domain, in the ensemble's order: that of the expert's shard.

    Experts may come in any order, and outputs may stay unused. Where an expert, or the router, records no
    shard, all are taken to be in the router's order, and the numbers must agree. ``total`` is the number of
    outputs; ``settled`` has those already known, None where an expert has none.
    """
    shape = Counter(record.sample_shape for _, record in experts).most_common(1)[0][0]
    if router.sample_shape != shape:
        found.differ(name, f"sample_shape {router.sample_shape}, not {shape}")
    places: list[int | None] = list(settled or [None] * len(experts))
    if beyond := sorted(output for output in places if output is not None and output >= total):
        found.differ(name, f"has outputs 0 to {total - 1}, and the ensemble takes {beyond}")
        return ()
    loose = [
        expert
        for (expert, record), place in zip(experts, places, strict=True)
        if place is None and not (record.shard and router.shard_hashes)
    ]
    if loose and (len(experts) != total or any(place is not None for place in places)):
        reason = "without a shard record" if router.shard_hashes else "of a router that records no shards"
        found.differ(
            name,
            f"tells {total} shards apart, and there are {len(experts)} experts, of which {', '.join(loose)} "
            f"{reason} can only be matched by order",
        )
        return ()
    if loose:
        places = list(range(total))
        if not router.shard_hashes:
            found.note(f"{name} records no shards; experts are taken to be in the order of its outputs")
    takers: dict[int, tuple[str, ShardRecord | None]] = {}
    outputs = []
    for k, ((expert, record), place) in enumerate(zip(experts, places, strict=True)):
        own = place
        if record.shard is not None and router.shard_hashes:
            if record.shard.hash not in router.shard_hashes:
                found.differ(
                    expert,
                    f"was trained on a shard that {name} does not know ({record.shard.hash[:12]}); train a "
                    "router on all shards and pass it with --router",
                )
                continue
            own = router.shard_hashes.index(record.shard.hash)
            if place not in (None, own):
                found.differ(expert, f"was trained on the shard of output {own} of {name}, not {place}")
        elif expert in loose and router.shard_hashes:
            found.note(f"{expert} records no shard; by its place it is taken for output {k} of the router")
        assert own is not None
        outputs.append(own)
        other, shard = takers.setdefault(own, (expert, record.shard))
        # Two of one shard are refused as such.
        if other != expert and None in (shard, record.shard):
            found.differ(expert, f"takes output {own} of the router, and so does {other}")
    left = sorted(set(range(total)) - set(outputs))
    if left and not found.differences:
        found.note(f"{name}: of its {total} outputs, these are left out: {', '.join(map(str, left))}")
    return tuple(outputs)


NO_SHIFT = 1.0


def prior_of(
    experts: Sequence[Named],
    found: Findings,
    shares: Shares = (),
    before: Sequence[float] | None = None,
    domains: Domains = (),
) -> tuple[float, ...]:
    """p(k): ``shares`` where they are given, and of the rest a part by shard size.

    A domain counts once: its experts have equal parts of its p, and of its share (`spread`). Where a size is
    unknown, the rest is divided by ``before`` (positive in sum), or equally. Raises `HddmError` for shares
    beyond 0 … 1, shares of all that do not sum to 1, or of some that leave nothing.
    """
    fixed = {k: share for k, share in enumerate(shares) if share is not None}
    free = [k for k in range(len(experts)) if k not in fixed]
    _check_shares(experts, fixed, free)
    domains = domains or range(len(experts))
    unknown = [experts[k][0] for k in free if not experts[k][1].shard]
    if unknown and len({domains[k] for k in free}) > 1:
        kept = "keeps its proportions" if before else "is equal for all"
        others = " whose share is not given" if fixed else ""
        if not before and len(unknown) < len(free):
            others += "; the sizes of the other shards are given up; --share EXPERT=0.3 states a part"
        found.note(f"{', '.join(unknown)}: no shard is recorded, so the prior {kept}{others}")
    if unknown:
        sizes = [before[k] if before else 1.0 for k in free]
    else:
        sizes = [float(shard.images) for k in free if (shard := experts[k][1].shard)]
    if free and not sum(sizes):
        sizes = [1.0] * len(free)
    if not (unknown and before):
        sizes = [size / Counter(domains)[domains[k]] for size, k in zip(sizes, free, strict=True)]
    rest = 1 - math.fsum(fixed.values()) if free else 0.0
    parts = fixed | {k: rest * size / sum(sizes) for k, size in zip(free, sizes, strict=True)}
    return tuple(parts[k] for k in range(len(experts)))


def _check_shares(experts: Sequence[Named], fixed: Mapping[int, float], free: Sequence[int]) -> None:
    for k, share in fixed.items():
        if not 0 <= share <= 1:
            raise UsageError(f"--share {experts[k][0]}={share:g}: a share lies between 0 and 1")
    total = math.fsum(fixed.values())
    if fixed and not free and abs(total - 1) > SHARE_TOLERANCE:
        raise UsageError(f"--share: the shares of all experts sum to {total:g}; they must sum to 1")
    if free and total > 1 - SHARE_TOLERANCE:
        left = ", ".join(experts[k][0] for k in free)
        raise UsageError(f"--share: the shares given sum to {total:g} and leave nothing for {left}")


def class_prior_of(
    experts: Sequence[Named], lists: ClassLists, prior: Sequence[float], found: Findings
) -> tuple[tuple[float, ...], ...]:
    """p(k | class), one row for each class of `hddm.classes.join_classes`: p(k) p(class | k), normalised.

    p(class | k) is the share of the class among the images of shard k. An expert that does not count them
    is taken to have seen its classes equally often; one that knows no class is asked for none. A class of no
    images is asked of those who know it, by p(k). Empty where no classes have names, and where no row would
    differ from ``prior``.
    """
    names = join_classes(tuple(map(tuple, lists))).names
    if not names or len(experts) == 1:
        return ()
    rows = {name: [0.0] * len(experts) for name in names}
    without, seen = [], set[str]()
    for k, ((name, record), own) in enumerate(zip(experts, lists, strict=True)):
        counts = record.shard.class_images if record.shard else ()
        if not own:
            found.note(f"{name} has no classes, so no class is asked of it; say by --classes what it makes")
        elif len(counts) != len(own) or not sum(counts):
            counts = (1,) * len(own)
            without.append(name)
        for known, count in zip(own, counts, strict=False):
            rows[known][k] += prior[k] * count / sum(counts)
            seen |= {known} if count else set()
    if len(without) == len(experts) and len(set(map(tuple, lists))) == 1:
        found.note(f"p(k | class) is unknown, so 'draw' has p(k): {', '.join(without)} counts no classes")
        return ()
    if without:
        found.note(f"{', '.join(without)}: counts no images by class, so its classes are taken to be equal")
    if unseen := [name for name in names if name not in seen]:
        found.note(f"no shard has images of {', '.join(unseen)}; 'draw' takes p(k) for them")
    for name in (name for name, row in rows.items() if not sum(row)):
        knows = [float(name in own) for own in lists]
        parts = [part * share for part, share in zip(knows, prior, strict=True)]
        rows[name] = parts if sum(parts) else knows
    return tuple(tuple(one / sum(row) for one in row) for row in rows.values())


def note_overlaps(experts: Sequence[Named], found: Findings) -> None:
    """Note which experts of unlike partitions have images in common, and for which that is not known."""
    shards = [(name, record.shard) for name, record in experts if record.shard is not None]
    if len({shard.partition or shard.hash for _, shard in shards}) < 2:
        return
    for (name, mine), (other, theirs) in itertools.combinations(shards, 2):
        part = overlap(mine.sketch, theirs.sketch, mine.images, theirs.images)
        if part > 0 and (mine.partition or mine.hash) != (theirs.partition or theirs.hash):
            found.note(f"about {part:.0%} of the images of {name} are those of {other}, too")
    if silent := [name for name, shard in shards if not shard.sketch]:
        found.note(
            f"{', '.join(silent)}: record no hashes of images, so it is not known how many are others'"
        )


def common_shift(experts: Sequence[Named], found: Findings) -> float:
    """Time grid shift that all experts want, 1 where they differ."""
    shifts = [record.shift for _, record in experts]
    if len(set(shifts)) == 1:
        return shifts[0]
    all_shifts = ", ".join(f"{shift:g} ({name})" for (name, _), shift in zip(experts, shifts, strict=True))
    found.note(f"experts want different shifts of the time grid, so it has {NO_SHIFT:g}: {all_shifts}")
    return NO_SHIFT
