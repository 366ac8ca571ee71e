"""hddm compare."""

from pathlib import Path
from typing import Annotated

import typer

from hddm.utils.errors import UsageError
from hddm_cli.options import InputArgument


def compare(
    results: Annotated[
        list[Path],
        InputArgument(
            help="Results of hddm evaluate --out, or folders of benchmarks; the first is the baseline. A "
            "folder of results is one model."
        ),
    ],
    varies: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SETTING", help="Sampling setting that differs on purpose, such as steps."
        ),
    ] = None,
) -> None:
    """Compare results side by side: better, worse or within noise.

    Results that differ in more than the model are refused, except for --varies. A folder with one result per
    training seed stands for one model; files of the same name are paired. A difference counts if its 95 %
    interval over at least three seeds excludes 0, corrected for the number of comparisons. Benchmarks are
    compared row by row. A single result is shown. Scores of models on held-out images are compared with
    each other, with gaps paired by image.
    """
    from hddm.objective.compare import compared, is_objective, read_score_groups

    if any(map(is_objective, results)):
        if varies:
            raise UsageError("`varies`: scores by the objective have no sampling settings; drop it")
        for line in compared(read_score_groups(results)):
            typer.echo(line)
        return
    from hddm.benchmark.objective import read_objectives
    from hddm.benchmark.results import read_compared
    from hddm.evaluation.compare import escaped, summary, table
    from hddm.evaluation.results import refuse_incomparable

    rows = read_compared(results)
    for groups in rows.values():
        if isinstance(groups, str):
            continue
        if sum(len(group.results) for group in groups) > 1:
            refuse_incomparable(groups, varies or ())
    objectives = read_objectives(results)
    for row, groups in rows.items():
        if isinstance(groups, str):
            shown = escaped(groups)
        else:
            shown = table(groups) if len(groups) > 1 else summary(groups[0])
        typer.echo(f"## {escaped(row)}\n\n{shown}\n" if row else shown)
        if row in objectives:
            scores = objectives[row]
            lines = [escaped(scores)] if isinstance(scores, str) else compared(scores)
            typer.echo("\n".join([*lines, ""]))
