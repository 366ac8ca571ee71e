"""Whether experts fit together in one ensemble: one rule, for experts in memory and for folders.

Experts that are mixed make samples of one kind. Experts that are drawn, one per sample, may differ in that.
The experts of one domain cover [0, 1] once, with samples of one kind, from the same data. Students of few
steps predict means over a step, which go with nothing else.

All differences are collected and reported together, one line per expert.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hddm.utils.errors import HddmError
from hddm.utils.records import NoiseRange


@dataclass
class Findings:
    """Differences by the name of what differs, and notes for the user.

    ``trusts_components`` decides what `trust` makes of a VAE or text encoder that no record confirms.
    """

    differences: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    trusts_components: bool = False
    trusted: dict[str, list[str]] = field(default_factory=dict)
    """Components that were taken on trust, by the name of the expert."""

    def differ(self, name: str, text: str) -> None:
        """Add a difference of ``name``, once."""
        texts = self.differences.setdefault(name, [])
        if text not in texts:
            texts.append(text)

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def trust(self, name: str, component: str, text: str, claim: str) -> None:
        """Take a ``component`` of the expert ``name`` on trust, or add a difference.

        ``text`` says what is not known of it, and ``claim`` what the caller states by ``trust_components``.
        """
        if self.trusts_components:
            self.note(f"{name} {text}; taken on trust")
            self.trusted.setdefault(name, []).append(component)
        else:
            self.differ(name, f"{text}; pass `trust_components` if {claim}")

    @property
    def lines(self) -> list[str]:
        """All differences, one line per name."""
        return [f"{name}: {'; '.join(texts)}" for name, texts in self.differences.items()]

    @contextmanager
    def errors_of(self, name: str) -> Iterator[None]:
        """Record an `HddmError` that is raised in this block as a difference of ``name``."""
        try:
            yield
        except HddmError as error:
            self.differ(name, "; ".join([error.message, *error.details]))

    def refuse(
        self, message: str = "these parts do not fit together, and nothing was written:"
    ) -> None:
        """Raise an `HddmError` with all differences, one line per name, if there are any."""
        if self.differences:
            raise HddmError(message, self.lines)


@dataclass(frozen=True)
class Candidate:
    """What decides whether an expert fits others.

    Args:
        name: its name in messages.
        kind: what samples must have in common to be mixed, by its name in messages; a value that is not
            known is None, and fits every other.
        domain: equal for the experts of one domain.
        noise_range: the part of t that it covers.
        data: what the experts of one domain must have in common besides; None as in ``kind``.
        is_student: True for a student of few steps.
    """

    name: str
    kind: Mapping[str, Hashable]
    domain: Hashable
    noise_range: NoiseRange
    data: Mapping[str, Hashable] = field(default_factory=dict)
    is_student: bool = False


def compare(experts: Sequence[Candidate], are_mixed: bool, found: Findings) -> None:
    """Record all that keeps ``experts`` from being one ensemble that mixes them, or draws one per sample."""
    if are_mixed:
        differing = compare_kinds(experts, found)
        for name in differing:
            found.differ(name, "so it can be drawn, without a router, and not mixed")
    compare_students(experts, are_mixed, found)
    for domain in dict.fromkeys(one.domain for one in experts):
        _compare_domain([one for one in experts if one.domain == domain], found)


def compare_kinds(experts: Sequence[Candidate], found: Findings) -> list[str]:
    """Record where kinds of samples differ from the most common ones; return the names of these experts.

    Of values that are equally common the first one counts.
    """
    differing = []
    for key in experts[0].kind:
        values = [one.kind[key] for one in experts]
        known = Counter(value for value in values if value is not None)
        if not known:
            continue
        usual = known.most_common(1)[0][0]
        for one, value in zip(experts, values, strict=True):
            if value is not None and value != usual:
                found.differ(one.name, f"{key} {value}, not {usual}")
                differing.append(one.name)
    return differing


def are_alike(experts: Sequence[Candidate]) -> bool:
    """True if samples of all ``experts`` are of one kind, so that they can be mixed."""
    return not experts or not compare_kinds(experts, Findings())


def compare_students(experts: Sequence[Candidate], are_mixed: bool, found: Findings) -> None:
    """Record students of few steps among other experts, or mixed; their velocities are means over steps."""
    students = [one for one in experts if one.is_student]
    num_domains = len({one.domain for one in experts})
    if (are_mixed and num_domains > 1) or len(students) < len(experts):
        for one in students:
            found.differ(
                one.name, "is a student of few steps; it can be drawn, and only among students"
            )


def _compare_domain(experts: Sequence[Candidate], found: Findings) -> None:
    """Record why the experts of one domain do not make one sample together."""
    name = " and ".join(one.name for one in experts)
    ranges = [one.noise_range for one in experts]
    misfit = _misfit_of(ranges)
    if misfit is not None:
        listed = " and ".join(f"{low:g}:{high:g}" for low, high in ranges)
        remedy = "experts of one domain cover [0, 1] once, and `domain` says which are one"
        found.differ(name, f"for t in {listed}, so that {misfit}; {remedy}")
    different = _differing([one.data for one in experts])
    if _differing([one.kind for one in experts]):
        different.append("samples or latents")
    for what in different:
        found.differ(name, f"are of one domain, and of different {what}; leave one out")


def _differing(properties: Sequence[Mapping[str, Hashable]]) -> list[str]:
    """Names of the ``properties`` of several experts that have several known values."""
    names = []
    for name in properties[0]:
        values = {own[name] for own in properties}
        if len(values - {None}) > 1:
            names.append(name)
    return names


def _misfit_of(ranges: Sequence[NoiseRange]) -> str | None:
    """The first part of [0, 1] that is in none of ``ranges``, or in two, in words; None without any."""
    end = 0.0
    for low, high in sorted(ranges):
        if low > end:
            return f"t in {end:g}:{low:g} is missing"
        if low < end:
            return f"t in {low:g}:{min(end, high):g} is double"
        end = high
    return None if end >= 1 else f"t in {end:g}:1 is missing"
