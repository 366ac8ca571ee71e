"""What is decided on experts when they are assembled: shares, names of classes, domains, who stays."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from hddm.experts.ensemble_records import label
from hddm.experts.expert import Expert, with_decisions
from hddm.experts.shares import domains_of
from hddm.utils.errors import HddmError, UsageError, did_you_mean, one_line
from hddm.utils.files import read_yaml
from hddm.utils.records import composed

SHARE_TOLERANCE = 1e-6
Value = TypeVar("Value")

ClassNames = Sequence[str] | Mapping[int | str, str]
"""Names of all of an expert's classes, or new ones of some, by number or by the name that they have."""


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
    experts = _with_classes(experts, _by_index(classes, experts, "`classes`"))
    experts = _with_domains(experts, domain)
    return _with_shares(experts, _by_index(share, experts, "`share`"))


def _with_classes(experts: Sequence[Expert], given: Mapping[int, ClassNames]) -> list[Expert]:
    names = [one.member.classes for one in experts]
    for k, own in given.items():
        names[k] = _names_of(own, experts[k])
    return with_decisions(experts, classes=names)


def _with_domains(experts: Sequence[Expert], domain: Sequence[Sequence[str]]) -> list[Expert]:
    """``experts`` with these domains, each a group of names; a domain that loses an expert is dissolved."""
    groups = []
    for names in domain:
        groups.append([index_of(name, experts, "`domain`") for name in names])
    taken = [one.member.domain for one in experts]
    broken = {taken[k] for k in itertools.chain.from_iterable(groups)}
    taken = [None if one in broken else one for one in taken]
    for group in groups:
        text = " + ".join(str(experts[k].member.name) for k in group)
        while text in taken:
            text += " '"
        for k in group:
            taken[k] = text
    return with_decisions(experts, domain=taken)


def _with_shares(experts: Sequence[Expert], given: Mapping[int, float]) -> list[Expert]:
    """``experts`` with the shares ``given``, else with their own; those sum to 1 if none is given."""
    domains = domains_of(experts)
    before = [one.member.share for one in experts]
    known = [one for one in before if one is not None]
    total = math.fsum(known)
    now = _spread([given.get(k) for k in range(len(experts))], domains)
    if not given and len(known) == len(experts) and total > 0:
        now = [one / total for one in known]
    stated: list[float | None] = []
    for new, old in zip(now, before, strict=True):
        stated.append(old if new is None else new)
    now = _spread(stated, domains)
    _check_shares(experts, now)
    return with_decisions(experts, share=now)


def _spread(shares: Sequence[float | None], domains: Sequence[int]) -> list[float | None]:
    """Shares of domains (the sum over a domain's experts), divided equally among the experts."""
    found: list[float | None] = []
    for domain in domains:
        known, number = [], 0
        for share, other in zip(shares, domains, strict=True):
            if other != domain:
                continue
            number += 1
            if share is not None:
                known.append(share)
        found.append(math.fsum(known) / number if known else None)
    return found


def _check_shares(experts: Sequence[Expert], shares: Sequence[float | None]) -> None:
    free = [one.name for one, share in zip(experts, shares, strict=True) if share is None]
    total = math.fsum(share for share in shares if share is not None)
    if free and total > 1 - SHARE_TOLERANCE:
        raise UsageError(
            f"`share`: the shares sum to {total:g} and leave nothing for {', '.join(free)}"
        )
    if not free and abs(total - 1) > SHARE_TOLERANCE:
        raise UsageError(f"`share`: the shares of all experts sum to {total:g}; they must sum to 1")


def _by_index(
    given: Mapping[str, Value] | None, experts: Sequence[Expert], option: str
) -> dict[int, Value]:
    """Values by names of experts (`index_of`), by their indices; `HddmError` for an expert named twice."""
    found: dict[int, Value] = {}
    for name, value in (given or {}).items():
        k = index_of(name, experts, option)
        if k in found:
            raise HddmError(
                f"{option} {one_line(name, 60)}: {experts[k].name} is named twice; name it once"
            )
        found[k] = value
    return found


def index_of(name: str, experts: Sequence[Expert], option: str) -> int:
    """Index of an expert by its folder, the end of its path, its name in the ensemble, or its number.

    Digits alone are no name. Raises `HddmError` for no expert, and for several.
    """
    full, steps = Path(name).resolve(), Path(name).parts
    found = [k for k, one in enumerate(experts) if one.place.resolve() == full]
    if not found:
        for k, one in enumerate(experts):
            is_its_name = name == one.member.name and not name.isdecimal()
            if is_its_name or one.place.parts[-len(steps) :] == steps:
                found.append(k)
    if not found:
        found = [k for k in range(len(experts)) if str(k) == name]
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
        if not isinstance(listed, dict) or any(map(_is_no_name, listed.values())):
            raise HddmError(f"{origin} must have a list of names, or classes with names")
        named: dict[int | str, str] = {}
        for key, name in listed.items():
            own = int(key) if str(key).isdecimal() else composed(str(key))
            named[own] = composed(str(name))
        classes[expert] = list(named.values()) if isinstance(names, list) else named
    return classes


def _is_no_name(value: object) -> bool:
    return isinstance(value, bool | list | dict | None)


def _names_of(given: ClassNames, expert: Expert) -> tuple[str, ...]:
    """Names of all of an expert's classes, where ``given`` has them all, or new ones of some."""
    known, origin = expert.classes, f"`classes` {expert.name}"
    size = len(known) or expert.record.null_class
    if isinstance(given, Mapping):
        numbers = list(map(str, range(size or 0)))
        given = _renamed(known or numbers, known, given, origin)
    number = size if expert.record.takes_classes and size is not None else len(given)
    if given and not len(set(given)) == len(given) == number:
        raise HddmError(
            f"{origin}: gives {len(set(given))} different names, and it takes {number} classes"
        )
    return tuple(given)


def _renamed(
    names: Sequence[str], known: Sequence[str], given: Mapping[int | str, str], origin: str
) -> list[str]:
    """``names`` with the ones ``given`` in place of those of these numbers, or with these ``known`` names."""
    numbers: dict[int | str, int] = {name: number for number, name in enumerate(known)}
    numbers |= {number: number for number in range(len(names))}
    renamed = list(names)
    for one, new in given.items():
        if one not in numbers:
            what = f"{origin}: has {len(names)} classes, and no {one_line(one, 60)}"
            raise HddmError(what + did_you_mean(str(one), known))
        renamed[numbers[one]] = new
    return renamed


def kept_of(experts: Sequence[Expert], remove: Sequence[str | int], is_added_to: bool) -> list[int]:
    """Indices of the experts that stay without those to ``remove``, named as `index_of` does.

    Their domains go too, unless experts are added in their place. Raises `HddmError` as `index_of`.
    """
    gone = {index_of(str(name), experts, "`remove`") for name in remove}
    if not is_added_to:
        # What is left of a domain cannot make a sample alone.
        domains = domains_of(experts)
        lost = {domains[k] for k in gone}
        gone = {k for k, domain in enumerate(domains) if domain in lost}
    return [k for k in range(len(experts)) if k not in gone]


def left_of(experts: Sequence[Expert], kept: Sequence[int]) -> list[Expert]:
    """The experts that are left, with what was decided on them.

    If an expert leaves a domain, the remaining ones keep the domain's whole share, so that another can take
    its place; their ``domain`` is cleared.
    """
    domains = domains_of(experts)
    shares = [one.member.share for one in experts]
    total = math.fsum(share or 0.0 for share in shares)
    are_parts = None in shares or abs(total - 1) < SHARE_TOLERANCE
    of, left = Counter(domains), Counter(domains[k] for k in kept)
    updated = []
    for k in kept:
        one, before, now = experts[k], of[domains[k]], left[domains[k]]
        share = one.member.share
        if share is not None:
            share = (share if are_parts else share / total) * before / now
        domain = one.member.domain if now == before else None
        updated += with_decisions(
            [one], class_shares=[{}], vae=[None], share=[share], domain=[domain]
        )
    return updated
