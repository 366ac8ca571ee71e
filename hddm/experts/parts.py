"""The experts' parts in an ensemble, derived from their records and from what was decided on each (`Member`).

p(k)          shares set by hand, and of the rest a part by shard size; a domain counts once
p(k | class)  p(k) p(class | k), from the images of each class that shards count
domains       experts of one shard, each for a part of t, unless a domain was set by hand
encoders      experts of one VAE, and of one text encoder, share it; numbered as they first appear
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from hddm.classes import join_classes
from hddm.experts.expert import Expert, with_decisions
from hddm.experts.shares import domains_of, weights_of
from hddm.fit import Findings
from hddm.networks.identity import TextEncoderRecord, UnreadVae, VaeRecord
from hddm.parts import Numbers, Part
from hddm.prompt_router import Topic
from hddm.velocity import VelocityField


def vaes_of(experts: Sequence[Expert]) -> list[Hashable]:
    """Identity of each expert's VAE: its record; None for an expert of pixels.

    An expert that does not record its own has the first one that is known of an expert with as many channels,
    or else an unknown one. One whose VAE could not be read has another expert's that could be it, or else
    that one.
    """
    known: list[VaeRecord | UnreadVae | None] = []
    for one in experts:
        known.append(one.record.vae or one.member.vae)
    read = [vae for vae in known if isinstance(vae, VaeRecord)]
    for k, one in enumerate(experts):
        if known[k] is None and one.record.unread_vae is not None:
            known[k] = _found_again(one.record.unread_vae, read)
    first: dict[int, Hashable] = {}
    for one, vae in zip(experts, known, strict=True):
        if vae is not None and one.record.space == "latents":
            first.setdefault(one.record.sample_shape[0], vae)
    found: list[Hashable] = []
    for one, vae in zip(experts, known, strict=True):
        channels = one.record.sample_shape[0]
        own = vae or first.get(channels, f"unknown, of {channels} channels")
        found.append(own if one.record.space == "latents" else None)
    return found


def _found_again(unread: UnreadVae, read: Sequence[VaeRecord]) -> VaeRecord | UnreadVae:
    """The first VAE that ``unread`` could be, or else itself."""
    for vae in read:
        if unread.misfit(vae) is None:
            return vae
    return unread


def text_encoders_of(experts: Sequence[Expert]) -> list[Hashable]:
    """Identity of each expert's text encoder: its record; None without text.

    An expert that does not record its own has the first one that is known, or else one called ``unknown``.
    """
    known = [one.record.text_encoder or one.member.text_encoder for one in experts]
    return _shared(known, [one.record.takes_text for one in experts])


def _shared(known: Sequence[Hashable], needs: Sequence[bool]) -> list[Hashable]:
    """Identities of the experts that need one; where it is not ``known``, the first that is known."""
    first: Hashable = "unknown"
    for own, need in zip(known, needs, strict=True):
        if need and own:
            first = own
            break
    shared: list[Hashable] = []
    for own, need in zip(known, needs, strict=True):
        shared.append((own or first) if need else None)
    return shared


def numbers_of(experts: Sequence[Expert], component: str) -> Numbers:
    """Which ``vae``, ``text_encoder`` or ``tokenizer`` each expert uses.

    A tokenizer has the number of its text encoder.
    """
    if component == "vae":
        return Numbers.of_vaes(vaes_of(experts))
    return Numbers.of_text_encoders(text_encoders_of(experts))


def parts_of(
    experts: Sequence[Expert],
    fields: Sequence[VelocityField] | None = None,
    found: Findings | None = None,
) -> list[Part]:
    """The experts' parts, of which ``fields`` are None where they are not needed; notes go into ``found``."""
    found, domains = found or Findings(), domains_of(experts)
    weights = weights_of(experts, domains, found)
    class_shares = _class_shares_of(experts, weights, found)
    vaes, text_encoders = vaes_of(experts), text_encoders_of(experts)
    topics = _topics_for_prompts(experts)
    parts = []
    for k in range(len(experts)):
        field: Any = None if fields is None else fields[k]
        parts.append(
            Part(
                field, weights[k], class_shares[k], domains[k], vaes[k], text_encoders[k], topics[k]
            )
        )
    return parts


def _topics_for_prompts(experts: Sequence[Expert]) -> list[Topic | None]:
    """What the captions of each expert are about that can take a prompt, where topics route prompts."""
    if topics_of(experts, Findings()) is None:
        return [None] * len(experts)
    return [one.topic if one.takes_prompts else None for one in experts]


def _class_shares_of(
    experts: Sequence[Expert], weights: Sequence[float], found: Findings
) -> list[dict[str, float]]:
    """p(k | class) of each expert by class name: p(k) p(class | k), normalised; empty where it is unknown.

    p(class | k) is the share of the class among the images of shard k. An expert that does not count them
    is taken to have seen its classes equally often; one that knows no class gets none. A class of no images
    goes to the experts that know it, by p(k).
    """
    if any(one.member.class_shares for one in experts):
        return [one.member.class_shares for one in experts]
    lists = [one.classes for one in experts]
    names = join_classes(tuple(lists)).names
    if not names or len(experts) == 1:
        return [{} for _ in experts]
    rows = {name: [0.0] * len(experts) for name in names}
    uncounted, seen = [], set[str]()
    for k, one in enumerate(experts):
        counts = one.record.shard.class_images if one.record.shard else ()
        if not one.classes:
            found.note(
                f"{one.name} has no classes, so no class goes to it; name its own by `classes`"
            )
        elif len(counts) != len(one.classes) or not sum(counts):
            counts = (1,) * len(one.classes)
            uncounted.append(one.name)
        for name, count in zip(one.classes, counts, strict=False):
            rows[name][k] += weights[k] * count / sum(counts)
            if count:
                seen.add(name)
    if len(uncounted) == len(experts) and len(set(lists)) == 1:
        found.note(
            f"p(k | class) is unknown, so 'draw' has p(k): {', '.join(uncounted)} counts no classes"
        )
        return [{} for _ in experts]
    if uncounted:
        found.note(
            f"{', '.join(uncounted)}: counts no images by class, so its classes are taken to be equal"
        )
    unseen = [name for name in names if name not in seen]
    if unseen:
        found.note(f"no shard has images of {', '.join(unseen)}; 'draw' takes p(k) for them")
    for name, row in rows.items():
        if not sum(row):
            knows, by_size = [], []
            for own, weight in zip(lists, weights, strict=True):
                know = float(name in own)
                knows.append(know)
                by_size.append(know * weight)
            rows[name] = by_size if sum(by_size) else knows
    shares: list[dict[str, float]] = [{} for _ in experts]
    for name, row in rows.items():
        total = sum(row)
        for k, value in enumerate(row):
            shares[k][name] = value / total
    return shares


def topics_of(experts: Sequence[Expert], found: Findings) -> TextEncoderRecord | None:
    """The text encoder of the topics that route prompts; None where an expert of text has no topic."""
    known = {}
    for one in experts:
        if one.topic is not None and one.topic.record is not None:
            known[one.name] = one.topic.record.text_encoder
    if not known or len(experts) == 1:
        return None
    first = next(iter(known))
    for name, encoder in known.items():
        if encoder.fingerprint != known[first].fingerprint:
            found.differ(
                name, f"is described by another text encoder than {first}; describe both by one"
            )
    silent = [one.name for one in experts if one.record.takes_text and one.name not in known]
    if silent:
        names = ", ".join(silent)
        found.note(
            f"prompts are routed by p(k), since {names} has no topic; hddm describe makes one"
        )
        return None
    unused = [one.name for one in experts if not one.takes_prompts]
    if unused:
        found.note(f"no prompt is for {', '.join(unused)}, which takes neither text nor classes")
    return known[first]


def topics_number(experts: Sequence[Expert], found: Findings) -> int | None:
    """Number of the text encoder of `topics_of`; a text encoder that no expert uses comes last."""
    encoder = topics_of(experts, found)
    if encoder is None:
        return None
    used = numbers_of(experts, "text_encoder").distinct
    for number, one in enumerate(used):
        if isinstance(one, TextEncoderRecord) and one.fingerprint == encoder.fingerprint:
            return number
    return len(used)


def with_parts(experts: Sequence[Expert], parts: Sequence[Part]) -> list[Expert]:
    """``experts`` with all of ``parts`` that does not follow from their records set by hand."""
    keys = [part.domain for part in parts]
    domains = list(map(keys.index, keys))
    if domains != list(domains_of(experts)):
        named = [str(one) if domains.count(one) > 1 else None for one in domains]
        experts = with_decisions(experts, domain=named)
    experts = _with_encoders(experts, parts)
    weights, derived = [part.weight for part in parts], parts_of(experts)
    if not _have_prior(derived, weights):
        experts = with_decisions(experts, share=weights)
        derived = parts_of(experts)
    shares = [part.class_shares for part in parts]
    theirs = [part.class_shares for part in derived]
    if not all(map(_are_close, shares, theirs)):
        # Where p(k | class) is not known, it is p(k).
        names = [] if any(shares) else derived[0].class_shares
        rows = []
        for own, weight in zip(shares, weights, strict=True):
            rows.append(own or dict.fromkeys(names, weight))
        experts = with_decisions(experts, class_shares=rows)
    return list(experts)


def _have_prior(parts: Sequence[Part], weights: Sequence[float]) -> bool:
    """True if p(k) of ``parts`` is in proportion to ``weights``, up to rounding."""
    total, other = sum(weights), sum(part.weight for part in parts)
    pairs = zip(weights, parts, strict=True)
    return all(math.isclose(one * other, part.weight * total, rel_tol=1e-12) for one, part in pairs)


def _with_encoders(experts: Sequence[Expert], parts: Sequence[Part]) -> Sequence[Expert]:
    """``experts`` with the VAEs and text encoders of ``parts`` that do not follow from their records."""
    vaes = [one.member.vae for one in experts]
    encoders = [one.member.text_encoder for one in experts]
    derived_vaes, derived_encoders = vaes_of(experts), text_encoders_of(experts)
    for k, (one, part) in enumerate(zip(experts, parts, strict=True)):
        is_open = one.record.vae is None and part.vae != derived_vaes[k]
        if is_open and isinstance(part.vae, VaeRecord):
            vaes[k] = part.vae
        is_open = one.record.text_encoder is None and part.text_encoder != derived_encoders[k]
        if is_open and isinstance(part.text_encoder, TextEncoderRecord):
            encoders[k] = part.text_encoder
    return with_decisions(experts, vae=vaes, text_encoder=encoders)


def _are_close(shares: Mapping[str, float], others: Mapping[str, float]) -> bool:
    """True for the same classes with the same shares, up to rounding."""
    if shares.keys() != others.keys():
        return False
    return all(math.isclose(shares[name], others[name]) for name in shares)
