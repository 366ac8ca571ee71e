"""The experts' parts in an ensemble, derived from their records and from what was decided on each (`Member`).

p(k)          shares set by hand, and of the rest a part by shard size; a domain counts once
p(k | class)  p(k) p(class | k), from the images of each class that shards count
domains       experts of one shard, each for a part of t, unless a domain was set by hand
encoders      experts of one VAE, and of one text encoder, share it; numbered as they first appear

Each VAE and text encoder is stored once: the first is called ``vae`` and ``text_encoder``, a second one
``vae_2`` and ``text_encoder_2``. `arrange` chooses them.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hddm.conditions import join_classes
from hddm.ensemble import Part, numbered_by_first, numbered_vaes
from hddm.experts.compatibility import (
    Entry,
    Findings,
    domains_of,
    identities,
    read_entries,
    takes_classes,
    takes_text,
    with_decisions,
)
from hddm.experts.ensemble_folders import COMPONENTS, KEPT, MOST_ENCODERS, held_by, kept_components, numbered
from hddm.networks.components import read_config
from hddm.networks.encoders import replaced_by
from hddm.networks.families import families
from hddm.networks.identity import TextEncoderRecord, UnreadVae, VaeRecord
from hddm.networks.prompts import several_in, texts_facts
from hddm.networks.vae import vae_facts
from hddm.routers import Topic
from hddm.utils.errors import UsageError
from hddm.utils.files import inside
from hddm.velocity import VelocityField

_ENCODERS: Mapping[str, type] = {"vae": VaeRecord, "text_encoder": TextEncoderRecord}
_LATENT_CHANNELS = 4
"""Default of the class, for configs that leave it out."""


class _TextEncoder(NamedTuple):
    """A text encoder that experts may use, with its tokenizer, and what it is."""

    folder: Path
    tokenizer: Path | None
    record: TextEncoderRecord


def parts_of(
    entries: Sequence[Entry], fields: Sequence[VelocityField] | None = None, found: Findings | None = None
) -> list[Part]:
    """The experts' parts, of which ``fields`` are None where they are not needed; notes go into ``found``."""
    found, domains = found or Findings(), domains_of(entries)
    weights = _weights_of(entries, domains, found)
    rows = _class_shares_of(entries, weights, found)
    encoders = [identities(entries, name) for name in _ENCODERS]
    own: Sequence[Any] = fields or [None] * len(entries)
    columns = (own, weights, rows, domains, *encoders, _topics_for_prompts(entries))
    return [Part(*values) for values in zip(*columns, strict=True)]


def _topics_for_prompts(entries: Sequence[Entry]) -> list[Topic | None]:
    """What the captions of each expert are about that can take a prompt, where topics route prompts."""
    if topics_of(entries, Findings()) is None:
        return [None] * len(entries)
    return [one.topic if takes_prompts(one) else None for one in entries]


def takes_prompts(one: Entry) -> bool:
    """True for an expert that reads text, or has classes, which a prompt may name."""
    return takes_text(one.record) or takes_classes(one.record)


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
            unused = ", not by the sizes of the other shards" if sizes else ""
            text = f"so all experts{others} get equal shares{unused}; `share` EXPERT=0.3 changes them"
            found.note(f"{', '.join(unknown)}: no shard is recorded, {text}")
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
    if unused := [one.name for one in entries if not takes_prompts(one)]:
        found.note(f"no prompt is for {', '.join(unused)}, which takes neither text nor classes")
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
    keys = [part.domain for part in parts]
    domains = list(map(keys.index, keys))
    if domains != list(domains_of(entries)):
        entries = with_decisions(
            entries, domain=[str(one) if domains.count(one) > 1 else None for one in domains]
        )
    for name, kind in _ENCODERS.items():
        taken, found = identities(entries, name), []
        for part, one, its in zip(parts, entries, taken, strict=True):
            own = getattr(part, name)
            is_new = isinstance(own, kind) and own != its and getattr(one.record, name) is None
            found.append(own if is_new else getattr(one.member, name))
        entries = with_decisions(entries, **{name: found})
    weights, derived = [part.weight for part in parts], parts_of(entries)
    total, other = sum(weights), sum(part.weight for part in derived)
    pairs = zip(weights, derived, strict=True)
    if not all(math.isclose(one * other, part.weight * total, rel_tol=1e-12) for one, part in pairs):
        entries = with_decisions(entries, share=weights)
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
        entries = with_decisions(entries, class_shares=rows)
    return list(entries)


def components_of(expert: Path) -> dict[str, Path]:
    """`kept_components`, and what the ensemble that holds the expert has for it."""
    found = kept_components(expert)
    if (held := held_by(expert)) is None:
        return found
    whole, facts, k = held
    entries = read_entries([whole / one.folder for one in facts.experts], facts.experts)
    for name in KEPT:
        number = numbers_of(entries, name)[k]
        place = inside(whole, numbered(name, number))
        if number >= 0 and place.is_dir():
            found.setdefault(name, place)
    return found


def arrange(
    entries: Sequence[Entry], given: Mapping[str, Path], own: Mapping[str, Path], stay: int, found: Findings
) -> tuple[dict[str, Path], list[Entry]]:
    """Choose components by name: of those ``given``, of the ensemble's ``own``, and of what experts keep.

    The first ``stay`` experts are the ensemble's.
    An expert that records its VAE or text encoder gets that one. An expert that does not gets what it keeps
    itself, else what is given, else what it was taken to have, else the first; the returned entries say so.
    Differences and notes go into ``found``.
    """
    # What the ensemble has for an expert that stays may be replaced by what is given.
    kept = [
        kept_components(one.folder) if k < stay else components_of(one.folder)
        for k, one in enumerate(entries)
    ]
    vaes = _arrange_vaes(entries, given, own, kept, found)
    encoders, entries = _arrange_texts(entries, given, own, kept, found)
    parts = vaes | encoders
    for name in sorted(parts.keys() - set(COMPONENTS)):
        found.differ(str(parts[name]), f"is one too many; {MOST_ENCODERS} of a kind are stored")
    return parts, entries


def _arrange_vaes(
    entries: Sequence[Entry],
    given: Mapping[str, Path],
    own: Mapping[str, Path],
    kept: Sequence[Mapping[str, Path]],
    found: Findings,
) -> dict[str, Path]:
    spaces, named = identities(entries, "vae"), given.get("vae")
    groups = [space for space in dict.fromkeys(spaces) if space is not None]
    known = [folder for name, folder in own.items() if name.startswith("vae")]
    known += [one["vae"] for one in kept if "vae" in one]
    known = known if named is None else [named, *known]
    parts = dict[str, Path]()
    for number, space in enumerate(groups):
        chosen = next((folder for folder in known if _is_of(space, folder)), None)
        if len(groups) == 1 and known and (chosen is None or named is not None):
            chosen = known[0]
        if chosen is not None:
            of = [one for one, its in zip(entries, spaces, strict=True) if its == space]
            _compare_vae(of, chosen, found)
            parts[numbered("vae", number)] = chosen
    if named is not None and named not in parts.values():
        found.differ(str(named), "is the VAE of none of these experts; leave it out")
    return parts


def _is_of(space: Hashable, folder: Path) -> bool:
    """True for the VAE of latents of this identity, or one that could be it."""
    vae = vae_facts(folder)
    return space.misfit(vae) is None if isinstance(space, UnreadVae) else vae == space


def _compare_vae(entries: Sequence[Entry], folder: Path, found: Findings) -> None:
    """Compare a VAE with what experts of its latents record."""
    vae, name = vae_facts(folder), str(folder)
    channels = read_config(folder).get("latent_channels", _LATENT_CHANNELS)
    for one in entries:
        record = one.record
        if channels != record.sample_shape[0]:
            found.differ(name, f"{channels} latent channels, and {one.name} has {record.sample_shape[0]}")
        if (unread := record.unread_vae) is not None:
            if (misfit := unread.misfit(vae)) is not None:
                remedy = "convert it anew beside a VAE of its own that can be read"
                found.differ(name, f"{misfit}, but {one.name} has an {unread}; {remedy}")
            elif unread.fingerprint != vae.fingerprint:
                found.note(f"{one.name} has an {unread}; {name} is taken on trust")
        elif record.vae is None:
            found.note(f"{one.name} does not record its VAE; taken on trust")
            if not replaced_by(vae.kind) and record.latent_scale not in (None, vae.scale):
                found.differ(name, f"scale {vae.scale:g}, and {one.name} has {record.latent_scale:g}")
        elif record.vae.kind != vae.kind:
            # A distilled VAE of the same latents has other weights and another scale of its own.
            kinds = f"{name} is an {vae.kind}, and {one.name} records an {record.vae.kind}"
            found.note(f"{kinds}; taken on trust")
        else:
            for key in ("fingerprint", "scale", "shift"):
                if (mine := getattr(vae, key)) != (theirs := getattr(record.vae, key)):
                    found.differ(name, f"{key} {mine}, and {one.name} records {theirs}")


def _arrange_texts(
    entries: Sequence[Entry],
    given: Mapping[str, Path],
    own: Mapping[str, Path],
    kept: Sequence[Mapping[str, Path]],
    found: Findings,
) -> tuple[dict[str, Path], list[Entry]]:
    is_whole = "text_encoder" in given and several_in(given["text_encoder"]) is not None
    if not is_whole and ("text_encoder" in given) != ("tokenizer" in given):
        raise UsageError("`text_encoder` and `tokenizer` go together; pass both, or none")
    named, mine = _text_encoder(given), [_text_encoder(one) for one in kept]
    owned = [_text_encoder(own, number) for number in range(MOST_ENCODERS)]
    known = [part for part in (named, *owned, *mine) if part is not None]
    by_record = {part.record: part for part in reversed(known)}
    takers = [one for one in entries if takes_text(one.record)]
    silent = [one for one in takers if one.record.text_encoder is None]
    taken = [one.member.text_encoder for one in entries]
    for k, one in enumerate(entries):
        if one not in silent:
            continue
        trusted = taken[k]
        part = mine[k] or named or (by_record.get(trusted) if trusted else next(iter(known), None))
        if part is not None or trusted is not None or len(silent) < len(takers):
            found.note(f"{one.name} does not record its text encoder; taken on trust")
        if part is not None:
            config = read_config(one.folder)
            width = families()[config["_class_name"]].text_width(config)
            if width not in (None, part.record.width):
                width_of = f"tokens {part.record.width} wide"
                found.differ(str(part.folder), f"{width_of}, and {one.name} takes {width}")
            taken[k] = part.record
    entries = with_decisions(entries, text_encoder=taken)
    if len(takers) > 1 and not known and len(silent) == len(takers):
        found.note("no expert records its text encoder; that all share one is taken on trust")
    order = [one for one in dict.fromkeys(identities(entries, "text_encoder")) if one is not None]
    topics = topics_of([replace(one, topic=Topic.load(one.folder)) for one in entries], found)
    if topics is not None:
        reader = next((one for one in known if one.record.fingerprint == topics.fingerprint), None)
        if reader is None:
            found.note("prompts are routed by p(k): the topics' text encoder is missing (`text_encoder`)")
        elif reader.record not in order:
            order.append(reader.record)
    encoders = {}
    for number, identity in enumerate(order):
        if isinstance(identity, TextEncoderRecord) and (part := by_record.get(identity)) is not None:
            encoders[numbered("text_encoder", number)] = part.folder
            if part.tokenizer is not None:
                encoders[numbered("tokenizer", number)] = part.tokenizer
    if named is not None and named.folder not in encoders.values():
        found.differ(str(named.folder), "is the text encoder of none of these experts; leave it out")
    return encoders, entries


def _text_encoder(parts: Mapping[str, Path], number: int = 0) -> _TextEncoder | None:
    folder, tokenizer = (parts.get(numbered(name, number)) for name in ("text_encoder", "tokenizer"))
    if folder is None or (tokenizer is None and several_in(folder) is None):
        return None
    return _TextEncoder(folder, tokenizer, texts_facts(folder, tokenizer))
