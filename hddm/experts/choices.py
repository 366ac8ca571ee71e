"""What a user decides on the experts of an ensemble: shares, names of classes, and domains."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from hddm.experts.compatibility import SHARE_TOLERANCE, Entry, decide, domains_of, takes_classes
from hddm.experts.ensemble_folders import label
from hddm.utils.errors import HddmError, UsageError, did_you_mean, one_line
from hddm.utils.files import read_yaml
from hddm.utils.records import composed

Value = TypeVar("Value")

ClassNames = Sequence[str] | Mapping[int | str, str]
"""Names of all of an expert's classes, or new ones of some, by number or by the name that they have."""


def decided(
    entries: Sequence[Entry],
    share: Mapping[str, float] | None,
    classes: Path | Mapping[str, ClassNames] | None,
    domain: Sequence[Sequence[str]],
) -> list[Entry]:
    """``entries`` with the shares, classes and domains of these experts, named as in `index_of`.

    ``classes`` may be in a file (`read_classes`).
    Shares of a domain's experts are added, and divided equally among them. A class that is not mentioned
    keeps its name. Raises `HddmError` for a key of no expert, or of several, for names that do not fit the
    classes that an expert takes, and for shares that do not sum to 1.
    """
    classes = read_classes(classes) if isinstance(classes, Path) else classes
    names = _by_index(classes, entries, "`classes`")
    entries = decide(
        entries,
        classes=[
            _names_of(names[k], one) if k in names else one.member.classes for k, one in enumerate(entries)
        ],
    )
    groups = [[index_of(name, entries, "`domain`") for name in group] for group in domain]
    taken = [one.member.domain for one in entries]
    broken = {taken[k] for group in groups for k in group}
    taken = [None if one in broken else one for one in taken]
    for group in groups:
        text = " + ".join(str(entries[k].member.name) for k in group)
        while text in taken:
            text += " '"
        for k in group:
            taken[k] = text
    entries = decide(entries, domain=taken)
    domains, shares = domains_of(entries), _by_index(share, entries, "`share`")
    before = [one.member.share for one in entries]
    known = [one for one in before if one is not None]
    now = _spread([shares.get(k) for k in range(len(entries))], domains)
    if not shares and len(known) == len(entries) and math.fsum(known) > 0:
        now = [one / math.fsum(known) for one in known]
    now = _spread([old if new is None else new for new, old in zip(now, before, strict=True)], domains)
    _check_shares(entries, now)
    return decide(entries, share=now)


def _spread(shares: Sequence[float | None], domains: Sequence[int]) -> list[float | None]:
    """Shares of domains, each the sum of those given for its experts, divided equally among these."""
    found: list[float | None] = []
    for domain in domains:
        own = [share for share, other in zip(shares, domains, strict=True) if other == domain]
        known = [share for share in own if share is not None]
        found.append(math.fsum(known) / len(own) if known else None)
    return found


def _check_shares(entries: Sequence[Entry], shares: Sequence[float | None]) -> None:
    free = [one.name for one, share in zip(entries, shares, strict=True) if share is None]
    total = math.fsum(share for share in shares if share is not None)
    if free and total > 1 - SHARE_TOLERANCE:
        raise UsageError(f"`share`: the shares sum to {total:g} and leave nothing for {', '.join(free)}")
    if not free and abs(total - 1) > SHARE_TOLERANCE:
        raise UsageError(f"`share`: the shares of all experts sum to {total:g}; they must sum to 1")


def _by_index(given: Mapping[str, Value] | None, entries: Sequence[Entry], option: str) -> dict[int, Value]:
    """Values by names of experts (`index_of`), by their indices; `HddmError` for an expert named twice."""
    found: dict[int, Value] = {}
    for name, value in (given or {}).items():
        if (k := index_of(name, entries, option)) in found:
            raise HddmError(f"{option} {one_line(name, 60)}: {entries[k].name} is named twice; name it once")
        found[k] = value
    return found


def index_of(name: str, entries: Sequence[Entry], option: str) -> int:
    """Index of an expert by its folder, the end of its path, its name in the ensemble, or its number.

    Digits alone are no name. Raises `HddmError` for no expert, and for several.
    """
    full, steps = Path(name).resolve(), Path(name).parts
    found = [k for k, one in enumerate(entries) if one.folder.resolve() == full]
    found = found or [
        k
        for k, one in enumerate(entries)
        if one.folder.parts[-len(steps) :] == steps or (name == one.member.name and not name.isdecimal())
    ]
    found = found or [k for k in range(len(entries)) if str(k) == name]
    if len(found) != 1:
        which = "no expert" if not found else f"{len(found)} experts"
        known = ", ".join(label(one.name, one.member.name or one.name) for one in entries)
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


def _names_of(given: ClassNames, expert: Entry) -> tuple[str, ...]:
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
    number = size if takes_classes(expert.record) and size is not None else len(given)
    if given and not len(set(given)) == len(given) == number:
        raise HddmError(f"{origin}: gives {len(set(given))} different names, and it takes {number} classes")
    return tuple(given)
