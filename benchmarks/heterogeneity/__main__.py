"""``python -m benchmarks.heterogeneity``: the iso-FLOP sweep."""

from pathlib import Path
from typing import Annotated

import typer

import benchmarks.heterogeneity.scaling as sweeps
from benchmarks.harness import (
    RESULTS,
    QuickOption,
    ResultsOption,
    Start,
    WorkersOption,
    WorkOption,
    main,
)

app = typer.Typer(add_completion=False)


@app.command()
def scaling(
    data: Annotated[Path | None, typer.Option("--data", help="CIFAR-10 as folders train and test.")] = None,
    results: ResultsOption = RESULTS,
    work: WorkOption = Path("runs"),
    quick: QuickOption = False,
    workers: WorkersOption = 2,
) -> None:
    """At which sizes and budgets experts are ahead of one model: on digits, or on CIFAR-10 below --data."""
    chosen = sweeps.SHORT if quick else sweeps.DIGITS if data is None else sweeps.CIFAR
    typer.echo(sweeps.scaling(chosen, Start(results, work, workers=workers), data))


if __name__ == "__main__":
    main(app)
