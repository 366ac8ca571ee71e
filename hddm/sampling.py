"""From noise to samples: a time grid, a solver and a velocity field.

Sample i depends on (seed, i) alone: its noise, and the expert that ``draw`` gives it, come from a generator
of its own, whatever the batch size. A batch size changes rounding only.
"""

import functools
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hddm.classes import class_indices, flat_labels
from hddm.editing import SAME, Picture
from hddm.ensemble import Ensemble, Strategy
from hddm.solvers import DEFAULT_SOLVER, DEFAULT_STEPS, OnStep, Solver, solver_named, unchanged
from hddm.utils.errors import HddmError
from hddm.utils.tensors import generator
from hddm.velocity import INTERVAL, PRIOR, Guidance, VelocityField, check_labels, check_names

Keep = Callable[[Tensor, Callable[[], Tensor]], Tensor]


def made(rows: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """The ``keep`` that makes every batch and keeps none."""
    return make()


BINS = 10
MOST = 0.9
"""Share of the weight that one expert may take without a warning."""
FEWEST_EXPECTED = 3
"""Samples that ``draw`` must be expected to give an expert before it warns that there were none."""


class ExpertUse:
    """A tally of weights (samples, K) over time, in `BINS` even bins of t in [0, 1]."""

    def __init__(self, num_experts: int) -> None:
        self._weight = torch.zeros(BINS, num_experts, dtype=torch.float64)
        self._runs = torch.zeros(BINS, num_experts, dtype=torch.float64)
        self._samples = torch.zeros(BINS, dtype=torch.float64)
        self.last = torch.zeros(0, num_experts)
        """Weights (samples, K) of the last call of the velocity."""

    def add(self, t: float, weights: Tensor) -> None:
        """Count one call of the velocity at ``t`` with ``weights`` (samples, K)."""
        self.last = weights
        place = min(int(t * BINS), BINS - 1)
        self._weight[place] += weights.sum(0).double().cpu()
        self._runs[place] += (weights != 0).sum(0).double().cpu()
        self._samples[place] += len(weights)

    def values(self) -> dict[str, Any]:
        """The tally as plain values, exactly."""
        return {name: tally.tolist() for name, tally in self._tallies.items()}

    def load(self, values: Mapping[str, Any]) -> None:
        """Count from the tally that `values` gave."""
        for name, tally in self._tallies.items():
            tally.copy_(torch.tensor(values[name], dtype=tally.dtype))

    def add_all(self, other: "ExpertUse") -> None:
        """Count all that another tally of the same experts has counted."""
        for name, tally in self._tallies.items():
            tally += other._tallies[name]

    @property
    def _tallies(self) -> dict[str, Tensor]:
        return {"weight": self._weight, "runs": self._runs, "samples": self._samples}

    @property
    def shares(self) -> Tensor:
        """Share of each expert in all weight (K,); 0 where none ran."""
        return (self._weight.sum(0) / self._weight.sum()).nan_to_num()

    @property
    def experts_a_sample(self) -> float:
        """Experts that ran for a sample and call, on average; 0 where none ran."""
        return float((self._runs.sum() / self._samples.sum()).nan_to_num())

    def report(self) -> dict[str, Any]:
        """Plain values: a row a bin that was visited, from data to noise."""
        visited = [place for place in range(BINS) if self._samples[place]]
        return {
            "experts_a_sample": round(self.experts_a_sample, 4),
            "shares": _rounded(self.shares),
            "by_time": [
                {
                    "t": [place / BINS, (place + 1) / BINS],
                    "shares": _rounded(self._weight[place] / self._weight[place].sum()),
                    "runs": _rounded(self._runs[place] / self._samples[place]),
                }
                for place in visited
            ],
        }

    def warnings(
        self, expected: Tensor | None = None, domains: Sequence[int] = (), is_learned: bool = True
    ) -> list[str]:
        """Warnings of an expert that takes more than 90 % of the weight, or none of it.

        Args:
            expected: how many samples each expert should get by p(k | conditions), (K,), where that is
                known. It explains a large share, and an absence where few are expected.
            domains: as `Ensemble.domains`; those of one count together, under the first. By default none do.
            is_learned: where experts are chosen by a router that is trained.
        """
        lines = []
        first = torch.tensor(domains or range(len(self.shares)))
        same = (first[:, None] == first).double()
        shares, runs = self.shares @ same, self._runs.sum(0) @ same
        wanted = None if expected is None else expected.double() @ same
        leads = first.unique().tolist()
        for k in leads:
            due = float(wanted[k] / expected.sum()) if wanted is not None and expected is not None else 0.0
            if len(leads) > 1 and shares[k] > MOST and due <= MOST:
                if expected is None or expected.sum() >= FEWEST_EXPECTED * len(leads):
                    doubt = "; is the router trained?" if is_learned else ""
                    lines.append(f"expert {k} takes {shares[k]:.0%} of the weight{doubt}")
            elif not runs[k] and (wanted is None or wanted[k] >= FEWEST_EXPECTED):
                lines.append(f"expert {k} is never used")
        return lines


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


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


def initial_noise(seed: int, start: int, stop: int, shape: tuple[int, ...]) -> Tensor:
    """Noise (stop - start, *shape) of samples ``start`` … ``stop`` - 1, in float32 on the CPU."""
    return noise_of(seed, range(start, stop), shape)


def noise_of(seed: int, indices: Iterable[int], shape: tuple[int, ...], *stream: int) -> Tensor:
    """Noise (n, *shape) of the samples of these indices, as `initial_noise`; ``stream`` is another one."""
    return torch.stack([torch.randn(shape, generator=generator(seed, *stream, i)) for i in indices])


def noise_stream(seed: int, indices: Iterable[int], shape: tuple[int, ...]) -> Callable[[], Tensor]:
    """A function that gives new noise (n, *shape) for these samples at every call, apart from `noise_of`."""
    streams = [generator(seed, i, 2) for i in indices]
    return lambda: torch.stack([torch.randn(shape, generator=one) for one in streams])


def posterior_of(ensemble: Ensemble, x: Tensor, s: float, conditions: Mapping[str, Tensor]) -> Tensor:
    """Probabilities (batch, K) that ``draw`` draws the experts of noised pictures from.

    They are p(k | x_s, s, condition) for the states x (batch, C, H, W), where the ensemble has a router and s
    is below 1, else p(k | condition).
    """
    if s == 1 or ensemble.router is None:
        return ensemble.prior_of(len(x), conditions)
    full = ensemble.under("full")
    t = torch.full((len(x),), s, dtype=torch.float64)
    here = {name: value.to(full.device) for name, value in conditions.items()}
    return full.weights(x.to(full.device), t.to(full.device), None, here).cpu()


def draw_experts(prior: Tensor, seed: int, start: int, stop: int) -> Tensor:
    """Expert index (stop - start,) of each sample, drawn from ``prior``, (K,) or one row a sample."""
    return pick_experts(prior, uniform_draws(seed, range(start, stop)))


def uniform_draws(seed: int, indices: Iterable[int]) -> Tensor:
    """Numbers in [0, 1), one per sample, in float64 on the CPU."""
    # The second key keeps this stream apart from the noise of the same sample.
    streams = [generator(seed, i, 1) for i in indices]
    return torch.stack([torch.rand((), generator=stream, dtype=torch.float64) for stream in streams])


def pick_experts(prior: Tensor, uniform: Tensor) -> Tensor:
    """Expert index (batch,) for numbers in [0, 1) by the inverse distribution of ``prior``."""
    bounds = prior.expand(len(uniform), -1).cumsum(1)[:, :-1].contiguous()
    return torch.searchsorted(bounds, uniform[:, None].contiguous(), right=True)[:, 0]


STUDENT_SOLVER = "euler"
"""Solver of students of few steps: its step along a mean velocity is exact."""


def settled(
    model: VelocityField | Ensemble, steps: int | None = None, solver: str | None = None
) -> tuple[int, str]:
    """The numbers of steps and the solver that are asked for, or by default the model's own.

    Those of a student of few steps are the steps that it was trained for, and ``euler``. Raises `HddmError`
    for another solver of a student.
    """
    own = model.sampling_steps
    if own is not None and solver not in (None, STUDENT_SOLVER):
        raise HddmError(
            f"--solver {solver}: a student of few steps gives the mean velocity over a step, which "
            f"{STUDENT_SOLVER} takes exactly; drop the option"
        )
    default = DEFAULT_SOLVER if own is None else STUDENT_SOLVER
    return own or DEFAULT_STEPS if steps is None else steps, solver or default


@torch.no_grad()
def integrate(
    model: VelocityField | Ensemble,
    x: Tensor,
    times: Tensor,
    solver: str | Solver | None = None,
    guidance_scale: float | Guidance | Callable[[], Guidance] = 1.0,
    negative: Mapping[str, Tensor] | None = None,
    conditions: Mapping[str, Tensor] | None = None,
    *,
    expert: Tensor | None = None,
    draws: Tensor | None = None,
    router_every: int = 1,
    use: ExpertUse | None = None,
    on_step: OnStep = unchanged,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> Tensor:
    """The states x (batch, C, H, W) of times[0], carried to times[-1] along the model's velocity.

    Args:
        model: an expert or an ensemble.
        x: see `hddm.sampling`.
        times: see `time_grid`.
        solver: its name, or a function; see `hddm.solvers`. None is the model's own (`settled`).
        guidance_scale: see `VelocityField.velocity`; a function is asked at every call of the velocity.
        negative: as conditions.
        conditions: see `VelocityField.velocity`; on the model's device. Both are read at every call, so that
            ``on_step`` may change them.
        expert: (batch,) the one expert of each sample; ``draw`` needs it.
        draws: (batch,) numbers in [0, 1), by which ``commit-x`` draws an expert per sample, at the first of
            ``times`` at or below x. There the velocity changes, so solvers begin anew.
        router_every: the router is asked at every n-th call of the velocity; between, its choice stays.
        use: a tally of the weights, where one is wanted.
        on_step: see `hddm.solvers`.
        is_interrupted: asked after each step; once it is true, states stay as they are, no network runs and
            ``on_step`` is not called.

    Raises:
        HddmError: as `Ensemble.velocity`, and for a ``router_every`` below 1.
    """
    if router_every < 1:
        raise HddmError(f"router_every starts at 1, not {router_every}")
    if isinstance(model, Ensemble) and expert is None and model.commits_at is not None and draws is not None:
        above = int((times > model.commits_at + SAME).sum())
        part = functools.partial(
            integrate,
            solver=solver,
            guidance_scale=guidance_scale,
            negative=negative,
            conditions=conditions,
            router_every=router_every,
            use=use,
            is_interrupted=is_interrupted,
        )
        if above:
            x = part(model.under("full"), x, times[: above + 1], on_step=on_step)
        if above == len(times) - 1 or is_interrupted():
            return x
        chosen = pick_experts(posterior_of(model, x, float(times[above]), conditions or {}), draws)

        def later(index: int, x: Tensor) -> Tensor:
            return on_step(above + index, x)

        return part(model, x, times[above:], expert=chosen.to(x.device), on_step=later)

    def asked() -> Guidance:
        return guidance_scale() if callable(guidance_scale) else Guidance.of(guidance_scale)

    if isinstance(model, Ensemble):
        model.refuse_weakless(asked(), expert)
    else:
        model.refuse_beyond(times)
    given, count = {} if conditions is None else conditions, itertools.count()
    ends = dict(itertools.pairwise(times.tolist())) if model.sampling_steps is not None else {}
    kept: Tensor | None = None
    stopped = x if is_interrupted() else None

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        nonlocal kept
        if stopped is not None:
            return torch.zeros_like(x)
        over = dict[str, Tensor]()
        if ends:
            over[INTERVAL] = torch.full((len(x),), float(t) - ends[float(t)], device=x.device)
        if not isinstance(model, Ensemble):
            return _finite(model.velocity(x, t, asked(), negative, **given, **over), t)
        if next(count) % router_every == 0 and (kept is None or expert is None):
            kept = model.weights(x, t.expand(len(x)), expert, given)
        assert kept is not None
        kept = model.at(t.expand(len(x)), kept)
        if use is not None:
            use.add(float(t), kept)
        return _finite(model.velocity(x, t, asked(), negative, weights=kept, **given, **over), t, kept)

    def step(index: int, x: Tensor) -> Tensor:
        nonlocal stopped
        # A solver with a memory would move on from where it was stopped.
        if stopped is not None:
            return stopped
        x = on_step(index, x)
        stopped = x if is_interrupted() else None
        return x

    if solver is None or isinstance(solver, str):
        solver = solver_named(settled(model, None, solver)[1])
    return solver(velocity, x, times, step)


def _finite(v: Tensor, t: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return ``v`` (batch, …); raise an `HddmError` that names the experts where it is not finite."""
    is_finite = v.flatten(1).isfinite().all(1)
    if is_finite.all():
        return v
    broken = (~is_finite).to("cpu")
    which = ""
    if weights is not None:
        experts = (weights.to("cpu")[broken] != 0).any(0).nonzero()[:, 0].tolist()
        which = f" of expert {' or '.join(map(str, experts))}"
    raise HddmError(
        f"the velocity{which} is not finite at t = {float(t):.4g}, for {int(broken.sum())} of {len(v)} "
        "samples: damaged weights, a dtype that is too narrow (float16 ends at 65,504), or too much guidance"
    )


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
    shift: float | None = None,
    batch_size: int = 64,
    shape: tuple[int, ...] | None = None,
    start: int = 0,
    numbers: Tensor | None = None,
    expert: int | None = None,
    router_every: int = 1,
    use: ExpertUse | None = None,
    on_step: OnStep = unchanged,
    on_batch: Callable[[int], None] | None = None,
    keep: Keep = made,
    picture: Picture | None = None,
    **conditions: Any,
) -> Tensor:
    """Integrate the model's velocity from noise at t = 1, or from a noised picture, to data at t = 0.

    Args:
        model: an expert or an ensemble, or the folder of one.
        num: number of samples.
        seed: sample i depends on (seed, i) alone.
        steps: solver steps, even in t up to ``shift``; by default 25, or a student's own.
        strategy: for this call, instead of the ensemble's own; see `hddm.ensemble`.
        solver: ``euler``, ``heun``, ``adams-bashforth`` or ``adams-moulton``, the default; see
            `hddm.solvers`. Students of few steps take ``euler`` alone.
        guidance_scale: 1 for none, another number by condition, or a `hddm.velocity.Guidance`.
        negative: conditions to guide away from, each (num, …); by default the null ones.
        shift: of the time grid; by default the model's own.
        batch_size: samples integrated together; changes a sample by rounding only, which a hard choice of
            experts can amplify.
        shape: (C, H, W) of a sample, for a model that has none of its own.
        start: index i of the first sample: a run in several pieces is the run in one.
        numbers: index i of each sample (num,), in place of ``start``; needs ``expert`` or a router.
        expert: the one expert to use, instead of any strategy; with those of its domain, if it covers a part
            of t.
        router_every: ask the router at every n-th call of the velocity only.
        use: a tally of how the experts were used, to be read afterwards.
        on_step: see `hddm.solvers`; called for each batch in turn.
        on_batch: called with the number of samples after each batch.
        keep: called with the rows of each batch (indices, from 0) and a function that makes its samples;
            returns them, made now or kept from an earlier call.
        picture: what samples begin with, and what of it stays; see `hddm.editing`. With ``draw`` and a router
            that looks at states, each expert is drawn from p(k | x_s, s).
        conditions: keywords of the experts' networks, each (num, …); ``class_labels`` may be names.

    Returns:
        (num, C, H, W) on the CPU, in float32, or float64 where a network is, in the units that the experts
        were trained in.

    Raises:
        HddmError: for a num below 1, an unknown strategy, solver, class or argument, a strategy for a single
            expert, a single expert for a part of t, conditions of another length than num, a model of unknown
            sample shape, a shape of other channels than the model's, or a velocity that is not finite.
    """
    if isinstance(model, str | Path):
        from hddm.experts.loading import load

        model = load(model)
    known = model.sample_shape
    if isinstance(model, Ensemble):
        # An unknown expert is refused below, with the others.
        one = expert if expert in range(len(model.experts)) else None
        model.refuse_kinds(range(len(model.experts)) if one is None else [one])
        known = known if one is None else model.experts[one].sample_shape
    shape = tuple(_shape(shape, known))
    steps, solver = settled(model, steps, solver)
    for name, value in {"num": num, "batch_size": batch_size, "seed": seed, "start": start}.items():
        least = 0 if name in ("seed", "start") else 1
        if not isinstance(value, Integral) or value < least:
            raise HddmError(f"{name} is a whole number from {least}, not {value!r}")
    arguments = inspect.signature(sample).parameters.keys() - {"conditions"}
    for branch in (conditions, negative or {}):
        check_names(branch, model.conditions, arguments)
    labels = conditions.get("class_labels")
    if labels is not None and not isinstance(labels, Tensor):
        flat = flat_labels(labels)
        is_named = any(isinstance(label, str) for label in flat)
        conditions["class_labels"] = class_indices(flat, model.classes) if is_named else torch.tensor(flat)
    conditions = {name: torch.as_tensor(value) for name, value in conditions.items()}
    check_labels(conditions, model.classes)
    negative = {name: torch.as_tensor(value) for name, value in (negative or {}).items()}
    for name, value in (*conditions.items(), *negative.items()):
        if value.ndim == 0 or len(value) != num:
            found = len(value) if value.ndim else "no"
            raise HddmError(f"condition {name!r} has {found} rows for {num} samples")
    if picture is not None:
        picture.check(num, shape)
    chosen = None
    if isinstance(model, Ensemble):
        model, chosen = routed(model, strategy, expert, num, conditions)
        if chosen is None and model.strategy == "draw":
            if numbers is not None:
                raise HddmError("numbers= goes with expert= or a router; 'draw' counts from start")
            prior = model.prior_of(num, conditions)
            if picture is not None:
                parts = []
                for rows in torch.arange(num).split(batch_size):
                    x_s = picture.rows(rows).noised(noise_of(seed, (start + rows).tolist(), shape))
                    given = _rows(conditions, rows, model.device)
                    parts.append(posterior_of(model, x_s, picture.strength, given))
                prior = torch.cat(parts)
            chosen = pick_experts(prior, uniform_draws(seed, range(start, start + num)))
        model.refuse_weakless(Guidance.of(guidance_scale), chosen)
    elif strategy is not None or expert is not None:
        Strategy.parse(strategy or "draw")
        asked = f"strategy {strategy!r}" if strategy is not None else f"expert {expert}"
        raise HddmError(f"{asked} needs an ensemble; this is a single expert")
    times = time_grid(steps, model.shift if shift is None else shift)
    if picture is not None:
        times = picture.times(times)
    # Samples of one domain follow each other, so that an expert comes once and sees large batches.
    order = torch.arange(num)
    if chosen is not None and isinstance(model, Ensemble):
        order = torch.tensor(model.domains)[chosen].argsort(stable=True)
    dtype = torch.promote_types(model.dtype, torch.float32)
    samples = torch.empty(num, *shape, dtype=dtype)
    numbers = torch.arange(start, start + num) if numbers is None else numbers

    commits = isinstance(model, Ensemble) and model.commits_at is not None

    def make(rows: Tensor) -> Tensor:
        own = numbers[rows].tolist()
        x, solve = noise_of(seed, own, shape).to(model.device, dtype), solver_named(solver)
        if picture is not None:
            part = picture.rows(rows)
            solve = part.solver(solve, noise_stream(seed, own, shape))
            x = part.noised(x)
        return integrate(
            model,
            x,
            times,
            solve,
            guidance_scale,
            _rows(negative, rows, model.device) or None,
            _rows(conditions, rows, model.device),
            expert=None if chosen is None else chosen[rows].to(model.device),
            draws=uniform_draws(seed, own) if commits else None,
            router_every=router_every,
            use=use,
            on_step=on_step,
        ).cpu()

    for rows in order.split(batch_size):
        try:
            samples[rows] = keep(rows, functools.partial(make, rows))
        except (RuntimeError, ValueError) as error:
            if shape == known or isinstance(error, HddmError):
                raise
            raise HddmError(f"shape={shape}: a network of samples {known} fails on it: {error}") from error
        if on_batch is not None:
            on_batch(len(rows))
    return samples


def routed(
    ensemble: Ensemble,
    strategy: str | None,
    expert: int | None,
    num: int,
    conditions: Mapping[str, Tensor],
) -> tuple[Ensemble, Tensor | None]:
    """The ensemble under the strategy of one call, and the experts (num,) where the user names one.

    Warns where ``draw`` has no p(k | condition) for the conditions at hand.

    Raises:
        HddmError: for an unknown strategy, an expert that is not there, or both at once.
    """
    # A copy, so that another thread's sampling keeps its own strategy.
    ensemble = ensemble.under(strategy or ensemble.strategy)
    if expert is not None:
        if strategy is not None:
            raise HddmError(f"expert {expert} and strategy {strategy!r}: choose one of the two")
        if not 0 <= expert < len(ensemble.experts):
            raise HddmError(f"expert {expert}: there are 0 … {len(ensemble.experts) - 1}")
        return ensemble, torch.full((num,), expert)
    known = PRIOR in conditions or (ensemble.knows_classes and set(conditions) == {"class_labels"})
    if ensemble.strategy == "draw" and conditions and not known and len(ensemble.experts) > 1:
        warnings.warn(
            "draw picks experts by the prior alone: p(k | condition) is not known for "
            f"{', '.join(sorted(conditions))}",
            # Above this one and the caller stands the wrapper of no_grad.
            stacklevel=4,
        )
    return ensemble, None


def _shape(asked: tuple[int, ...] | None, known: tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape asked for, or the model's; height and width may differ from the model's, as for a UNet."""
    shape = known if asked is None else asked
    if shape is None:
        raise HddmError("this model does not tell the shape of a sample: pass shape=(C, H, W)")
    if not shape or not all(isinstance(size, Integral) and size >= 1 for size in shape):
        raise HddmError(f"shape= takes whole numbers from 1, (C, H, W), not {tuple(shape)}")
    if known is not None and (len(shape), shape[0]) != (len(known), known[0]):
        raise HddmError(
            f"shape={tuple(shape)}: samples of this model are {tuple(known)}; only its sides may differ"
        )
    return shape


def _rows(conditions: Mapping[str, Tensor], rows: Tensor, device: torch.device) -> dict[str, Tensor]:
    return {name: value[rows.to(value.device)].to(device) for name, value in conditions.items()}
