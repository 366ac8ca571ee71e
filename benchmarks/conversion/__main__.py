"""``python -m benchmarks.conversion <question>``: see ``--help``."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="What the exact conversion is worth.", no_args_is_help=True, add_completion=False)
Results = Annotated[Path, typer.Option("--results", help="Where the result is written.")]
Work = Annotated[Path, typer.Option("--work", help="Where models and single runs are kept.")]
Quick = Annotated[bool, typer.Option("--quick", help="About a minute; the numbers mean nothing.")]
Seeds = Annotated[int, typer.Option("--seeds", min=1)]
WorkerCount = Annotated[int, typer.Option("--workers", min=1, help="Processes, one thread each.")]
RESULTS, WORK = Path(__file__).parents[1] / "results", Path("runs/conversion")


class DataSet(StrEnum):
    """Choices of --data."""

    digits = "digits"
    cifar = "cifar"


def _command() -> str:
    kept = [part for part in sys.argv[1:] if not part.startswith("/")]
    return " ".join(part for part in kept if part not in ("--archives", "--work", "--results"))


@app.command()
def fidelity(
    results: Results = RESULTS,
    work: Work = WORK,
    quick: Quick = False,
    seeds: Seeds = 3,
    workers: WorkerCount = 2,
) -> None:
    """Velocity error over t of the exact conversion and of what is done without it."""
    from benchmarks.conversion.fidelity import FULL, QUICK, measure_fidelity

    written = measure_fidelity(QUICK if quick else FULL, seeds, work, results, workers, _command())
    typer.echo(written)


@app.command()
def convergence(
    data: Annotated[DataSet, typer.Option("--data")] = DataSet.digits,
    archives: Annotated[
        Path, typer.Option("--archives", help="Folder of cifar10-train.tar.gz and cifar10-test.tar.gz.")
    ] = Path("data"),
    results: Results = RESULTS,
    work: Work = WORK,
    quick: Quick = False,
    seeds: Annotated[int | None, typer.Option("--seeds", min=1, help="Default: digits 3, cifar 1.")] = None,
    workers: WorkerCount = 2,
) -> None:
    """Steps of flow matching that each start needs on new data."""
    from benchmarks.conversion.cases import CIFAR, DIGITS
    from benchmarks.conversion.cases import quick as shortened
    from benchmarks.conversion.convergence import convergence as run

    case = CIFAR if data is DataSet.cifar else DIGITS
    count = seeds or (1 if data is DataSet.cifar else 3)
    case = shortened(case) if quick else case
    typer.echo(run(case, count, work, results, archives, workers, _command()))


@app.command()
def cost(
    results: Results = RESULTS,
    work: Work = WORK,
    quick: Quick = False,
    repeats: Annotated[int, typer.Option("--repeats", min=1)] = 3,
) -> None:
    """Time and memory of a conversion of 675 million weights."""
    from benchmarks.conversion.cost import measure_cost

    typer.echo(measure_cost(quick, repeats, work, results, _command()))


@app.command()
def ablation(
    results: Results = RESULTS,
    work: Work = WORK,
    quick: Quick = False,
    seeds: Seeds = 3,
    workers: WorkerCount = 2,
) -> None:
    """Native DDPM, native flow, converted DDPM and a mix, sampled on digits."""
    from benchmarks.conversion.ablation import FULL, QUICK, measure_ablation

    typer.echo(measure_ablation(QUICK if quick else FULL, seeds, work, results, workers, _command()))


@app.command()
def grid(out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of a hddm benchmark.")]) -> None:
    """The DDPM experts of a finished benchmark under every conversion, and under their own sampler."""
    from benchmarks.conversion.grid import grid as run

    for line in run(out):
        typer.echo(line)


if __name__ == "__main__":
    app()
