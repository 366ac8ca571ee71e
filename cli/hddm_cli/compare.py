"""hddm compare."""

from pathlib import Path
from typing import Annotated

import typer

from hddm_cli.options import InputArgument


def compare(
    results: Annotated[
        list[Path],
        InputArgument(
            help="Results of hddm evaluate --out, the first to compare with, one alone is shown; a folder is "
            "one model. Or folders of benchmarks."
        ),
    ],
    varies: Annotated[
        list[str] | None,
        typer.Option("--varies", help="A sampling setting that differs on purpose, as steps; repeatable."),
    ] = None,
) -> None:
    """Results side by side: better, worse or within noise; refused where more differs than the model.

    A folder of results, one a training seed, stands for one model. Files of one name are paired, and a gap
    counts where its 95 % interval over three seeds or more excludes 0, corrected for the number of
    comparisons. Of benchmarks the rows that their first tables share are compared, one after the other.
    """
    from hddm.benchmark.results import read_compared
    from hddm.evaluation.compare import escaped, summary, table
    from hddm.evaluation.results import refuse_incomparable

    rows = read_compared(results)
    for groups in rows.values():
        if sum(len(group.results) for group in groups) > 1:
            refuse_incomparable(groups, varies or ())
    for row, groups in rows.items():
        shown = table(groups) if len(groups) > 1 else summary(groups[0])
        typer.echo(f"## {escaped(row)}\n\n{shown}\n" if row else shown)
