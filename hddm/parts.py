"""The parts of an ensemble: its experts, the share and the domain of each, and what each can make.

Classes are numbered together, by name, and each expert gets them in its own numbering (`hddm.classes`).

An expert that cannot take what a sample asks for, such as one without text for a prompt, has p(k | …) = 0: no
strategy uses it (`Parts.able`).

**Domains.** A domain is what a group of images shows, as those of a shard. Its experts may divide t among
them, as a pair for high and for low noise. The noise ranges of a domain cover [0, 1] once.
"""

import functools
import itertools
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field

import torch
from torch import Tensor

from hddm.classes import JointClasses, check_label_range, join_classes
from hddm.condition_names import LABELS, TEXT
from hddm.conditions import can_guide
from hddm.fit import Candidate, Findings, are_alike, compare_kinds
from hddm.guidance import Guidance
from hddm.networks.families import sample_settings, text_conditions
from hddm.networks.wrappers import missing_from
from hddm.prompt_router import PromptRouter, Topic
from hddm.utils.errors import HddmError, UsageError, one_line
from hddm.utils.tensors import to_float64, within
from hddm.velocity import VelocityField

_OPTIONS = {TEXT: "`prompt` or ", LABELS: "`class_labels` or "}
"""Other options that provide a condition."""


@dataclass(frozen=True)
class Part:
    """An expert's part in an ensemble.

    Args:
        field: its velocity field.
        weight: its share of all data, in any unit, such as the images of its shard.
        class_shares: p(k | class) by the class's name, in any unit per class; empty where it is not known.
            Where classes have numbers alone, they are in their order.
        domain: equal for the experts that divide t among them; None for a domain of its own.
        vae: identity of its latent space; experts of several can be drawn, and not mixed.
        text_encoder: identity of its text encoder; None for the first expert's, or for an expert without
            text.
        topic: what its captions are about, where topics route prompts; see `Ensemble.prompt_router`.
    """

    field: VelocityField
    weight: float = 1.0
    class_shares: Mapping[str, float] = dataclass_field(default_factory=dict)
    domain: Hashable = None
    vae: Hashable = None
    text_encoder: Hashable = None
    topic: Topic | None = None


@dataclass(frozen=True)
class Numbers:
    """The VAEs, or the text encoders, of several experts, numbered from 0 as they first appear.

    ``distinct`` are their identities in the order of their numbers, and ``of`` has each expert's number.
    """

    distinct: tuple[Hashable, ...]
    of: tuple[int, ...]

    @classmethod
    def of_text_encoders(cls, identities: Sequence[Hashable]) -> "Numbers":
        """Number text encoders; an expert without one, whose identity is None, has the number 0."""
        return cls._with(identities, 0)

    @classmethod
    def of_vaes(cls, identities: Sequence[Hashable]) -> "Numbers":
        """Number VAEs; an expert of pixels, whose identity is None, has -1 if others have VAEs, else 0."""
        return cls._with(identities, -1 if any(identities) else 0)

    @classmethod
    def _with(cls, identities: Sequence[Hashable], without: int) -> "Numbers":
        distinct = tuple(dict.fromkeys(one for one in identities if one is not None))
        numbers = []
        for one in identities:
            numbers.append(without if one is None else distinct.index(one))
        return cls(distinct, tuple(numbers))


class Parts:
    """Experts as one group, without router and strategy.

    Args:
        experts: velocity fields on the common path, one per shard, or a `Part` for each.
        prior: p(k) (K,) in any unit, in place of the parts' weights.

    Raises:
        HddmError: for no experts, and for an invalid prior.
    """

    def __init__(
        self, experts: Sequence[VelocityField | Part], prior: Sequence[float] | Tensor | None = None
    ) -> None:
        parts = [one if isinstance(one, Part) else Part(one) for one in experts]
        weights = [one.weight for one in parts] if prior is None else prior
        self.prior = _normalised(weights, len(parts))
        """p(k) (K,) in float64: the weights, normalised to sum 1."""
        pairs = zip(parts, torch.as_tensor(weights, dtype=torch.float64).tolist(), strict=True)
        self.parts = tuple(replace(part, weight=weight) for part, weight in pairs)
        """The experts, each with its weight, classes and domain."""

    @functools.cached_property
    def experts(self) -> list[VelocityField]:
        """The parts' velocity fields."""
        return [part.field for part in self.parts]

    @functools.cached_property
    def domains(self) -> tuple[int, ...]:
        """For each expert the index of the first one of its domain."""
        keys = [k if part.domain is None else (part.domain,) for k, part in enumerate(self.parts)]
        return tuple(map(keys.index, keys))

    @functools.cached_property
    def texts(self) -> tuple[int, ...]:
        """Number of each expert's text encoder; tokens of the second are ``encoder_hidden_states_2``."""
        return Numbers.of_text_encoders([part.text_encoder for part in self.parts]).of

    @functools.cached_property
    def vaes(self) -> tuple[int, ...]:
        """Number of each expert's VAE; -1 for an expert of pixels beside others of latents."""
        return Numbers.of_vaes([part.vae for part in self.parts]).of

    @functools.cached_property
    def class_prior(self) -> Tensor | None:
        """p(k | class), (classes, K); None where no part has any."""
        if not any(part.class_shares for part in self.parts):
            return None
        names = self.classes
        if not names:
            lists = [part.class_shares for part in self.parts]
            names = tuple(dict.fromkeys(itertools.chain.from_iterable(lists)))
        weights = [part.weight for part in self.parts]
        rows = []
        for name in names:
            row = [part.class_shares.get(name, 0.0) for part in self.parts]
            # A class that no expert has seen may be made by any of them.
            rows.append(_normalised(row if any(row) else weights, len(row)))
        return torch.stack(rows)

    @property
    def num_domains(self) -> int:
        """Number of domains; equal to the number of experts where each covers all of t."""
        return len(set(self.domains))

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """What decides whether the experts fit together (`hddm.fit`)."""
        found = []
        for k, field in enumerate(self.experts):
            vae = "none" if self.vaes[k] < 0 else self.vaes[k] + 1
            kind = {"sample_shape": field.sample_shape, "VAE": vae}
            is_student = field.sampling_steps is not None
            domain = self.domains[k]
            found.append(
                Candidate(f"expert {k}", kind, domain, field.noise_range, is_student=is_student)
            )
        return tuple(found)

    def describe_kinds(self) -> str:
        """In what the samples of the experts differ, in words."""
        found = Findings()
        compare_kinds(self.candidates, found)
        return ", ".join(found.lines)

    def are_alike(self, experts: Iterable[int] | None = None) -> bool:
        """True if samples of ``experts``, by default all, can be mixed: of one shape, in one latent space."""
        candidates = self.candidates
        return are_alike(candidates if experts is None else [candidates[k] for k in experts])

    @property
    def sample_shape(self) -> tuple[int, ...] | None:
        """Shape (C, H, W) of a sample, None where no expert has one or their samples differ in kind."""
        shapes = (e.sample_shape for e in self.experts if e.sample_shape is not None)
        return next(shapes, None) if self.are_alike() else None

    def refuse_kinds(self, experts: Iterable[int]) -> None:
        """Raise an `HddmError` where samples of ``experts``, by index, cannot be one tensor."""
        if not self.are_alike(experts):
            raise HddmError(
                f"these experts make samples of several kinds ({self.describe_kinds()}), and this is one "
                "tensor: take hddm.HDDMPipeline or hddm sample, which draw and decode each, or one expert="
            )

    @property
    def sampling_steps(self) -> int | None:
        """Number of steps of students of few steps, the largest where they differ; None for other experts."""
        found = (one.sampling_steps for one in self.experts)
        return max((steps for steps in found if steps is not None), default=None)

    @property
    def device(self) -> torch.device:
        """Device of the first expert; all experts must be on it."""
        return self.experts[0].device

    @property
    def dtype(self) -> torch.dtype:
        """The widest dtype of the experts."""
        return functools.reduce(torch.promote_types, (expert.dtype for expert in self.experts))

    @property
    def conditions(self) -> tuple[str, ...] | None:
        """Keywords that any expert takes; None where one takes all, unchecked."""
        if any(expert.conditions is None for expert in self.experts):
            return None
        names = dict[str, None]()
        for k in range(len(self.experts)):
            names |= dict.fromkeys(self.names_of(k).values())
        return tuple(names)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes of all experts (`hddm.classes.join_classes`), empty where none has any."""
        return self.joint.names

    @property
    def knows_classes(self) -> bool:
        """True where the experts' shares depend on the class (`prior_of`)."""
        return self.class_prior is not None or self.joint.numbers is not None

    @property
    def joint(self) -> JointClasses:
        """The classes of all experts, and their numbers of each."""
        return join_classes(tuple(one.classes for one in self.experts))

    def check_range(self, labels: Tensor, expert: Tensor | None) -> None:
        """Raise an `HddmError` for class labels (batch,), on the CPU, that an expert of their row lacks."""
        if self.joint.numbers is not None:
            # In the joint numbering, what is beyond the classes is no class.
            check_label_range(labels, len(self.classes), len(self.classes))
            return
        domains = torch.tensor(self.domains)
        for k, one in enumerate(self.experts):
            one.check_range(
                {LABELS: labels if expert is None else labels[domains[expert] == domains[k]]}
            )

    def require(
        self, guidance: Guidance, conditions: Collection[str], expert: Tensor | None
    ) -> None:
        """Check that the experts ``expert``, by default all, have what they need for samples.

        Raises an `HddmError` where one lacks the weak model to guide by, and a `UsageError` where it needs a
        condition that is not among ``conditions``.
        """
        named = range(len(self.experts)) if expert is None else expert.unique().tolist()
        domains = {self.domains[k] for k in named}
        used = [k for k, domain in enumerate(self.domains) if domain in domains]
        without = [str(k) for k in used if self.experts[k].weak is None]
        if without and guidance.by_weak:
            by = "" if self.conditions == () else "guide by condition, or "
            raise HddmError(
                f"expert {', '.join(without)}: has no weak model to guide by; {by}take other experts"
            )
        for k in used:
            given = {own for own, name in self.names_of(k).items() if name in conditions}
            given |= self.experts[k].null_conditions.keys()
            for name in missing_from(given, self.experts[k].conditions or ()):
                raise UsageError(
                    f"{_OPTIONS.get(name, '')}`conditions`: the experts need {self.names_of(k)[name]} and "
                    "have no empty default; pass it"
                )

    def able(self, num: int, conditions: Mapping[str, Tensor]) -> Tensor | None:
        """Which experts can make what each of ``num`` samples asks for, (num, K); None where all can.

        An expert can if it takes one of the conditions that say what a sample shows: all but
        `sample_settings`, and of the classes those that it knows. It also can if that is true for
        another expert of its domain. A label beyond the classes asks for nothing.
        """
        asked = conditions.keys() - sample_settings()
        if not asked:
            return None
        beside_classes = asked - {LABELS}
        found = torch.zeros(num, len(self.experts), dtype=torch.bool)
        for k, one in enumerate(self.experts):
            if one.conditions is None or not beside_classes.isdisjoint(self.names_of(k).values()):
                found[:, k] = True
        if LABELS in asked:
            is_class, knows = self._knows(conditions[LABELS].cpu())
            found |= is_class[:, None] & knows
            if not beside_classes:
                found[~is_class] = True
        if self.num_domains < len(self.experts):
            domains = torch.tensor(self.domains)
            same = domains[:, None] == domains
            found = (found.double() @ same.double()) > 0
        return None if found.all() else found

    def _knows(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each label (N,) is a class (N,), and whether each expert makes that class (N, K)."""
        shares, num_classes = self.class_prior, len(self.classes)
        if not num_classes and shares is not None:
            num_classes = len(shares)
        # Where classes are not counted, any number may be one.
        is_class, indices = within(labels, num_classes or 2**31)
        knows = torch.zeros(len(labels), len(self.experts), dtype=torch.bool)
        for k, one in enumerate(self.experts):
            if LABELS in (one.conditions or ()) or one.classes:
                knows[:, k] = True
            elif shares is not None:
                # It has no input for classes, and is known to make some of them.
                knows[:, k] = shares[indices, k] > 0
        known = self.joint.known(labels)
        return is_class, knows if known is None else knows & known

    def check_able(self, weights: Tensor, conditions: Mapping[str, Tensor]) -> None:
        """Raise an `HddmError` where an expert of weight (N, K) above 0 cannot take a sample's conditions."""
        self.joint.check(weights, conditions.get(LABELS))
        able = self.able(len(weights), conditions)
        if able is None:
            return
        for _, k in ((weights != 0) & ~able).nonzero()[:1].tolist():
            raise HddmError(
                f"expert {k} cannot take {asked_for(conditions)}; use another expert, or leave it out"
            )

    def prior_of(
        self, num: int, conditions: Mapping[str, Tensor], prior: Tensor | None = None
    ) -> Tensor:
        """The distribution that ``draw`` draws the expert of each of ``num`` samples from, (num, K).

        It is ``prior`` (num, K) where provided, such as by a prompt, else p(k | class) where that is known,
        else p(k); and 0 for an expert that is not `able`. A label beyond the classes counts as no class.
        Raises `HddmError` where no expert with a share is able, and for a ``prior`` that is no distribution.
        """
        rows = self.prior.expand(num, -1)
        if prior is not None:
            rows = to_float64(prior).cpu()
            _check_shares(rows, num, len(self.experts))
            rows = rows / rows.sum(1, keepdim=True)
        labels = conditions[LABELS].cpu() if LABELS in conditions else None
        if labels is not None and self.class_prior is not None and prior is None:
            is_class, indices = within(labels, len(self.class_prior))
            rows = torch.where(is_class[:, None], self.class_prior[indices], rows)
        allowed = self.able(num, conditions)
        known = None if labels is None else self.joint.known(labels)
        if known is not None:
            allowed = known if allowed is None else allowed & known
        if allowed is None:
            return rows
        rows = rows * allowed
        total = rows.sum(1, keepdim=True)
        if (total == 0).any():
            raise HddmError(
                f"no expert with a share of the data {self._lack(conditions, total[:, 0] == 0)}; give one "
                "that does a share"
            )
        return rows / total

    def _lack(self, conditions: Mapping[str, Tensor], rows: Tensor) -> str:
        """What no expert does for the samples where ``rows`` (num,) is true, in words."""
        if conditions.keys() - sample_settings() != {LABELS}:
            return f"takes {asked_for(conditions)}"
        numbers = conditions[LABELS].cpu()[rows].unique().tolist()
        names = [self.classes[k] if 0 <= k < len(self.classes) else str(k) for k in numbers[:5]]
        return f"knows class {', '.join(names)}"

    @functools.cached_property
    def prompt_router(self) -> PromptRouter | None:
        """p(k | prompt) by the parts' topics; None where no part has one."""
        topics = [part.topic for part in self.parts]
        if self.num_domains == 1 or all(topic is None for topic in topics):
            return None
        return PromptRouter(topics, self.prior.tolist())

    def names_of(self, index: int) -> dict[str, str]:
        """Names of the conditions of this ensemble by those of an expert's network."""
        number = self.texts[index]
        names = {}
        for name in self.experts[index].conditions or ():
            is_numbered = number > 0 and name in text_conditions()
            names[name] = f"{name}_{number + 1}" if is_numbered else name
        return names

    def conditions_by_expert(
        self, guidance: Guidance, negative: Mapping[str, Tensor], conditions: Mapping[str, Tensor]
    ) -> list[tuple[Guidance, dict[str, Tensor], dict[str, Tensor]]]:
        """Guidance, negative conditions and conditions for each expert, by its own names and class numbers.

        An expert that takes none of the conditions that guide runs without guidance.
        """
        found, is_guided = [], guidance.by_condition and can_guide(conditions, negative)
        for k in range(len(self.experts)):
            own, own_negative = self._conditions_of(k, conditions), self._conditions_of(k, negative)
            goes_on = not is_guided or can_guide(own, own_negative)
            found.append((guidance if goes_on else Guidance(1.0), own_negative, own))
        return found

    def _conditions_of(self, k: int, conditions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The conditions that expert k takes, by its own names, with classes in its own numbering."""
        one, names = self.experts[k], self.names_of(k)
        own = {name: conditions[here] for name, here in names.items() if here in conditions}
        if one.conditions is None:
            own = dict(conditions)
        if LABELS in own and self.joint.numbers is not None:
            null = one.null_conditions.get(LABELS)
            own[LABELS] = self.joint.own(
                own[LABELS], k, len(one.classes) if null is None else int(null)
            )
        return own


def asked_for(conditions: Collection[str]) -> str:
    """What samples of these conditions ask for, in words: the prompt, the class, or the conditions' names."""
    if any(name.startswith(text_conditions()) for name in conditions):
        return "the prompt"
    names = sorted(set(conditions) - sample_settings())
    return "the class" if names == [LABELS] else " and ".join(names)


def _check_shares(rows: Tensor, num: int, num_experts: int) -> None:
    """Raise an `HddmError` unless ``rows`` are ``num`` distributions over experts, in any unit."""
    if rows.shape != (num, num_experts):
        raise HddmError(
            f"`prior` has shape {tuple(rows.shape)}, and must have {(num, num_experts)}"
        )
    is_valid = (rows >= 0).all(1) & (rows.sum(1) > 0) & rows.sum(1).isfinite()
    if not is_valid.all():
        row = int(is_valid.logical_not().nonzero()[0])
        shown = one_line(rows[row].tolist(), 80)
        raise HddmError(
            f"`prior` of sample {row} is {shown}: must be numbers of 0 or more, one of them above 0"
        )


def _normalised(prior: Sequence[float] | Tensor, num_experts: int) -> Tensor:
    values = torch.as_tensor(prior, dtype=torch.float64)
    if (
        values.shape != (num_experts,)
        or not (values >= 0).all()
        or not 0 < values.sum() < torch.inf
    ):
        raise HddmError(
            f"prior must be {num_experts} non-negative numbers with a positive sum, not {prior}"
        )
    return values / values.sum()
