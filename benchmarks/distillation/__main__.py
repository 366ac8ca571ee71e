"""``python -m benchmarks.distillation``: see ``--help``."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def distillation(
    results: Annotated[Path, typer.Option("--results", help="Where the result is written.")] = Path(
        __file__
    ).parents[1]
    / "results",
    work: Annotated[Path, typer.Option("--work", help="Where models and rows are kept.")] = Path(
        "runs/distillation"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Half a minute; the numbers mean nothing.")] = False,
    seeds: Annotated[int, typer.Option("--seeds", min=1)] = 3,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes, one thread each.")] = 2,
) -> None:
    """A student of a mixed-objective ensemble against its teacher, and a model of its budget, on digits."""
    from benchmarks.distillation.measure import measure_distillation
    from benchmarks.distillation.settings import FULL, QUICK
    from hddm.utils.errors import HddmError

    kept = [part for part in sys.argv[1:] if not part.startswith("/")]
    command = " ".join(part for part in kept if part not in ("--work", "--results"))
    try:
        typer.echo(measure_distillation(QUICK if quick else FULL, seeds, work, results, workers, command))
    except HddmError as error:
        typer.echo(f"benchmarks.distillation: {error}", err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(distillation)
