"""Experts and a router as one velocity field.

    v(x, t) = sum_k w_k(x, t) v_k(x, t)

With w_k = p(k | x_t), the posterior of the shard, this is exactly the velocity of all the data (DDM,
arXiv:2501.05450, section 3.2). An expert of noise or of clean images counts too: its field converts what it
predicts to a velocity (`VelocityField.guided`). A strategy (`hddm.routers`) sets small weights to 0, and
experts of weight 0 do not run.

Classes are numbered together, by name, and each expert gets them in its own numbering (`hddm.conditions`).

A router sees no condition. Where p(k | class) is known, samples of a class are routed by

    p(k | x_t, class) = p(k | x_t) p(k | class) / p(k),  normalised,

which is exact where class and x_t are independent given k. Without this correction, an expert may be used for
a class that it has never seen. p(k | prompt) takes the place of p(k | class) where it is provided.

An expert that cannot take what a sample asks for, such as one without text for a prompt, has p(k | …) = 0: no
strategy uses it (`Ensemble.able`).

**Domains.** A domain is what a group of images shows, as those of a shard. Its experts may divide t among
them, as a pair for high and for low noise; in the formulas above, k then stands for a domain. t decides which
of its experts runs, and that one has all of the domain's probability:

    p(k | x_t, t) = [low_k <= t < high_k] sum_j p(j | x_t)     over the experts j of k's domain

Where two noise ranges meet, the expert of higher noise runs; the range that ends at 1 includes t = 1. The
noise ranges of a domain cover [0, 1] once.
"""

import copy
import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field

import torch
from torch import Tensor

from hddm.conditions import (
    LABELS,
    Guidance,
    Inputs,
    JointClasses,
    can_guide,
    check_label_range,
    check_names,
    check_rows,
    join_classes,
    within,
)
from hddm.networks.families import sample_settings
from hddm.networks.offload import in_best_order
from hddm.networks.wrappers import TEXT_CONDITIONS, missing_from
from hddm.routers import (
    Choice,
    PromptRouter,
    Strategy,
    Topic,
    answer_of,
    given_condition,
    sparse_weights,
)
from hddm.utils.errors import HddmError, UsageError
from hddm.utils.tensors import to_float64
from hddm.velocity import VelocityField, check_states, check_times, misfit_of


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


def numbered_by_first(identities: Iterable[Hashable]) -> tuple[int, ...]:
    """Number each identity by its first appearance, from 0; None is 0 too."""
    order: dict[Hashable, int] = {}
    return tuple(0 if one is None else order.setdefault(one, len(order)) for one in identities)


def numbered_vaes(identities: Sequence[Hashable]) -> tuple[int, ...]:
    """`numbered_by_first` of VAEs, with -1 for an expert of pixels beside others of latents."""
    has_latents, numbers = any(identities), numbered_by_first(identities)
    pairs = zip(numbers, identities, strict=True)
    return tuple(-1 if one is None and has_latents else k for k, one in pairs)


class Ensemble:
    """Velocity field of ``experts`` mixed by ``router``.

    Args:
        experts: velocity fields on the common path, one per shard, or a `Part` for each.
        router: ``router(x_t, t)`` to probabilities (batch, K). Not needed for ``draw``, or for one domain.
        strategy: see `hddm.routers`; can be set later. The default is valid for any number of experts; an
            ensemble loaded from a folder uses the one recorded there.
        prior: p(k) (K,) in any unit, in place of the parts' weights: ``draw`` draws from it, and the
            correction by class divides by it. Values of a domain's experts add up.
        shift: of the time grid that its samples want (`hddm.sampling.time_grid`).

    Raises:
        HddmError: for no experts or such that do not go together, a strategy that is unknown or not for them,
            an invalid prior, or a domain whose noise ranges do not cover [0, 1] once.
    """

    def __init__(
        self,
        experts: Sequence[VelocityField | Part],
        router: Callable[[Tensor, Tensor], Tensor] | None = None,
        strategy: str = "nucleus-0.9",
        prior: Sequence[float] | Tensor | None = None,
        *,
        shift: float = 1.0,
    ) -> None:
        parts = [one if isinstance(one, Part) else Part(one) for one in experts]
        weights = [one.weight for one in parts] if prior is None else prior
        self.prior = _normalised(weights, len(parts))
        """p(k) (K,) in float64: the weights, normalised to sum 1."""
        pairs = zip(parts, torch.as_tensor(weights, dtype=torch.float64).tolist(), strict=True)
        self.parts = tuple(replace(part, weight=weight) for part, weight in pairs)
        """The experts, each with its weight, classes and domain."""
        self.router = router
        for first in set(self.domains):
            of = [k for k, domain in enumerate(self.domains) if domain == first]
            if misfit := misfit_of([self.experts[k].noise_range for k in of]):
                raise HddmError(
                    f"expert {' and '.join(map(str, of))}: {misfit}; noise ranges of one domain cover [0, 1] "
                    "once, and Part(field, domain=...) says which experts are one"
                )
            if not self.are_alike(of):
                kinds = self.describe_kinds()
                raise HddmError(
                    f"experts of one domain need one shape and VAE, and these have several ({kinds})"
                )
        students = [str(k) for k, one in enumerate(self.experts) if one.sampling_steps is not None]
        if 0 < len(students) < len(self.experts):
            raise HddmError(
                f"expert {', '.join(students)}: students of few steps and other experts do not go together; "
                "use only one of the two"
            )
        self.strategy = strategy
        self.shift = shift

    def __repr__(self) -> str:
        routed = "no router" if self.router is None else "a router"
        return (
            f"<Ensemble of {len(self.parts)} experts, {self.strategy}, {routed}, samples {self.sample_shape}>"
        )

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
        return numbered_by_first(part.text_encoder for part in self.parts)

    @functools.cached_property
    def vaes(self) -> tuple[int, ...]:
        """Number of each expert's VAE; -1 for an expert of pixels beside others of latents."""
        return numbered_vaes([part.vae for part in self.parts])

    @functools.cached_property
    def class_prior(self) -> Tensor | None:
        """p(k | class), (classes, K); None where no part has any."""
        if not any(part.class_shares for part in self.parts):
            return None
        names = self.classes or dict.fromkeys(name for part in self.parts for name in part.class_shares)
        rows = [[part.class_shares.get(name, 0.0) for part in self.parts] for name in names]
        weights = [part.weight for part in self.parts]
        # A class that no expert has seen may be made by any of them.
        return torch.stack([_normalised(row if any(row) else weights, len(row)) for row in rows])

    @property
    def strategy(self) -> str:
        """Name of the current strategy."""
        return self._name

    @strategy.setter
    def strategy(self, name: str) -> None:
        parsed = Strategy.parse(name)
        parsed.check(self.num_domains)
        if parsed.kind != "draw" and not self.are_alike():
            raise HddmError(
                f"{name} mixes samples of one kind, and these differ: {self.describe_kinds()}; take experts "
                "of one kind, or strategy 'draw'"
            )
        if parsed.kind != "draw" and self.num_domains > 1 and self.sampling_steps is not None:
            raise HddmError(
                f"{name} mixes velocities at a time, and those of students of few steps are means over "
                "steps; take strategy 'draw'"
            )
        self._name, self._strategy = name, parsed

    @property
    def commits_at(self) -> float | None:
        """The time x of ``commit-x``; None under another strategy."""
        return self._strategy.value if self._strategy.kind == "commit" else None

    def under(self, strategy: str) -> "Ensemble":
        """The same ensemble under another strategy; this one keeps its own."""
        other = copy.copy(self)
        other.strategy = strategy
        return other

    @property
    def num_domains(self) -> int:
        """Number of domains; equal to the number of experts where each covers all of t."""
        return len(set(self.domains))

    @property
    def sample_shape(self) -> tuple[int, ...] | None:
        """Shape (C, H, W) of a sample, None where no expert has one or their samples differ in kind."""
        shapes = (e.sample_shape for e in self.experts if e.sample_shape is not None)
        return next(shapes, None) if self.are_alike() else None

    def describe_kinds(self) -> str:
        """The sample shape or VAE in which the experts differ, in words."""
        shapes = [f"expert {k} {e.sample_shape}" for k, e in enumerate(self.experts) if e.sample_shape]
        numbers = numbered_by_first(part.vae for part in self.parts)
        spaces = [f"expert {k} VAE {number + 1}" for k, number in enumerate(numbers)]
        return ", ".join(shapes if len({e.sample_shape for e in self.experts} - {None}) > 1 else spaces)

    def are_alike(self, experts: Iterable[int] | None = None) -> bool:
        """True if samples of ``experts``, by default all, can be mixed: of one shape, in one latent space."""
        parts = self.parts if experts is None else [self.parts[k] for k in experts]
        shapes = {part.field.sample_shape for part in parts} - {None}
        return len(shapes) <= 1 and len({part.vae for part in parts}) <= 1

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
        names = [name for k in range(len(self.experts)) for name in self.names_of(k).values()]
        return tuple(dict.fromkeys(names))

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes of all experts (`hddm.conditions.join_classes`), empty where none has any."""
        return self.joint.names

    @property
    def knows_classes(self) -> bool:
        """True where the experts' shares depend on the class (`prior_of`)."""
        return self.class_prior is not None or self.joint.numbers is not None

    @property
    def joint(self) -> JointClasses:
        """The classes of all experts, and their numbers of each."""
        return join_classes(tuple(one.classes for one in self.experts))

    def velocity(
        self,
        x_t: Tensor,
        t: Tensor,
        guidance_scale: float | Guidance = 1.0,
        negative: Mapping[str, Tensor] | None = None,
        expert: Tensor | None = None,
        then: Tensor | None = None,
        **conditions: Tensor,
    ) -> Tensor:
        """Velocity of the mixture.

        An expert sees the samples that need it and no others; one that nobody needs does not run.

        Args:
            x_t: (batch, …).
            t: (batch,) in [0, 1].
            guidance_scale: applied by each expert, before mixing; 1 for none, or a `Guidance`.
            negative: conditions of the negative branch.
            expert: (batch,) index of one expert for each sample, instead of the strategy; at each t, the
                expert of its domain that covers t runs.
            then: as in `VelocityField.velocity`.
            conditions: keywords of the experts' networks; each expert gets those that it declares.

        Raises:
            HddmError: as `VelocityField.velocity`; for a strategy that needs a router where there is none;
                for ``draw``, and for ``commit-x`` at or below x, without ``expert``; for conditions that no
                expert, or not ``expert``, can take.
        """
        check_states(x_t, self.sample_shape)
        times = check_times(x_t, t).cpu()
        for branch in (conditions, negative or {}):
            check_names(branch, self.conditions)
            check_rows(len(x_t), branch)
        choice = Choice(self.weights(x_t, times, expert, conditions))
        self.check_able(choice.weights, conditions)
        self.refuse_kinds(choice.rows)
        inputs = self.inputs_by_expert(x_t, choice, Guidance.of(guidance_scale), negative or {}, conditions)
        self.check_inputs(inputs)
        return self.mix(x_t, times, choice, inputs, then)

    def inputs_by_expert(
        self,
        x_t: Tensor,
        choice: Choice,
        guidance: Guidance,
        negative: Mapping[str, Tensor],
        conditions: Mapping[str, Tensor],
    ) -> dict[int, Inputs]:
        """The inputs of each expert that is chosen, for its samples, checked; raises as `velocity`."""
        shared = self.conditions_by_expert(guidance, negative, conditions)
        found = {}
        for k, (here, _) in choice.parts(x_t.device).items():
            whole = self.experts[k].inputs(x_t, *shared[k])
            found[k] = whole if here is None else whole.rows(here)
        return found

    def check_inputs(self, inputs: Mapping[int, Inputs]) -> None:
        """Raise an `HddmError` for class labels that their expert has no embedding of; reads the device."""
        for k, own in inputs.items():
            for branch in (own.conditions, own.negative):
                self.experts[k].check_range(branch)

    def mix(
        self,
        x_t: Tensor,
        times: Tensor,
        choice: Choice,
        inputs: Mapping[int, Inputs],
        then: Tensor | None = None,
    ) -> Tensor:
        """As `velocity`, without its checks; nothing is read back from the device.

        Args:
            x_t: (batch, …).
            times: (batch,) in float64 on the CPU.
            choice: the weights, zero for an expert that does not cover its row's time.
            inputs: of each expert, for the rows that it is chosen for.
            then: the end of the step, a scalar or (batch,), on the CPU.
        """
        mixed = torch.zeros_like(x_t, dtype=torch.promote_types(x_t.dtype, torch.float32))
        parts = choice.parts(x_t.device)

        def velocity_of(k: int) -> Tensor:
            here, _ = parts[k]
            own, rows = x_t if here is None else x_t[here], choice.rows[k]
            end = then if then is None or then.ndim == 0 else then[rows]
            return self.experts[k].guided(own.to(mixed.dtype), times[rows], inputs[k], end)

        found = dict(self.each_of(list(parts), velocity_of))
        # By index, so that rounding does not depend on which expert ran first.
        for k, (here, share) in sorted(parts.items()):
            weighted = share.view(-1, *[1] * (x_t.ndim - 1)).to(mixed) * found[k]
            if here is None:
                mixed += weighted
            else:
                mixed.index_add_(0, here, weighted)
        return mixed.to(x_t.dtype)

    def each_of(
        self, experts: Sequence[int], velocity_of: Callable[[int], Tensor]
    ) -> Iterable[tuple[int, Tensor]]:
        """Velocities of ``experts``; those whose weights are already on the device run first."""
        for k in in_best_order({k: self.experts[k].network for k in experts}):
            yield k, velocity_of(k)

    def check_range(self, labels: Tensor, expert: Tensor | None) -> None:
        """Raise an `HddmError` for class labels (batch,), on the CPU, that an expert of their row lacks."""
        if self.joint.numbers is not None:
            # In the joint numbering, what is beyond the classes is no class.
            check_label_range(labels, len(self.classes), len(self.classes))
            return
        domains = torch.tensor(self.domains)
        for k, one in enumerate(self.experts):
            one.check_range({LABELS: labels if expert is None else labels[domains[expert] == domains[k]]})

    def require(self, guidance: Guidance, conditions: Collection[str], expert: Tensor | None) -> None:
        """Check that the experts ``expert``, by default all, have what they need for samples.

        Raises an `HddmError` where one lacks the weak model to guide by, and a `UsageError` where it needs a
        condition that is not among ``conditions``.
        """
        domains = set(self.domains) if expert is None else {self.domains[k] for k in expert.unique().tolist()}
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
                option = {TEXT_CONDITIONS[0]: "`prompt` or ", LABELS: "`class_labels` or "}.get(name, "")
                raise UsageError(
                    f"{option}`conditions`: the experts need {self.names_of(k)[name]} and have no empty "
                    "default; pass it"
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

    def prior_of(self, num: int, conditions: Mapping[str, Tensor], prior: Tensor | None = None) -> Tensor:
        """The distribution that ``draw`` draws the expert of each of ``num`` samples from, (num, K).

        It is ``prior`` (num, K) where provided, such as by a prompt, else p(k | class) where that is known,
        else p(k); and 0 for an expert that is not `able`. A label beyond the classes counts as no class.
        Raises `HddmError` where no expert with a share is able.
        """
        rows = self.prior.expand(num, -1)
        if prior is not None:
            rows = to_float64(prior).cpu()
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
        """What no expert does for the samples ``rows`` (num,), a mask, in words."""
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

    def weights(
        self,
        x_t: Tensor,
        t: Tensor,
        expert: Tensor | None = None,
        conditions: Mapping[str, Tensor] | None = None,
        prior: Tensor | None = None,
    ) -> Tensor:
        """Weights (batch, K) of the experts at x_t (batch, …) and t (batch,), by the strategy, on the CPU.

        ``prior`` (batch, K) is p(k | prompt), as in `prior_of`. Raises `HddmError` as `velocity`.
        """
        if expert is not None:
            if expert.shape != (len(x_t),):
                raise HddmError(f"expert= takes {len(x_t)} indices, one per state, not {expert.tolist()}")
            return self.at(t, Choice.of(expert.cpu(), len(self.experts)).weights)
        return self.routed(x_t, t.cpu(), self.shares_of(len(x_t), conditions or {}, prior))

    def shares_of(
        self, num: int, conditions: Mapping[str, Tensor], prior: Tensor | None = None
    ) -> Tensor | None:
        """p(k | class or prompt) of each sample, to correct the router; None where only p(k) is known."""
        is_known = prior is not None or (LABELS in conditions and self.knows_classes)
        if not is_known and self.able(num, conditions) is None:
            return None
        return self.prior_of(num, conditions, prior)

    def routed(self, x_t: Tensor, t: Tensor, shares: Tensor | None, may_be_nan: bool = False) -> Tensor:
        """Weights (batch, K) at x_t (batch, …) and t (batch,), which is on the CPU, by strategy and router.

        For ``shares`` see `shares_of`, for ``may_be_nan`` `answer_of`.
        """
        strategy = self._strategy
        if strategy.kind == "commit" and (t > strategy.value).all():
            strategy = Strategy("full")
        if self.num_domains > 1 and strategy.kind in ("draw", "commit"):
            raise HddmError(
                f"strategy {self.strategy!r} keeps one expert per sample: pass expert= indices, or use "
                "hddm.sample, which draws them"
            )
        if self.num_domains == 1:
            return self.at(t, torch.eye(len(self.experts))[:1].expand(len(x_t), -1))
        if self.router is None:
            raise HddmError(
                f"strategy {self.strategy!r} needs a router (hddm assemble --router moments); 'draw' does not"
            )
        probabilities = answer_of(self.router, x_t, t, len(self.experts), may_be_nan)
        if shares is not None:
            probabilities = given_condition(probabilities, self.prior, shares)
        return sparse_weights(self.at(t, probabilities), strategy)

    def at(self, t: Tensor, weights: Tensor) -> Tensor:
        """``weights`` (batch, K), moved within each domain to the expert that covers t (batch,)."""
        if self.num_domains == len(self.experts):
            return weights
        domains = torch.tensor(self.domains)
        covers = torch.stack([one.covers(to_float64(t).cpu()) for one in self.experts], 1)
        return (weights @ (domains[:, None] == domains).to(weights)) * covers

    def names_of(self, index: int) -> dict[str, str]:
        """Names of the conditions of this ensemble by those of an expert's network."""
        names = self.experts[index].conditions or ()
        text = self.texts[index]
        return {name: f"{name}_{text + 1}" if text and name in TEXT_CONDITIONS else name for name in names}

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
            own[LABELS] = self.joint.own(own[LABELS], k, len(one.classes) if null is None else int(null))
        return own


def asked_for(conditions: Collection[str]) -> str:
    """What samples of these conditions ask for, in words: the prompt, the class, or the conditions' names."""
    if any(name.startswith(TEXT_CONDITIONS) for name in conditions):
        return "the prompt"
    names = sorted(set(conditions) - sample_settings())
    return "the class" if names == [LABELS] else " and ".join(names)


def _normalised(prior: Sequence[float] | Tensor, num_experts: int) -> Tensor:
    values = torch.as_tensor(prior, dtype=torch.float64)
    if values.shape != (num_experts,) or not (values >= 0).all() or not 0 < values.sum() < torch.inf:
        raise HddmError(f"prior must be {num_experts} non-negative numbers with a positive sum, not {prior}")
    return values / values.sum()
