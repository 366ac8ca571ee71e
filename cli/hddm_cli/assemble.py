"""hddm assemble."""

from pathlib import Path
from typing import Annotated

import typer

from hddm_cli.options import Out, Overwrite


def assemble(
    experts: Annotated[list[Path], typer.Argument(help="Expert folders, in the router's order.")],
    out: Out,
    router: Annotated[Path | None, typer.Option("--router", help="Router folder.")] = None,
    strategy: Annotated[
        str, typer.Option("--strategy", help="Recommended strategy, stored in the folder.")
    ] = "draw",
    overwrite: Overwrite = False,
) -> None:
    """Put experts and a router into one ensemble folder, after checking that they fit."""
    from hddm.assembly import assemble as put_together

    put_together(experts, out, router, strategy, overwrite)
    typer.echo(f"{out}: {len(experts)} experts, strategy {strategy}")
