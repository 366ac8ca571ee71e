"""VAEs and text encoders of an ensemble: which of them are stored, for which experts.

Experts of one latent space share a VAE, and experts of one text encoder share that: each is stored once. The
first is called ``vae`` and ``text_encoder``, a second one ``vae_2`` and ``text_encoder_2``
(`hddm.experts.parts.numbers_of`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hddm.experts.compatibility import Entry, Findings, decide, read_entries, takes_text
from hddm.experts.ensemble_folders import held_by, kept_components
from hddm.experts.model_index import KEPT, MOST_ENCODERS, numbered
from hddm.experts.parts import identities, numbers_of, topics_of
from hddm.networks.identity import TextEncoderRecord
from hddm.networks.prompts import family_in, texts_facts
from hddm.networks.vae import read_config, vae_facts
from hddm.networks.wrappers import text_width
from hddm.routers import Topic
from hddm.utils.errors import UsageError
from hddm.utils.files import inside

_LATENT_CHANNELS = 4
"""Default of the class, for configs that leave it out."""


class _TextEncoder(NamedTuple):
    """A text encoder that experts may use, with its tokenizer, and what it is."""

    folder: Path
    tokenizer: Path | None
    record: TextEncoderRecord


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
    return vaes | encoders, entries


def _arrange_vaes(
    entries: Sequence[Entry],
    given: Mapping[str, Path],
    own: Mapping[str, Path],
    kept: Sequence[Mapping[str, Path]],
    found: Findings,
) -> dict[str, Path]:
    spaces, named = identities(entries, "vae"), given.get("vae")
    groups = [space for space in dict.fromkeys(spaces) if space is not None]
    if named is not None and not groups:
        found.differ(str(named), "a VAE, and these experts make pixels; leave it out")
        return {}
    known = [folder for name, folder in own.items() if name.startswith("vae")]
    known += [one["vae"] for one in kept if "vae" in one]
    known = known if named is None else [named, *known]
    parts = dict[str, Path]()
    for number, space in enumerate(groups):
        chosen = next((folder for folder in known if vae_facts(folder) == space), None)
        if len(groups) == 1 and known and (chosen is None or named is not None):
            chosen = known[0]
        if chosen is not None:
            of = [one for one, its in zip(entries, spaces, strict=True) if its == space]
            _compare_vae(of, chosen, found)
            parts[numbered("vae", number)] = chosen
    if named is not None and named not in parts.values():
        found.differ(str(named), "is the VAE of none of these experts; leave it out")
    if len(groups) > MOST_ENCODERS:
        last = entries[spaces.index(groups[-1])].name
        found.differ(last, f"has one VAE too many; {MOST_ENCODERS} are stored")
    return parts


def _compare_vae(entries: Sequence[Entry], folder: Path, found: Findings) -> None:
    """Compare a VAE with what experts of its latents record."""
    vae, name = vae_facts(folder), str(folder)
    channels = read_config(folder).get("latent_channels", _LATENT_CHANNELS)
    for one in entries:
        record = one.record
        if channels != record.sample_shape[0]:
            found.differ(name, f"{channels} latent channels, and {one.name} has {record.sample_shape[0]}")
        if record.vae is None:
            found.note(f"{one.name} does not record its VAE; taken on trust")
            if vae.kind != "AutoencoderTiny" and record.latent_scale not in (None, vae.scale):
                found.differ(name, f"scale {vae.scale:g}, and {one.name} has {record.latent_scale:g}")
        elif record.vae.kind != vae.kind:
            # A distilled VAE of the same latents has other weights and another scale of its own.
            kinds = f"{name} is an {vae.kind}, and {one.name} records an {record.vae.kind}"
            found.note(f"{kinds}; taken on trust")
        else:
            _compare_keys(name, vae, one.name, record.vae, ("fingerprint", "scale", "shift"), found)


def _compare_keys(
    name: str, mine: object, expert: str, theirs: object, keys: Sequence[str], found: Findings
) -> None:
    for key in keys:
        if getattr(mine, key) != getattr(theirs, key):
            found.differ(name, f"{key} {getattr(mine, key)}, and {expert} records {getattr(theirs, key)}")


def _arrange_texts(
    entries: Sequence[Entry],
    given: Mapping[str, Path],
    own: Mapping[str, Path],
    kept: Sequence[Mapping[str, Path]],
    found: Findings,
) -> tuple[dict[str, Path], list[Entry]]:
    is_whole = "text_encoder" in given and family_in(given["text_encoder"]) is not None
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
            width = text_width(read_config(one.folder))
            if width not in (None, part.record.width):
                width_of = f"tokens {part.record.width} wide"
                found.differ(str(part.folder), f"{width_of}, and {one.name} takes {width}")
            taken[k] = part.record
    entries = decide(entries, text_encoder=taken)
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
        if not takers:
            found.differ(str(named.folder), "a text encoder, and none of these experts takes text")
        for one in takers:
            if (stated := one.record.text_encoder) is not None:
                keys = ("fingerprint", "width", "tokens")
                _compare_keys(str(named.folder), named.record, one.name, stated, keys, found)
    if len(order) > MOST_ENCODERS:
        found.differ(takers[-1].name, f"needs one text encoder too many; {MOST_ENCODERS} are stored")
    return encoders, entries


def _text_encoder(parts: Mapping[str, Path], number: int = 0) -> _TextEncoder | None:
    folder, tokenizer = (parts.get(numbered(name, number)) for name in ("text_encoder", "tokenizer"))
    if folder is None or (tokenizer is None and family_in(folder) is None):
        return None
    return _TextEncoder(folder, tokenizer, texts_facts(folder, tokenizer))
