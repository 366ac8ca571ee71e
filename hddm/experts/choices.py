"""What a user decides on the experts of an ensemble: shares, names of classes, and domains."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from hddm.conditions import LABELS
from hddm.experts.compatibility import SHARE_TOLERANCE, Named
from hddm.experts.ensemble_folders import Member, label, name_of
from hddm.experts.parts import domains_of
from hddm.experts.records import ExpertRecord
from hddm.utils.errors import HddmError, UsageError, did_you_mean, one_line
from hddm.utils.files import read_yaml
from hddm.utils.records import composed

Value = TypeVar("Value")

ClassNames = Sequence[str] | Mapping[int | str, str]
"""Names of all of an expert's classes, or new ones of some, by number or by the name that they have."""


def decided(
    folders: Sequence[Path],
    members: Sequence[Member],
    experts: Sequence[Named],
    share: Mapping[str, float] | None,
    classes: Mapping[str, ClassNames] | None,
    domain: Sequence[Sequence[str]],
) -> list[Member]:
    """``members`` with the shares, classes and domains that are given, by names as in `index_of`.

    Shares of a domain's experts are added, and divided equally among them. A class of which nothing is said
    keeps its name. Raises `HddmError` for a key of no expert, or of several, for two of one expert, for names
    that do not fit the classes that an expert takes, and for shares that do.
    """
    members = list(members)
    for k, names in _by_index(classes, folders, "--classes").items():
        (name, record), known = experts[k], members[k].classes or experts[k][1].classes
        members[k] = members[k].model_copy(update={"classes": _names_of(names, name, record, known)})
    named = [[index_of(name, folders, "--domain") for name in names] for names in domain]
    every = list(itertools.chain.from_iterable(named))
    if twice := [experts[k][0] for k in every if every.count(k) > 1]:
        raise UsageError(f"--domain {twice[0]}: is named twice; an expert is of one domain")
    broken = {members[k].domain for k in every} - {None}
    members = [one.model_copy(update={"domain": None}) if one.domain in broken else one for one in members]
    for group in named:
        taken = {member.domain for member in members}
        text = " + ".join(str(members[k].name) for k in group)
        domain = next(one for number in itertools.count() if (one := text + " '" * number) not in taken)
        for k in group:
            members[k] = members[k].model_copy(update={"domain": domain})
    domains = domains_of(members, experts)
    shares = _by_index(share, folders, "--share")
    now = _spread([shares.get(k) for k in range(len(members))], domains)
    then = [member.share for member in members]
    fixed = [share for share in then if share is not None]
    if fixed:
        if set(now) == {None} and len(fixed) == len(then) and math.fsum(fixed) > 0:
            now = [share / math.fsum(fixed) for share in fixed]
        now = _spread([old if new is None else new for new, old in zip(now, then, strict=True)], domains)
    _check_shares(experts, now)
    return [one.model_copy(update={"share": share}) for one, share in zip(members, now, strict=True)]


def _spread(shares: Sequence[float | None], domains: Sequence[int]) -> list[float | None]:
    """Shares of domains, each the sum of those given for its experts, divided equally among these."""
    given = {one: [s for s, d in zip(shares, domains, strict=True) if d == one] for one in domains}
    sums = {one: None if set(of) == {None} else math.fsum(filter(None, of)) for one, of in given.items()}
    return [None if (total := sums[one]) is None else total / len(given[one]) for one in domains]


def _check_shares(experts: Sequence[Named], shares: Sequence[float | None]) -> None:
    fixed = {k: share for k, share in enumerate(shares) if share is not None}
    for k, share in fixed.items():
        if not 0 <= share <= 1:
            raise UsageError(f"--share {experts[k][0]}={share:g}: a share lies between 0 and 1")
    total = math.fsum(fixed.values())
    free = [name for k, (name, _) in enumerate(experts) if k not in fixed]
    if fixed and not free and abs(total - 1) > SHARE_TOLERANCE:
        raise UsageError(f"--share: the shares of all experts sum to {total:g}; they must sum to 1")
    if free and total > 1 - SHARE_TOLERANCE:
        raise UsageError(
            f"--share: the shares given sum to {total:g} and leave nothing for {', '.join(free)}"
        )


def _by_index(given: Mapping[str, Value] | None, experts: Sequence[Path], option: str) -> dict[int, Value]:
    """What is given by names of experts (`index_of`), by their indices; `HddmError` for one named twice."""
    found: dict[int, Value] = {}
    for name, value in (given or {}).items():
        if (k := index_of(name, experts, option)) in found:
            raise HddmError(f"{option} {one_line(name, 60)}: {experts[k]} is named twice; name it once")
        found[k] = value
    return found


def index_of(name: str, experts: Sequence[Path], option: str) -> int:
    """Index of an expert by its folder, the end of its path, its name (`name_of`), or its number.

    Digits alone are no name. Raises `HddmError` for no expert, and for several.
    """
    full, parts = Path(name).resolve(), Path(name).parts
    found = [k for k, folder in enumerate(experts) if folder.resolve() == full]
    found = found or [
        k
        for k, folder in enumerate(experts)
        if folder.parts[-len(parts) :] == parts or (name == name_of(folder) and not name.isdecimal())
    ]
    found = found or [k for k in range(len(experts)) if str(k) == name]
    if len(found) != 1:
        which = "no expert" if not found else f"{len(found)} experts"
        known = ", ".join(label(str(folder), name_of(folder)) for folder in experts)
        raise HddmError(f"{option} {one_line(name, 60)}: names {which}; choose of {known}")
    return found[0]


def read_classes(path: Path) -> dict[str, ClassNames]:
    """Read names of classes by expert from a YAML or JSON file; `HddmError` for anything but names.

    experts/dit: {207: golden retriever, 281: tabby}
    experts/mine: [tabby, siamese]
    experts/theirs: {car: automobile}
    """
    classes: dict[str, ClassNames] = {}
    for expert, names in read_yaml(path, has_numbers=True).items():
        listed = dict(enumerate(names)) if isinstance(names, list) else names
        if not isinstance(listed, dict) or not listed:
            raise HddmError(
                f"{path}: {one_line(expert, 60)} must have a list of names, or classes with names"
            )
        for number, name in listed.items():
            if isinstance(name, bool | list | dict | None) or not str(name):
                wrong = f"{one_line(number, 40)}: {one_line(name, 40)}"
                raise HddmError(f"{path}: {one_line(expert, 60)}: {wrong}; write a class and its name")
        texts = [(composed(str(key)), composed(str(name))) for key, name in listed.items()]
        named = {int(key) if key.isdecimal() else key: name for key, name in texts}
        if len(named) < len(listed):
            raise HddmError(f"{path}: {one_line(expert, 60)}: has a number twice; name each class once")
        if str(expert) in classes:
            raise HddmError(f"{path}: {expert} is named twice; name it once")
        classes[str(expert)] = list(named.values()) if isinstance(names, list) else named
    return classes


def _names_of(given: ClassNames, name: str, record: ExpertRecord, known: Sequence[str]) -> tuple[str, ...]:
    size = len(known) or record.null_class
    if isinstance(given, Mapping):
        if size is None:
            raise HddmError(f"--classes {name}: does not record how many classes it takes; list all names")
        numbers = dict(enumerate(known)) or {number: str(number) for number in range(size)}
        of = {own: number for number, own in numbers.items()} | {number: number for number in numbers}
        if beyond := [one for one in given if one not in of]:
            what = f"--classes {name}: has classes 0 to {size - 1}, and no {one_line(beyond[0], 60)}"
            raise HddmError(what + did_you_mean(str(beyond[0]), known))
        if len({of[one] for one in given}) < len(given):
            raise HddmError(f"--classes {name}: a class is there by number and by name; name each once")
        given = [*(numbers | {of[one]: new for one, new in given.items()}).values()]
    if given and LABELS in record.conditions and size not in (None, len(given)):
        raise HddmError(f"--classes {name}: gives {len(given)} names, and it takes {size} classes")
    if len(set(given)) < len(given):
        twice = next(one for one in given if list(given).count(one) > 1)
        raise HddmError(f"--classes {name}: has {one_line(twice, 60)} twice")
    return tuple(given)
