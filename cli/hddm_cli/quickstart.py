"""hddm quickstart."""

from pathlib import Path
from typing import Annotated

import typer

from hddm_cli.options import Overwrite, refuse_other

STORY_FILE = "story.json"
"""Record of the folder that a quickstart writes."""


def quickstart(
    out: Annotated[Path, typer.Option("--out", help="Folder to write, or to go on with.")] = Path(
        "runs/quickstart"
    ),
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Trainings of every model.")] = 1,
    overwrite: Overwrite = False,
) -> None:
    """Grow an old model of digits by experts of new ones, in minutes on a laptop CPU.

    Trains a plain diffusers model, converts it, trains a flow and a DDPM expert on new images, puts all
    three together, samples and measures: every step a command of hddm, printed as it runs.
    """
    if not overwrite:
        refuse_other(out, STORY_FILE, "quickstart")

    from hddm.benchmark.report import REPORT_FILE
    from hddm_cli.story import tell

    if said := tell(out, overwrite, seeds):
        typer.echo(f"\n{said}")
    typer.echo(f"report: {out / REPORT_FILE}")
