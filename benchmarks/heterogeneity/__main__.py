"""``python -m benchmarks.heterogeneity``: the iso-FLOP sweep."""

from pathlib import Path

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
    results: ResultsOption = RESULTS,
    work: WorkOption = Path("runs"),
    quick: QuickOption = False,
    workers: WorkersOption = 2,
) -> None:
    """At which sizes and budgets experts are ahead of one model, on digits."""
    chosen = sweeps.SHORT if quick else sweeps.DIGITS
    typer.echo(sweeps.scaling(chosen, Start(results, work, workers=workers)))


if __name__ == "__main__":
    main(app)
