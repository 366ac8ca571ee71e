"""``python -m benchmarks.conversion <question>``: see ``--help``."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness import (
    RESULTS,
    QuickOption,
    ResultsOption,
    SeedsOption,
    Start,
    WorkersOption,
    WorkOption,
    main,
)

app = typer.Typer(help="What the exact conversion is worth.", no_args_is_help=True, add_completion=False)
WORK = Path("runs/conversion")


class DataSet(StrEnum):
    """Choices of --data."""

    digits = "digits"
    cifar = "cifar"


@app.command()
def fidelity(
    results: ResultsOption = RESULTS,
    work: WorkOption = WORK,
    quick: QuickOption = False,
    seeds: SeedsOption = 3,
    workers: WorkersOption = 2,
) -> None:
    """Velocity error over t of the exact conversion and of what is done without it."""
    from benchmarks.conversion.fidelity import FULL, QUICK, measure_fidelity

    typer.echo(measure_fidelity(QUICK if quick else FULL, Start(results, work, seeds, workers)))


@app.command()
def convergence(
    data: Annotated[DataSet, typer.Option("--data")] = DataSet.digits,
    archives: Annotated[
        Path, typer.Option("--archives", help="Folder of cifar10-train.tar.gz and cifar10-test.tar.gz.")
    ] = Path("data"),
    results: ResultsOption = RESULTS,
    work: WorkOption = WORK,
    quick: QuickOption = False,
    seeds: Annotated[int | None, typer.Option("--seeds", min=1, help="Default: digits 3, cifar 1.")] = None,
    workers: WorkersOption = 2,
) -> None:
    """Steps of flow matching that each start needs on new data."""
    from benchmarks.conversion.cases import CIFAR, DIGITS
    from benchmarks.conversion.cases import quick as shortened
    from benchmarks.conversion.convergence import convergence as run

    case, few = (CIFAR, 1) if data is DataSet.cifar else (DIGITS, 3)
    start = Start(results, work, seeds or few, workers)
    typer.echo(run(shortened(case) if quick else case, start, archives))


@app.command()
def cost(
    results: ResultsOption = RESULTS,
    work: WorkOption = WORK,
    quick: QuickOption = False,
    repeats: Annotated[int, typer.Option("--repeats", min=1)] = 3,
) -> None:
    """Time and memory of a conversion of 675 million weights."""
    from benchmarks.conversion.cost import measure_cost

    typer.echo(measure_cost(quick, repeats, Start(results, work)))


@app.command()
def azula(results: ResultsOption = RESULTS, seeds: SeedsOption = 3) -> None:
    """Velocity error over t, ours and azula's, against closed forms; needs azula."""
    from benchmarks.conversion.azula import measure_azula

    typer.echo(measure_azula(Start(results, seeds=seeds)))


if __name__ == "__main__":
    main(app)
