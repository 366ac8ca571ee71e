"""How wrong the velocity is, over t, without the exact conversion."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.conversion.conversions import SameTimeField
from benchmarks.conversion.fidelity_report import lines, picture
from benchmarks.conversion.mixtures import DiagonalMixture
from benchmarks.conversion.starts import DDPM_LINEAR
from benchmarks.harness import DDPM_ON_DIGITS, SHORT_DDPM, Digits, Start, as_json, run_calls
from hddm.data.images import load_images
from hddm.experts.loading import load
from hddm.schedules import CosineSchedule, DiscreteSchedule, Schedule, from_diffusers
from hddm.training.expert import train_expert
from hddm.training.settings import ExpertSettings
from hddm.utils.processes import Report
from hddm.utils.streams import generator
from hddm.utils.tensors import append_dims
from hddm.utils.workers import Call, Workers
from hddm.velocity import VelocityField

TIMES = (0.02, 0.05, 0.1, 0.15, 0.25, 0.35, 0.5, 0.65, 0.75, 0.85, 0.9, 0.95, 0.98, 0.99, 0.999)
LAST_INDEX = 999
# Bounds of the published conversion (arXiv:2603.06741).
SMALLEST_ALPHA, LARGEST_X_0 = 0.01, 20.0
EXACT, CALIBRATED = "exact", "exact, calibrated"
Velocity = Callable[[Tensor, Tensor], Tensor]
Network = Callable[..., Tensor]


@dataclass(frozen=True)
class Settings:
    """Of the measurement; ``training`` is that of the network on digits."""

    dimensions: tuple[int, ...]
    states: int
    training: ExpertSettings
    name: str = "fidelity"


FULL = Settings(
    dimensions=(8, 64),
    states=8192,
    training=DDPM_ON_DIGITS.model_copy(update={"steps": 2000}),
)
QUICK = Settings(
    dimensions=(8,),
    states=256,
    training=SHORT_DDPM,
    name="fidelity-quick",
)


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
def errors_on_mixtures(settings: Settings, seeds: int) -> list[dict[str, Any]]:
    """Relative root mean square error of the velocity, a row per schedule, dimension and seed."""
    found = []
    for name, schedule in schedules().items():
        for dimension in settings.dimensions:
            for seed in range(seeds):
                mixture = DiagonalMixture.random(seed, modes=6, dimension=dimension)

                def network(
                    y: Tensor, timestep: Tensor, schedule: Schedule = schedule, of: DiagonalMixture = mixture
                ) -> Tensor:
                    unit = 1.0 if isinstance(schedule, DiscreteSchedule) else 1000.0
                    return of.x_0_and_eps(y, *schedule.alpha_sigma(timestep / unit))[1]

                errors: dict[str, list[float]] = {}
                for t in TIMES:
                    x, times = mixture.states(settings.states, t, seed)
                    x_0, eps = mixture.x_0_and_eps(x, 1 - times, times)
                    for one, velocity in conversions(network, schedule).items():
                        errors.setdefault(one, []).append(_relative(velocity(x, times), eps - x_0))
                found.append({"schedule": name, "dimension": dimension, "seed": seed, "errors": errors})
    return found


def measure_fidelity(settings: Settings, start: Start) -> Path:
    """Measure on mixtures, then on networks trained for it, and write the result."""
    folder = start.work / settings.name
    digits, mixtures = Digits(folder), errors_on_mixtures(settings, start.seeds)
    common = {"shard": digits.shards("whole", 1) / "shard_0", "held_out": digits.held_out}
    calls = [
        Call(
            network_job,
            {
                **common,
                "out": folder / f"{'cosine' if name == 'cosine' else 'linear'}-{seed}",
                "schedule": name,
                "settings": settings.training.model_copy(update={"seed": seed}),
            },
            f"{name} {seed}",
            settings.training.steps,
        )
        for seed in range(start.seeds)
        for name in schedules()
    ]
    with Workers(start.workers) as pool:
        networks = run_calls(pool, calls, "train")
    found = {"times": TIMES, "mixtures": mixtures, "networks": networks}
    content = {"settings": as_json(settings), **found}
    return start.write(f"conversion-{settings.name}", lines(settings, content), content, picture(content))


def network_job(
    shard: Path,
    held_out: Path,
    out: Path,
    schedule: str,
    settings: ExpertSettings,
    report: Report,
) -> dict[str, Any]:
    """Train a DDPM expert on digits and measure its conversions on held-out images."""
    train_expert(shard, out, settings, schedules()[schedule], schedule, True, on_step=lambda *_: report(1))
    field = load(out)
    assert isinstance(field, VelocityField)
    return {
        "schedule": schedule,
        "seed": settings.seed,
        **measured_network(field, load_images(held_out).normalised),
    }


@torch.no_grad()
def measured_network(field: VelocityField, images: Tensor) -> Mapping[str, Any]:
    """Error against the exact conversion and flow-matching loss of each conversion, over `TIMES`."""
    ways = {**conversions(field.network, field.schedule), CALIBRATED: field.velocity}
    errors: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, list[float]] = {name: [] for name in ways}
    draws = generator(0, 1003)
    x_0 = images.repeat(4, 1, 1, 1)
    for t in TIMES:
        eps = torch.randn(x_0.shape, generator=draws)
        times = torch.full((len(x_0),), t, dtype=torch.float64)
        x_t = (1 - t) * x_0 + t * eps
        found = {name: velocity(x_t, times) for name, velocity in ways.items()}
        for name, v in found.items():
            errors[name].append(_relative(v, found[EXACT]))
            losses[name].append((v - (eps - x_0)).square().mean().item())
    return {"errors": errors, "losses": losses}


def _relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).double().norm() / expected.double().norm()).item()
