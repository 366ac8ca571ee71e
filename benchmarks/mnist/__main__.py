"""``python -m benchmarks.mnist --weights FOLDER``: published networks of two authors, alone and mixed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from matplotlib.figure import Figure
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.harness import RESULTS, ResultsOption, Start, main
from benchmarks.mnist.networks import (
    DDPM,
    FLOW,
    NONE,
    SHAPE,
    flow_expert,
    flow_network,
    noise_expert,
    noise_network,
)
from hddm import Ensemble, VelocityField, sample
from hddm.guidance import Guidance
from hddm.utils.errors import HddmError

STEPS, COLUMNS, STATES = 50, 10, 64
TIMES = (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
LARGEST_DIFFERENCE = 1e-4
AUTHORS = {
    FLOW: "x_0 on a flow path, data in [0, 1], by class (S. Dominguez C.)",
    **{name: f"noise, {name[10:]} schedule, data in [-0.5, 0.5] (S. Daloglu)" for name in DDPM},
}
"""The rows of the picture."""
MIXED = "all four, mixed at every step, without a class"


def differences(folder: Path) -> dict[str, float]:
    """Largest difference of a number from the outputs of the authors' code, by network.

    Raises:
        HddmError: for one that is above `LARGEST_DIFFERENCE`.
    """
    found: dict[str, float] = {}
    for name in (FLOW, *DDPM):
        known = load_file(folder / name / "reference.safetensors")
        if name == FLOW:
            labels = known["label"].long()
            labels = torch.where(labels < 0, NONE, labels)
            output = flow_network(folder)(known["x"], known["time"], labels)
        else:
            network, _ = noise_network(folder, name)
            output = network(known["x"], known["step"].float())
        found[name] = (output - known["output"]).abs().max().item()
        if not found[name] <= LARGEST_DIFFERENCE:
            raise HddmError(f"{name}: outputs differ by {found[name]:.1e} from the authors' own")
    return found


def experts(folder: Path, with_units: bool = True) -> dict[str, VelocityField]:
    """All networks as experts."""
    found = {FLOW: flow_expert(folder, with_units)}
    for name in DDPM:
        found[name] = noise_expert(folder, name, with_units)
    return found


def ensemble(folder: Path) -> Ensemble:
    """All networks in equal parts: each was trained on all of MNIST, so none knows better than another."""

    def router(x_t: Tensor, t: Tensor) -> Tensor:
        return torch.full((len(x_t), 1 + len(DDPM)), 1 / (1 + len(DDPM)))

    return Ensemble(list(experts(folder).values()), router, "full")


@torch.no_grad()
def disagreement(fields: Mapping[str, VelocityField], images: Tensor) -> dict[float, float]:
    """How far velocities at noised ``images`` lie from their mean, relative to it, by t."""
    noise, found = torch.Generator().manual_seed(0), dict[float, float]()
    for t in TIMES:
        x_t = (1 - t) * images + t * torch.randn(images.shape, generator=noise)
        each = torch.stack([one.velocity(x_t, torch.tensor(t)) for one in fields.values()])
        found[t] = ((each - each.mean(0)).norm() / (len(each) ** 0.5 * each.mean(0).norm())).item()
    return found


def samples(folder: Path) -> dict[str, Tensor]:
    """Rows of images in [-1, 1] by their names: every network alone, and all of them mixed."""
    rows: dict[str, Tensor] = {}
    for name, field in experts(folder).items():
        given: dict[str, Any] = {}
        if name == FLOW:
            guidance = Guidance(2.0, interval=(0.3, 0.7))
            given = {"class_labels": torch.arange(COLUMNS), "guidance_scale": guidance}
        rows[AUTHORS[name]] = sample(field, COLUMNS, steps=STEPS, **given)
        if name == FLOW:
            rows["the same without a class"] = sample(field, COLUMNS, steps=STEPS)
    rows[MIXED] = sample(ensemble(folder), 2 * COLUMNS, steps=STEPS, shape=SHAPE)
    return rows


def picture_of(rows: Mapping[str, Tensor]) -> Figure:
    """A picture with a title above each row."""
    heights = [len(images) // COLUMNS for images in rows.values()]
    figure = Figure(figsize=(7, 1.0 * sum(heights)), layout="constrained")
    axes = figure.subplots(len(rows), 1, height_ratios=heights)
    for axis, (name, images) in zip(axes, rows.items(), strict=True):
        lines = images.clamp(-1, 1)[:, 0].split(COLUMNS)
        axis.imshow(
            torch.cat([torch.cat(list(line), 1) for line in lines]), cmap="gray", vmin=-1, vmax=1
        )
        axis.set_title(name, fontsize=9)
        axis.axis("off")
    return figure


def table(
    known: Mapping[str, float], right: Mapping[float, float], wrong: Mapping[float, float]
) -> list[str]:
    """Lines of the result."""
    lines = [
        "# Published networks of MNIST, mixed",
        "Networks by S. Dominguez C. (github.com/sofia-dominguezc/MNIST-diffusion) and S. Daloglu "
        "(github.com/sdaloglu/diffusion_with_entropy), both MIT licensed, written anew; largest difference "
        "of an output from the authors' own:",
        "",
        "| network | difference |",
        "|---|---:|",
        *(f"| {name} | {value:.1e} |" for name, value in known.items()),
        "",
        "How far the four velocities lie from their mean, relative to it, at samples of the mixture with "
        "noise: read with the data that each was trained on, and as if all data were in [-1, 1].",
        "",
        "| t | own data | [-1, 1] for all |",
        "|---|---:|---:|",
    ]
    for t, value in right.items():
        lines.append(f"| {t:g} | {value:.3f} | {wrong[t]:.3f} |")
    return lines


app = typer.Typer(help="Published networks of MNIST, alone and mixed.", add_completion=False)


@app.command()
def run(
    weights: Annotated[Path, typer.Option(help="Folder with a folder of each network.")],
    results: ResultsOption = RESULTS,
) -> None:
    """Compare the networks with their authors' outputs, sample them alone and mixed, and draw a picture."""
    torch.set_num_threads(1)
    start = Start(results)
    known = differences(weights)
    rows = samples(weights)
    images = sample(ensemble(weights), STATES, steps=STEPS, shape=SHAPE, seed=1)
    right, wrong = (disagreement(experts(weights, own), images) for own in (True, False))
    content = {"differences": known, "own_data": right, "common_data": wrong}
    lines = table(known, right, wrong)
    typer.echo(start.write("mnist-published", lines, content, picture_of(rows)))


if __name__ == "__main__":
    main(app)
