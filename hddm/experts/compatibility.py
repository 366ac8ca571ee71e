"""Experts among others: what a user decides on them, and whether they fit together, by their records.

They are compared before weights are read. All differences are collected and reported together, one line per
part. A value that one part records and another does not leads to a note, not to a difference.
"""

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hddm.data.shard_records import overlap
from hddm.experts.ensemble_folders import label
from hddm.experts.expert import Expert, with_decisions
from hddm.experts.records import ExpertRecord, RouterRecord
from hddm.networks.identity import UnreadVae, VaeRecord
from hddm.utils.errors import HddmError, UsageError, did_you_mean, one_line
from hddm.utils.files import read_yaml
from hddm.utils.records import WHOLE, composed
from hddm.velocity import misfit_of

SHARE_TOLERANCE = 1e-6
Value = TypeVar("Value")

ClassNames = Sequence[str] | Mapping[int | str, str]
"""Names of all of an expert's classes, or new ones of some, by number or by the name that they have."""


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


def identities(experts: Sequence[Expert], name: str) -> list[Hashable]:
    """Record of each expert's ``vae`` or ``text_encoder``; None for an expert of pixels, or without text.

    An expert that does not record its own has the first that is known, or else one called ``unknown``. One
    whose VAE could not be read has another expert's that could be it, or else that one.
    """
    is_text = name == "text_encoder"
    needs = [one.record.takes_text if is_text else one.record.space == "latents" for one in experts]
    known = [getattr(one.record, name) or getattr(one.member, name) for one in experts]
    if not is_text:
        read = [own for own in known if isinstance(own, VaeRecord)]
        known = [own or _vae_among(one.record, read) for own, one in zip(known, experts, strict=True)]
    first = next((own for own, need in zip(known, needs, strict=True) if need and own), "unknown")
    return [own or first if need else None for own, need in zip(known, needs, strict=True)]


def _vae_among(record: ExpertRecord, read: Sequence[VaeRecord]) -> VaeRecord | UnreadVae | None:
    """The first of the VAEs ``read`` that could be one that was not, else that one."""
    unread = record.unread_vae
    if unread is None:
        return None
    return next((vae for vae in read if unread.misfit(vae) is None), unread)


def kinds_of(experts: Sequence[Expert]) -> list[Hashable]:
    """Shape, space and VAE of each expert's samples; samples of one kind can be mixed."""
    vaes = identities(experts, "vae")
    return [(one.record.sample_shape, one.record.space, vae) for one, vae in zip(experts, vaes, strict=True)]


def domains_of(experts: Sequence[Expert]) -> tuple[int, ...]:
    """For each expert the index of the first expert of its domain.

    A domain was set by hand, or has the experts of one shard, each for a part of t.
    """
    keys: list[Hashable] = []
    for k, one in enumerate(experts):
        shard = None if one.record.noise_range == WHOLE else one.record.shard
        keys.append(("set", one.member.domain) if one.member.domain else k if shard is None else shard.hash)
    return tuple(map(keys.index, keys))


def with_settings(
    experts: Sequence[Expert],
    share: Mapping[str, float] | None,
    classes: Path | Mapping[str, ClassNames] | None,
    domain: Sequence[Sequence[str]],
) -> list[Expert]:
    """``experts`` with the shares, classes and domains of these experts, named as in `index_of`.

    ``classes`` may be in a file (`read_classes`).
    Shares of a domain's experts are added, and divided equally among them. A class that is not mentioned
    keeps its name. Raises `HddmError` for a key of no expert, or of several, for names that do not fit the
    classes that an expert takes, and for shares that do not sum to 1.
    """
    classes = read_classes(classes) if isinstance(classes, Path) else classes
    names = _by_index(classes, experts, "`classes`")
    experts = with_decisions(
        experts,
        classes=[
            _names_of(names[k], one) if k in names else one.member.classes for k, one in enumerate(experts)
        ],
    )
    groups = [[index_of(name, experts, "`domain`") for name in group] for group in domain]
    taken = [one.member.domain for one in experts]
    broken = {taken[k] for group in groups for k in group}
    taken = [None if one in broken else one for one in taken]
    for group in groups:
        text = " + ".join(str(experts[k].member.name) for k in group)
        while text in taken:
            text += " '"
        for k in group:
            taken[k] = text
    experts = with_decisions(experts, domain=taken)
    domains, shares = domains_of(experts), _by_index(share, experts, "`share`")
    before = [one.member.share for one in experts]
    known = [one for one in before if one is not None]
    now = _spread([shares.get(k) for k in range(len(experts))], domains)
    if not shares and len(known) == len(experts) and math.fsum(known) > 0:
        now = [one / math.fsum(known) for one in known]
    now = _spread([old if new is None else new for new, old in zip(now, before, strict=True)], domains)
    _check_shares(experts, now)
    return with_decisions(experts, share=now)


def _spread(shares: Sequence[float | None], domains: Sequence[int]) -> list[float | None]:
    """Shares of domains (the sum over a domain's experts), divided equally among the experts."""
    found: list[float | None] = []
    for domain in domains:
        own = [share for share, other in zip(shares, domains, strict=True) if other == domain]
        known = [share for share in own if share is not None]
        found.append(math.fsum(known) / len(own) if known else None)
    return found


def _check_shares(experts: Sequence[Expert], shares: Sequence[float | None]) -> None:
    free = [one.name for one, share in zip(experts, shares, strict=True) if share is None]
    total = math.fsum(share for share in shares if share is not None)
    if free and total > 1 - SHARE_TOLERANCE:
        raise UsageError(f"`share`: the shares sum to {total:g} and leave nothing for {', '.join(free)}")
    if not free and abs(total - 1) > SHARE_TOLERANCE:
        raise UsageError(f"`share`: the shares of all experts sum to {total:g}; they must sum to 1")


def _by_index(given: Mapping[str, Value] | None, experts: Sequence[Expert], option: str) -> dict[int, Value]:
    """Values by names of experts (`index_of`), by their indices; `HddmError` for an expert named twice."""
    found: dict[int, Value] = {}
    for name, value in (given or {}).items():
        if (k := index_of(name, experts, option)) in found:
            raise HddmError(f"{option} {one_line(name, 60)}: {experts[k].name} is named twice; name it once")
        found[k] = value
    return found


def index_of(name: str, experts: Sequence[Expert], option: str) -> int:
    """Index of an expert by its folder, the end of its path, its name in the ensemble, or its number.

    Digits alone are no name. Raises `HddmError` for no expert, and for several.
    """
    full, steps = Path(name).resolve(), Path(name).parts
    found = [k for k, one in enumerate(experts) if one.place.resolve() == full]
    found = found or [
        k
        for k, one in enumerate(experts)
        if one.place.parts[-len(steps) :] == steps or (name == one.member.name and not name.isdecimal())
    ]
    found = found or [k for k in range(len(experts)) if str(k) == name]
    if len(found) != 1:
        which = "no expert" if not found else f"{len(found)} experts"
        known = ", ".join(label(one.name, one.member.name or one.name) for one in experts)
        raise HddmError(f"{option} {one_line(name, 60)}: names {which}; choose one of {known}")
    return found[0]


def read_classes(path: Path) -> dict[str, ClassNames]:
    """Read names of classes by expert from a YAML or JSON file; `HddmError` for anything but names.

    experts/dit: {207: golden retriever, 281: tabby}
    experts/mine: [tabby, siamese]
    experts/theirs: {car: automobile}
    """
    classes: dict[str, ClassNames] = {}
    for expert, names in read_yaml(path).items():
        origin = f"{path}: {one_line(expert, 60)}"
        listed = dict(enumerate(names)) if isinstance(names, list) else names
        values = listed.values() if isinstance(listed, dict) else [None]
        if any(isinstance(name, bool | list | dict | None) for name in values):
            raise HddmError(f"{origin} must have a list of names, or classes with names")
        named: dict[int | str, str] = {
            int(key) if str(key).isdecimal() else composed(str(key)): composed(str(name))
            for key, name in listed.items()
        }
        classes[expert] = list(named.values()) if isinstance(names, list) else named
    return classes


def _names_of(given: ClassNames, expert: Expert) -> tuple[str, ...]:
    """Names of all of an expert's classes, where ``given`` has them all, or new ones of some."""
    known, origin = expert.classes, f"`classes` {expert.name}"
    size = len(known) or expert.record.null_class
    if isinstance(given, Mapping):
        names = dict(enumerate(known or map(str, range(size or 0))))
        numbers = {name: number for number, name in enumerate(known)} | {number: number for number in names}
        if unknown := [one for one in given if one not in numbers]:
            what = f"{origin}: has {len(names)} classes, and no {one_line(unknown[0], 60)}"
            raise HddmError(what + did_you_mean(str(unknown[0]), known))
        given = [*(names | {numbers[one]: new for one, new in given.items()}).values()]
    number = size if expert.record.takes_classes and size is not None else len(given)
    if given and not len(set(given)) == len(given) == number:
        raise HddmError(f"{origin}: gives {len(set(given))} different names, and it takes {number} classes")
    return tuple(given)


def _qualities(record: ExpertRecord, vae: Hashable) -> dict[str, Any]:
    """Properties that experts must share; None where one does not record it, or it does not apply.

    ``vae`` is its identity among the others' (`identities`).
    """
    found: dict[str, Any] = {
        "sample_shape": record.sample_shape,
        "space": record.space,
        "latent_scale": record.latent_scale,
    }
    own = record.vae if record.unread_vae is None else vae
    if isinstance(own, VaeRecord):
        return found | {"VAE": own.fingerprint, "VAE's scale": own.scale, "VAE's shift": own.shift}
    return found | {"VAE": None if own is None else str(own), "VAE's scale": None, "VAE's shift": None}


def compare_experts(experts: Sequence[Expert], found: Findings, is_drawn: bool = False) -> None:
    """Record each expert's differences from the most common values, of equally common ones the first.

    Experts that are drawn, one per sample, may make samples of several kinds.
    """
    vaes = identities(experts, "vae")
    qualities = [_qualities(one.record, vae) for one, vae in zip(experts, vaes, strict=True)]
    for key in qualities[0]:
        values = [one[key] for one in qualities]
        known = Counter(value for value in values if value is not None)
        usual = known.most_common(1)[0][0] if known else None
        silent = []
        for one, value in zip(experts, values, strict=True):
            if not is_drawn and value not in (None, usual):
                found.differ(one.name, f"{key} {value}, not {usual}")
            if value is None and (key == "latent_scale" or (key == "VAE" and one.record.space == "latents")):
                silent.append(one.name)
        for name in silent if known else ():
            found.note(f"{name} does not record its {key}; taken on trust")
        if not known and len(silent) > 1 and key == "VAE":
            found.note("no expert records its VAE; that all share one is taken on trust")
    students = [one.name for one in experts if one.record.sampling_steps is not None]
    if 0 < len(students) < len(experts) or not is_drawn:
        for name in students:
            found.differ(name, "is a student of few steps; it can be drawn, and only among students")


def compare_domains(experts: Sequence[Expert], found: Findings) -> None:
    """Refuse domains whose noise ranges do not cover [0, 1] once, or whose experts are of unlike data.

    Several domains of one shard need shares that say how they divide it.
    """
    domains, kinds, first = domains_of(experts), kinds_of(experts), dict[str, Expert]()
    for domain in dict.fromkeys(domains):
        numbers = [k for k, own in enumerate(domains) if own == domain]
        of = [experts[k] for k in numbers]
        name, ranges = " and ".join(one.name for one in of), [one.record.noise_range for one in of]
        if misfit := misfit_of(ranges):
            parts = " and ".join(f"{low:g}:{high:g}" for low, high in ranges)
            remedy = "experts of one domain cover [0, 1] once, and `domain` says which are one"
            found.differ(name, f"for t in {parts}, so that {misfit}; {remedy}")
        for what, values in (
            ("shards", {one.record.shard.hash for one in of if one.record.shard}),
            ("classes", {one.classes for one in of}),
            ("samples or latents", {kinds[k] for k in numbers}),
        ):
            if len(values) > 1:
                found.differ(name, f"are of one domain, and of different {what}; leave one out")
        mine, shard = of[0], of[0].record.shard
        if shard is not None and (other := first.setdefault(shard.hash, mine)) is not mine:
            without = [one.name for one in (mine, other) if one.member.share is None]
            missing = f"; none is given for {without[0]}" if len(without) == 1 else ""
            if without:
                problem = f"was trained on the same shard ({shard.hash[:12]}) as {other.name}"
                found.differ(mine.name, f"{problem}; leave one out, or divide it by `share`{missing}")


def compare_classes(experts: Sequence[Expert], found: Findings) -> None:
    """Refuse experts that number their classes without names beside others that name theirs."""
    named = next((one.name for one in experts if one.classes), None)
    for one in experts:
        if named is not None and one.record.takes_classes and not one.classes:
            found.differ(one.name, f"numbers its classes, and {named} names them; name them by `classes`")


def router_outputs(
    experts: Sequence[Expert], router: RouterRecord, total: int, found: Findings, name: str = "router"
) -> list[int]:
    """The router's output for each expert: the one set by hand, else its shard's; fewer where some differ.

    Experts may come in any order, and outputs may stay unused. Where an expert, or the router, records no
    shard and no output is set, all domains are taken to be in the router's order, and the numbers must agree.
    ``total`` is the number of the router's outputs.
    """
    domains, hashes = domains_of(experts), router.shard_hashes
    firsts = {domain: experts[domain] for domain in dict.fromkeys(domains)}
    shape = Counter(one.record.sample_shape for one in firsts.values()).most_common(1)[0][0]
    if router.sample_shape != shape:
        found.differ(name, f"sample_shape {router.sample_shape}, not {shape}")
    chosen = [one.member.output for one in firsts.values()]
    if beyond := sorted(output for output in chosen if output is not None and output >= total):
        found.differ(name, f"has outputs 0 to {total - 1}, and the ensemble takes {beyond}")
        return []
    unmatched = [
        one.name for one in firsts.values() if one.member.output is None and not (one.record.shard and hashes)
    ]
    if unmatched and (len(firsts) != total or set(chosen) != {None}):
        reason = "without a shard record" if hashes else "of a router that records no shards"
        problem = f"distinguishes {total} shards, and there are {len(firsts)} experts"
        found.differ(name, f"{problem}; {', '.join(unmatched)} {reason} can only be matched by order")
        return []
    if unmatched and not hashes:
        found.note(f"{name} records no shards; experts are taken to be in the order of its outputs")
    outputs, takers = dict[int, int](), dict[int, Expert]()
    for place, (domain, one) in enumerate(firsts.items()):
        shard, output = one.record.shard, place if unmatched else one.member.output
        if shard is not None and hashes:
            if shard.hash not in hashes:
                problem = f"was trained on a shard that {name} does not know ({shard.hash[:12]})"
                found.differ(one.name, f"{problem}; train a router on all shards and pass it with `router`")
                continue
            own = hashes.index(shard.hash)
            if output not in (None, own):
                found.differ(one.name, f"was trained on the shard of output {own} of {name}, not {output}")
            output = own
        elif one.name in unmatched and hashes:
            found.note(f"{one.name} records no shard; by its place it gets output {place} of the router")
        assert output is not None
        outputs[domain] = output
        other = takers.setdefault(output, one)
        # Two of one shard are refused as such.
        if other is not one and None in (other.record.shard, shard):
            found.differ(one.name, f"takes output {output} of the router, and so does {other.name}")
    if (left := sorted(set(range(total)) - takers.keys())) and not found.differences:
        found.note(f"{name}: of its {total} outputs, these are left out: {', '.join(map(str, left))}")
    return [outputs[domain] for domain in domains if domain in outputs]


def note_overlaps(experts: Sequence[Expert], found: Findings) -> None:
    """Note which experts of unlike partitions have images in common, and for which that is not known."""
    shards = [(one.name, shard) for one in experts if (shard := one.record.shard) is not None]
    if len({shard.partition or shard.hash for _, shard in shards}) < 2:
        return
    for (name, mine), (other, theirs) in itertools.combinations(shards, 2):
        part = overlap(mine.sketch, theirs.sketch, mine.images, theirs.images)
        if part > 0 and (mine.partition or mine.hash) != (theirs.partition or theirs.hash):
            found.note(f"about {part:.0%} of the images of {name} are those of {other}, too")
    if silent := [name for name, shard in shards if not shard.sketch]:
        found.note(f"{', '.join(silent)}: record no hashes of images, so their overlap is unknown")


def common_shift(experts: Sequence[Expert], found: Findings) -> float:
    """Time grid shift that all experts want, 1 where they differ."""
    shifts = [one.record.shift for one in experts]
    if len(set(shifts)) == 1:
        return shifts[0]
    listed = ", ".join(f"{one.record.shift:g} ({one.name})" for one in experts)
    found.note(f"experts want different shifts of the time grid, so it has 1: {listed}")
    return 1.0
