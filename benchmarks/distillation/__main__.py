"""``python -m benchmarks.distillation``: see ``--help``."""

from pathlib import Path

import typer

from benchmarks.distillation.measure import measure_distillation
from benchmarks.distillation.settings import FULL, QUICK
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


def distillation(
    results: ResultsOption = RESULTS,
    work: WorkOption = Path("runs/distillation"),
    quick: QuickOption = False,
    seeds: SeedsOption = 3,
    workers: WorkersOption = 2,
) -> None:
    """A student of a mixed-objective ensemble against its teacher, and a model of its budget, on digits."""
    typer.echo(measure_distillation(QUICK if quick else FULL, Start(results, work, seeds, workers)))


if __name__ == "__main__":
    main(lambda: typer.run(distillation))
