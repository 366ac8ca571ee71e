"""hddm merge."""

from pathlib import Path
from typing import Annotated

import typer

from hddm.utils.errors import UsageError
from hddm_cli.options import InputArgument, Out, Overwrite


def merge(
    experts: Annotated[list[Path], InputArgument(help="Expert folders of one architecture, two or more.")],
    out: Out,
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights", metavar="0.5,0.5", help="Each expert's weight, that sum to 1; default: equal ones."
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Average the weights of experts of one architecture into one expert, at the cost of one."""
    try:
        numbers = None if weights is None else [float(one) for one in weights.split(",")]
    except ValueError as error:
        raise UsageError(f"--weights {weights}: write one number an expert, as 0.5,0.5") from error

    from hddm.checkpoints.merging import merge_experts
    from hddm.utils.progress import Progress

    with Progress(None, "merge"):
        notes = merge_experts(experts, out, numbers, overwrite)
    for note in notes:
        typer.echo(f"note: {note}")
    typer.echo(f"{out}: merged of {len(experts)} experts")
