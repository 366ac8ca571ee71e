"""The experts' parts in an ensemble, derived from their records and from what was decided on each (`Member`).

p(k)          shares set by hand, and of the rest a part by shard size; a domain counts once
p(k | class)  p(k) p(class | k), from the images of each class that shards count
domains       experts of one shard, each for a part of t, unless a domain was set by hand
encoders      experts of one VAE, and of one text encoder, share it; numbered as they first appear
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from hddm.conditions import join_classes
from hddm.ensemble import Part, numbered_by_first
from hddm.experts.compatibility import Findings, Named, match_router, takes_text
from hddm.experts.ensemble_folders import Member
from hddm.experts.records import EXPERT_FILE, FORMAT, ExpertRecord, RouterRecord
from hddm.networks.identity import TextEncoderRecord, VaeRecord
from hddm.routers import Topic
from hddm.utils.records import WHOLE, read_record

Value = TypeVar("Value")


def read_records(folders: Sequence[Path]) -> list[Named]:
    """Records of expert folders, with the folders' names."""
    return [(str(folder), read_record(folder / EXPERT_FILE, ExpertRecord, FORMAT)) for folder in folders]


def class_lists(members: Sequence[Member], experts: Sequence[Named]) -> list[tuple[str, ...]]:
    """Names of each expert's classes, in its own numbering."""
    return [member.classes or record.classes for member, (_, record) in zip(members, experts, strict=True)]


def domains_of(members: Sequence[Member], experts: Sequence[Named]) -> tuple[int, ...]:
    """For each expert the index of the first expert of its domain."""
    keys: list[Hashable] = []
    for k, (member, (_, record)) in enumerate(zip(members, experts, strict=True)):
        shard = None if record.noise_range == WHOLE else record.shard
        keys.append(("set", member.domain) if member.domain else k if shard is None else shard.hash)
    return tuple(map(keys.index, keys))


def by_domain(values: Sequence[Value], domains: Sequence[int]) -> list[Value]:
    """The first expert's value in each domain."""
    return [values[k] for k in dict.fromkeys(domains)]


def router_outputs(
    members: Sequence[Member],
    experts: Sequence[Named],
    domains: Sequence[int],
    router: RouterRecord,
    total: int,
    found: Findings,
    name: str = "router",
) -> dict[int, int]:
    """The router's output by domain; arguments and differences as in `match_router`."""
    stated = by_domain([member.output for member in members], domains)
    placed = match_router(by_domain(experts, domains), stated, router, total, found, name)
    # There are fewer where differences were found.
    return dict(zip(dict.fromkeys(domains), placed, strict=False))


def weights_of(
    members: Sequence[Member], experts: Sequence[Named], domains: Sequence[int], found: Findings
) -> list[float]:
    """p(k), not normalised: shares that are set, and of the rest a part by shard size.

    The experts of a domain have equal parts of its p. Where a size is unknown, the rest is divided equally.
    """
    shares = [member.share for member in members]
    free = [k for k, share in enumerate(shares) if share is None]
    if not free:
        return [share for share in shares if share is not None]
    fixed = [share for share in shares if share is not None]
    shards = [experts[k][1].shard for k in free]
    if unknown := [experts[k][0] for k in free if experts[k][1].shard is None]:
        if len({domains[k] for k in free}) > 1:
            others = " whose share is not given" if fixed else ""
            if len(unknown) < len(free):
                others += "; the sizes of the other shards are not used; --share EXPERT=0.3 sets a part"
            found.note(f"{', '.join(unknown)}: no shard is recorded, so p(k) is equal for all{others}")
        sizes = [1.0] * len(free)
    else:
        sizes = [float(shard.images) for shard in shards if shard is not None]
    count = Counter(domains)
    sizes = [size / count[domains[k]] for size, k in zip(sizes, free, strict=True)]
    rest = 1 - math.fsum(fixed)
    parts = {k: rest * size / sum(sizes) for k, size in zip(free, sizes, strict=True)}
    return [parts[k] if share is None else share for k, share in enumerate(shares)]


def class_shares_of(
    members: Sequence[Member], experts: Sequence[Named], weights: Sequence[float], found: Findings
) -> list[dict[str, float]]:
    """p(k | class) of each expert by class name: p(k) p(class | k), normalised; empty where it is unknown.

    p(class | k) is the share of the class among the images of shard k. An expert that does not count them
    is taken to have seen its classes equally often; one that knows no class is asked for none. A class of no
    images is asked of those who know it, by p(k).
    """
    if any(member.class_shares for member in members):
        return [member.class_shares for member in members]
    lists = class_lists(members, experts)
    names, unknown = join_classes(tuple(lists)).names, [dict[str, float]() for _ in members]
    if not names or len(experts) == 1:
        return unknown
    rows = {name: [0.0] * len(experts) for name in names}
    without, seen = [], set[str]()
    for k, ((name, record), own) in enumerate(zip(experts, lists, strict=True)):
        counts = record.shard.class_images if record.shard else ()
        if not own:
            found.note(f"{name} has no classes, so no class is asked of it; name what it makes by --classes")
        elif len(counts) != len(own) or not sum(counts):
            counts = (1,) * len(own)
            without.append(name)
        for known, count in zip(own, counts, strict=False):
            rows[known][k] += weights[k] * count / sum(counts)
            seen |= {known} if count else set()
    if len(without) == len(experts) and len(set(lists)) == 1:
        found.note(f"p(k | class) is unknown, so 'draw' has p(k): {', '.join(without)} counts no classes")
        return unknown
    if without:
        found.note(f"{', '.join(without)}: counts no images by class, so its classes are taken to be equal")
    if unseen := [name for name in names if name not in seen]:
        found.note(f"no shard has images of {', '.join(unseen)}; 'draw' takes p(k) for them")
    for name in (name for name, row in rows.items() if not sum(row)):
        knows = [float(name in own) for own in lists]
        parts = [part * weight for part, weight in zip(knows, weights, strict=True)]
        rows[name] = parts if sum(parts) else knows
    return [{name: row[k] / sum(row) for name, row in rows.items()} for k in range(len(experts))]


def vaes_of(members: Sequence[Member], experts: Sequence[Named]) -> list[Hashable]:
    """Identity of each expert's VAE, None for pixels; one that records none has the first that is known."""
    pairs = [(member, record) for member, (_, record) in zip(members, experts, strict=True)]
    known = [None if one.space == "pixels" else one.vae or member.vae for member, one in pairs]
    first = next((one for one in known if one is not None), "unknown")
    return [
        None if one.space == "pixels" else vae or first for (_, one), vae in zip(pairs, known, strict=True)
    ]


def text_encoders_of(members: Sequence[Member], experts: Sequence[Named]) -> list[Hashable]:
    """Identity of the text encoder of each expert of text, None for the others; see `vaes_of`."""
    pairs = [(member, record) for member, (_, record) in zip(members, experts, strict=True)]
    known = [one.text_encoder or member.text_encoder if takes_text(one) else None for member, one in pairs]
    first = next((one for one in known if one is not None), "unknown")
    return [text or first if takes_text(one) else None for (_, one), text in zip(pairs, known, strict=True)]


@dataclass(frozen=True)
class Encoders:
    """Numbers of the experts' VAEs (-1 for pixels beside latents) and text encoders, from 0.

    ``topics`` is the number of the text encoder that prompts are routed by; None where they are not.
    """

    vaes: tuple[int, ...]
    texts: tuple[int, ...]
    topics: int | None = None


def encoders_of(
    members: Sequence[Member], experts: Sequence[Named], topics: Sequence[Topic | None] = ()
) -> Encoders:
    """Number the encoders of experts as they first appear."""
    vaes, texts = vaes_of(members, experts), text_encoders_of(members, experts)
    numbers = numbered_by_first(vaes)
    if any(vaes):
        numbers = tuple(-1 if vae is None else k for k, vae in zip(numbers, vaes, strict=True))
    routing = topics_of(experts, topics, Findings())
    order = [one for one in dict.fromkeys(texts) if one is not None]
    of_topics = None
    if routing is not None:
        prints = [one.fingerprint if isinstance(one, TextEncoderRecord) else None for one in order]
        of_topics = prints.index(routing.fingerprint) if routing.fingerprint in prints else len(order)
    return Encoders(numbers, numbered_by_first(texts), of_topics)


def topics_of(
    experts: Sequence[Named], topics: Sequence[Topic | None], found: Findings
) -> TextEncoderRecord | None:
    """The text encoder of the topics that route prompts; None where an expert of text has no topic."""
    named = zip(experts, topics, strict=False)
    known = {
        name: topic.record for (name, _), topic in named if topic is not None and topic.record is not None
    }
    if not known or len(experts) == 1:
        return None
    first = next(iter(known))
    for name, record in known.items():
        if record.text_encoder.fingerprint != known[first].text_encoder.fingerprint:
            found.differ(name, f"is described by another text encoder than {first}; describe both by one")
    if silent := [name for name, record in experts if takes_text(record) and name not in known]:
        found.note(
            f"prompts are routed by p(k), since {', '.join(silent)} has no topic; hddm describe makes one"
        )
        return None
    silent = [name for name, record in experts if not takes_text(record) and not record.classes]
    if unasked := [name for name in silent if name not in known]:
        found.note(f"no prompt is for {', '.join(unasked)}, which has no topic")
    return known[first].text_encoder


def parts_of(members: Sequence[Member], experts: Sequence[Named], fields: Sequence[Any]) -> list[Part]:
    """The experts' parts, with their velocity fields, or without (None)."""
    domains = domains_of(members, experts)
    weights = weights_of(members, experts, domains, Findings())
    rows = class_shares_of(members, experts, weights, Findings())
    vaes, texts = vaes_of(members, experts), text_encoders_of(members, experts)
    return [Part(*one) for one in zip(fields, weights, rows, domains, vaes, texts, strict=True)]


def with_parts(members: Sequence[Member], experts: Sequence[Named], parts: Sequence[Part]) -> list[Member]:
    """``members`` with all of ``parts`` that does not follow from their records set by hand."""
    fields = [part.field for part in parts]
    domains = [k if part.domain is None else ("in", part.domain) for k, part in enumerate(parts)]
    known = domains_of(members, experts)
    if list(known) != list(map(domains.index, domains)):
        members = [
            one.model_copy(update={"domain": None if domain == k else str(domains.index(domain))})
            for k, (one, domain) in enumerate(zip(members, domains, strict=True))
        ]
    vaes, texts = vaes_of(members, experts), text_encoders_of(members, experts)
    members = [
        member.model_copy(
            update={
                name: own
                for name, own, taken, kind in (
                    ("vae", part.vae, vae, VaeRecord),
                    ("text_encoder", part.text_encoder, text, TextEncoderRecord),
                )
                # An identity that is no record tells experts apart in memory alone.
                if getattr(record, name) is None and own != taken and isinstance(own, kind)
            }
        )
        for member, (_, record), part, vae, text in zip(members, experts, parts, vaes, texts, strict=True)
    ]
    if not _are_proportional(parts_of(members, experts, fields), parts):
        members = [
            one.model_copy(update={"share": part.weight}) for one, part in zip(members, parts, strict=True)
        ]
    found = parts_of(members, experts, fields)
    if any(not _are_close(one.classes, part.classes) for one, part in zip(found, parts, strict=True)):
        # Where p(k | class) is not known, it is p(k).
        names = [] if any(part.classes for part in parts) else found[0].classes
        members = [
            one.model_copy(update={"class_shares": part.classes or dict.fromkeys(names, part.weight)})
            for one, part in zip(members, parts, strict=True)
        ]
    return members


def _are_proportional(mine: Sequence[Part], theirs: Sequence[Part]) -> bool:
    one, other = (
        torch.tensor([part.weight for part in parts], dtype=torch.float64) for parts in (mine, theirs)
    )
    return torch.allclose(one / one.sum(), other / other.sum(), rtol=1e-12, atol=0)


def _are_close(mine: Mapping[str, float], theirs: Mapping[str, float]) -> bool:
    return mine.keys() == theirs.keys() and all(math.isclose(mine[name], theirs[name]) for name in mine)
