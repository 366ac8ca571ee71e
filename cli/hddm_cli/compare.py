"""hddm compare."""

from pathlib import Path
from typing import Annotated

import typer

from hddm_cli.options import InputArgument


def compare(
    results: Annotated[
        list[Path],
        InputArgument(
            help="Results of hddm evaluate --out, the first to compare with; a folder is one side. "
            "Or folders of benchmarks."
        ),
    ],
    varies: Annotated[
        list[str] | None,
        typer.Option("--varies", help="A sampling setting that differs on purpose, as steps; repeatable."),
    ] = None,
) -> None:
    """Results side by side: better, worse or within noise; refused where more differs than the model.

    A folder of results, one a training seed, is one side, judged by the spread over seeds. Of benchmarks the
    rows that their first tables share are compared, one after the other.
    """
    from hddm.benchmark.sides import compared_sides
    from hddm.evaluation.results import refuse_incomparable
    from hddm.evaluation.verdict import table

    rows = compared_sides(results)
    for sides in rows.values():
        refuse_incomparable(sides, varies or ())
    for row, sides in rows.items():
        typer.echo(f"## {row}\n\n{table(sides)}\n" if row else table(sides))
