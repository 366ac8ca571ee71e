"""How wrong the velocity is, over t, without the exact conversion.

The data is a mixture of Gaussians, so the ideal network, which predicts the noise, and the true velocity are
known in closed form.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.conversion.conversions import SameTimeField
from benchmarks.conversion.mixtures import DiagonalMixture
from benchmarks.harness import Start
from benchmarks.reports import mean_spread, table
from hddm.schedules import CosineSchedule, DiscreteSchedule, Schedule, from_diffusers
from hddm.utils.tensors import append_dims
from hddm.velocity import VelocityField

TIMES = (0.02, 0.05, 0.1, 0.15, 0.25, 0.35, 0.5, 0.65, 0.75, 0.85, 0.9, 0.95, 0.98, 0.99, 0.999)
DIMENSIONS, STATES, MODES, LAST_INDEX = (8, 64), 8192, 6, 999
# Bounds of the published conversion (arXiv:2603.06741).
SMALLEST_ALPHA, LARGEST_X_0 = 0.01, 20.0
# The scheduler of google/ddpm-cifar10-32 and of most DDPM checkpoints.
DDPM_LINEAR = {
    "_class_name": "DDPMScheduler",
    "num_train_timesteps": 1000,
    "beta_start": 1e-4,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "clip_sample": True,
    "prediction_type": "epsilon",
}
EXACT = "exact"
Velocity = Callable[[Tensor, Tensor], Tensor]
Network = Callable[..., Tensor]


def schedules() -> dict[str, Schedule]:
    """The two that are measured, by name."""
    return {"cosine": CosineSchedule(), "DDPM, linear betas": from_diffusers(DDPM_LINEAR)}


def conversions(network: Network, schedule: Schedule) -> dict[str, Velocity]:
    """Velocities of an epsilon ``network``, by the name of the conversion.

    Native time runs to ``schedule.end``: 1, or index 999. "Same t" means its share t, which the continuous
    schedule is fed as 1000 t and the discrete one as 999 t.
    """
    scale = LAST_INDEX if isinstance(schedule, DiscreteSchedule) else 1000.0
    unit = 1.0 if isinstance(schedule, DiscreteSchedule) else 1000.0
    exact = VelocityField(network, schedule, "epsilon", unit)
    same = SameTimeField(network, schedule, "epsilon", float(scale))

    def at_index(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        native = (LAST_INDEX * t).round() / LAST_INDEX * schedule.end
        alpha, sigma = (append_dims(one, x.ndim).to(x) for one in schedule.alpha_sigma(native))
        return network(x, (native * unit).to(x.dtype)), alpha, sigma

    def published(x: Tensor, t: Tensor) -> Tensor:
        eps, alpha, sigma = at_index(x, t)
        x_0 = (x - sigma * eps) / alpha.clamp_min(SMALLEST_ALPHA)
        return eps - x_0.clamp(-LARGEST_X_0, LARGEST_X_0)

    def as_velocity(x: Tensor, t: Tensor) -> Tensor:
        return at_index(x, t)[0]

    return {
        EXACT: exact.velocity,
        "same x, same t": same.velocity,
        "round(999 t), own coefficients": published,
        "round(999 t), read as velocity": as_velocity,
    }


@torch.no_grad()
def errors_on_mixtures(dimensions: Sequence[int], states: int, seeds: int) -> list[dict[str, Any]]:
    """Relative root mean square error of the velocity: one row per schedule, dimension and seed."""
    found = []
    for name, schedule in schedules().items():
        for dimension in dimensions:
            for seed in range(seeds):
                mixture = DiagonalMixture.random(seed, MODES, dimension)

                def network(
                    y: Tensor,
                    timestep: Tensor,
                    schedule: Schedule = schedule,
                    of: DiagonalMixture = mixture,
                ) -> Tensor:
                    unit = 1.0 if isinstance(schedule, DiscreteSchedule) else 1000.0
                    return of.x_0_and_eps(y, *schedule.alpha_sigma(timestep / unit))[1]

                errors: dict[str, list[float]] = {}
                for t in TIMES:
                    x, times = mixture.states(states, t, seed)
                    x_0, eps = mixture.x_0_and_eps(x, 1 - times, times)
                    true = eps - x_0
                    for one, velocity in conversions(network, schedule).items():
                        error = (velocity(x, times) - true).norm() / true.norm()
                        errors.setdefault(one, []).append(error.item())
                found.append(
                    {"schedule": name, "dimension": dimension, "seed": seed, "errors": errors}
                )
    return found


def measure_fidelity(start: Start) -> Path:
    """Measure, and write the result."""
    rows = errors_on_mixtures(DIMENSIONS, STATES, start.seeds)
    content = {"times": TIMES, "mixtures": rows}
    return start.write("conversion-fidelity", list(_lines(rows, start.seeds)), content)


def _lines(rows: Sequence[Mapping[str, Any]], seeds: int) -> Iterator[str]:
    """The report, its title first."""
    yield "# Velocity error over t, by conversion"
    yield "An expert that predicts noise, read as a velocity on the common path x = (1 - t) x_0 + t eps:"
    yield ""
    yield (
        "- exact: native time of the same log-SNR, state (a + s) x, v = (eps - x)/(1 - t); outside the noise "
        "levels of the schedule the rule of `hddm/velocity.py`; no calibration;"
    )
    yield (
        "- same x, same t: network(x, t), t counted as the share of native time (1000 t for the cosine, "
        "index 999 t for the betas), v = (eps - x)/(1 - t);"
    )
    yield (
        "- round(999 t), own coefficients: network(x, round(999 t)), x_0 = (x - s eps)/max(a, 0.01) with the "
        "expert's own (a, s) there, bounded to ±20, v = eps - x_0: the inference of arXiv:2603.06741;"
    )
    yield (
        "- round(999 t), read as velocity: v = network(x, round(999 t)): its checkpoint recipe, had it kept "
        "the head. With the fresh head v is 0 and the relative error 1 at every t."
    )
    yield ""
    yield (
        f"Mixtures of {MODES} Gaussians in {' and '.join(map(str, DIMENSIONS))} dimensions, {seeds} of each, "
        f"{STATES:,} states per time, against the closed-form velocity. Error: root mean square of the "
        'difference over that of the true velocity. Mean over mixtures, "s" their standard deviation. The '
        "betas cover t = 0.0099 to 0.9937; beyond, no network output says what is asked, so that exact is "
        "not 0 there."
    )
    for name in schedules():
        own = [row for row in rows if row["schedule"] == name]
        ways = list(own[0]["errors"])
        cells = [
            [f"{t:g}", *(mean_spread([row["errors"][way][k] for row in own]) for way in ways)]
            for k, t in enumerate(TIMES)
        ]
        yield from ("", f"{name}, relative error:", "", *table(["t", *ways], cells))
