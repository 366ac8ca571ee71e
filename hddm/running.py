"""How samples run once all is decided: `run` integrates a `Batch` of samples under a `Plan`.

`hddm.sampling` makes plans and batches. Here a batch starts as noise, or as a noised picture, and its states
follow the velocity of the plan's ensemble through the plan's times.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hddm.choice import Choice, pick_experts
from hddm.condition_names import LABELS
from hddm.conditions import Conditions, Inputs, check_names
from hddm.editing import SAME, Picture, edit
from hddm.ensemble import Ensemble
from hddm.expert_use import ExpertUse
from hddm.guidance import Guidance
from hddm.native import native_samples
from hddm.networks.families import sample_settings
from hddm.noise import Noise, Shape
from hddm.settings import NativeName
from hddm.solvers import OnStep, Solver, unchanged
from hddm.times import beginner_of, first_step, mean_seen, time_grid
from hddm.utils.errors import HddmError


class NotFinite(HddmError):
    """Samples that are NaN or Inf."""


def state_dtype(model: Ensemble) -> torch.dtype:
    """Dtype of states and samples: the model's, float32 at least."""
    return torch.promote_types(model.dtype, torch.float32)


def shape_of(model: Ensemble, expert: int, shape: Shape | None = None) -> Shape:
    """Shape (C, H, W) of a sample of this expert, or ``shape`` if it is one.

    Raises:
        HddmError: where neither is known, and for other channels than the model's.
    """
    own = model.sample_shape if model.are_alike() else model.experts[expert].sample_shape
    found = shape or own
    if found is None:
        raise HddmError("this model does not record the shape of a sample: pass shape=(C, H, W)")
    if own is not None and (len(found) != len(own) or found[0] != own[0]):
        raise HddmError(
            f"`shape` {tuple(found)}: samples of this model have {own[0]} channels, as {own}"
        )
    return found


class Beginning(NamedTuple):
    """How samples come to the end of their experts (`hddm.times`)."""

    time: float
    """The time at which networks begin."""
    asks: bool
    """True if the first call is for the mean of the data, which an expert without a calibration lacks."""


@dataclass(frozen=True)
class Plan:
    """How samples are drawn, with every default filled in; `hddm.sampling.plan` makes it."""

    model: Ensemble
    """Under the strategy of these samples."""
    expert: int | None
    """The one expert of all samples; None where the strategy chooses."""
    solver: Solver
    solver_name: str
    """Name of the solver that runs; the function's name for a function of the caller's own."""
    grid_steps: int
    """Steps from t = 1 to 0, of which a picture needs the last ones only."""
    times: Tensor
    """Times from 1, or from the strength of a picture, to 0, in float64, for experts that cover them."""
    shift: float | None
    """Of the time grid; None where its times are the caller's own."""
    guidance: Guidance
    noise: Noise
    shape: tuple[int, ...] | None
    """Shape (C, H, W) of a sample; None for the experts' own."""
    picture: Callable[[int], Picture | None]
    """What samples begin with, in the units of the expert with this index; None for noise."""
    router_every: int = 1
    native: NativeName | None = None
    """A sampler of `hddm.native`, in place of the solver."""

    @property
    def steps(self) -> int:
        """Number of steps that a sample takes."""
        return len(self.times) - 1

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of states and samples."""
        return state_dtype(self.model)

    def beginning_of(self, experts: Iterable[int] | None = None) -> "Beginning":
        """Where networks begin for samples of these ``experts``; None for all of them, mixed.

        That is their end, the largest of them, where samples do not begin below it.
        """
        beginners = []
        for k in range(len(self.model.experts)) if experts is None else experts:
            beginners.append(beginner_of(self.model, k))
        start = float(self.times[0])
        time = min(max(one.end for one in beginners), start)
        picture = self.picture(self.expert or 0)
        is_edit = picture is not None and picture.source is not None
        is_unknown = any(one.calibration is None for one in beginners)
        # An edit begins with a picture, which has its mean; one step alone is the call itself.
        asks = is_unknown and time < start and not is_edit and self.steps > 1
        return Beginning(time, asks)

    def beginning_of_batch(self, batch: "Batch") -> "Beginning":
        """`beginning_of` the experts of a batch; its samples have one, but for times of the caller's own."""
        if batch.expert is not None:
            return self.beginning_of(batch.expert.unique().tolist())
        return self.beginning_of(None if self.expert is None else [self.expert])

    def times_of(self, batch: "Batch") -> Tensor:
        """Times of the steps of a batch, to 0, in float64: as many as the plan's own ``times``.

        These hold for samples that begin at the end of their experts, or below. Others have their steps below
        the end, and one that leads there if networks are asked for it.
        """
        time, asks = self.beginning_of_batch(batch)
        if self.shift is None or time == self.times[0]:
            return self.times
        if asks:
            return torch.cat([self.times[:1], time_grid(self.steps - 1, self.shift, time)])
        return time_grid(self.steps, self.shift, time)

    def shape_of(self, expert: int) -> tuple[int, ...]:
        """Shape (C, H, W) of a sample of this expert.

        Raises:
            HddmError: where neither the plan nor the model knows it, and for other channels than the model's.
        """
        return shape_of(self.model, expert, self.shape)

    def start(self, numbers: Sequence[int], rows: Tensor, expert: int) -> tuple[Tensor, float]:
        """States (n, C, H, W) that samples begin with, on the CPU, and their time.

        Args:
            numbers: the samples' numbers under a seed.
            rows: their places among all samples (n,).
            expert: an expert of the samples' kind.
        """
        noise, picture = self.noise.initial(numbers, self.shape_of(expert)), self.picture(expert)
        return (
            (noise, 1.0)
            if picture is None
            else (picture.rows(rows).noised(noise), picture.strength)
        )


@dataclass(frozen=True)
class Batch:
    """Samples that are integrated together."""

    rows: Tensor
    """Their places among all samples (n,)."""
    numbers: Sequence[int]
    """Their numbers under a seed."""
    conditions: Conditions
    """On the model's device."""
    expert: Tensor | None = None
    """The expert of each sample (n,), on the CPU; None where experts are mixed."""
    kind: int = 0
    """An expert of the kind that the samples are of."""

    @classmethod
    def of(cls, num: int, conditions: Conditions, expert: Tensor | None) -> "Batch":
        """Samples 0 … ``num`` - 1; ``expert`` (num,) is the expert of each, None where experts are mixed."""
        return cls(torch.arange(num), range(num), conditions, expert)

    def part(self, rows: Tensor) -> "Batch":
        """The samples in these places of the batch (n,)."""
        numbers = [self.numbers[row] for row in rows.tolist()]
        expert = None if self.expert is None else self.expert[rows]
        return Batch(self.rows[rows], numbers, self.conditions.rows(rows), expert, self.kind)


def posterior_of(ensemble: Ensemble, x: Tensor, s: float, conditions: Conditions) -> Tensor:
    """Probabilities (batch, K) of the expert that carries states x (batch, C, H, W) on from time s.

    They are p(k | x_s, s, condition) where the ensemble has a router and s is below 1, else p(k | condition).
    """
    if s == 1 or ensemble.router is None:
        return ensemble.begun(x, s, conditions.given, conditions.prior)
    t = torch.full((len(x),), s, dtype=torch.float64)
    full = ensemble.under("full")
    return full.weights(x.to(ensemble.device), t, None, conditions.given, conditions.prior)


@torch.no_grad()
def run(
    plan: Plan,
    batch: Batch,
    on_step: OnStep = unchanged,
    stop: Callable[[], bool] = lambda: False,
    use: ExpertUse | None = None,
) -> Tensor:
    """Integrate a batch from its noise, or its picture, to samples (n, C, H, W), on the model's device.

    Under ``draw``, for one expert and below x of ``commit-x``, samples are grouped by expert once, and steps
    read nothing back from the device. Other strategies read the router's answer, once per step.

    Args:
        plan: see `hddm.sampling.plan`.
        batch: one of its `hddm.sampling.batches`.
        on_step: see `hddm.solvers`.
        stop: called after each step; once it is true, states stay as they are, no network runs and
            ``on_step`` is not called.
        use: a tally of the experts' weights, where one is wanted.

    Raises:
        NotFinite: naming the step at which the velocity was not finite, which a second pass finds.
        HddmError: as `Ensemble.velocity`.
    """
    x = _integrate(plan, batch, on_step, stop, use)
    if x.isfinite().all() or stop():
        return x
    _integrate(plan, batch, stop=stop, is_checked=True)
    if stop():
        return x
    raise NotFinite("samples are not finite though every velocity is: on_step changed them")


def _integrate(
    plan: Plan,
    batch: Batch,
    on_step: OnStep = unchanged,
    stop: Callable[[], bool] = lambda: False,
    use: ExpertUse | None = None,
    is_checked: bool = False,
) -> Tensor:
    model, solver, picture = plan.model, plan.solver, plan.picture(batch.kind)
    x, s = plan.start(batch.numbers, batch.rows, batch.kind)
    source: Batch | None = None
    if picture is not None:
        fresh, picture = (
            plan.noise.fresh(batch.numbers, tuple(x.shape[1:])),
            picture.rows(batch.rows),
        )
        solver = picture.solver(solver, fresh)
        if picture.source is not None:
            source = _source_of(plan, batch, picture.source, x, s)
            unguided = replace(plan, guidance=Guidance(1.0))
            beside = _Walk(model, unguided, source, unchanged, stop, None, is_checked)

            def source_velocity(x: Tensor, now: Tensor, then: Tensor) -> Tensor:
                return torch.zeros_like(x) if stop() else beside.velocity(x, now, then)

            solver = edit(solver, picture.x_0, source_velocity, fresh)
            x = picture.x_0.to(x).expand_as(x)
    x = x.to(model.device, torch.promote_types(plan.dtype, x.dtype))
    if use is not None:
        use.kept = batch.expert
    if stop():
        return x
    if plan.native is not None:
        return _natively(plan, batch, x, plan.native, on_step, stop, use)
    mixed = model if batch.expert is not None or model.commits_at is None else model.under("full")
    times, done = plan.times_of(batch), 0
    if plan.beginning_of_batch(batch).time < plan.times[0]:
        walk = _Walk(mixed, plan, batch, on_step, stop, use, is_checked)
        x, times, done = _begun(walk, source, x)
        if stop():
            return x
    above = 0
    if batch.expert is None and model.commits_at is not None:
        above = int((times > model.commits_at + SAME).sum())
        if above:
            above = min(above, len(times) - 1)
            walk = _Walk(mixed, plan, batch, _later(on_step, done), stop, use, is_checked)
            x = solver(walk.velocity, x, times[: above + 1], walk.on_step_unless_stopped)
        # States that are not finite have no probabilities; the second pass finds who made them.
        if above == len(times) - 1 or stop() or not x.isfinite().all():
            return x
        posterior = posterior_of(model, x, float(times[above]), batch.conditions)
        batch = replace(batch, expert=pick_experts(posterior, plan.noise.draws(batch.numbers)))
        if use is not None:
            use.kept = batch.expert
    walk = _Walk(model, plan, batch, _later(on_step, done + above), stop, use, is_checked)
    return solver(walk.velocity, x, times[above:], walk.on_step_unless_stopped)


def _natively(
    plan: Plan,
    batch: Batch,
    x: Tensor,
    name: NativeName,
    on_step: OnStep,
    stop: Callable[[], bool],
    use: ExpertUse | None,
) -> Tensor:
    """Samples (n, C, H, W) from noise x of a batch of one expert, by that expert's own sampler."""
    walk = _Walk(plan.model, plan, batch, on_step, stop, use, is_checked=False)
    assert walk.choice is not None
    if use is not None:
        use.add(1.0, walk.choice.weights)
    conditions = batch.conditions
    inputs = plan.model.inputs_by_expert(
        x, walk.choice, plan.guidance, conditions.negative, conditions.given
    )
    (expert,) = walk.choice.rows
    part = plan.model.parts[expert]
    is_pixels = part.vae is None and x.shape[1] in (1, 3)
    return native_samples(
        part.field, x, plan.steps, name, inputs[expert], is_pixels, walk.on_step_unless_stopped
    )


def _later(on_step: OnStep, done: int) -> OnStep:
    """The ``on_step`` of steps that come after ``done`` others."""
    return lambda index, x: on_step(done + index, x)


def _begun(walk: "_Walk", source: Batch | None, x: Tensor) -> tuple[Tensor, Tensor, int]:
    """The states x (n, …) at which networks begin, the times of their steps, and the steps that are done.

    Times of the caller's own may have several above the experts' end, each a step.
    """
    plan, batch = walk.plan, walk.batch
    begin, asks = plan.beginning_of_batch(batch)
    times, now, done = plan.times_of(batch), float(plan.times[0]), 0
    x_0 = mean_seen(walk.velocity, x, now, begin) if asks else None

    def carried(x: Tensor, of: Batch, guidance: Guidance, s: float, t: float) -> Tensor:
        return first_step(plan.model, x, s, t, of.expert, of.conditions, guidance)

    while now > begin and done < len(times) - 1:
        following = float(times[done + 1])
        then = max(begin, following)
        if x_0 is not None:
            x = then / now * x + (1 - then / now) * x_0
        elif source is None:
            x = carried(x, batch, plan.guidance, now, then)
        else:
            # The states of `edit` are pictures. The step is affine: without noise it is its mean over noise.
            noised = (1 - now) * x
            moved = carried(noised, batch, plan.guidance, now, then)
            x = x + moved - carried(noised, source, Guidance(1.0), now, then)
        now = then
        if following >= begin:
            x = walk.on_step_unless_stopped(done, x)
            done += 1
    return x, torch.cat([times.new_tensor([now]), times[done + 1 :]]), done


def _source_of(plan: Plan, batch: Batch, conditions: Conditions, x: Tensor, s: float) -> Batch:
    """The same samples under ``conditions`` that describe their pictures, noised to x at s."""
    model, expert = plan.model, batch.expert
    conditions = conditions.map(lambda value: value.to(model.device))
    given, settings = batch.conditions.given, sample_settings()
    same = {name: value for name, value in given.items() if name in settings}
    conditions = replace(conditions, given=same | conditions.given)
    if model.strategy == "draw" and plan.expert is None:
        expert = pick_experts(
            posterior_of(model, x, s, conditions), plan.noise.draws(batch.numbers)
        )
    return replace(batch, conditions=conditions, expert=expert)


@dataclass
class _Walk:
    """A batch on its way from one time to another: which experts run, and with which inputs."""

    model: Ensemble
    plan: Plan
    batch: Batch
    on_step: OnStep
    stop: Callable[[], bool]
    use: ExpertUse | None
    is_checked: bool
    choice: Choice | None = None
    """The experts that run; fixed where each sample of the batch has its own."""
    shares: Tensor | None = None
    seen: Mapping[str, Tensor] = field(default_factory=dict)
    """The conditions that the router gets."""
    labels: Tensor | None = None
    inputs: tuple[Choice | None, Mapping[int, Inputs]] = (None, {})
    """A choice, and the inputs of its experts."""
    stopped: Tensor | None = None
    """The states at which the walk was stopped."""

    def __post_init__(self) -> None:
        self.calls = itertools.count()
        model, conditions, expert = self.model, self.batch.conditions, self.batch.expert
        for branch in (conditions.given, conditions.negative):
            check_names(branch, model.conditions)
            if LABELS in branch:
                model.check_range(branch[LABELS].cpu(), expert)
        self.labels = conditions.given[LABELS].cpu() if LABELS in conditions.given else None
        if expert is None:
            given, prior = conditions.given, conditions.prior
            self.shares = model.shares_of(len(self.batch.rows), given, prior)
            self.seen = model.seen_by_router(given, prior)
        else:
            self.choice = Choice.of(expert, len(model.experts))
            model.check_able(self.choice.weights, conditions.given)

    def velocity(self, x: Tensor, now: Tensor, then: Tensor) -> Tensor:
        """The velocity of states x (n, …) at ``now``, for a step to ``then``."""
        if self.stopped is not None:
            return torch.zeros_like(x)
        model, conditions, t = self.model, self.batch.conditions, now.expand(len(x))
        if self.batch.expert is None and next(self.calls) % self.plan.router_every == 0:
            may_be_nan = not self.is_checked
            self.choice = Choice(model.routed(x, t, self.shares, self.seen, may_be_nan))
            model.joint.check(self.choice.weights, self.labels)
        assert self.choice is not None
        choice = self.choice
        if model.num_domains < len(model.experts):
            choice = Choice(model.at(t, choice.weights))
        if self.use is not None:
            self.use.add(float(now), choice.weights)
        if self.inputs[0] is not choice:
            given, negative = conditions.given, conditions.negative
            self.inputs = (
                choice,
                model.inputs_by_expert(x, choice, self.plan.guidance, negative, given),
            )
        v = model.mix(x, t, choice, self.inputs[1], then)
        if self.is_checked:
            _check_finite(v, now, choice)
        return v

    def on_step_unless_stopped(self, index: int, x: Tensor) -> Tensor:
        """The ``on_step`` of the solver."""
        # A solver with a memory would move on from where it was stopped.
        if self.stopped is not None:
            return self.stopped
        x = self.on_step(index, x)
        self.stopped = x if self.stop() else None
        return x


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


def gathered(made: Sequence[tuple[Batch, Tensor]]) -> list[tuple[Tensor, int, Tensor]]:
    """All samples of each kind, in order: their rows, an expert of the kind, and samples (n, C, H, W)."""
    found = []
    for kind in dict.fromkeys(batch.kind for batch, _ in made):
        own = [(batch, samples) for batch, samples in made if batch.kind == kind]
        rows = torch.cat([batch.rows for batch, _ in own])
        samples = torch.cat([samples for _, samples in own])
        order = rows.argsort()
        found.append((rows[order], kind, samples[order]))
    return found
