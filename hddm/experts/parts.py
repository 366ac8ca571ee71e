"""The experts' parts in an ensemble, derived from their records and from what was decided on each (`Member`).

p(k)          shares set by hand, and of the rest a part by shard size; a domain counts once
p(k | class)  p(k) p(class | k), from the images of each class that shards count
domains       experts of one shard, each for a part of t, unless a domain was set by hand
encoders      experts of one VAE, and of one text encoder, share it; numbered as they first appear
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from hddm.conditions import join_classes
from hddm.ensemble import Part, numbered_by_first, numbered_vaes
from hddm.experts.compatibility import Entry, Findings, decide, domains_of, takes_text
from hddm.networks.identity import TextEncoderRecord, VaeRecord
from hddm.utils.errors import HddmError
from hddm.velocity import VelocityField

_ENCODERS: Mapping[str, type] = {"vae": VaeRecord, "text_encoder": TextEncoderRecord}


def parts_of(
    entries: Sequence[Entry],
    fields: Sequence[VelocityField] | None = None,
    found: Findings | None = None,
) -> list[Part]:
    """The experts' parts, of which ``fields`` are None where they are not needed; notes go into ``found``."""
    found, domains = found or Findings(), domains_of(entries)
    weights = _weights_of(entries, domains, found)
    rows = _class_shares_of(entries, weights, found)
    encoders = [identities(entries, name) for name in _ENCODERS]
    own: Sequence[Any] = fields or [None] * len(entries)
    return [Part(*values) for values in zip(own, weights, rows, domains, *encoders, strict=True)]


def _weights_of(entries: Sequence[Entry], domains: Sequence[int], found: Findings) -> list[float]:
    """p(k), not normalised: shares that are set, and of the rest a part by shard size.

    The experts of a domain have equal parts of its p. Where a size is unknown, the rest is divided equally.
    """
    fixed = {k: one.member.share for k, one in enumerate(entries) if one.member.share is not None}
    free = [k for k in range(len(entries)) if k not in fixed]
    sizes = {k: float(shard.images) for k in free if (shard := entries[k].record.shard) is not None}
    if unknown := [entries[k].name for k in free if k not in sizes]:
        if len({domains[k] for k in free}) > 1:
            others = " whose share is not given" if fixed else ""
            if sizes:
                others += "; the sizes of the other shards are not used; `share` EXPERT=0.3 sets a part"
            found.note(f"{', '.join(unknown)}: no shard is recorded, so p(k) is equal for all{others}")
        sizes = dict.fromkeys(free, 1.0)
    experts = Counter(domains)
    sizes = {k: size / experts[domains[k]] for k, size in sizes.items()}
    rest, total = 1 - math.fsum(fixed.values()), sum(sizes.values())
    return [fixed[k] if k in fixed else rest * sizes[k] / total for k in range(len(entries))]


def _class_shares_of(
    entries: Sequence[Entry], weights: Sequence[float], found: Findings
) -> list[dict[str, float]]:
    """p(k | class) of each expert by class name: p(k) p(class | k), normalised; empty where it is unknown.

    p(class | k) is the share of the class among the images of shard k. An expert that does not count them
    is taken to have seen its classes equally often; one that knows no class gets none. A class of no images
    goes to the experts that know it, by p(k).
    """
    if any(one.member.class_shares for one in entries):
        return [one.member.class_shares for one in entries]
    lists = [one.classes for one in entries]
    names = join_classes(tuple(lists)).names
    if not names or len(entries) == 1:
        return [{} for _ in entries]
    rows, uncounted, seen = {name: [0.0] * len(entries) for name in names}, [], set[str]()
    for k, one in enumerate(entries):
        counts = one.record.shard.class_images if one.record.shard else ()
        if not one.classes:
            found.note(f"{one.name} has no classes, so no class goes to it; name its own by `classes`")
        elif len(counts) != len(one.classes) or not sum(counts):
            counts = (1,) * len(one.classes)
            uncounted.append(one.name)
        for name, count in zip(one.classes, counts, strict=False):
            rows[name][k] += weights[k] * count / sum(counts)
            seen |= {name} if count else set()
    if len(uncounted) == len(entries) and len(set(lists)) == 1:
        found.note(f"p(k | class) is unknown, so 'draw' has p(k): {', '.join(uncounted)} counts no classes")
        return [{} for _ in entries]
    if uncounted:
        found.note(f"{', '.join(uncounted)}: counts no images by class, so its classes are taken to be equal")
    if unseen := [name for name in names if name not in seen]:
        found.note(f"no shard has images of {', '.join(unseen)}; 'draw' takes p(k) for them")
    for name in (name for name, row in rows.items() if not sum(row)):
        knows = [float(name in own) for own in lists]
        by_size = [know * weight for know, weight in zip(knows, weights, strict=True)]
        rows[name] = by_size if sum(by_size) else knows
    return [{name: row[k] / sum(row) for name, row in rows.items()} for k in range(len(entries))]


def identities(entries: Sequence[Entry], name: str) -> list[Hashable]:
    """Record of each expert's ``vae`` or ``text_encoder``; None for an expert of pixels, or without text.

    An expert that does not record its own has the first that is known, or else one called ``unknown``.
    """
    needs = [
        takes_text(one.record) if name == "text_encoder" else one.record.space == "latents" for one in entries
    ]
    known = [getattr(one.record, name) or getattr(one.member, name) for one in entries]
    first = next((own for own, need in zip(known, needs, strict=True) if need and own), "unknown")
    return [own or first if need else None for own, need in zip(known, needs, strict=True)]


def numbers_of(entries: Sequence[Entry], name: str) -> tuple[int, ...]:
    """Number of each expert's ``vae`` or ``text_encoder``, as in `hddm.ensemble.Ensemble`, or ``tokenizer``.

    A tokenizer has the number of its text encoder.
    """
    if name == "vae":
        return numbered_vaes(identities(entries, name))
    return numbered_by_first(identities(entries, "text_encoder"))


def topics_of(entries: Sequence[Entry], found: Findings) -> TextEncoderRecord | None:
    """The text encoder of the topics that route prompts; None where an expert of text has no topic."""
    known = {one.name: record.text_encoder for one in entries if (record := one.topic and one.topic.record)}
    if not known or len(entries) == 1:
        return None
    first = next(iter(known))
    for name, encoder in known.items():
        if encoder.fingerprint != known[first].fingerprint:
            found.differ(name, f"is described by another text encoder than {first}; describe both by one")
    silent = [one for one in entries if one.name not in known]
    if of_text := [one.name for one in silent if takes_text(one.record)]:
        names = ", ".join(of_text)
        found.note(f"prompts are routed by p(k), since {names} has no topic; hddm describe makes one")
        return None
    if unused := [one.name for one in silent if not one.record.classes]:
        found.note(f"no prompt is for {', '.join(unused)}, which has no topic")
    return known[first]


def topics_number(entries: Sequence[Entry], found: Findings) -> int | None:
    """Number of the text encoder of `topics_of`; a text encoder that no expert uses comes last."""
    if (encoder := topics_of(entries, found)) is None:
        return None
    order = [one for one in dict.fromkeys(identities(entries, "text_encoder")) if one is not None]
    prints = [one.fingerprint if isinstance(one, TextEncoderRecord) else None for one in order]
    return prints.index(encoder.fingerprint) if encoder.fingerprint in prints else len(order)


def with_parts(entries: Sequence[Entry], parts: Sequence[Part]) -> list[Entry]:
    """``entries`` with all of ``parts`` that does not follow from their records set by hand."""
    keys = [k if part.domain is None else ("in", part.domain) for k, part in enumerate(parts)]
    domains = list(map(keys.index, keys))
    if domains != list(domains_of(entries)):
        entries = decide(entries, domain=[str(one) if domains.count(one) > 1 else None for one in domains])
    for name, kind in _ENCODERS.items():
        taken, found = identities(entries, name), []
        for part, one, its in zip(parts, entries, taken, strict=True):
            own = getattr(part, name)
            # An identity that is no record distinguishes experts in memory alone.
            is_new = isinstance(own, kind) and own != its and getattr(one.record, name) is None
            found.append(own if is_new else getattr(one.member, name))
        entries = decide(entries, **{name: found})
    weights, derived = [part.weight for part in parts], parts_of(entries)
    if not (total := sum(part.weight for part in derived)):
        chosen = ", ".join(one.name for one in entries)
        raise HddmError(f"{chosen}: all shares are 0; choose others too, or set them: hddm assemble --share")
    scale = sum(weights) / total
    pairs = zip(weights, derived, strict=True)
    if not all(math.isclose(one, scale * part.weight, rel_tol=1e-12) for one, part in pairs):
        entries = decide(entries, share=weights)
        derived = parts_of(entries)
    shares = [part.class_shares for part in parts]
    if any(
        mine.keys() != part.class_shares.keys()
        or not all(math.isclose(mine[name], part.class_shares[name]) for name in mine)
        for mine, part in zip(shares, derived, strict=True)
    ):
        # Where p(k | class) is not known, it is p(k).
        names = [] if any(shares) else derived[0].class_shares
        rows = [own or dict.fromkeys(names, one) for own, one in zip(shares, weights, strict=True)]
        entries = decide(entries, class_shares=rows)
    return list(entries)
