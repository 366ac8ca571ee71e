"""``python -m benchmarks.solvers EXPERT …``: solvers beside diffusers', at equal calls of trained experts.

The error of a solver is the root mean square difference of its samples from those of Heun's method with many
steps, from the same noise on the same path. The schedulers of diffusers get the expert's velocity as a flow
prediction, on evenly spaced times.
"""

from pathlib import Path
from typing import Annotated

import diffusers
import torch
import typer
from torch import Tensor

import hddm
from hddm.condition_names import LABELS
from hddm.sampling import time_grid
from hddm.solvers import SOLVERS, Velocity

OURS = ("euler", "adams-moulton")
THEIRS = {
    "UniPC-2": (diffusers.UniPCMultistepScheduler, 2),
    "UniPC-3": (diffusers.UniPCMultistepScheduler, 3),
    "DPM-Solver++(2M)": (diffusers.DPMSolverMultistepScheduler, 2),
}
CALLS = (8, 10, 15, 20, 30)


def main(
    experts: list[Path],
    num: Annotated[int, typer.Option(help="Samples per expert.")] = 64,
    exact_steps: Annotated[
        int, typer.Option(help="Steps of Heun's method for the solution.")
    ] = 300,
) -> None:
    """Print one table per expert."""
    for folder in experts:
        print(f"\n{folder.name}\n\n| solver | {' | '.join(f'{calls} calls' for calls in CALLS)} |")
        print(f"|---|{'---:|' * len(CALLS)}")
        errors = errors_of(hddm.load(folder), num, exact_steps)
        for name in (*OURS, *THEIRS):
            print(
                f"| {name} | {' | '.join(f'{errors[name, calls]:.4f}' for calls in CALLS)} |",
                flush=True,
            )


@torch.no_grad()
def errors_of(
    model: hddm.VelocityField, num: int, exact_steps: int
) -> dict[tuple[str, int], float]:
    """Root mean square errors by solver and calls."""
    x = torch.randn(num, *model.sample_shape, generator=torch.Generator().manual_seed(1)).double()
    given = {LABELS: torch.arange(num) % len(model.classes)} if model.classes else {}

    def velocity(x: Tensor, now: Tensor, then: Tensor) -> Tensor:
        return model.velocity(x.float(), now.expand(len(x)), **given).double()

    def by_us(name: str, steps: int) -> Tensor:
        return SOLVERS[name](velocity, x, time_grid(steps))

    exact = by_us("heun", exact_steps)
    made = {(name, calls): by_us(name, calls) for name in OURS for calls in CALLS}
    made |= {
        (name, calls): by_diffusers(name, velocity, x, calls) for name in THEIRS for calls in CALLS
    }
    return {key: (value - exact).square().mean().sqrt().item() for key, value in made.items()}


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


if __name__ == "__main__":
    typer.run(main)
