"""``python -m benchmarks.routing``: see ``--help``."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def routing(
    results: Annotated[Path, typer.Option("--results", help="Where the result is written.")] = Path(
        __file__
    ).parents[1]
    / "results",
    work: Annotated[Path, typer.Option("--work", help="Where models and single rows are kept.")] = Path(
        "runs/routing"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Half a minute; the numbers mean nothing.")] = False,
    seeds: Annotated[int, typer.Option("--seeds", min=1)] = 3,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes, one thread each.")] = 2,
) -> None:
    """Calibrated and plain routers under every strategy, on digits."""
    from benchmarks.routing.measure import measure_routing
    from benchmarks.routing.settings import FULL, QUICK
    from hddm.utils.errors import HddmError

    kept = [part for part in sys.argv[1:] if not part.startswith("/")]
    command = " ".join(part for part in kept if part not in ("--work", "--results"))
    try:
        typer.echo(measure_routing(QUICK if quick else FULL, seeds, work, results, workers, command))
    except HddmError as error:
        typer.echo(f"benchmarks.routing: {error}", err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(routing)
