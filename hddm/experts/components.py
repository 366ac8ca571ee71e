"""VAEs and text encoders of an ensemble: which of them serve which expert, and which reads the prompts.

Experts of one latent space share a VAE, and experts of one text encoder share that: each is stored once. The
first is called ``vae`` and ``text_encoder``, a second one ``vae_2`` and ``text_encoder_2``.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hddm.experts.compatibility import Findings, Named, takes_text
from hddm.experts.ensemble_folders import MOST_ENCODERS, components_of, kept_components, numbered
from hddm.networks.identity import TextEncoderRecord, VaeRecord
from hddm.networks.text_encoder import read_tokenizer, text_encoder_facts
from hddm.networks.vae import read_config, vae_facts
from hddm.networks.wrappers import text_width
from hddm.routers import Topic
from hddm.utils.errors import UsageError

_LATENT_CHANNELS = 4
"""Default of the class, for configs that leave it out."""


@dataclass(frozen=True)
class Arranged:
    """Folders of components by name, and the number of each expert's.

    ``vaes`` has -1 for an expert of pixels; ``topics`` is the number of the text encoder that prompts are
    routed by, None where they are not. Empty tuples stand for the first of all.
    """

    folders: Mapping[str, Path]
    texts: tuple[int, ...] = ()
    vaes: tuple[int, ...] = ()
    topics: int | None = None


@dataclass(frozen=True)
class _TextEncoder:
    """A text encoder that experts may use, with its tokenizer, and what it is."""

    folder: Path
    tokenizer: Path
    record: TextEncoderRecord


def arrange(
    folders: Sequence[Path],
    experts: Sequence[Named],
    given: Mapping[str, Path],
    own: Mapping[str, Path],
    found: Findings,
    before: Sequence[int | None] = (),
) -> Arranged:
    """Choose components for experts, of those ``given``, of the ensemble's ``own``, and of what experts keep.

    An expert that records its VAE or text encoder gets the one that is recorded; one that does not gets what
    it keeps itself, else the text encoder of the number that it had ``before``, else the first, on trust.
    Differences and notes go into ``found``.
    """
    vaes, parts = _arrange_vaes(folders, experts, given, own, found)
    texts, topics, encoders = _arrange_texts(folders, experts, given, own, found, before)
    return Arranged(
        {**parts, **encoders},
        () if set(texts) <= {0} else tuple(texts),
        () if set(vaes) <= {0} or set(vaes) <= {-1} else tuple(vaes),
        topics,
    )


def _arrange_vaes(
    folders: Sequence[Path],
    experts: Sequence[Named],
    given: Mapping[str, Path],
    own: Mapping[str, Path],
    found: Findings,
) -> tuple[list[int], dict[str, Path]]:
    latent = [k for k, (_, record) in enumerate(experts) if record.space == "latents"]
    if "vae" in given and not latent:
        found.differ(str(given["vae"]), "a VAE, and these experts make pixels; leave it out")
        return [-1] * len(experts), {}
    kinds: dict[VaeRecord | None, list[int]] = {}
    for k in latent:
        kinds.setdefault(experts[k][1].vae, []).append(k)
    # An expert that records none belongs to the first.
    unknown = kinds.pop(None, [])
    groups = list(kinds.items()) or [(None, [])]
    groups[0][1].extend(unknown)
    kept = [parts["vae"] for parts in map(components_of, folders) if "vae" in parts]
    known = [given["vae"]] if "vae" in given else []
    known += [folder for name, folder in own.items() if name.startswith("vae")] + kept
    numbers, parts = [-1] * len(experts), dict[str, Path]()
    for number, (record, members) in enumerate(groups):
        for k in members:
            numbers[k] = number
        chosen = next((folder for folder in known if vae_facts(folder) == record), None)
        if len(groups) == 1 and known and (chosen is None or "vae" in given):
            chosen = known[0]
        if chosen is not None and members:
            _compare_vae([experts[k] for k in members], chosen, found)
            parts[numbered("vae", number)] = chosen
    if "vae" in given and given["vae"] not in parts.values():
        found.differ(str(given["vae"]), "is the VAE of none of these experts; leave it out")
    if len(groups) > MOST_ENCODERS:
        found.differ(experts[groups[-1][1][0]][0], f"is of one VAE too many; {MOST_ENCODERS} are stored")
    return numbers, parts


def _compare_vae(experts: Sequence[Named], folder: Path, found: Findings) -> None:
    """Compare a VAE with what experts of its latents record."""
    vae, name = vae_facts(folder), str(folder)
    channels = read_config(folder).get("latent_channels", _LATENT_CHANNELS)
    for expert, record in experts:
        if channels != record.sample_shape[0]:
            found.differ(name, f"{channels} latent channels, and {expert} has {record.sample_shape[0]}")
        if record.vae is None:
            found.note(f"{expert} does not record its VAE; taken on trust")
            if vae.kind != "AutoencoderTiny" and record.latent_scale not in (None, vae.scale):
                found.differ(name, f"scale {vae.scale:g}, and {expert} has {record.latent_scale:g}")
        elif record.vae.kind != vae.kind:
            # A distilled VAE of the same latents has other weights and another scale of its own.
            found.note(f"{name} is an {vae.kind}, and {expert} records an {record.vae.kind}; taken on trust")
        else:
            _compare_keys(name, vae, expert, record.vae, ("fingerprint", "scale", "shift"), found)


def _compare_keys(
    name: str, mine: object, expert: str, theirs: object, keys: Sequence[str], found: Findings
) -> None:
    for key in keys:
        if getattr(mine, key) != getattr(theirs, key):
            found.differ(name, f"{key} {getattr(mine, key)}, and {expert} records {getattr(theirs, key)}")


def _arrange_texts(
    folders: Sequence[Path],
    experts: Sequence[Named],
    given: Mapping[str, Path],
    own: Mapping[str, Path],
    found: Findings,
    before: Sequence[int | None],
) -> tuple[list[int], int | None, dict[str, Path]]:
    if ("text_encoder" in given) != ("tokenizer" in given):
        raise UsageError("--text-encoder and --tokenizer go together; pass both, or none")
    names = ("text_encoder", "tokenizer")
    of_own = [
        {name: own[numbered(name, n)] for name in names if numbered(name, n) in own}
        for n in range(MOST_ENCODERS)
    ]
    sources = [given, *of_own]
    parts = [_text_part(one) for one in sources]
    # What the ensemble has for an expert that stays may be replaced by what is given.
    stays = [number is not None for number in before] or [False] * len(folders)
    for folder, is_here in zip(folders, stays, strict=True):
        parts.append(_text_part(kept_components(folder) if is_here else components_of(folder)))
    known = [part for part in parts if part is not None]
    kept = parts[len(sources) :]
    keys: dict[Hashable, int] = {}
    numbers, encoders = [0] * len(experts), dict[str, Path]()

    def place(key: Hashable, part: _TextEncoder | None) -> int:
        number = keys.setdefault(key, len(keys))
        if part is not None:
            encoders[numbered("text_encoder", number)] = part.folder
            encoders[numbered("tokenizer", number)] = part.tokenizer
        return number

    takers = [k for k, (_, record) in enumerate(experts) if takes_text(record)]
    for k in takers:
        name, record = experts[k]
        stated = record.text_encoder
        if stated is not None:
            part = next((one for one in known if one.record == stated), None)
            numbers[k] = place(stated, part)
            continue
        number = before[k] if before else None
        had = parts[0] or (None if number is None else parts[1 + number])
        part = kept[k] or had or next(iter(known), None)
        first = next((one for j in takers if (one := experts[j][1].text_encoder) is not None), None)
        if part is not None or first is not None:
            found.note(f"{name} does not record its text encoder; taken on trust")
        if part is None:
            numbers[k] = place(first, None)
            continue
        width = text_width(read_config(folders[k]))
        if width not in (None, part.record.width):
            found.differ(str(part.folder), f"tokens {part.record.width} wide, and {name} takes {width}")
        numbers[k] = place(part.record, part)
    if len(takers) > 1 and not known and all(experts[k][1].text_encoder is None for k in takers):
        found.note("no expert records its text encoder; that all share one is taken on trust")
    topics = _topics(folders, experts, found)
    number = None
    if topics is not None:
        reader = next((one for one in known if one.record.fingerprint == topics.fingerprint), None)
        if reader is None:
            found.note(
                "prompts are spread by the sizes of shards: the text encoder of the experts' topics is not "
                "here; name it by --text-encoder and --tokenizer"
            )
        else:
            number = place(reader.record, reader)
    if parts[0] is not None and parts[0].folder not in encoders.values():
        if not takers:
            found.differ(str(parts[0].folder), "a text encoder, and none of these experts takes text")
        for k in (k for k in takers if experts[k][1].text_encoder is not None):
            stated = experts[k][1].text_encoder
            keys_of = ("fingerprint", "width", "tokens")
            _compare_keys(str(parts[0].folder), parts[0].record, experts[k][0], stated, keys_of, found)
    if len(keys) > MOST_ENCODERS:
        found.differ(experts[takers[-1]][0], f"needs a text encoder too many; {MOST_ENCODERS} are stored")
    return numbers, number, encoders


def _text_part(parts: Mapping[str, Path]) -> _TextEncoder | None:
    if not {"text_encoder", "tokenizer"} <= parts.keys():
        return None
    folder, tokenizer = parts["text_encoder"], parts["tokenizer"]
    limit = read_tokenizer(tokenizer).model_max_length
    return _TextEncoder(folder, tokenizer, text_encoder_facts(folder, limit))


def _topics(folders: Sequence[Path], experts: Sequence[Named], found: Findings) -> TextEncoderRecord | None:
    """The text encoder of the topics that route prompts; None where an expert of text has no topic."""
    known = {
        name: topic.record
        for folder, (name, _) in zip(folders, experts, strict=True)
        if (topic := Topic.load(folder)) is not None and topic.record is not None
    }
    if not known or len(experts) == 1:
        return None
    first = next(iter(known))
    for name, record in known.items():
        if record.text_encoder.fingerprint != known[first].text_encoder.fingerprint:
            found.differ(name, f"is described by another text encoder than {first}; describe both by one")
    if silent := [name for name, record in experts if takes_text(record) and name not in known]:
        found.note(
            f"prompts are spread by the sizes of shards, since {', '.join(silent)} has no topic; say by hddm "
            "describe what its captions are about"
        )
        return None
    silent = [name for name, record in experts if not takes_text(record) and not record.classes]
    if unasked := [name for name in silent if name not in known]:
        found.note(f"no prompt is for {', '.join(unasked)}, which has no topic")
    return known[first].text_encoder
