"""hddm merge."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from hddm.utils.errors import UsageError
from hddm_cli.options import ModelArgument, Out, Overwrite, checked_by, opens_experts
from hddm_cli.usage import say


def _numbers(weights: str | None) -> list[float] | None:
    """The numbers in ``0.5,0.5``."""
    try:
        return None if weights is None else [float(one) for one in weights.split(",")]
    except ValueError as error:
        raise UsageError(f"--weights {weights}: write one number per expert, as 0.5,0.5") from error


def check_weights(experts: Sequence[Path], weights: str | None) -> None:
    """Refuse weights that are not those of these experts."""
    from hddm.checkpoints.merging import shares_of

    shares_of(experts, _numbers(weights))


@opens_experts
@checked_by(check_weights)
def merge(
    experts: Annotated[
        list[Path], ModelArgument(help="Two or more expert folders of one architecture.")
    ],
    out: Out,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="WEIGHT,WEIGHT,…",
            help="Weight of each expert; they sum to 1. Default: equal weights.",
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Average the weights of several experts into one expert."""
    numbers = _numbers(weights)
    from hddm.checkpoints.merging import merge_experts
    from hddm.utils.progress import Progress

    with Progress(None, "merge"):
        notes = merge_experts(experts, out, numbers, overwrite)
    for note in notes:
        say(f"note: {note}")
    typer.echo(f"{out}: merged of {len(experts)} experts")
