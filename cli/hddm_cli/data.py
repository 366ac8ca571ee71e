"""hddm data."""

from pathlib import Path
from typing import Annotated

import typer

from hddm.utils.errors import HddmError
from hddm_cli.options import AsJson, InputArgument

commands = typer.Typer(help="Look at images before training.", no_args_is_help=True)


@commands.callback()
def data() -> None:
    """Look at images before training."""


@commands.command("check")
def check(
    path: Annotated[Path, InputArgument(help="Images (a folder, .tar or .parquet), a shard or a partition.")],
    max_bad: Annotated[int, typer.Option("--max-bad", min=0, help="Bad images that are no failure.")] = 0,
    caption_column: Annotated[
        str | None, typer.Option("--caption-column", help="Column of the captions.")
    ] = None,
    label_column: Annotated[str | None, typer.Option("--label-column", help="Column of the labels.")] = None,
    as_json: AsJson = False,
) -> None:
    """Decode every image and name those that are corrupt, oversized or there twice.

    Exit 1 where more than --max-bad are corrupt or oversized. Equal images are listed only: those on both
    sides of a split (folders as train and test, or the training and held-out images of a partition) apart.
    """
    from hddm.data.check import check_data
    from hddm.utils.errors import counted

    report = check_data(path, caption_column, label_column)
    bad = len(report.bad)
    typer.echo(report.model_dump_json(indent=2) if as_json else "\n".join(report.lines()))
    if bad > max_bad:
        raise HddmError(
            f"{path}: {counted(bad, 'bad image')}, more than --max-bad {max_bad}; mend or remove "
            f"{'it' if bad == 1 else 'them'}"
        )
