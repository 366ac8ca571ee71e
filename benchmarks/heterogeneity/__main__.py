"""``python -m benchmarks.heterogeneity``: see ``--help``."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness import main
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


if __name__ == "__main__":
    main(app)
