"""hddm compare."""

from pathlib import Path
from typing import Annotated

import typer


def compare(
    results: Annotated[
        list[Path],
        typer.Argument(
            help="Results of hddm evaluate --out, the first to compare with; a folder is one side."
        ),
    ],
    varies: Annotated[
        list[str] | None,
        typer.Option("--varies", help="A sampling setting that differs on purpose, as steps; repeatable."),
    ] = None,
) -> None:
    """Results side by side: better, worse or within noise; refused where more differs than the model.

    A folder of results, one a training seed, is one side, judged by the spread over seeds.
    """
    from hddm.evaluation.comparison import refuse_incomparable
    from hddm.evaluation.results import read_sides
    from hddm.evaluation.verdicts import table

    sides = read_sides(results)
    refuse_incomparable(sides, varies or ())
    typer.echo(table(sides))
