"""``python -m benchmarks.heterogeneity``: see ``--help``."""

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
from benchmarks.heterogeneity.by_error import by_error as run

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder of a finished hddm benchmark.")]


@app.command("by-error")
def by_error(
    out: Out, most: Annotated[int | None, typer.Option("--ddpm", min=1, help="So many DDPM shards.")] = None
) -> None:
    """On each shard the expert with the lower error."""
    for line in run(out, most):
        typer.echo(line)


@app.command()
def blended(out: Out) -> None:
    """On each shard both experts, at each noise level the one with the lower error."""
    for line in run(out, blended=True):
        typer.echo(line)


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
