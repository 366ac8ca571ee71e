"""hddm data."""

from pathlib import Path
from typing import Annotated

import typer

from hddm.utils.errors import HddmError
from hddm_cli.options import AsJson, CaptionColumn, InputArgument, LabelColumn, MaxBad
from hddm_cli.usage import Verb

commands = typer.Typer(help="Check images before training.", no_args_is_help=True)


@commands.callback()
def data() -> None:
    """Check images before training."""


@commands.command("check", cls=Verb)
def check(
    path: Annotated[Path, InputArgument(help="Images (a folder, .tar or .parquet), a shard or a partition.")],
    max_bad: MaxBad = 0,
    caption_column: CaptionColumn = None,
    label_column: LabelColumn = None,
    as_json: AsJson = False,
) -> None:
    """List corrupt, oversized and duplicate images.

    Exits with 1 if more than --max-bad images are corrupt or oversized. Duplicates shared by both sides of a
    split (train and test folders, or a partition's training and held-out images) are listed separately.
    """
    from hddm.data.check import check_data
    from hddm.utils.errors import counted

    report = check_data(path, caption_column, label_column)
    bad = len(report.bad)
    typer.echo(report.model_dump_json(indent=2) if as_json else "\n".join(report.lines()))
    if bad > max_bad:
        raise HddmError(
            f"{path}: {counted(bad, 'bad image')}, more than --max-bad {max_bad}; repair or remove "
            f"{'it' if bad == 1 else 'them'}"
        )
