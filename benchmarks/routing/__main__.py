"""``python -m benchmarks.routing``: see ``--help``."""

from pathlib import Path

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
from benchmarks.routing.measure import measure_routing
from benchmarks.routing.settings import FULL, QUICK


def routing(
    results: ResultsOption = RESULTS,
    work: WorkOption = Path("runs/routing"),
    quick: QuickOption = False,
    seeds: SeedsOption = 3,
    workers: WorkersOption = 2,
) -> None:
    """Calibrated and plain routers under every strategy, on digits."""
    typer.echo(measure_routing(QUICK if quick else FULL, Start(results, work, seeds, workers)))


if __name__ == "__main__":
    main(lambda: typer.run(routing))
