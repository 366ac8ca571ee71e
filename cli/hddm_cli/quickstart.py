"""hddm quickstart."""

from pathlib import Path
from typing import Annotated

import typer

from hddm_cli.options import Overwrite


def quickstart(
    out: Annotated[Path, typer.Option("--out", help="Folder to write, or to go on with.")] = Path(
        "runs/quickstart"
    ),
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Trainings, for the spread between them.")] = 1,
    overwrite: Overwrite = False,
) -> None:
    """Run the whole pipeline on real images, in minutes on a laptop CPU.

    Partitions scikit-learn's digits, trains isolated flow and DDPM experts, a router and a single
    model at equal compute, samples them all and compares them.
    """
    from hddm.benchmark.presets import chosen, load_settings
    from hddm.benchmark.report import tables_text
    from hddm.benchmark.run import quickstart as run

    results = run(chosen(load_settings("quickstart"), f"0-{seeds - 1}"), out, overwrite)
    typer.echo(tables_text(results))
    typer.echo(f"\nreport: {out / 'report.html'}\nfigures: {out / 'results.json'}")
