"""hddm quickstart."""

from pathlib import Path
from typing import Annotated

import typer

from hddm.utils.errors import optional
from hddm_cli.options import Overwrite, refuse_other

STORY_FILE = "story.json"
"""Record of the folder that a quickstart writes."""


def quickstart(
    out: Annotated[Path, typer.Option(help="Output folder, or a quickstart's folder to continue.")] = Path(
        "runs/quickstart"
    ),
    seeds: Annotated[
        int, typer.Option(min=1, metavar="NUMBER", help="Number of training runs per model.")
    ] = 1,
    overwrite: Overwrite = False,
) -> None:
    """Extend a model of digits with new experts, on a laptop CPU.

    Trains a plain diffusers model, converts it, trains a flow expert and a DDPM expert on new images,
    combines all three, samples and measures. Every step is an hddm command and is printed as it runs.
    """
    if not overwrite:
        refuse_other(out, STORY_FILE, "quickstart")

    optional("matplotlib", "hddm quickstart", "train")
    from hddm.benchmark.report import REPORT_FILE
    from hddm_cli.story import tell

    if said := tell(out, overwrite, seeds):
        typer.echo(f"\n{said}")
    typer.echo(f"report: {out / REPORT_FILE}")
