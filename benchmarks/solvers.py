"""Solvers beside diffusers', at equal calls: closed-form modes, and trained experts and ensembles.

    python -m benchmarks.solvers MODEL …

The error of a solver is the root mean square difference of its samples from those of Heun's method with many
steps, from the same noise on the same path. The schedulers of diffusers get the velocity as a flow
prediction, on evenly spaced times. "Lines alone" is Adams-Moulton without the bend that it learns. In
brackets the ratio to the best of diffusers' three.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import diffusers
import torch
import typer
from torch import Tensor

import hddm
from benchmarks.harness import RESULTS, ResultsOption, Start, WorkOption, main
from hddm.condition_names import LABELS
from hddm.solvers import SOLVERS, OnStep, Velocity, unchanged
from hddm.times import time_grid

THEIRS = {
    "UniPC-2": (diffusers.UniPCMultistepScheduler, 2),
    "UniPC-3": (diffusers.UniPCMultistepScheduler, 3),
    "DPM-Solver++(2M)": (diffusers.DPMSolverMultistepScheduler, 2),
}
CALLS = (8, 10, 15, 20, 30)
MODES = {
    "4 wide modes, 2 dimensions": (4, 2, 0.5),
    "6 wide modes, 16 dimensions": (6, 16, 0.5),
    "4 narrow modes, 2 dimensions": (4, 2, 0.05),
    "6 narrow modes, 16 dimensions": (6, 16, 0.05),
}
"""Number, dimensions and standard deviation of modes, whose means are standard normal."""


def lines_alone(
    velocity: Velocity, x: Tensor, times: Tensor, on_step: OnStep = unchanged
) -> Tensor:
    """Adams-Moulton of order 3 that predicts velocities by lines."""
    before = expected = x
    last_step = gain = 0.0
    for index, (now, then) in enumerate(itertools.pairwise(times)):
        step = float(then - now)
        slope = velocity(x, now, then)
        mean = slope
        if index > 0:
            x = x + gain * (slope - expected)
            weight = step / (2 * last_step)
            mean = (1 + weight) * slope - weight * before
            gain = step * (2 * step + 3 * last_step) / (6 * (step + last_step))
        else:
            gain = step / 2
        x = on_step(index, x + step * mean)
        expected = 2 * mean - slope
        before, last_step = slope, step
    return x


OURS = {
    "Adams-Moulton (default)": SOLVERS["adams-moulton"],
    "lines alone": lines_alone,
    "Euler": SOLVERS["euler"],
}


def modes(number: int, dimensions: int, width: float) -> tuple[Velocity, Tensor]:
    """The exact velocity of equal modes, and 64 states at t = 1."""
    noise = torch.Generator().manual_seed(0)
    means = torch.randn(number, dimensions, generator=noise).double()

    def velocity(x: Tensor, now: Tensor, then: Tensor) -> Tensor:
        signal = 1 - now
        variance = signal**2 * width**2 + now**2
        away = x[:, None] - signal * means
        shares = (-away.square().sum(-1) / (2 * variance)).softmax(-1)
        data = means + signal * width**2 / variance * away
        eps = now / variance * away
        return torch.einsum("nm,nmd->nd", shares, eps - data)

    return velocity, torch.randn(64, dimensions, generator=noise).double()


def of_model(folder: Path, num: int) -> tuple[Velocity, Tensor]:
    """The velocity of an expert, or of a mix by strategy full, with classes in turn, and states at t = 1."""
    model = hddm.load(folder)
    if isinstance(model, hddm.Ensemble) and model.num_domains > 1:
        model = model.under("full")
    noise = torch.Generator().manual_seed(1)
    x = torch.randn(num, *model.sample_shape, generator=noise).double()
    given = {LABELS: torch.arange(num) % len(model.classes)} if model.classes else {}

    def velocity(x: Tensor, now: Tensor, then: Tensor) -> Tensor:
        return model.velocity(x.float(), now.expand(len(x)).float(), **given).double()

    return velocity, x


@torch.no_grad()
def errors_of(velocity: Velocity, x: Tensor, exact_steps: int) -> dict[str, list[float]]:
    """Root mean square errors by solver, for each number of `CALLS`."""
    exact = SOLVERS["heun"](velocity, x, time_grid(exact_steps))
    found: dict[str, list[float]] = {}
    for calls in CALLS:
        made = {name: solve(velocity, x, time_grid(calls)) for name, solve in OURS.items()}
        made |= {name: by_diffusers(name, velocity, x, calls) for name in THEIRS}
        for name, value in made.items():
            error = (value - exact).square().mean().sqrt().item()
            found.setdefault(name, []).append(error)
    return found


def by_diffusers(name: str, velocity: Velocity, x: Tensor, steps: int) -> Tensor:
    """Samples by one of `THEIRS`."""
    kind, order = THEIRS[name]
    scheduler = kind(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0, solver_order=order
    )
    scheduler.set_timesteps(steps)
    for index, step in enumerate(scheduler.timesteps):
        now, then = scheduler.sigmas[index : index + 2].double()
        x = scheduler.step(velocity(x, now, then), step, x).prev_sample
    return x


def table(errors: dict[str, list[float]]) -> list[str]:
    """A line for each solver."""
    lines = [f"| solver | {' | '.join(f'{calls} calls' for calls in CALLS)} |"]
    lines.append("|---" + "|---:" * len(CALLS) + "|")
    best = [min(column) for column in zip(*(errors[name] for name in THEIRS), strict=True)]
    for name, row in errors.items():
        cells = [
            f"{error:.5f} ({error / least:.2f})" for error, least in zip(row, best, strict=True)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


app = typer.Typer(add_completion=False)


@app.command()
def run(
    models: Annotated[list[Path] | None, typer.Argument(help="Experts and ensembles.")] = None,
    results: ResultsOption = RESULTS,
    work: WorkOption = Path("runs"),
    num: Annotated[int, typer.Option(help="Samples per model.")] = 64,
    exact_steps: Annotated[
        int, typer.Option(help="Steps of Heun's method for the solution of models.")
    ] = 300,
) -> None:
    """Measure the errors of all solvers."""
    start = Start(results=results, work=work)
    cases: dict[str, Callable[[], dict[str, list[float]]]] = {}
    for title, (number, dimensions, width) in MODES.items():
        cases[title] = lambda n=number, d=dimensions, w=width: errors_of(*modes(n, d, w), 1000)
    for folder in models or ():
        title = "/".join(folder.absolute().parts[-2:])
        cases[title] = lambda folder=folder: errors_of(*of_model(folder, num), exact_steps)
    lines, figures = ["# Errors of solvers", *_TEXT], {}
    for title, errors in cases.items():
        figures[title] = errors()
        part = ["", f"## {title}", "", *table(figures[title])]
        print("\n".join(part), flush=True)
        lines += part
    content = {"calls": CALLS, "samples": num, "errors": figures}
    print(start.write("solvers", lines, content))


_TEXT = (
    "Root mean square differences from the exact solution, at equal calls of the velocity; in brackets the "
    "ratio to the best of diffusers' three.",
)


if __name__ == "__main__":
    main(app)
