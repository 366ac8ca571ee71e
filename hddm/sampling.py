"""From noise to samples: `plan` decides how samples are drawn, `batches` groups them, `sample` does it all.

`hddm.running.run` integrates what is planned here: at each step the ensemble decides which experts run
(`Ensemble.routed`, or the sample's own expert), mixes their velocities (`Ensemble.mix`), and the solver takes
the step. Sample i depends on (seed, i) alone: its noise, and the expert that ``draw`` chooses for it, come
from generators of its own. The batch size changes rounding only, which a hard choice of experts can amplify.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hddm.choice import Choice, pick_experts
from hddm.classes import class_indices
from hddm.condition_names import LABELS, TEXT
from hddm.conditions import Conditions, check_names, check_negative, check_rows
from hddm.editing import Picture
from hddm.ensemble import Ensemble
from hddm.expert_use import ExpertUse
from hddm.guidance import OPTIONS, Guidance
from hddm.native import refuse_guidance, refuse_native
from hddm.networks.offload import expect_batches, holder_of, is_offloaded
from hddm.noise import Latents, Noise, Seeded
from hddm.running import Batch, Plan, posterior_of, run
from hddm.sampling_choices import check_expert, refuse_beside_native, refuse_native_mix
from hddm.settings import NativeName
from hddm.solvers import (
    DEFAULT_SOLVER,
    DEFAULT_STEPS,
    WITH_MEMORY,
    OnStep,
    Solver,
    euler,
    solver_named,
    unchanged,
)
from hddm.strategies import refuse_void, void_since
from hddm.times import time_grid as time_grid
from hddm.utils.errors import HddmError
from hddm.utils.records import WHOLE
from hddm.velocity import VelocityField


def resolve_solver(
    model: Ensemble, requested: str | Solver | None, picture: Picture | None = None
) -> tuple[str, Solver]:
    """Name and function of the solver that runs: the caller's choice, else the model's.

    Args:
        model: that is sampled.
        requested: a name or a function; None for no choice.
        picture: what samples begin with.

    Raises:
        HddmError: for an unknown solver, for students of few steps another one than Euler's, and one with a
            memory for a picture whose every step is a solver's first.
    """
    is_student = model.sampling_steps is not None
    forgets = picture is not None and picture.one_step_at_a_time
    if requested is None:
        requested = "euler" if is_student or forgets else DEFAULT_SOLVER
    if isinstance(requested, str):
        name, solver = requested, solver_named(requested)
    else:
        name, solver = getattr(requested, "__name__", repr(requested)), requested
    if is_student and solver is not euler:
        raise HddmError(
            f"`solver` {name}: a student of few steps predicts the mean velocity over a step, which euler "
            "takes exactly; drop the option"
        )
    if forgets and solver in WITH_MEMORY:
        raise HddmError(
            f"`solver` {name}: uses earlier steps, which a mask and an edit do not have; take euler or heun"
        )
    return name, solver


def check_effects(
    model: Ensemble, strategy: str | None, expert: int | None, guidance: Guidance, router_every: int
) -> None:
    """Raise an `HddmError` for an option that would change nothing, since another one makes it void.

    Values that are the defaults are no choice of anybody, and always accepted; ``strategy`` is None for the
    model's own.
    """
    if strategy is not None:
        refuse_void(strategy, len(model.experts), model.num_domains)
    reason = void_since(len(model.experts), model.num_domains)
    if expert is not None:
        reason = f"`expert` {expert} is chosen"
    elif model.strategy == "draw" and not reason:
        reason = "strategy draw keeps one expert per image"
    if router_every != 1 and reason:
        raise HddmError(f"`router_every` {router_every}: no router runs, since {reason}; drop it")
    if guidance.scale == 1:
        plain = Guidance(1.0)
        for field, option in OPTIONS.items():
            value = getattr(guidance, field)
            if value != getattr(plain, field):
                text = "has no effect at `guidance_scale` 1; set a scale, or drop it"
                shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
                raise HddmError(f"`{option}` {shown}: {text}")


def plan(
    model: Ensemble | VelocityField,
    *,
    steps: int | None = None,
    solver: str | Solver | None = None,
    shift: float | None = None,
    strategy: str | None = None,
    expert: int | None = None,
    guidance: float | Guidance = 1.0,
    router_every: int = 1,
    shape: tuple[int, ...] | None = None,
    noise: Noise | Callable[[], Noise] = Seeded(),  # noqa: B008 - it holds a number alone
    picture: Callable[[int], Picture | None] = lambda expert: None,
    times: Tensor | None = None,
    native: NativeName | None = None,
) -> Plan:
    """Decide how samples are drawn; an argument that is None takes the model's own value.

    Args:
        model: an ensemble, or one expert, which is an ensemble of one.
        steps: number of solver steps, evenly spaced in t if the shift is 1; by default 25, or a student's.
            They begin at the end of the experts, below t = 1 for some (`hddm.times`).
        solver: a name or a function, see `hddm.solvers`; by default ``adams-moulton``, or ``euler`` for
            students of few steps, with a mask and in edits.
        shift: see `hddm.times.time_grid`.
        strategy: instead of the ensemble's own; see `hddm.strategies`.
        expert: use this expert alone; at times outside its range, the other expert of its domain runs.
        guidance: 1 for none; another number is the scale of guidance by condition; or a `Guidance`.
        router_every: call the router at every n-th call of the velocity, which Heun's method makes twice per
            step, and use its last answer in between; for strategies that call it.
        shape: (C, H, W) of a sample, where it is not the model's.
        noise: see `hddm.running`; or a function that returns it, called once all else is decided.
        picture: the picture to start from, and the region of it to keep; see `hddm.editing`.
        times: in place of ``steps`` and ``shift``.
        native: a sampler of `hddm.native` in place of the solver, of each expert's own kind.

    Raises:
        HddmError: for an unknown strategy, solver or expert, numbers outside their ranges, a student with
            another solver than Euler's or with guidance on top of its own, times that an expert does not
            cover, and options without effect (`check_effects`, `resolve_solver`).
    """
    alone = model if isinstance(model, VelocityField) else None
    if isinstance(model, VelocityField):
        # The copy may run at any t; `refuse_beyond`, at the end of this function, checks the true range.
        whole = copy.copy(model)
        whole.noise_range = WHOLE
        model = Ensemble([whole], strategy="draw", shift=model.shift)
    check_expert(expert, strategy, len(model.experts))
    if shape is not None and len(shape) == 3:
        num = len(model.experts)
        model = model.at_sizes([(shape[1], shape[2])] * num, [1] * num)
    is_own = alone is None and strategy == model.strategy
    chosen = None if is_own else strategy
    # A copy, so that another thread's sampling keeps its own strategy.
    model = model.under(strategy or model.strategy)
    guidance = Guidance.of(guidance)
    scale, inner = guidance.scale, max(one.inner_guidance for one in model.experts)
    if scale != 1 and inner != 1:
        text = f"this student has guidance of scale {inner:g} inside; drop it"
        raise HddmError(f"`guidance_scale` {scale:g}: {text}")
    check_effects(model, chosen, expert, guidance, router_every)
    first = picture(expert or 0)
    if native is not None:
        others = {"solver": solver, "shift": shift, "times": times}
        refuse_guidance(guidance, native)
        check_native(model, native, expert, first, steps or DEFAULT_STEPS, others)
    solver_name, solver = resolve_solver(model, solver, first)
    solver_name = native or solver_name
    if times is None:
        grid_steps = steps if steps is not None else model.sampling_steps or DEFAULT_STEPS
        shift = model.shift if shift is None else shift
        times = time_grid(grid_steps, shift)
        times = times if first is None else first.times(times)
        is_edit = first is not None and first.source is not None
        if is_edit and model.commits_at is not None and expert is None:
            raise HddmError(
                f"`strategy` {model.strategy}: cannot edit a picture; choose draw or full"
            )
    elif steps is not None or shift is not None:
        raise HddmError(
            "`times` are the steps themselves: pass neither `steps` nor `shift` beside them"
        )
    else:
        grid_steps = len(times) - 1
    if alone is not None:
        alone.refuse_beyond(times)
    return Plan(
        model=model,
        expert=expert,
        solver=solver,
        solver_name=solver_name,
        grid_steps=grid_steps,
        times=times,
        # A native sampler has times of its own.
        shift=None if native is not None else shift,
        guidance=guidance,
        noise=noise() if callable(noise) else noise,
        shape=shape,
        picture=picture,
        router_every=router_every,
        native=native,
    )


def check_native(
    model: Ensemble,
    name: NativeName,
    expert: int | None,
    picture: Picture | None,
    steps: int,
    others: Mapping[str, object],
) -> None:
    """Raise an `HddmError` for a native sampler beside ``others`` that are set, and as `refuse_native`."""
    refuse_beside_native(name, others)
    if picture is not None:
        raise HddmError(f"`native` {name}: begins with noise alone; drop the picture")
    if expert is None and model.num_domains > 1:
        refuse_native_mix(name, model.strategy)
    for k, one in enumerate(model.experts):
        if expert in (None, k):
            refuse_native(one, name, steps)


def batches(
    plan: Plan, numbers: Sequence[int], conditions: Conditions, size: int
) -> Iterator[Batch]:
    """Group the samples ``numbers`` into batches of at most ``size``; ``draw`` draws their experts first.

    If drawn samples need several batches, they are sorted by domain, so that each expert gets large batches.
    A batch holds samples of one kind and of one time grid (`Plan.times_of`). Where experts are offloaded,
    their domains need the same weights, as LoRA experts of one base do, so that each expert is brought to the
    device once.

    Raises:
        HddmError: for conditions or a picture of another length than ``numbers``, experts that cannot be
            guided as planned, conditions that no expert, or not the plan's, can take, and conditions to guide
            away from without guidance by condition.
        UsageError: for a condition that an expert of these samples needs and that is missing.
    """
    model, num = plan.model, len(numbers)
    check_negative(plan.guidance, conditions.negative)
    for branch in (conditions.given, conditions.negative):
        check_names(branch, model.conditions)
        check_rows(num, branch)
    is_apart = plan.expert is None and not model.are_alike()
    chosen = _chosen(plan, numbers, conditions, size)
    kinds = [plan.expert or 0]
    if is_apart and chosen is not None:
        kinds = chosen.unique().tolist()
    for k in kinds:
        picture = plan.picture(k)
        if picture is not None:
            picture.check(num, plan.shape_of(k))
    used = chosen
    if chosen is None:
        shares = model.shares_of(num, conditions.given, conditions.prior)
        used = None if shares is None else shares.sum(0).nonzero()[:, 0]
    model.require(plan.guidance, conditions.given, used)
    groups = _groups(plan, chosen, num, size, is_apart)

    def grouped() -> Iterator[Batch]:
        parts = [rows for group in groups for rows in group.split(size)]
        for number, rows in enumerate(parts):
            experts = None if chosen is None else chosen[rows]
            if chosen is not None and is_offloaded(one.network for one in model.experts):
                expect_batches(_in_order(model, chosen[torch.cat(parts[number:])].tolist()))
            kind = plan.expert or 0
            if experts is not None and is_apart:
                kind = int(experts[0])
            own = [numbers[row] for row in rows.tolist()]
            yield Batch(rows, own, conditions.rows(rows, model.device), experts, kind)

    # All that can be refused was refused above, before the first batch is taken.
    return grouped()


def _groups(plan: Plan, chosen: Tensor | None, num: int, size: int, is_apart: bool) -> list[Tensor]:
    """Rows of samples that may share batches of ``size``; ``chosen`` (num,) is the expert of each."""
    if chosen is None:
        return [torch.arange(num)]
    model, domains = plan.model, torch.tensor(plan.model.domains)
    if is_apart or plan.native is not None:
        keys = chosen
    else:
        weights = [0] * len(model.experts)
        if is_offloaded(one.network for one in model.experts):
            weights = _by_weights(model)
        kinds = [(weight, plan.beginning_of([k])) for k, weight in enumerate(weights)]
        keys = torch.tensor([kinds.index(kind) for kind in kinds])[chosen]
    groups = []
    for key in keys.unique().tolist():
        rows = (keys == key).nonzero()[:, 0]
        if len(rows) > size:
            rows = rows[domains[chosen[rows]].argsort(stable=True)]
        groups.append(rows)
    return groups


def _in_order(model: Ensemble, experts: Iterable[int]) -> list[object]:
    """Networks in the order in which samples of these ``experts``, batch after batch, need them."""
    found = list[object]()
    for expert in dict.fromkeys(experts):
        same = []
        for domain, one in zip(model.domains, model.experts, strict=True):
            if domain == model.domains[expert]:
                same.append(one)
        # Steps lead from noise to data.
        same.sort(key=lambda one: one.noise_range[1], reverse=True)
        found += [one.network for one in same]
    return found


def _by_weights(model: Ensemble) -> list[int]:
    """For each expert the first one of a domain that needs the same weights on the device."""
    needed = dict[int, set[int]]()
    for domain, one in zip(model.domains, model.experts, strict=True):
        needed.setdefault(domain, set()).add(id(holder_of(one.network) or one.network))
    first = dict[frozenset[int], int]()
    for domain, weights in needed.items():
        first.setdefault(frozenset(weights), domain)
    return [first[frozenset(needed[domain])] for domain in model.domains]


def blind_draw(model: Ensemble, conditions: Conditions, shares: Tensor) -> str | None:
    """Say that the conditions do not choose among the experts of ``shares`` (num, K); None where they do."""
    given = conditions.given
    is_known = conditions.prior is not None or (model.knows_classes and set(given) == {LABELS})
    is_known = is_known or model.is_seen(given) is not None
    usable = {model.domains[k] for k in shares.sum(0).nonzero()[:, 0].tolist()}
    if not given or is_known or len(usable) < 2:
        return None
    text = "decide which expert makes an image, only the shares do"
    if TEXT not in given:
        return f"{', '.join(sorted(given))} do not {text}"
    if any(part.topic is not None for part in model.parts):
        return f"the prompt does not {text}; descriptions of experts need it as text, not as embeddings"
    return f"the prompt does not {text}; hddm describe changes that"


@torch.no_grad()
def _chosen(plan: Plan, numbers: Sequence[int], conditions: Conditions, size: int) -> Tensor | None:
    """The expert of each sample (num,), where it is known before the first step."""
    model, num, given, prior = plan.model, len(numbers), conditions.given, conditions.prior
    if plan.expert is not None:
        chosen = torch.full((num,), plan.expert)
        model.check_able(Choice.of(chosen, len(model.experts)).weights, given)
        return chosen
    if model.strategy != "draw":
        return None
    shares = model.prior_of(num, given, prior)
    blind = blind_draw(model, conditions, shares)
    if blind is not None:
        # Up to the user: this function, no_grad's wrapper, `batches`, `sample`, its wrapper, the user.
        warnings.warn(blind, stacklevel=6)
    shares = drawn_from(plan, numbers, conditions, size)
    return pick_experts(shares, plan.noise.draws(numbers))


@torch.no_grad()
def drawn_from(plan: Plan, numbers: Sequence[int], conditions: Conditions, size: int) -> Tensor:
    """The distribution (num, K) of the expert of each sample, as it is known before the first step.

    A router is asked about pictures, and about conditions that it sees, in batches of ``size``.
    """
    model, num = plan.model, len(numbers)
    given, prior = conditions.given, conditions.prior
    is_asked = plan.picture(0) is not None or model.is_seen(given, prior) is not None
    if model.router is None or not is_asked:
        return model.prior_of(num, given, prior)
    parts = []
    for rows in torch.arange(num).split(size):
        x, s = plan.start([numbers[row] for row in rows.tolist()], rows, 0)
        parts.append(posterior_of(model, x, s, conditions.rows(rows, model.device)))
    return torch.cat(parts)


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
    native: NativeName | None = None,
    on_step: OnStep = unchanged,
    **conditions: Any,
) -> Tensor:
    """Integrate the model's velocity from noise at t = 1, or from a noised picture, to data at t = 0.

    Args:
        model: an expert or an ensemble, or the folder of one.
        num: number of samples.
        seed: sample i depends on (seed, i) alone.
        steps: see `plan`, as strategy, solver, shift, shape, expert and router_every.
        strategy: for this call, instead of the ensemble's own.
        solver: ``euler``, ``heun`` or ``adams-moulton``.
        guidance_scale: 1 for none; another number is the scale of guidance by condition; or a `Guidance`.
        negative: conditions to guide away from, each (num, …); by default the null ones.
        prior: (num, K) distribution of the expert of each sample, in place of p(k | class) and of what a
            router sees of conditions.
        shift: see `hddm.times.time_grid`; by default the model's.
        batch_size: samples integrated together; changes a sample by rounding only, which a hard choice of
            experts can amplify.
        shape: (C, H, W) of a sample, for a model that has none of its own.
        start: index i of the first sample: a run in several pieces is the run in one.
        expert: use this expert alone, instead of any strategy.
        router_every: call the router only at every n-th call of the velocity.
        picture: the picture to start from, and the region of it to keep; see `hddm.editing`. With ``draw``
            and a router that looks at states, each expert is drawn from p(k | x_s, s).
        use: a tally of how the experts were used, which the caller reads afterwards.
        native: see `plan`.
        on_step: see `hddm.solvers`; called for each batch in turn.
        conditions: keywords of the experts' networks, each (num, …); ``class_labels`` may be names.

    Returns:
        (num, C, H, W) on the CPU, in float32, or float64 where a network is, in the units that the experts
        were trained in.

    Raises:
        HddmError: as `plan`, `batches` and `hddm.running.run`; for an unknown class or argument, a model of
            unknown sample shape, or experts of several kinds.
    """
    if isinstance(model, str | Path):
        from hddm.experts.loading import load

        model = load(model)
    if num < 1:
        raise HddmError(f"`num` {num}: must be 1 or more")
    if prior is not None and expert is not None:
        raise HddmError(
            f"`prior` chooses experts, and `expert` {expert} is chosen already; drop one of the two"
        )
    planned = plan(
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
        native=native,
    )
    planned.model.refuse_kinds(range(len(planned.model.experts)) if expert is None else [expert])
    check_names(conditions, planned.model.conditions, sample)
    check_names(negative or {}, planned.model.conditions)
    if conditions.get(LABELS) is not None:
        # A prompt that names no class has the label for none, and brings its prior.
        has_prior = prior is not None
        conditions[LABELS] = class_indices(conditions[LABELS], planned.model.classes, has_prior)
    given = {name: torch.as_tensor(value) for name, value in conditions.items()}
    against = {name: torch.as_tensor(value) for name, value in (negative or {}).items()}
    numbers = range(start, start + num)
    groups = batches(planned, numbers, Conditions(given, against, prior), batch_size)
    samples = torch.empty(num, *planned.shape_of(expert or 0), dtype=planned.dtype)
    for batch in groups:
        samples[batch.rows] = run(planned, batch, on_step, use=use).cpu()
    return samples


def integrate(
    model: VelocityField | Ensemble,
    x: Tensor,
    times: Tensor,
    conditions: Conditions | None = None,
    expert: Tensor | None = None,
    on_step: OnStep = unchanged,
    **options: Any,
) -> Tensor:
    """The states x (batch, C, H, W) of times[0], carried to times[-1] along the model's velocity.

    Args:
        model: an expert or an ensemble.
        x: on any device.
        times: see `hddm.times.time_grid`. No network runs above the end of the experts, where
            `hddm.times.first_step` leads from each time to the next.
        conditions: on the model's device.
        expert: (batch,) the one expert of each sample; ``draw`` and ``commit-x`` need it.
        on_step: see `hddm.solvers`.
        options: of `plan`, such as ``solver``.

    Raises:
        HddmError: as `plan` and `hddm.running.run`.
    """
    planned = plan(
        model, times=times, noise=Latents(x=x.cpu()), shape=tuple(x.shape[1:]), **options
    )
    if conditions is not None:
        check_negative(planned.guidance, conditions.negative)
    batch = Batch.of(len(x), conditions or Conditions(), None if expert is None else expert.cpu())
    return run(planned, batch, on_step)
