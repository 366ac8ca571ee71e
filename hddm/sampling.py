"""From noise to samples: `plan` decides how samples are drawn, `batches` groups them, and `run` integrates.

Sample i depends on (seed, i) alone: its noise, and the expert that ``draw`` gives it, come from a generator
of its own, whatever the batch size. A batch size changes rounding only.
"""

import copy
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from hddm.classes import LABELS, class_indices, flat_labels
from hddm.editing import SAME, Picture
from hddm.ensemble import Choice, Ensemble, Strategy
from hddm.expert_use import ExpertUse
from hddm.noise import Latents, Noise, Seeded
from hddm.solvers import (
    DEFAULT_SOLVER,
    DEFAULT_STEPS,
    SOLVERS,
    OnStep,
    Solver,
    euler,
    solver_named,
    unchanged,
)
from hddm.utils.errors import HddmError
from hddm.utils.records import WHOLE, NoiseRange, Record
from hddm.velocity import Guidance, GuideBy, Inputs, VelocityField, check_labels, check_names


def check_strategy(name: str) -> str:
    """``name``, if it is that of a strategy."""
    Strategy.parse(name)
    return name


def check_solver(name: str) -> str:
    """``name``, if it is that of a solver."""
    solver_named(name)
    return name


@dataclass(frozen=True)
class Conditions:
    """Conditions of samples, conditions to guide away from, and p(k | prompt), one row per sample."""

    given: dict[str, Tensor] = field(default_factory=dict)
    negative: dict[str, Tensor] = field(default_factory=dict)
    prior: Tensor | None = None
    """(num, K) distribution of the expert of each sample, where a prompt gives it."""

    def map(self, change: Callable[[Tensor], Tensor]) -> "Conditions":
        """The same conditions with every tensor changed."""
        given, negative = (
            {name: change(value) for name, value in one.items()} for one in (self.given, self.negative)
        )
        return Conditions(given, negative, None if self.prior is None else change(self.prior))

    def rows(self, rows: Tensor, device: torch.device | None = None) -> "Conditions":
        """The conditions of these samples, on ``device`` or where they are."""
        return self.map(lambda value: value[rows.to(value.device)].to(device or value.device))

    def cycled(self, numbers: Sequence[int]) -> "Conditions":
        """The conditions of the samples ``numbers``, where those at hand take turns."""
        return self.map(lambda value: value[torch.tensor(numbers) % len(value)])


Positive = Annotated[int, Field(ge=1)]
KnownStrategy = Annotated[str, AfterValidator(check_strategy)]
"""Name of a strategy (`hddm.ensemble`)."""
KnownSolver = Annotated[str, AfterValidator(check_solver)]
"""Name of a solver (`hddm.solvers`)."""


class SamplingSettings(Record):
    """How samples are drawn, as ``hddm sample``, a request to a service and a benchmark state it."""

    strategy: KnownStrategy | None = None
    """None for the model's own, as of solver and steps."""
    solver: KnownSolver | None = None
    steps: Positive | None = None
    guidance_scale: float = 1.0
    guide_by: GuideBy = "condition"

    @property
    def guidance(self) -> Guidance:
        """Guidance of these samples."""
        return Guidance(self.guidance_scale, by=self.guide_by)

    @property
    def how(self) -> dict[str, Any]:
        """Arguments of `plan`."""
        names = ("strategy", "solver", "steps")
        return {name: getattr(self, name) for name in names} | {"guidance": self.guidance}


class NotFinite(HddmError):
    """Samples that are NaN or Inf; ``by_guidance``: without guidance they would not be."""

    def __init__(self, message: str, details: Sequence[str] = (), by_guidance: bool = False) -> None:
        super().__init__(message, details)
        self.by_guidance = by_guidance

    def __reduce__(self) -> Any:
        return type(self), (self.message, self.details, self.by_guidance)


@dataclass(frozen=True)
class Plan:
    """How samples are drawn, with every default filled in; `plan` makes it."""

    model: Ensemble
    """Under the strategy of these samples."""
    expert: int | None
    """The one expert of all samples; None where the strategy chooses."""
    steps: int
    """Steps over all of t, of which a picture needs the last ones."""
    solver: Solver
    times: Tensor
    """Times from 1, or from the strength of a picture, to 0, in float64."""
    guidance: Callable[[], Guidance]
    """Guidance of the next call of the velocity."""
    noise: Noise
    shape: tuple[int, ...] | None
    """Shape (C, H, W) of a sample; None for the experts' own."""
    picture: Callable[[int], Picture | None]
    """What samples begin with, by an expert in whose units it is."""
    router_every: int = 1

    @property
    def solver_name(self) -> str:
        """Name of the solver."""
        return next(name for name, one in SOLVERS.items() if one is self.solver)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of states and samples."""
        return torch.promote_types(self.model.dtype, torch.float32)

    def shape_of(self, expert: int) -> tuple[int, ...]:
        """Shape (C, H, W) of a sample of this expert.

        Raises:
            HddmError: where neither the plan nor the model knows it.
        """
        own = (
            self.model.experts[expert].sample_shape if len(self.model.kinds) > 1 else self.model.sample_shape
        )
        if (found := self.shape or own) is None:
            raise HddmError("this model does not tell the shape of a sample: pass shape=(C, H, W)")
        return found


@dataclass(frozen=True)
class Batch:
    """Samples that are integrated together."""

    rows: Tensor
    """Their places among all samples (n,)."""
    numbers: Sequence[int]
    """Their numbers under a seed."""
    asked: Conditions
    """On the model's device; ``on_step`` may change its dictionaries."""
    expert: Tensor | None = None
    """The expert of each sample (n,), on the CPU; None where they are mixed."""
    kind: int = 0
    """An expert of the kind that the samples are of."""

    @classmethod
    def of(cls, num: int, asked: Conditions, expert: Tensor | None) -> "Batch":
        """Samples 0 … ``num`` - 1; ``expert`` (num,) is the one of each, None where they are mixed."""
        return cls(torch.arange(num), range(num), asked, expert)

    def part(self, rows: Tensor) -> "Batch":
        """The samples in these places of the batch (n,)."""
        numbers = [self.numbers[row] for row in rows.tolist()]
        expert = None if self.expert is None else self.expert[rows]
        return Batch(self.rows[rows], numbers, self.asked.rows(rows), expert, self.kind)


def no_picture(expert: int) -> Picture | None:
    """Samples begin with noise."""
    return None


def time_grid(steps: int, shift: float = 1.0) -> Tensor:
    """``steps`` + 1 times from 1 to 0, in float64.

        t = shift u / (1 + (shift - 1) u),   u evenly spaced

    A shift above 1 spends more steps on noise (SD3, arXiv:2403.03206, equation 23). It is applied here
    and nowhere else.

    Raises:
        HddmError: for steps that are no whole number from 1, a shift that is not positive and finite, or one
            so far from 1 that neighbouring times are equal.
    """
    if not isinstance(steps, Integral) or steps < 1:
        raise HddmError(f"steps must be at least 1 and a whole number, not {steps}")
    if not (shift > 0 and math.isfinite(shift)):
        raise HddmError(f"shift must be positive and finite, not {shift}")
    u = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    times = shift * u / (1 + (shift - 1) * u)
    if not (times.diff() < 0).all():
        raise HddmError(f"shift {shift:g}: some of {steps} steps have no length; take one nearer to 1")
    return times


def resolve_solver(model: Ensemble, steps: int | None, solver: str | Solver | None) -> tuple[int, Solver]:
    """Steps and solver: the caller's choice, else the model's.

    Raises:
        HddmError: for an unknown solver, or for students of few steps another one than Euler's.
    """
    own = model.sampling_steps
    default = DEFAULT_SOLVER if own is None else "euler"
    found = solver_named(solver or default) if solver is None or isinstance(solver, str) else solver
    if own is not None and found is not euler:
        name = solver if isinstance(solver, str) else getattr(solver, "__name__", solver)
        raise HddmError(
            f"--solver {name}: a student of few steps gives the mean velocity over a step, which euler takes "
            "exactly; drop the option"
        )
    return own or DEFAULT_STEPS if steps is None else steps, found


def plan(
    model: Ensemble | VelocityField,
    *,
    steps: int | None = None,
    solver: str | Solver | None = None,
    shift: float | None = None,
    strategy: str | None = None,
    expert: int | None = None,
    guidance: float | Guidance | Callable[[], Guidance] = 1.0,
    router_every: int = 1,
    shape: tuple[int, ...] | None = None,
    noise: Noise = Seeded(),  # noqa: B008 - it holds a number alone
    picture: Callable[[int], Picture | None] = no_picture,
    part: NoiseRange = WHOLE,
    times: Tensor | None = None,
) -> Plan:
    """Decide how samples are drawn; None is the model's own.

    Args:
        model: an ensemble, or one expert, which is an ensemble of one.
        steps: solver steps, even in t up to ``shift``; by default 25, or a student's own.
        solver: see `hddm.solvers`; by default ``adams-moulton``, or ``euler`` for students of few steps.
        shift: of the time grid.
        strategy: instead of the ensemble's own; see `hddm.ensemble`.
        expert: the one expert to use, with those of its domain if it covers a part of t.
        guidance: 1 for none, another number by condition, a `Guidance`, or a function that gives it for the
            next call of the velocity.
        router_every: ask the router at every n-th call of the velocity; between, its choice stays.
        shape: (C, H, W) of a sample, where it is not the model's.
        noise: see `hddm.noise`.
        picture: what samples begin with, and what of it stays; see `hddm.editing`.
        part: (low, high) of t, from high to low, where samples are not to go all the way.
        times: in place of ``steps``, ``shift`` and ``part``.

    Raises:
        HddmError: for an unknown strategy, solver or expert, numbers outside their ranges, a shape of other
            channels than the model's, a student with another solver than Euler's or with guidance on top of
            its own, and times that an expert does not cover.
    """
    alone = model if isinstance(model, VelocityField) else None
    model = model if isinstance(model, Ensemble) else _ensemble_of_one(model)
    if expert is not None and strategy is not None:
        raise HddmError(f"expert {expert} and strategy {strategy!r}: choose one of the two")
    if expert is not None and not 0 <= expert < len(model.experts):
        raise HddmError(f"expert {expert}: there are 0 … {len(model.experts) - 1}")
    if router_every < 1:
        raise HddmError(f"router_every starts at 1, not {router_every}")
    # A copy, so that another thread's sampling keeps its own strategy.
    model = model.under(strategy or model.strategy)
    guided = guidance if callable(guidance) else _always(Guidance.of(guidance))
    scale, inner = guided().scale, max(one.inner_guidance for one in model.experts)
    if scale != 1 and inner != 1:
        raise HddmError(
            f"--guidance-scale {scale:g}: this student has guidance of scale {inner:g} inside; drop it"
        )
    steps, solver = resolve_solver(model, steps, solver)
    if times is None:
        low, high = part
        times = low + (high - low) * time_grid(steps, model.shift if shift is None else shift)
        first = picture(expert or 0)
        times = times if first is None else first.times(times)
    if alone is not None:
        alone.refuse_beyond(times)
    known = model.sample_shape if expert is None else model.experts[expert].sample_shape
    if shape is not None:
        _check_shape(shape, known)
    return Plan(model, expert, steps, solver, times, guided, noise, shape, picture, router_every)


def _always(guidance: Guidance) -> Callable[[], Guidance]:
    return lambda: guidance


def _ensemble_of_one(alone: VelocityField) -> Ensemble:
    # Its noise range is checked against the times of the plan.
    whole = copy.copy(alone)
    whole.noise_range = WHOLE
    made = Ensemble([whole], strategy="draw")
    made.shift = alone.shift
    return made


def batches(how: Plan, numbers: Sequence[int], asked: Conditions, size: int) -> Iterator[Batch]:
    """Group the samples ``numbers`` into batches of at most ``size``; ``draw`` draws their experts first.

    Where there are several batches, samples of one domain follow each other, so that an expert comes once and
    sees large batches; those of several kinds are never in one batch.

    Raises:
        HddmError: for conditions or a picture of another length than ``numbers``, a size below 1, and experts
            that cannot be guided as planned.
    """
    model, num = how.model, len(numbers)
    if not isinstance(size, Integral) or size < 1:
        raise HddmError(f"batch_size is a whole number from 1, not {size!r}")
    for name, value in (*asked.given.items(), *asked.negative.items()):
        if value.ndim == 0 or len(value) != num:
            found = len(value) if value.ndim else "no"
            raise HddmError(f"condition {name!r} has {found} rows for {num} samples")
    is_apart = how.expert is None and len(model.kinds) > 1
    chosen = _chosen(how, numbers, asked, size)
    for k in chosen.unique().tolist() if is_apart and chosen is not None else [how.expert or 0]:
        if (first := how.picture(k)) is not None:
            first.check(num, how.shape_of(k))
    model.require_weak_model(how.guidance(), chosen)
    groups = [torch.arange(num)]
    if chosen is not None and is_apart:
        groups = [(chosen == k).nonzero()[:, 0] for k in chosen.unique().tolist()]
    elif chosen is not None and num > size:
        groups = [torch.tensor(model.domains)[chosen].argsort(stable=True)]
    return (
        Batch(
            rows,
            [numbers[row] for row in rows.tolist()],
            asked.rows(rows, model.device),
            None if chosen is None else chosen[rows],
            int(chosen[rows[0]]) if chosen is not None and is_apart else how.expert or 0,
        )
        for group in groups
        for rows in group.split(size)
    )


@torch.no_grad()
def _chosen(how: Plan, numbers: Sequence[int], asked: Conditions, size: int) -> Tensor | None:
    """The expert of each sample (num,), where it is known before the first step."""
    model, num = how.model, len(numbers)
    if how.expert is not None:
        return torch.full((num,), how.expert)
    if model.strategy != "draw":
        return None
    known = asked.prior is not None or (model.knows_classes and set(asked.given) == {LABELS})
    if asked.given and not known and len(model.experts) > 1:
        warnings.warn(
            "draw picks experts by the prior alone: p(k | condition) is not known for "
            f"{', '.join(sorted(asked.given))}",
            # Above are no_grad's wrapper, `batches`, and whoever called it for the user, in a wrapper again.
            stacklevel=6,
        )
    prior = model.prior_of(num, asked.given, asked.prior)
    if how.picture(0) is not None and model.router is not None:
        parts = []
        for rows in torch.arange(num).split(size):
            x, s = _start(how, [numbers[row] for row in rows.tolist()], rows, 0)
            parts.append(posterior_of(model, x, s, asked.rows(rows, model.device)))
        prior = torch.cat(parts)
    return pick_experts(prior, how.noise.draws(numbers))


def _start(how: Plan, numbers: Sequence[int], rows: Tensor, kind: int) -> tuple[Tensor, float]:
    """States (n, C, H, W) that samples begin with, on the CPU, and their time."""
    noise, picture = how.noise.initial(numbers, how.shape_of(kind)), how.picture(kind)
    return (noise, 1.0) if picture is None else (picture.rows(rows).noised(noise), picture.strength)


def posterior_of(ensemble: Ensemble, x: Tensor, s: float, asked: Conditions) -> Tensor:
    """Probabilities (batch, K) of the expert that carries states x (batch, C, H, W) on from time s.

    They are p(k | x_s, s, condition) where the ensemble has a router and s is below 1, else p(k | condition).
    """
    if s == 1 or ensemble.router is None:
        return ensemble.prior_of(len(x), asked.given, asked.prior)
    t = torch.full((len(x),), s, dtype=torch.float64)
    return ensemble.under("full").weights(x.to(ensemble.device), t, None, asked.given, asked.prior)


def draw_experts(prior: Tensor, seed: int, start: int, stop: int) -> Tensor:
    """Expert index (stop - start,) of each sample, drawn from ``prior``, (K,) or one row per sample."""
    return pick_experts(prior, Seeded(seed).draws(range(start, stop)))


def pick_experts(prior: Tensor, uniform: Tensor) -> Tensor:
    """Expert index (batch,) for numbers in [0, 1) by the inverse distribution of ``prior``."""
    bounds = prior.expand(len(uniform), -1).cumsum(1)[:, :-1].contiguous()
    return torch.searchsorted(bounds, uniform[:, None].contiguous(), right=True)[:, 0]


def never() -> bool:
    """The ``stop`` that never comes."""
    return False


@torch.no_grad()
def run(
    how: Plan,
    batch: Batch,
    on_step: OnStep = unchanged,
    stop: Callable[[], bool] = never,
    use: ExpertUse | None = None,
) -> Tensor:
    """Integrate a batch from its noise, or its picture, to samples (n, C, H, W), on the model's device.

    Under ``draw``, for one expert and below x of ``commit-x``, samples are grouped by expert once, and steps
    read nothing back from the device. Other strategies read the router's answer, once per step.

    Args:
        how: the plan.
        batch: one of its `batches`.
        on_step: see `hddm.solvers`.
        stop: asked after each step; once it is true, states stay as they are, no network runs and ``on_step``
            is not called.
        use: a tally of the weights, where one is wanted.

    Raises:
        NotFinite: naming the step at which the velocity was not finite, which a second pass finds.
        HddmError: as `Ensemble.velocity`.
    """
    x = _integrate(how, batch, on_step, stop, use)
    if x.isfinite().all() or stop():
        return x
    try:
        _integrate(how, batch, stop=stop, is_checked=True)
    except NotFinite as error:
        plain = replace(how, guidance=_always(Guidance(1.0)), times=how.times[[0, -1]])
        is_guided = how.guidance().scale != 1
        error.by_guidance = is_guided and bool(_integrate(plain, batch).isfinite().all())
        raise
    if stop():
        return x
    raise NotFinite("samples are not finite though every velocity is: on_step changed them")


def _integrate(
    how: Plan,
    batch: Batch,
    on_step: OnStep = unchanged,
    stop: Callable[[], bool] = never,
    use: ExpertUse | None = None,
    is_checked: bool = False,
) -> Tensor:
    model, solver, times, picture = how.model, how.solver, how.times, how.picture(batch.kind)
    x, _ = _start(how, batch.numbers, batch.rows, batch.kind)
    if picture is not None:
        fresh = how.noise.fresh(batch.numbers, tuple(x.shape[1:]))
        solver = picture.rows(batch.rows).solver(solver, fresh)
    x = x.to(model.device, torch.promote_types(how.dtype, x.dtype))
    if stop():
        return x
    expert, above = batch.expert, 0
    if expert is None and model.commits_at is not None:
        above = int((times > model.commits_at + SAME).sum())
        if above:
            walk = _Walk(replace(how, model=model.under("full")), batch, None, on_step, stop, use, is_checked)
            x = solver(walk.velocity, x, times[: above + 1], walk.step)
        # States that are not finite have no probabilities; the second pass finds who made them.
        if above == len(times) - 1 or stop() or not x.isfinite().all():
            return x
        prior = posterior_of(model, x, float(times[above]), batch.asked)
        expert = pick_experts(prior, how.noise.draws(batch.numbers))

    def later(index: int, x: Tensor) -> Tensor:
        return on_step(above + index, x)

    walk = _Walk(how, batch, expert, later, stop, use, is_checked)
    return solver(walk.velocity, x, times[above:], walk.step)


def gathered(made: Sequence[tuple[Batch, Tensor]]) -> list[tuple[Tensor, int, Tensor]]:
    """All samples of each kind, in order: their rows, an expert of the kind, and samples (n, C, H, W)."""
    found = []
    for kind in dict.fromkeys(batch.kind for batch, _ in made):
        own = [(batch.rows, samples) for batch, samples in made if batch.kind == kind]
        rows = torch.cat([rows for rows, _ in own])
        order = rows.argsort()
        found.append((rows[order], kind, torch.cat([samples for _, samples in own])[order]))
    return found


class _Walk:
    """A batch on its way from one time to another: who runs, and with which inputs."""

    def __init__(
        self,
        how: Plan,
        batch: Batch,
        expert: Tensor | None,
        on_step: OnStep,
        stop: Callable[[], bool],
        use: ExpertUse | None,
        is_checked: bool,
    ) -> None:
        self.how, self.batch, self.on_step, self.stop, self.use = how, batch, on_step, stop, use
        self.is_checked, self.calls = is_checked, itertools.count()
        self.is_fixed = expert is not None
        self.choice = None if expert is None else Choice.of(expert, len(how.model.experts))
        self.stopped: Tensor | None = None
        self.guidance: Guidance | None = None
        self.seen: tuple[tuple[Tensor, int], ...] = ()
        """Conditions that were read, each with its version, which changes when it is changed in place."""
        self.inputs: tuple[Choice | None, dict[int, Inputs]] = None, {}
        """A choice, and the inputs of its experts."""

    def velocity(self, x: Tensor, now: Tensor, then: Tensor) -> Tensor:
        """The velocity of states x (n, …) at ``now``, for a step to ``then``."""
        if self.stopped is not None:
            return torch.zeros_like(x)
        model, t = self.how.model, now.expand(len(x))
        self._read_conditions()
        if not self.is_fixed and next(self.calls) % self.how.router_every == 0:
            self.choice = Choice(model.routed(x, t, self.shares, may_be_nan=not self.is_checked))
            model.check_classes(self.choice, self.labels)
        assert self.choice is not None
        choice = self.choice.at(model, t)
        if self.use is not None:
            self.use.add(float(now), choice.weights)
        if self.inputs[0] is not choice:
            asked = self.batch.asked
            own = model.inputs_by_expert(x, choice, self.how.guidance(), asked.negative, asked.given)
            self.inputs = choice, own
        v = model.mix(x, t, choice, self.inputs[1], then)
        if self.is_checked:
            _check_finite(v, now, choice)
        return v

    def step(self, index: int, x: Tensor) -> Tensor:
        """What happens after a step."""
        # A solver with a memory would move on from where it was stopped.
        if self.stopped is not None:
            return self.stopped
        x = self.on_step(index, x)
        self.stopped = x if self.stop() else None
        return x

    def _read_conditions(self) -> None:
        """Look at conditions and guidance again where a callback has changed them."""
        asked, guidance = self.batch.asked, self.how.guidance()
        now = tuple((one, one._version) for one in (*asked.given.values(), *asked.negative.values()))
        pairs = zip(now, self.seen, strict=False)
        is_same = len(now) == len(self.seen) and all(a is b and v == w for (a, v), (b, w) in pairs)
        if is_same and guidance == self.guidance:
            return
        model, labels = self.how.model, list[Tensor | None]()
        for branch in (asked.given, asked.negative):
            check_names(branch, model.conditions)
            labels.append(branch[LABELS].cpu() if LABELS in branch else None)
            if labels[-1] is not None:
                model.check_range(labels[-1])
        self.guidance, self.seen, self.inputs, self.labels = guidance, now, (None, {}), labels[0]
        if self.choice is not None and self.is_fixed:
            model.check_classes(self.choice, self.labels)
        else:
            self.shares = model.shares_of(len(self.batch.rows), asked.given, asked.prior)


def _check_finite(v: Tensor, t: Tensor, choice: Choice) -> None:
    """Raise a `NotFinite` that names the experts where the velocity (batch, …) is not finite."""
    broken = ~v.flatten(1).isfinite().all(1).cpu()
    if broken.any():
        experts = (choice.weights[broken] != 0).any(0).nonzero()[:, 0].tolist()
        raise NotFinite(
            f"the velocity of expert {' or '.join(map(str, experts))} is not finite at t = {float(t):.4g}, "
            f"for {int(broken.sum())} of {len(v)} samples: damaged weights, a dtype that is too narrow "
            "(float16 ends at 65,504), or too much guidance"
        )


def integrate(
    model: VelocityField | Ensemble,
    x: Tensor,
    times: Tensor,
    solver: str | Solver | None = None,
    guidance_scale: float | Guidance = 1.0,
    negative: Mapping[str, Tensor] | None = None,
    conditions: Mapping[str, Tensor] | None = None,
    *,
    expert: Tensor | None = None,
    on_step: OnStep = unchanged,
    stop: Callable[[], bool] = never,
    router_every: int = 1,
) -> Tensor:
    """The states x (batch, C, H, W) of times[0], carried to times[-1] along the model's velocity.

    Args:
        model: an expert or an ensemble.
        x: on the model's device.
        times: see `time_grid`.
        solver: its name, or a function; see `hddm.solvers`. None is the model's own.
        guidance_scale: see `VelocityField.velocity`.
        negative: as conditions.
        conditions: see `VelocityField.velocity`; on the model's device.
        expert: (batch,) the one expert of each sample; ``draw`` and ``commit-x`` need it.
        on_step: see `hddm.solvers`.
        stop: see `run`.
        router_every: see `plan`.

    Raises:
        HddmError: as `plan` and `run`.
    """
    how = plan(
        model,
        solver=solver,
        guidance=guidance_scale,
        router_every=router_every,
        noise=Latents(x.cpu()),
        times=times,
    )
    if expert is None and how.model.strategy == "draw" and len(how.model.experts) == 1:
        expert = torch.zeros(len(x), dtype=torch.long)
    asked = Conditions(dict(conditions or {}), dict(negative or {}))
    how = replace(how, shape=tuple(x.shape[1:]))
    return run(how, Batch.of(len(x), asked, None if expert is None else expert.cpu()), on_step, stop)


@torch.no_grad()
def sample(
    model: VelocityField | Ensemble | str | Path,
    num: int,
    seed: int = 0,
    steps: int | None = None,
    strategy: str | None = None,
    solver: str | None = None,
    guidance_scale: float | Guidance = 1.0,
    *,
    negative: Mapping[str, Tensor] | None = None,
    prior: Tensor | None = None,
    shift: float | None = None,
    batch_size: int = 64,
    shape: tuple[int, ...] | None = None,
    start: int = 0,
    expert: int | None = None,
    router_every: int = 1,
    picture: Picture | None = None,
    use: ExpertUse | None = None,
    on_step: OnStep = unchanged,
    on_batch: Callable[[int], None] | None = None,
    **conditions: Any,
) -> Tensor:
    """Integrate the model's velocity from noise at t = 1, or from a noised picture, to data at t = 0.

    Args:
        model: an expert or an ensemble, or the folder of one.
        num: number of samples.
        seed: sample i depends on (seed, i) alone.
        steps: see `plan`, as strategy, solver, shift, shape, expert and router_every.
        strategy: for this call, instead of the ensemble's own.
        solver: ``euler``, ``heun``, ``adams-bashforth`` or ``adams-moulton``.
        guidance_scale: 1 for none, another number by condition, or a `hddm.velocity.Guidance`.
        negative: conditions to guide away from, each (num, …); by default the null ones.
        prior: (num, K) distribution of the expert of each sample, in place of p(k | class).
        shift: of the time grid.
        batch_size: samples integrated together; changes a sample by rounding only, which a hard choice of
            experts can amplify.
        shape: (C, H, W) of a sample, for a model that has none of its own.
        start: index i of the first sample: a run in several pieces is the run in one.
        expert: the one expert to use, instead of any strategy.
        router_every: ask the router at every n-th call of the velocity only.
        picture: what samples begin with, and what of it stays; see `hddm.editing`. With ``draw`` and a router
            that looks at states, each expert is drawn from p(k | x_s, s).
        use: a tally of how the experts were used, to be read afterwards.
        on_step: see `hddm.solvers`; called for each batch in turn.
        on_batch: called with the number of samples after each batch.
        conditions: keywords of the experts' networks, each (num, …); ``class_labels`` may be names.

    Returns:
        (num, C, H, W) on the CPU, in float32, or float64 where a network is, in the units that the experts
        were trained in.

    Raises:
        HddmError: as `plan`, `batches` and `run`; for a num below 1, an unknown class or argument, a model of
            unknown sample shape, or experts of several kinds.
    """
    if isinstance(model, str | Path):
        from hddm.experts.loading import load

        model = load(model)
    for name, value in {"num": num, "seed": seed, "start": start}.items():
        least = 1 if name == "num" else 0
        if not isinstance(value, Integral) or value < least:
            raise HddmError(f"{name} is a whole number from {least}, not {value!r}")
    how = plan(
        model,
        steps=steps,
        solver=solver,
        shift=shift,
        strategy=strategy,
        expert=expert,
        guidance=guidance_scale,
        router_every=router_every,
        shape=shape,
        noise=Seeded(seed),
        picture=lambda expert: picture,
    )
    how.model.refuse_kinds(range(len(how.model.experts)) if expert is None else [expert])
    arguments = inspect.signature(sample).parameters.keys() - {"conditions"}
    for branch in (conditions, negative or {}):
        check_names(branch, how.model.conditions, arguments)
    labels = conditions.get(LABELS)
    if labels is not None and not isinstance(labels, Tensor):
        flat = flat_labels(labels)
        is_named = any(isinstance(label, str) for label in flat)
        conditions[LABELS] = class_indices(flat, how.model.classes) if is_named else torch.tensor(flat)
    given, against = (
        {name: torch.as_tensor(value) for name, value in branch.items()}
        for branch in (conditions, negative or {})
    )
    if prior is None:
        # A prompt that names no class has a label beyond them.
        check_labels(given, how.model.classes)
    numbers = range(start, start + num)
    groups = batches(how, numbers, Conditions(given, against, prior), batch_size)
    samples = torch.empty(num, *how.shape_of(expert or 0), dtype=how.dtype)
    for batch in groups:
        try:
            samples[batch.rows] = run(how, batch, on_step, use=use).cpu()
        except (RuntimeError, ValueError) as error:
            own = replace(how, shape=None).shape_of(expert or 0)
            if shape in (None, own) or isinstance(error, HddmError):
                raise
            raise HddmError(f"shape={shape}: a network of samples {own} fails on it: {error}") from error
        if on_batch is not None:
            on_batch(len(batch.rows))
    return samples


def _check_shape(shape: tuple[int, ...], known: tuple[int, ...] | None) -> None:
    """Raise an `HddmError` unless ``shape`` is (C, H, W), of the model's channels; its sides may differ."""
    if not shape or not all(isinstance(size, Integral) and size >= 1 for size in shape):
        raise HddmError(f"shape= takes whole numbers from 1, (C, H, W), not {tuple(shape)}")
    if known is not None and (len(shape), shape[0]) != (len(known), known[0]):
        raise HddmError(
            f"shape={tuple(shape)}: samples of this model are {tuple(known)}; only its sides may differ"
        )
