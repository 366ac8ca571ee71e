"""hddm inspect."""

from pathlib import Path
from typing import Annotated

import typer

from hddm_cli.options import InputArgument
from hddm_cli.plain import plain_lines


def inspect(
    path: Annotated[Path, InputArgument(help="Folder that hddm wrote, result, images, or checkpoint.")],
    allow_pickle: Annotated[
        bool,
        typer.Option("--allow-pickle", help="Read pickle files without running code; only weights are read."),
    ] = False,
    variant: Annotated[
        str | None, typer.Option("--variant", help="Variant of the weights file, such as fp16.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Describe an artefact: objective, schedule, shard, size, licence, provenance."""
    import json

    from hddm.checkpoints.inspect import inspected

    facts = inspected(path, allow_pickle, variant)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for line in plain_lines(facts):
        typer.echo(line)
