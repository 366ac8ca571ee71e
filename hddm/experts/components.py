"""The VAEs, text encoders and tokenizers of an ensemble: which of those at hand its experts get.

Each one is stored once, by its number (`hddm.experts.parts.numbers_of`): the first are called ``vae`` and
``text_encoder``, second ones ``vae_2`` and ``text_encoder_2``.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hddm.experts.ensemble_records import (
    COMPONENTS,
    KEPT,
    MOST_ENCODERS,
    held_by,
    kept_components,
    numbered,
)
from hddm.experts.expert import Expert, experts_in, with_decisions
from hddm.experts.parts import numbers_of, topics_of, vaes_of
from hddm.fit import Findings
from hddm.networks.components import read_config
from hddm.networks.encoders import T5, replaced_by
from hddm.networks.families import families, pipelines
from hddm.networks.identity import TextEncoderRecord, UnreadVae
from hddm.networks.prompts import refuse_without_tokenizer, several_in, texts_record_of
from hddm.networks.vae import vae_record_of
from hddm.prompt_router import Topic
from hddm.utils.errors import an, in_words
from hddm.utils.files import inside
from hddm.utils.records import ENSEMBLE_FILE, EXPERT_FILE

VAE, TEXT_ENCODER = "vae", "text_encoder"
_LATENT_CHANNELS = 4
"""Default of the class, for configs that leave it out."""


def adding_command(model: object, missing: Iterable[str], is_expert: bool, trusts: bool) -> str:
    """The command that adds components of the kinds ``missing`` to an expert or ensemble, all at once.

    It ``trusts`` them where no record says which ones belong to it.
    """
    words = ["hddm assemble", str(model)]
    for name in missing:
        words.append(f"--{name.replace('_', '-')} FOLDER")
    if trusts:
        words.append("--trust-components")
    if is_expert:
        words.append("--out ENSEMBLE")
    return " ".join(words)


def how_to_add(folder: Path, missing: Sequence[str], trusts: bool) -> str:
    """The `adding_command` for the model in ``folder``; for the Paris release, where to put them."""
    is_expert = (folder / EXPERT_FILE).exists()
    if is_expert or (folder / ENSEMBLE_FILE).exists():
        return adding_command(folder, missing, is_expert, trusts)
    return f"as {in_words([str(folder / name) for name in missing])}"


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
    whole, record, k = held
    experts = experts_in(whole, record)
    for name in KEPT:
        number = numbers_of(experts, name).of[k]
        place = inside(whole, numbered(name, number))
        if number >= 0 and place.is_dir():
            found.setdefault(name, place)
    return found


def arrange(
    experts: Sequence[Expert],
    given: Mapping[str, Path],
    own: Mapping[str, Path],
    stay: int,
    found: Findings,
) -> tuple[dict[str, Path], list[Expert]]:
    """Choose components by name: of those ``given``, of the ensemble's ``own``, and of what experts keep.

    The first ``stay`` experts are the ensemble's.
    An expert that records its VAE or text encoder gets that one. An expert that does not gets what it keeps
    itself, else what is given, else what it was taken to have, else the first; the returned experts say so.
    Differences and notes go into ``found``.
    """
    # What the ensemble has for an expert that stays may be replaced by what is given.
    kept = [kept_components(one.place) for one in experts[:stay]]
    kept += [components_of(one.place) for one in experts[stay:]]
    vaes, experts = _arrange_vaes(experts, given, own, kept, stay, found)
    encoders, experts = _arrange_texts(experts, given, own, kept, stay, found)
    components = vaes | encoders
    for name in sorted(components.keys() - set(COMPONENTS)):
        found.differ(
            str(components[name]), f"is one too many; {MOST_ENCODERS} of a kind are stored"
        )
    trusted = []
    for one in experts:
        now = found.trusted.get(one.name, [])
        trusted.append(tuple(dict.fromkeys([*one.member.trusted, *now])))
    return components, with_decisions(experts, trusted=trusted)


def _arrange_vaes(
    experts: Sequence[Expert],
    given: Mapping[str, Path],
    own: Mapping[str, Path],
    kept: Sequence[Mapping[str, Path]],
    stay: int,
    found: Findings,
) -> tuple[dict[str, Path], list[Expert]]:
    spaces, named = vaes_of(experts), given.get("vae")
    groups = numbers_of(experts, "vae").distinct
    of_latents = [one for one in experts if one.record.space == "latents"]
    known = [folder for name, folder in own.items() if name.startswith("vae")]
    known += [one["vae"] for one in kept if "vae" in one]
    known = known if named is None else [named, *known]
    vaes, taken = dict[str, Path](), [one.member.vae for one in experts]
    for number, space in enumerate(groups):
        chosen = next((folder for folder in known if _is_of(space, folder)), None)
        if len(groups) == 1 and known and (chosen is None or named is not None):
            chosen = known[0]
        if chosen is None and named is not None and isinstance(space, str):
            channels = {
                one.record.sample_shape[0] for k, one in enumerate(experts) if spaces[k] == space
            }
            chosen = named if channels == {_channels_of(named)} else None
        if chosen is not None:
            vaes[numbered(VAE, number)] = chosen
        for k, one in enumerate(experts):
            if spaces[k] != space:
                continue
            # What an ensemble has for its own experts was decided when they came.
            is_decided = k < stay and (chosen is None or chosen != named)
            if chosen is not None:
                _compare_vae(one, chosen, is_decided, found)
                if one.record.latent_space is None:
                    taken[k] = vae_record_of(chosen)
            elif one.record.latent_space is None and not is_decided and len(of_latents) > 1:
                found.trust(one.name, VAE, "does not record its VAE", "it is that of the others")
    if named is not None and named not in vaes.values():
        found.differ(str(named), "is the VAE of none of these experts; leave it out")
    return vaes, with_decisions(experts, vae=taken)


def _channels_of(vae: Path) -> int:
    """Channels of the latents of a VAE."""
    channels: int = read_config(vae).get("latent_channels", _LATENT_CHANNELS)
    return channels


def _is_of(space: Hashable, folder: Path) -> bool:
    """True for the VAE of latents of this identity, or one that could be it."""
    vae = vae_record_of(folder)
    return space.misfit(vae) is None if isinstance(space, UnreadVae) else vae == space


def _compare_vae(expert: Expert, folder: Path, is_decided: bool, found: Findings) -> None:
    """Compare a VAE with what an expert of latents records; ``is_decided`` if the expert had it before."""
    vae, name, record = vae_record_of(folder), str(folder), expert.record
    channels = _channels_of(folder)
    if channels != record.sample_shape[0]:
        found.differ(
            name, f"{channels} latent channels, and {expert.name} has {record.sample_shape[0]}"
        )
    if record.unread_vae is not None:
        _compare_unread(expert, record.unread_vae, folder, is_decided, found)
    elif record.vae is None:
        if not is_decided:
            found.trust(expert.name, VAE, "does not record its VAE", f"it is that in {name}")
        if not replaced_by(vae.kind) and record.latent_scale not in (None, vae.scale):
            found.differ(
                name, f"scale {vae.scale:g}, and {expert.name} has {record.latent_scale:g}"
            )
    elif record.vae.mean and vae.mean != record.vae.mean:
        found.differ(
            name,
            f"does not scale each channel of latents as {expert.name} records it; convert that anew "
            "beside its own VAE",
        )
    elif _is_distilled(vae.kind, record.vae.kind):
        # A distilled VAE of the same latents has other weights and another scale of its own.
        kinds = f"{name} is {an(vae.kind)}, and {expert.name} records {an(record.vae.kind)}"
        found.note(f"{kinds}; taken on trust")
    else:
        for key in ("kind", "fingerprint", "scale", "shift", "mean", "deviation"):
            mine, theirs = getattr(vae, key), getattr(record.vae, key)
            if mine != theirs:
                found.differ(name, f"{key} {mine}, and {expert.name} records {theirs}")


def _is_distilled(one: str, other: str) -> bool:
    """True if VAEs of one of these classes are distilled from the other's."""
    return one in replaced_by(other) or other in replaced_by(one)


def _compare_unread(
    expert: Expert, unread: UnreadVae, folder: Path, is_decided: bool, found: Findings
) -> None:
    """Compare a VAE with one that could not be read when ``expert`` was converted."""
    vae, name = vae_record_of(folder), str(folder)
    misfit = unread.misfit(vae)
    if misfit is not None:
        remedy = "convert it anew beside a VAE of its own that can be read"
        found.differ(name, f"{misfit}, but {expert.name} has an {unread}; {remedy}")
    elif unread.fingerprint != vae.fingerprint and not is_decided:
        found.trust(expert.name, VAE, f"has an {unread}", f"it is that in {name}")


def _arrange_texts(
    experts: Sequence[Expert],
    given: Mapping[str, Path],
    own: Mapping[str, Path],
    kept: Sequence[Mapping[str, Path]],
    stay: int,
    found: Findings,
) -> tuple[dict[str, Path], list[Expert]]:
    refuse_without_tokenizer(given.get("text_encoder"), given.get("tokenizer"))
    named, mine = _text_encoder(given), [_text_encoder(one) for one in kept]
    owned = [_text_encoder(own, number) for number in range(MOST_ENCODERS)]
    known = [one for one in (named, *owned, *mine) if one is not None]
    by_record = {one.record: one for one in reversed(known)}
    takers = [k for k, one in enumerate(experts) if one.record.takes_text]
    silent = [k for k in takers if experts[k].record.text_encoder is None]
    taken = [one.member.text_encoder for one in experts]
    for k in silent:
        trusted = taken[k]
        reader = mine[k] or named
        if reader is None and trusted is not None:
            reader = by_record.get(trusted)
        elif reader is None and known:
            reader = known[0]
        # What an ensemble has for its own experts was decided when they came.
        is_decided = reader is not None and reader == mine[k]
        if k < stay and (reader is None or reader != named):
            is_decided = True
        if reader is not None:
            config = read_config(experts[k].place)
            _compare_width(experts[k], config, reader, found)
            _compare_pipeline(experts[k], config, reader, found)
            _compare_encoder(experts[k], reader, is_decided, found)
            taken[k] = reader.record
        elif len(takers) > 1 and not is_decided:
            found.trust(
                experts[k].name,
                TEXT_ENCODER,
                "does not record its text encoder",
                "it is that of the others",
            )
    experts = with_decisions(experts, text_encoder=taken)
    order = list(numbers_of(experts, "text_encoder").distinct)
    topics = topics_of([replace(one, topic=Topic.load(one.place)) for one in experts], found)
    if topics is not None:
        readers = [one.record for one in known if one.record.fingerprint == topics.fingerprint]
        if not readers:
            found.note(
                "prompts are routed by p(k): the topics' text encoder is missing (`text_encoder`)"
            )
        elif readers[0] not in order:
            order.append(readers[0])
    encoders = {}
    for number, identity in enumerate(order):
        if isinstance(identity, TextEncoderRecord) and identity in by_record:
            chosen = by_record[identity]
            encoders[numbered("text_encoder", number)] = chosen.folder
            if chosen.tokenizer is not None:
                encoders[numbered("tokenizer", number)] = chosen.tokenizer
    if named is not None and named.folder not in encoders.values():
        found.differ(
            str(named.folder), "is the text encoder of none of these experts; leave it out"
        )
    return encoders, experts


def _compare_encoder(
    expert: Expert, encoder: _TextEncoder, is_decided: bool, found: Findings
) -> None:
    """Compare a text encoder with one that ``expert`` does not record, or that could not be read."""
    unread, name = expert.record.unread_text_encoder, str(encoder.folder)
    misfit = None if unread is None else unread.misfit(encoder.record)
    if misfit is not None:
        remedy = "convert it anew beside a text encoder of its own that can be read"
        found.differ(name, f"{misfit}, but {expert.name} has an {unread}; {remedy}")
    elif is_decided or (unread is not None and unread.fingerprint is not None):
        return
    elif unread is not None:
        found.trust(expert.name, TEXT_ENCODER, f"has an {unread}", f"it is that in {name}")
    else:
        text = "does not record its text encoder"
        found.trust(expert.name, TEXT_ENCODER, text, f"it is that in {name}")


def _compare_width(
    expert: Expert, config: Mapping[str, Any], encoder: _TextEncoder, found: Findings
) -> None:
    """Compare the width of a text encoder's tokens with what an expert's network, of ``config``, takes."""
    width = families()[config["_class_name"]].text_width(config)
    if width not in (None, encoder.record.width):
        tokens = f"tokens {encoder.record.width} wide"
        found.differ(str(encoder.folder), f"{tokens}, and {expert.name} takes {width}")


def _compare_pipeline(
    expert: Expert, config: Mapping[str, Any], encoder: _TextEncoder, found: Findings
) -> None:
    """Compare the pipeline that reads a text encoder with that around an expert's network, of ``config``.

    Pipelines read the same T5 in their own ways: its number of tokens, upper case, and what of the padding
    counts. One outside of a pipeline's folder is read as its tokenizer says, which is none of theirs.
    """
    family = families()[config["_class_name"]]
    if not family.pipelines:
        return
    pipeline = family.pipeline(config, encoder.record)
    has_reading = pipeline.prompts is not None or pipeline.t5_tokens is not None
    if not has_reading or encoder.record.kind == pipeline.name:
        return
    folder, other = str(encoder.folder), pipelines().get(encoder.record.kind)
    takes = f"{expert.name} takes prompts of {pipeline.name}"
    remedy = "name the text encoder in a folder of that pipeline, below its model_index.json"
    if other is not None:
        found.differ(folder, f"is read as {other.name} reads it, and {takes}; {remedy}")
    elif encoder.record.kind == T5.name:
        found.note(
            f"{folder}: prompts are read as its tokenizer says, and {takes}, which may read them in lower "
            f"case, or more of them; {remedy}"
        )


def _text_encoder(components: Mapping[str, Path], number: int = 0) -> _TextEncoder | None:
    folder = components.get(numbered("text_encoder", number))
    tokenizer = components.get(numbered("tokenizer", number))
    if folder is None or (tokenizer is None and several_in(folder) is None):
        return None
    return _TextEncoder(folder, tokenizer, texts_record_of(folder, tokenizer))
